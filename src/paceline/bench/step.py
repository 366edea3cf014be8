"""What one target pass costs: by number of rows, by context, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..engine.calibration import PassTimer
from ..kv.pool import KVPool
from ..network.decoder import Decoder

WARM_UP = 2  # passes of each kind that are not counted


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

    def as_dict(self, bandwidth: float) -> dict[str, Any]:
        """Ready for JSON, with what follows of it.

        Args:
            bandwidth: bytes a second that the machine reads.

        Returns:
            Its fields, weights read over the whole step, weights and K/V over the whole step and weights over the
            linear layers alone as shares of ``bandwidth``.
        """
        return asdict(self) | {
            "weights_gb_per_s": self.weight_bytes / self.step_ms / 1e6,
            "share_of_bandwidth": (self.weight_bytes + self.kv_bytes) / (self.step_ms * 1e-3) / bandwidth,
            "linear_share_of_bandwidth": self.weight_bytes / (self.linear_ms * 1e-3) / bandwidth,
        }


def measure(
    decoder: Decoder,
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 30,
    progress: Callable[[int], None] | None = None,
) -> list[StepCost]:
    """Time passes of every row count at every context, interleaved so that a slow moment hits all alike."""
    timers = {context: PassTimer(decoder, 1, context, max(rows)) for context in contexts}
    steps: dict[tuple[int, int], list[float]] = {(r, c): [] for c in contexts for r in rows}
    linears: dict[int, list[float]] = {r: [] for r in rows}
    for repeat in range(repeats + WARM_UP):
        for (r, c), times in steps.items():
            times.append(timers[c].ms(1, r))
        for r, times in linears.items():
            times.append(_linear_ms(decoder, r))
        if progress:
            progress(repeat + 1)
    per_token = KVPool.bytes_per_token(*decoder.cache_shape, decoder.dtype)
    return [
        StepCost(
            rows=r,
            context=c,
            step_ms=_quantile(times, 0.5),
            low_ms=_quantile(times, 0.1),
            high_ms=_quantile(times, 0.9),
            linear_ms=_quantile(linears[r], 0.5),
            weight_bytes=decoder.pass_bytes,
            kv_bytes=(c + r) * per_token,
        )
        for (r, c), times in steps.items()
    ]


def _quantile(times: Sequence[float], share: float) -> float:
    return float(np.quantile(times[WARM_UP:], share))


@torch.inference_mode()
def _linear_ms(decoder: Decoder, rows: int) -> float:
    """The linear layers and the head, one after the other, without what lies between."""
    products = decoder.products()
    inputs = {width: torch.ones(rows, width, dtype=decoder.dtype, device=decoder.device) for _, width in products}
    began = perf_counter()
    for product, width in products:
        product(inputs[width])
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
    return (perf_counter() - began) * 1e3
