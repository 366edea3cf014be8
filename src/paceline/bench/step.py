"""What one target pass costs: by number of rows, by context, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch

from ..kv.pool import KVPool
from ..network.decoder import Decoder
from .calibrate import time_passes


def measure(
    decoder: Decoder,
    rows: Sequence[int],
    contexts: Sequence[int],
    bandwidth: float,
    repeats: int = 30,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, float]]:
    """Time passes of every row count at every context, and their linear layers alone; see `time_passes`.

    Args:
        bandwidth: bytes a second that the machine reads.

    Returns:
        For each row count at each context (committed tokens): ``step_ms``, the median of a whole pass (embed, layers,
        norm, head of every row), its 10th and 90th percentiles ``low_ms`` and ``high_ms``; ``linear_ms``, the median of
        the linear layers and the head alone; bytes of weights and of K/V that a pass reads; weights read over the
        whole step; as shares of ``bandwidth`` weights and K/V over the whole step, and weights over the linear layers.
    """
    steps = time_passes(decoder, [(1, c, r, None) for c in contexts for r in rows], repeats, progress)
    linears = {r: [_linear_ms(decoder, r) for _ in range(repeats + 2)][2:] for r in rows}  # the first two warm up
    per_token = KVPool.bytes_per_token(*decoder.cache_shape, decoder.dtype)
    found = []
    for (_, context, count, _), times in steps.items():
        low, middle, high = map(float, np.quantile(times, [0.1, 0.5, 0.9]))
        linear, weights, kv = float(np.median(linears[count])), decoder.pass_bytes, (context + count) * per_token
        found.append(
            {
                "rows": count,
                "context": context,
                "step_ms": middle,
                "low_ms": low,
                "high_ms": high,
                "linear_ms": linear,
                "weight_bytes": weights,
                "kv_bytes": kv,
                "weights_gb_per_s": weights / middle / 1e6,
                "share_of_bandwidth": (weights + kv) / (middle * 1e-3) / bandwidth,
                "linear_share_of_bandwidth": weights / (linear * 1e-3) / bandwidth,
            }
        )
    return found


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
