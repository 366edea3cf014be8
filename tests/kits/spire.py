"""A SPIRe draft for the tiny target: its last layers, and memory weights at random."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kits.state import taps_of
from kits.tiny import tiny_config, tiny_decoder, tiny_weights
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.papers.spire.drafter import SpireConfig, SpireDrafter
from paceline.papers.spire.model import SpireShape
from paceline.train.network import finish, normed, project, rotate

LAYERS = 2


def whole(**changes: Any) -> DecoderConfig:
    """The tiny target without sliding windows."""
    config = tiny_config(**changes)
    return tiny_config(**{"windows": (None,) * config.num_layers} | changes)


def draft_decoder(
    config: DecoderConfig, seed: int, layers: int = LAYERS, dtype: torch.dtype = torch.float64, compiled: bool = False
) -> Decoder:
    """The last layers and the ends of `tiny_decoder(config, seed=seed)`, not yet finished."""
    attention = make_backend(dtype)
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


def memory_of(shape: SpireShape, seed: int = 5) -> Tensor:
    """Weights that are no start's."""
    made = shape.fresh_memory()
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


def drafts_by_hand(
    net: Decoder, w: Tensor, shape: SpireShape, y: Sequence[Tensor], tokens: list[int], path: list[int]
) -> list[Tensor]:
    """[d] a draft's states, behind its norm, for the root and each token of a path, by section 3.3 as it is written:
    one row at a time, all memory vectors anew.

    Args:
        net: the draft, not finished.
        w: of its memory.
        y: of each layer of the target [tokens, d] activations of the text.
        tokens: the text, its last one the root.
    """
    c, n, root = net.config, shape.layers, len(tokens) - 1
    layers: list[Any] = list(net.layers)
    mix = w.to(net.embedding.dtype).softmax(-1)
    memory: list[list[Tensor]] = []  # of each position, by layer
    for position in range(root):
        # y^{N-n-1+i} for i = 1 .. n, of which y^1 is behind the first layer
        memory.append([y[len(y) - n - 1 + i - 1][position] for i in range(1, n + 1)])

    def seen(position: int) -> list[int]:
        return [j for j in range(position) if j < shape.sinks or j >= position - shape.window]

    def place(j: int) -> tuple[Tensor, Tensor]:
        assert net._rope is not None
        found = net._rope.rows(torch.tensor([j]))
        return found[0] if isinstance(found, list) else found  # a decoder has a list of tables

    found = []
    for step, token in enumerate([tokens[-1], *path]):
        x = [net.embedding[token]]
        for i in range(n):
            q = project(layers[i], c, x[-1][None], place(root + step))[0]
            keys, values = [], []
            for j in seen(root + step):
                _, k, v = project(layers[i], c, memory[j][i][None], None)
                keys.append(rotate(k, place(j))[0])
                values.append(v[0])
            scores = torch.einsum("kgd,tkd->kgt", q[0].view(c.num_kv_heads, -1, c.head_dim), torch.stack(keys))
            mixed = torch.einsum("kgt,tkd->kgd", (scores * c.head_dim**-0.5).softmax(-1), torch.stack(values))
            x.append(finish(layers[i], c, x[-1][None], mixed.reshape(1, -1))[0])
        memory.append([torch.einsum("l,ld->d", mix[i], torch.stack(x)) for i in range(n)])
        found.append(normed(net.norm, x[-1]))
    return found
