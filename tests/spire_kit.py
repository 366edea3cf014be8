"""A SPIRe draft for the tiny target: its last layers, and memory weights at random."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from state_kit import taps_of
from tiny import tiny_config, tiny_decoder, tiny_weights
from torch import Tensor

from paceline.attention import make_backend
from paceline.drafters.spire.drafter import SpireConfig, SpireDrafter
from paceline.drafters.spire.model import SpireShape
from paceline.target.decoder import Decoder
from paceline.target.families import DecoderConfig

LAYERS = 2


def whole(**changes: Any) -> DecoderConfig:
    """The tiny target without sliding windows."""
    config = tiny_config(**changes)
    return tiny_config(**{"windows": (None,) * config.num_layers} | changes)


def draft_decoder(
    config: DecoderConfig, seed: int, layers: int = LAYERS, dtype: torch.dtype = torch.float64, compiled: bool = False
) -> Decoder:
    """The last layers and the ends of `tiny_decoder(config, seed=seed)`, not yet finished."""
    attention = make_backend("reference" if dtype == torch.float64 else "sdpa", dtype)
    whole_one = Decoder(config, attention, dtype=dtype)
    parameters = tiny_weights(whole_one, seed)
    changes = {"num_layers": layers, "windows": (None,) * layers, "tied": False}
    fields = {name: getattr(config, name) for name in DecoderConfig.__dataclass_fields__}
    made = Decoder(DecoderConfig(**fields | changes), attention, dtype=dtype, native=compiled)
    first = config.num_layers - layers
    for name, value in made.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) + first)
        name = "embedding" if name == "head.weight" and config.tied else ".".join(parts)
        value.data.copy_(parameters[name].data)
    made.embedding.data.copy_(_met(config, seed, first))
    return made


@cache
def _met(config: DecoderConfig, seed: int, layers: int) -> Tensor:
    """[V, d] the mean state of each token behind the target's first layers: in the place of embeddings it makes the
    others right now and then."""
    draw, total = torch.Generator().manual_seed(0), torch.zeros(config.vocab_size, config.d_model, dtype=torch.float64)
    count, decoder = torch.ones(config.vocab_size, 1, dtype=torch.float64), tiny_decoder(config, seed=seed)
    with torch.inference_mode():
        for _ in range(6):
            tokens = torch.randint(0, config.vocab_size, (400,), generator=draw)
            total.index_add_(0, tokens, taps_of(decoder, tokens.tolist())[layers - 1])
            count.index_add_(0, tokens, torch.ones(400, 1, dtype=torch.float64))
    return total / count


def memory_of(shape: SpireShape, seed: int = 5) -> Tensor | None:
    """Weights that are no start's."""
    made = shape.fresh_memory()
    if made is None:
        return None
    return made + 0.5 * torch.randn(made.shape, generator=torch.Generator().manual_seed(seed))


def spire(
    *,
    config: DecoderConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    compiled: bool = False,
    shape: dict[str, Any] | None = None,
    **options: Any,
) -> SpireDrafter:
    """A `SpireDrafter` for `tiny_decoder(config, seed=seed)`.

    Args:
        shape: of `SpireShape`.
        options: of `SpireConfig`.
    """
    config = config or whole()
    made = SpireShape(**{"layers": LAYERS, "window": 12, "sinks": 2} | (shape or {}))
    source = draft_decoder(config, seed, made.layers, dtype, compiled), memory_of(made)
    return SpireDrafter(SpireConfig(**{"path": "tiny"} | options), made, source, config.num_layers)
