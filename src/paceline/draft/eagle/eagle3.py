"""EAGLE-3 heads, as published.

Three taps in place of the last state, a layer that reads token and state separately, and an output head of their own
over a smaller vocabulary.

    g = fc [low, mid, high]                                of a row of the text; a drafted row has its parent's output
    h = g + attention([norm(E(t)), norm(g)]),  h + mlp     the next state, from the state and the token after it
    l = lm_head norm(h)                                    over the draft's tokens; token i of them is i + d2t[i]

Source: EAGLE-3 (Li et al. 2025), section 3, and its published checkpoints; the layers that are tapped are those of the
authors' code (the inputs of layers 2, L / 2 and L - 3) unless the head's config names others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import CapabilityError, ConfigError
from ...core.options import shown
from ...kernels.drafts import NativeFuse
from ...kv.pool import KVPool
from ...model.attention import make_backend
from ...model.attention.base import Segment
from ...model.base import Batch
from ...model.families import DecoderConfig, decoder_config
from ...model.layers import rms, rms_constants, store
from ...model.rope import RopeTable, rotated
from ...weights.trained_files import TrainedFiles
from .speculators import VARIANTS

if TYPE_CHECKING:
    from ...kernels.layers import Stack
    from ...model.handle import TargetHandle

FILES = TrainedFiles("an EAGLE-3 head", "config.json", "model.safetensors", "restore the files that belong together")
AUX = "eagle_aux_hidden_state_layer_ids"  # at the config's top: layers whose inputs are tapped; in `INNER`: outputs
INNER = "eagle_config"  # of SGLang and SpecForge


class Eagle3Model:
    """The parameters of a head.

    Args:
        config: its ``config.json``.
        values: its tensors.
        place: where they are from, for messages.

    Raises:
        ConfigError: tensors that are missing, left over or misshaped; tokens that the vocabulary lacks.
        CapabilityError: a variant that is not computed here.
    """

    def __init__(self, config: Mapping[str, Any], values: Mapping[str, Tensor], place: Path) -> None:
        _refuse_variants(config, place)
        # The name of the architecture is the draft's, which no decoder has.
        self.config: DecoderConfig = decoder_config({**config, "architectures": None})
        named = {name.replace("midlayer.", "layers.0."): value for name, value in values.items()}
        self.embedding = named.pop("embed_tokens.weight", None)
        named.pop("t2d", None)  # the inverse of d2t
        self.aux = _named_layers(config, place)
        to_target = named.pop("d2t", None)
        output_head = named.get("lm_head.weight")
        tokens = self.config.vocab_size if output_head is None else len(output_head)
        self.tensors = {n: torch.zeros(shape) for n, shape in _shapes(self.config, tokens).items()}
        FILES.copy(self.tensors, named, place)
        self.tokens = torch.arange(tokens) + (0 if to_target is None else to_target.long())
        self._check_tokens(tokens, place)

    def _check_tokens(self, count: int, place: Path) -> None:
        """Check that the draft's tokens are distinct ones of the target's."""
        ids = self.tokens
        if ids.shape != (count,) or int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            wrong = f"d2t names tokens outside of the {self.config.vocab_size} of its config"
            raise ConfigError(f"eagle head {str(place)!r}", wrong, "restore the files that belong together")
        if len(ids.unique()) != count:
            raise ConfigError(f"eagle head {str(place)!r}", "d2t names a token twice", "restore the file")

    def taps(self, num_layers: int) -> tuple[int, int, int]:
        """Return layers whose outputs it reads, of a target with so many.

        Raises:
            CapabilityError: a target without such layers.
        """
        inputs = self.aux or (2, num_layers // 2, num_layers - 3)
        low, mid, high = (layer - 1 for layer in inputs)
        if not 0 <= low <= mid <= high < num_layers:
            wrong = (
                f"it reads the inputs of layers {', '.join(map(str, inputs))}, and the target has {num_layers} layers"
            )
            raise CapabilityError("an EAGLE-3 head", wrong, "use the target that it was trained for")
        return low, mid, high


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get(INNER)
    return inner if isinstance(inner, dict) else {}


def _refuse_variants(config: Mapping[str, Any], place: Path) -> None:
    """Refuse a config whose head computes something else than EAGLE-3 as published."""
    unsupported = {switch: what for switch, what in VARIANTS.items() if config.get(switch)}
    if config.get("norm_output") is False:  # SpecForge's; in the configs of speculators it is the default
        unsupported["norm_output"] = "computes logits of states that are not normed"
    if False in (config.get("use_aux_hidden_state"), _inner(config).get("use_aux_hidden_state")):
        unsupported["use_aux_hidden_state"] = "reads the target's last state instead of three layers"
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        unsupported["num_hidden_layers"] = f"has {shown(layers)} layers instead of one"
    for switch, what in unsupported.items():
        remedy = f"use a head of EAGLE-3 as published; if it is one, remove `{switch}` from its config"
        raise CapabilityError(f"eagle head {str(place)!r}", f"`{switch}` means that the head {what}", remedy)


def _named_layers(config: Mapping[str, Any], place: Path) -> tuple[int, int, int] | None:
    """Return the layers whose inputs are tapped, where a config names them."""
    inputs, outputs = config.get(AUX), _inner(config).get(AUX)
    layers = inputs or outputs
    if layers is None:
        return None
    if not isinstance(layers, list) or len(layers) != 3 or not all(type(x) is int for x in layers):
        raise ConfigError(f"eagle head {str(place)!r}", f"{AUX} is {shown(layers)}, not three layers", "correct it")
    low, mid, high = layers if inputs else (layer + 1 for layer in layers)
    return low, mid, high


def _shapes(c: DecoderConfig, tokens: int) -> dict[str, tuple[int, ...]]:
    d, kv = c.d_model, c.num_kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (c.num_heads * c.head_dim, 2 * d),
        "self_attn.k_proj": (kv, 2 * d),
        "self_attn.v_proj": (kv, 2 * d),
        "self_attn.o_proj": (d, c.num_heads * c.head_dim),
        "mlp.gate_proj": (c.d_ff, d),
        "mlp.up_proj": (c.d_ff, d),
        "mlp.down_proj": (d, c.d_ff),
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (d,)),
    }
    top: dict[str, tuple[int, ...]] = {"fc": (d, 3 * d), "norm": (d,), "lm_head": (tokens, d)}
    return {f"layers.0.{name}.weight": s for name, s in layer.items()} | {f"{n}.weight": s for n, s in top.items()}


class Eagle3Network:
    """Runs a head on torch's kernels; in a `HeadNetwork`'s place.

    Args:
        model: its parameters.
        taps: layers of the target, low to high.
        handle: of the target.
        device: where the target runs.
    """

    stack: Stack | None = None
    fuse: NativeFuse | None = None
    reads_tokens = True

    def __init__(
        self, model: Eagle3Model, taps: tuple[int, int, int], handle: TargetHandle, device: torch.device
    ) -> None:
        c = self.config = model.config
        self.taps, self.handle, self._vocab = taps, handle, c.vocab_size
        self.cache_shape = 1, c.num_kv_heads, c.head_dim
        self._weights = {n: v.to(device, handle.dtype) for n, v in model.tensors.items() if v.ndim == 2}
        norms = {n: v.to(device, handle.dtype) for n, v in model.tensors.items() if v.ndim == 1}
        self._norms = {name: rms_constants(value, c.norm_eps) for name, value in norms.items()}
        self._tokens = model.tokens.to(device)
        self._attention = make_backend(handle.dtype)
        self._rope = RopeTable(c.rope, handle.dtype, device)

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """Override `HeadNetwork.plan`."""
        return self._attention.plan(segments, positions, frozenset({None}))

    def read(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Override `HeadNetwork.read`: the three taps, mapped to one state."""
        return F.linear(torch.cat([hidden[layer] for layer in self.taps], -1), self._weights["fc.weight"])

    def final(self, states: Tensor) -> Tensor:
        """Override `HeadNetwork.final`: as they are."""
        return states

    def run(self, batch: Batch, states: Tensor, tokens: bool, pool: KVPool) -> Tensor:
        """Override `HeadNetwork.run`; rows always have a token."""
        c = self.config
        embedded = self._norm("input_layernorm", self.handle.embed(batch.tokens))
        x = torch.cat((embedded, self._norm("hidden_norm", states)), -1)
        q, k, v = (self._times(f"self_attn.{n}_proj", x).unflatten(-1, (-1, c.head_dim)) for n in "qkv")
        rotation = self._rope.rows(batch.positions)
        store(pool.k[0], batch.slots, rotated(k, *rotation))
        store(pool.v[0], batch.slots, v)
        arguments = batch.attn, rotated(q, *rotation), pool.k[0], pool.v[0], c.head_dim**-0.5, None
        hidden = states + self._times("self_attn.o_proj", self._attention.attend(*arguments))
        inner = self._norm("post_attention_layernorm", hidden)
        gated = F.silu(self._times("mlp.gate_proj", inner)) * self._times("mlp.up_proj", inner)
        return hidden + self._times("mlp.down_proj", gated)

    def logits(self, states: Tensor) -> Tensor:
        """Override `HeadNetwork.logits`; tokens that the draft lacks are impossible."""
        scale, floor = self._norms["norm.weight"]
        scores = F.linear(rms(states, scale, floor), self._weights["lm_head.weight"])
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return wide.new_full((len(wide), self._vocab), -math.inf).index_copy_(1, self._tokens, wide)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, *self._norms[f"layers.0.{name}.weight"])

    def _times(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"layers.0.{name}.weight"])
