"""What one target pass costs: by number of rows, by context, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..kv.pool import KVPool, SequenceCache
from ..target.decoder import Decoder
from ..target.packing import RowPacker

SPARE = 256  # slots behind a context: its rows, and room to place it contiguously


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One row count at one context."""

    rows: int
    context: int  # committed tokens in front of the rows
    step_ms: float  # median of a whole pass: embed, layers, norm, head of every row
    low_ms: float  # 10th percentile
    high_ms: float  # 90th percentile
    linear_ms: float  # median of the linear layers and the head alone
    weight_bytes: int  # that a pass reads
    kv_bytes: int  # that a pass reads

    def gigabytes_per_second(self) -> float:
        """Weights over the whole step."""
        return self.weight_bytes / self.step_ms / 1e6

    def share(self, bandwidth: float) -> float:
        """Weights and K/V over the whole step, of ``bandwidth`` bytes a second."""
        return (self.weight_bytes + self.kv_bytes) / (self.step_ms * 1e-3) / bandwidth

    def linear_share(self, bandwidth: float) -> float:
        """Weights over the linear layers alone, of ``bandwidth`` bytes a second."""
        return self.weight_bytes / (self.linear_ms * 1e-3) / bandwidth

    def as_dict(self, bandwidth: float) -> dict[str, Any]:
        """Ready for JSON, derived figures included."""
        return asdict(self) | {
            "weights_gb_per_s": self.gigabytes_per_second(),
            "share_of_bandwidth": self.share(bandwidth),
            "linear_share_of_bandwidth": self.linear_share(bandwidth),
        }


def measure(
    decoder: Decoder,
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 30,
    progress: Callable[[int], None] | None = None,
) -> list[StepCost]:
    """Time passes of every row count at every context, interleaved so that a slow moment hits all alike."""
    shape = decoder.config
    pool = KVPool(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        2 * len(contexts) * (max(contexts) + SPARE),
        decoder.dtype,
        decoder.device,
    )
    cases = [(r, c) for c in contexts for r in rows]
    caches = {c: _filled(pool, c) for c in contexts}
    steps: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    linears: dict[int, list[float]] = {r: [] for r in rows}
    for repeat in range(repeats + 2):
        for case in cases:
            steps[case].append(_pass_ms(decoder, pool, caches[case[1]], case[0]))
        for r in rows:
            linears[r].append(_linear_ms(decoder, r))
        if progress:
            progress(repeat + 1)
    per_token = KVPool.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, decoder.dtype)
    return [
        StepCost(
            rows=r,
            context=c,
            step_ms=median(steps[r, c][2:]),
            low_ms=_quantile(steps[r, c][2:], 0.1),
            high_ms=_quantile(steps[r, c][2:], 0.9),
            linear_ms=median(linears[r][2:]),
            weight_bytes=decoder.pass_bytes,
            kv_bytes=(c + r) * per_token,
        )
        for r, c in cases
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def _filled(pool: KVPool, context: int) -> SequenceCache:
    """A sequence with ``context`` committed tokens of random K and V."""
    cache = pool.open(expected=context + SPARE)
    cache.reserve(context)
    pool.commit([(cache, range(context))])
    generator = torch.Generator().manual_seed(context)
    for layer in (*pool.k, *pool.v):
        part = layer[:, cache.slots(0, context)]
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


@torch.inference_mode()
def _pass_ms(decoder: Decoder, pool: KVPool, cache: SequenceCache, rows: int) -> float:
    """One pass of a chain of ``rows`` rows, host work included."""
    cache.reserve(rows)
    began = perf_counter()
    first = cache.committed
    packer = RowPacker(decoder, decoder.device)
    packer.add(
        [7 + i % 100 for i in range(rows)],
        range(first, first + rows),
        range(rows),
        slots=cache.slots(first, first + rows),
        keys=cache.slots(0, first + rows),
        num_keys=first + rows,
        prefix=first,
    )
    state = decoder.embed(packer.batch())
    decoder.run_layers(state, 0, decoder.num_layers, pool)
    decoder.logits(state).argmax(dim=-1).tolist()
    elapsed = perf_counter() - began
    cache.rollback()
    return elapsed * 1e3


@torch.inference_mode()
def _linear_ms(decoder: Decoder, rows: int) -> float:
    """The linear layers and the head, one after the other, without what lies between."""
    products = decoder.products()
    inputs = {width: torch.ones(rows, width, dtype=decoder.dtype, device=decoder.device) for _, width in products}
    began = perf_counter()
    for product, width in products:
        product(inputs[width])
    if decoder.device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - began) * 1e3
