"""What one target pass costs: by number of rows, by context, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..kv.pool import KVPool
from ..network.decoder import Decoder
from .calibrate import time_passes


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
    """Time passes of every row count at every context, and their linear layers alone; see `time_passes`."""
    steps = time_passes(decoder, [(1, c, r, None) for c in contexts for r in rows], repeats, progress)
    linears = {r: [_linear_ms(decoder, r) for _ in range(repeats + 2)][2:] for r in rows}  # the first two warm up
    per_token = KVPool.bytes_per_token(*decoder.cache_shape, decoder.dtype)
    return [
        StepCost(
            rows=r,
            context=c,
            step_ms=float(np.quantile(times, 0.5)),
            low_ms=float(np.quantile(times, 0.1)),
            high_ms=float(np.quantile(times, 0.9)),
            linear_ms=float(np.median(linears[r])),
            weight_bytes=decoder.pass_bytes,
            kv_bytes=(c + r) * per_token,
        )
        for (_, c, r, _), times in steps.items()
    ]


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
