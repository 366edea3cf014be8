"""One decoder layer that predicts the target's next state from the last ones: the body of Lyanna and of EAGLE.

A *state* is what the target's head multiplies: the last layer's output after the final norm. A row's input is its state
fused with the embedding of the token that follows; its output is the state that comes next, which the target's own head
reads as it is.

Sources: Lyanna, section 4.1; EAGLE (Li et al. 2024), section 4.1, whose published heads have this layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...model.families import DecoderConfig, decoder_config
from ...model.layers import Layer
from ...model.linear import Dense, nan_parameter
from ...model.rope import RopeTable
from ...weights.names import Piece, weight_map

LAYER = "layers.0."


def layer_json(target: DecoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of one Llama layer of a target's width, heads and MLP: what a state head's layer is.

    Llama's for every family: RMS norm, rotary positions of the target's base, a gated MLP, no biases.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": target.bos_id,
        "eos_token_id": list(target.eos_ids) or None,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.d_model,
        "intermediate_size": target.d_ff,
        "max_position_embeddings": target.max_position,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": target.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": target.num_kv_heads,
        "rms_norm_eps": target.norm_eps,
        "rope_parameters": {"rope_theta": target.rope.theta, "rope_type": "default"},
        "rope_theta": target.rope.theta,
        "tie_word_embeddings": target.tied,
        "vocab_size": target.vocab_size,
    }


class StateHead(nn.Module):
    """Fusion of state and token, and one layer. Parameters are NaN until loaded or made by `start`.

    Args:
        layer: the layer's ``config.json``; see `layer_json`.
        blank: whether there is an embedding for rows that are fused with no token.
        input_norm: whether the layer has a norm before its attention; EAGLE's has none.
        bias: of the fusing map.
        dtype, device: of the parameters.

    Raises:
        ConfigError: a configuration of another number of layers, or that no decoder can have.
    """

    def __init__(
        self,
        layer: Mapping[str, Any],
        *,
        blank: bool = False,
        input_norm: bool = True,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        place, c = torch.device(device), decoder_config(dict(layer))
        if c.num_layers != 1:
            wrong = f"it has {c.num_layers} layers, and a state head has one"
            raise ConfigError("a state head's config", wrong, "use a head with num_hidden_layers = 1")
        c = replace(c, first_norm=input_norm)
        self.config, self.dtype = c, dtype
        self.fc = Dense(2 * c.d_model, c.d_model, bias, dtype, place)
        self.blank = nan_parameter((c.d_model,), dtype, place) if blank else None
        self.layer = Layer(c, 0, dtype, place, exact=False)
        self.rope = RopeTable(c.rope, dtype, place)

    # -- parameters

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """Fill with a random start: N(0, 0.02), residual projections smaller by sqrt(2), as `Network.init_weights`.

        The fusing map keeps the size of what it reads; norms are one; no token is zero.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name == "blank" or name.endswith("bias") else 1.0)
                continue
            wide = parameter.shape[1] ** -0.5 if name.startswith("fc.") else 0.02
            deviation = wide * (0.5**0.5 if name.split(".")[-2] in ("out", "down") else 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter) * deviation)

    def pieces(self) -> list[Piece]:
        """Return the layer's tensors in a file, and the parameters that they fill."""
        held = {name for name, _ in self.layer.named_parameters()}
        layer_pieces = [piece for piece in weight_map(self.config) if piece.source.startswith(LAYER)]
        return [piece for piece in layer_pieces if piece.into.removeprefix(LAYER) in held]

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters under their names in a file: ``fc.weight``, ``layers.0.self_attn.q_proj.weight`` and so on.

        Views: a copy into one fills the parameter.
        """
        tensors = {f"fc.{name}": value.data for name, value in self.fc.named_parameters()}
        if self.blank is not None:
            tensors["blank"] = self.blank.data
        parameters = dict(self.layer.named_parameters())
        for piece in self.pieces():
            value = parameters[piece.into.removeprefix(LAYER)].data
            rows = value if piece.rows is None else value[piece.at : piece.at + piece.rows]
            tensors[piece.source] = rows
        return tensors

    # -- what training and the torch path of a drafter share

    def fuse(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        """Return the layer's input: states (+) token embeddings, [..., d].

        Args:
            states: [..., d].
            embedded: [..., d] of the token after each; None: no token (`blank` in its place).

        Source: Lyanna, section 4.1; the order of the two is EAGLE's.
        """
        if embedded is None:
            assert self.blank is not None, "a head without a blank is always given tokens"
            of_token, of_state = self.fc.weight.chunk(2, dim=1)  # the share of `blank` is one row for all
            constant = F.linear(self.blank, of_token, self.fc.bias)
            return (F.linear(states, of_state) + constant).to(states.dtype)
        return F.linear(torch.cat((embedded, states), -1), self.fc.weight, self.fc.bias).to(states.dtype)
