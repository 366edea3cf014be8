"""The recipe ``target``: a Llama-family model, from random weights or grown from a trained one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.options import option
from ..network.families import decoder_config
from ..network.loader import load_weights
from .data import TokenBatch
from .losses import cross_entropy
from .network import Network

if TYPE_CHECKING:
    from .registry import BuildContext


CHUNK = 1024  # rows of logits held at a time


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Llama-family network."""

    layers: int = option(12, help="decoder layers")
    d_model: int = option(384, help="width of the residual stream")
    d_ff: int = option(1024, help="width of the gated MLP")
    heads: int = option(6, help="query heads")
    kv_heads: int = option(6, help="key and value heads")
    vocab_size: int = option(8192, help="tokens; that of the tokenizer")
    context: int = option(2048, help="positions")
    rope_theta: float = option(10000.0, help="base of the rotary embedding")
    tied: bool = option(True, help="the output head is the embedding table")

    def config(self, bos: int, eos: int, pad: int | None) -> dict[str, Any]:
        """Its config.json, as transformers writes one."""
        if self.d_model % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"d_model={self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}",
                "heads must divide d_model, and kv_heads heads",
                "change one of them",
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "head_dim": self.d_model // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "initializer_range": 0.02,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelShape):
    """A model to train from random weights, or to grow from a trained one."""

    grow: tuple[int, ...] = option((), help="for each layer the layer of --init it starts from; see `grow`")


class TargetRecipe:
    """Next-token prediction by a network, whose config.json is ``config``; evaluated on held-out batches by domain."""

    name = "target"

    def __init__(
        self,
        network: Network,
        config: Mapping[str, Any],
        held_out: Mapping[str, Sequence[TokenBatch]] | None = None,
    ) -> None:
        self.module, self.config, self.held_out = network, dict(config), held_out or {}

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Mean cross-entropy of the next token (nats), over the rows that carry weight."""
        return self._mean(batch), {}

    def _mean(self, batch: TokenBatch) -> Tensor:
        hidden = self.module(batch)  # [B, T, d_model]
        rows = batch.weights > 0
        weights = batch.weights[rows]
        return cross_entropy(hidden[rows], self.module.head_weight, batch.targets[rows], weights, chunk_rows=CHUNK)

    def evaluate(self) -> dict[str, float]:
        """Loss by domain, in nats a token."""
        device = self.module.head_weight.device
        figures = {}
        for domain, batches in self.held_out.items():
            losses = [float(self._mean(batch.to(device))) for batch in batches]
            figures[f"loss/{domain}"] = sum(losses) / len(losses)
        return figures

    def export(self, folder: Path) -> dict[str, Any]:
        """A Hugging Face folder in bf16 (without the tokenizer's files)."""
        self.module.save(folder, self.config, torch.bfloat16)
        return {}


def grow(network: Network, source: Path, keep: Sequence[int]) -> None:
    """Fill ``network`` from a shallower checkpoint of the same width; its function stays what it was.

    For each layer of the network ``keep`` names the checkpoint's layer it comes from; the first of several that name
    one layer is that layer, the others are copies whose ``out`` and ``down`` are zero, so that they add nothing to the
    residual stream until they are trained (Gong et al. 2019 stack trained layers; the zero projections are those of
    function-preserving growth, Evci et al. 2022).

    Raises:
        ConfigError: shapes that do not fit.
    """
    values = json.loads((source / "config.json").read_text("utf-8"))
    old = Network(decoder_config(values), frozen=True)
    load_weights(old.decoder, source)
    depth = len(old.layers)
    if len(keep) != len(network.layers) or set(keep) != set(range(depth)) or list(keep) != sorted(keep):
        raise ConfigError(
            f"grow={list(keep)}", f"it must name each of the {depth} layers, in order", "give one source a layer"
        )
    with torch.no_grad():
        for index, origin in enumerate(keep):
            own, other = (dict(n.layers[i].named_parameters()) for n, i in ((network, index), (old, origin)))
            again = index > 0 and keep[index - 1] == origin
            for name, parameter in own.items():
                if parameter.shape != other[name].shape:
                    raise ConfigError(f"growing {source}", f"{name} has another shape", "grow in depth only")
                parameter.copy_(other[name])
                if again and name.startswith(("out.", "down.")):
                    parameter.zero_()
        inner = dict(old.decoder.named_parameters())
        for name, parameter in network.decoder.named_parameters():
            if not name.startswith("layers."):
                parameter.copy_(inner[name])


def build(options: TargetOptions, context: BuildContext) -> TargetRecipe:
    """A network from random weights, from the checkpoint ``context.init``, or grown from it.

    Raises:
        ConfigError: a tokenizer or a checkpoint that does not fit.
    """
    tokenizer = context.tokenizer
    if len(tokenizer) > options.vocab_size:
        raise ConfigError(
            f"vocab_size={options.vocab_size}", f"the tokenizer has {len(tokenizer)} tokens", "raise vocab_size"
        )
    config = options.config(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    network = Network(decoder_config(config), context.device)
    if options.grow:
        if context.init is None:
            raise ConfigError("grow", "there is no checkpoint to grow from", "give --init FOLDER")
        grow(network, context.init, options.grow)
    elif context.init is not None and any(context.init.glob("*.safetensors")):
        load_weights(network.decoder, context.init)
    else:
        network.init_weights(context.seed)
    return TargetRecipe(network, config, context.held_out)
