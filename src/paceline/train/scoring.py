"""Outputs of a frozen target for whole documents: by its training network, or by the compiled layers that serve it.

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
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from ..core.inference import inference
from ..kernels.layers import unsupported
from ..kv.pool import KVPool
from ..model.attention import make_backend
from ..model.base import Taps
from ..model.decoder import Decoder
from ..model.packing import RowPacker
from ..weights.loader import load_model
from ..weights.source import resolve
from .data import Example, TokenBatch, collate
from .features import joined, last_states, likeliest, top_of
from .losses import TargetTop
from .network import Network

ROWS = 1024  # whose logits are held at a time


# Scores documents: of all their tokens, one document after the other, [tokens, d_model] last states, before the final
# norm, and the likeliest tokens after each, as many as are requested.
Scorer = Callable[[Sequence[np.ndarray], int], tuple[Tensor, TargetTop]]
Products = Callable[[], AbstractContextManager[Any]]  # a context in which products are made


@torch.no_grad()
def network_scores(
    target: Network, products: Products, documents: Sequence[np.ndarray], top: int
) -> tuple[Tensor, TargetTop]:
    """Override `Scorer`, by the frozen network that training runs."""
    batch = collate([[Example(tokens)] for tokens in documents], max(map(len, documents)))
    batch = batch.to(target.head_weight.device)
    with products():
        states = last_states(target, batch)[batch.documents >= 0]
        return states, likeliest(target, target.final(states), top)


class CompiledScorer:
    """By the compiled layers of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.stack is not None, "its layers are compiled"
        self.decoder, self.stack = decoder, decoder.stack
        self._pool: KVPool | None = None

    @inference
    def __call__(self, documents: Sequence[np.ndarray], top: int) -> tuple[Tensor, TargetTop]:
        """Override `Scorer`."""
        states = self._run(documents, Taps(()))
        return states, joined([top_of(self.stack.logits(part), top) for part in states.split(ROWS)])

    def activations(self, batch: TokenBatch, layers: Sequence[int]) -> list[Tensor]:
        """Return the states after each of ``layers``, 0-based, [B, T, d_model] float32; 0 where no document is."""
        there = batch.documents >= 0
        ends = F.pad(batch.documents[:, 1:] != batch.documents[:, :-1], (0, 1), value=True)[there]
        lengths = F.pad(ends.nonzero()[:, 0] + 1, (1, 0)).diff()
        taps = Taps(tuple(sorted({*layers})))
        self._run([document.numpy() for document in batch.tokens[there].split(lengths.tolist())], taps)
        parts = []
        for layer in layers:
            whole = torch.zeros(*there.shape, taps.hidden[layer].shape[1])
            whole[there] = taps.hidden[layer].float()
            parts.append(whole)
        return parts

    @inference
    def _run(self, documents: Sequence[np.ndarray], taps: Taps) -> Tensor:
        tokens, decoder = sum(map(len, documents)), self.decoder
        if self._pool is None or self._pool.num_tokens < tokens:  # K/V of one pass, which the next one overwrites
            self._pool = KVPool(*decoder.cache_shape, tokens, decoder.dtype, decoder.device)
        packer, at = RowPacker(decoder, decoder.device), 0
        for document in documents:
            count = len(document)
            places = slice(at, at + count)
            packer.add(document.tolist(), range(count), slots=places, keys=places, num_keys=count, prefix=0)
            at += count
        return decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, self._pool, taps).hidden


def make_scorer(folder: Path, target: Network, compiled: bool, products: Products) -> Scorer:
    """Choose a scorer for the target in ``folder``, which ``target`` is: its compiled layers where they are allowed and
    run, the faster ones on every processor; else the network, in the context ``products``."""
    return (compiled_scorer(folder, target) if compiled else None) or partial(network_scores, target, products)


def compiled_scorer(folder: Path, target: Network) -> CompiledScorer | None:
    """Return the target in ``folder`` by compiled layers, in bfloat16; None: they do not run it where ``target`` is."""
    kind = torch.bfloat16
    source = resolve(folder, kind)
    if unsupported(source.shape, kind, target.head_weight.device):
        return None
    return CompiledScorer(load_model(source, attention=make_backend(kind), native=True))
