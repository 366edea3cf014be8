"""What a frozen target says of whole documents: by its training network, or by the compiled layers that serve it.

Where the compiled layers run, states are those that a drafter is shown when it serves; elsewhere, and in float32, they
are the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class RememberedScorer:
    """By states that were kept while the target served; documents without any are scored.

    Args:
        known: [rows, d_model] bits of bfloat16, by the bytes of a document's int32 ids.
        target: whose norm and head say the rest.
        products: context in which it makes them.
        make: makes what scores the others, once there is one.
    """

    def __init__(
        self, known: Mapping[bytes, np.ndarray], target: Network, products: Products, make: Callable[[], Scorer]
    ) -> None:
        self.known, self.target, self.products, self._make = known, target, products, make
        self._scorer: Scorer | None = None

    def __call__(self, documents: Sequence[np.ndarray], top: int) -> tuple[Tensor, TargetTop]:
        """As `Scorer`."""
        parts = [self._score(tokens, top) for tokens in documents]
        said = [own for _, own in parts]
        ids, log_probs = torch.cat([own.ids for own in said]), torch.cat([own.log_probs for own in said])
        return torch.cat([states for states, _ in parts]), TargetTop(ids, log_probs)

    @torch.no_grad()
    def _score(self, tokens: np.ndarray, top: int) -> tuple[Tensor, TargetTop]:
        bits = self.known.get(tokens.tobytes())
        if bits is None:
            self._scorer = self._scorer or self._make()
            states, said = self._scorer([tokens], top)
            return states.float(), said
        states = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
        states = states.to(self.target.head_weight.device).float()
        with self.products():
            return states, likeliest(self.target, self.target.final(states), top)


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
