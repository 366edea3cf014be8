"""What a frozen target says of whole documents: by its training network, or by the compiled layers that serve it.

Where the compiled layers run, states are those that a drafter is shown when it serves; elsewhere, and in float32, they
are the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import make_backend
from ..core.inference import inference
from ..kv.pool import KVPool
from ..network.decoder import Decoder
from ..network.loader import load_model, read_config
from ..network.native import unsupported
from ..network.packing import RowPacker
from .data import Example, collate
from .features import last_states, likeliest, top_of
from .losses import TargetTop
from .network import Network

ROWS = 1024  # whose logits are held at a time


# Scores documents: of all their tokens, one document after the other, [tokens, d_model] last states, before the final
# norm, and the likeliest tokens after each, as many as are asked for.
Scorer = Callable[[Sequence[np.ndarray], int], tuple[Tensor, TargetTop]]
Products = Callable[[], AbstractContextManager[Any]]  # a context in which products are made


@torch.no_grad()
def network_scores(
    target: Network, products: Products, documents: Sequence[np.ndarray], top: int
) -> tuple[Tensor, TargetTop]:
    """As `Scorer`, by the frozen network that training runs."""
    batch = collate([[Example(tokens)] for tokens in documents], max(map(len, documents)))
    batch = batch.to(target.head_weight.device)
    with products():
        states = last_states(target, batch)[batch.documents >= 0]
        return states, likeliest(target, target.final(states), top)


class CompiledScorer:
    """By the compiled layers.

    Args:
        decoder: loaded for them.
    """

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.stack is not None, "its layers are compiled"
        self.decoder, self.stack = decoder, decoder.stack
        self._pool: KVPool | None = None

    @inference
    def __call__(self, documents: Sequence[np.ndarray], top: int) -> tuple[Tensor, TargetTop]:
        """As `Scorer`."""
        states = self._states(documents)
        parts = [top_of(self.stack.logits(part), top) for part in states.split(ROWS)]
        return states, TargetTop(torch.cat([p.ids for p in parts]), torch.cat([p.log_probs for p in parts]))

    def _states(self, documents: Sequence[np.ndarray]) -> Tensor:
        pool, packer, at = self._room(sum(map(len, documents))), RowPacker(self.decoder, self.decoder.device), 0
        for tokens in documents:
            count = len(tokens)
            own = slice(at, at + count)
            packer.add(tokens.tolist(), range(count), slots=own, keys=own, num_keys=count, prefix=0)
            at += count
        state = self.decoder.embed(packer.batch())
        return self.decoder.run_layers(state, 0, self.decoder.num_layers, pool).hidden

    def _room(self, tokens: int) -> KVPool:
        """K/V of one pass, which the next one overwrites."""
        if self._pool is None or self._pool.num_tokens < tokens:
            decoder = self.decoder
            self._pool = KVPool(*decoder.cache_shape, tokens, decoder.dtype, decoder.device)
        return self._pool


def make_scorer(folder: Path, target: Network, precision: str, products: Products) -> Scorer:
    """The faster of the two that computes in ``precision``.

    Args:
        folder: of the target.
        target: the same, loaded and frozen.
        precision: "bf16" or "fp32", of products.
        products: context in which the network makes them.
    """
    kind, device = torch.bfloat16, target.head_weight.device
    if precision != "bf16" or unsupported(read_config(folder), kind, device):
        return partial(network_scores, target, products)
    return CompiledScorer(load_model(folder, attention=make_backend("sdpa", kind), dtype=kind, native=True))
