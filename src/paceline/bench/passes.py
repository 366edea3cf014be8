"""Time passes of the target by their rows and context, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..engine.calibration import KVLayout, PassTimer
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from .config import StepConfig

PassSize = tuple[int, int, int, int | None]  # sequences, tokens that each has, rows of each, layers (None: all)


def time_passes(
    decoder: Decoder,
    sizes: Iterable[PassSize],
    repeats: int,
    progress: Callable[[int], None] | None = None,
    layout: KVLayout | None = None,
) -> dict[PassSize, list[float]]:
    """Return the ms of ``repeats`` passes of every size, in turns, so that a slow moment affects all alike.

    A first turn, which ``progress`` counts as well, warms up. ``layout`` is that of the K/V cache, see `PassTimer`.
    """
    times: dict[PassSize, list[float]] = {size: [] for size in sizes}
    timers = {}
    for context in {size[1] for size in times}:
        same = [size for size in times if size[1] == context]
        timers[context] = PassTimer(decoder, max(s[0] for s in same), context, max(s[2] for s in same), layout)
    for repeat in range(repeats + 1):
        for (sequences, context, rows, layers), times_ms in times.items():
            ms = timers[context].ms(sequences, rows, layers)
            if repeat:
                times_ms.append(ms)
        if progress:
            progress(repeat + 1)
    return times


def measure_steps(
    decoder: Decoder,
    config: StepConfig,
    bandwidth: float,
    progress: Callable[[int], None] | None = None,
    layout: KVLayout | None = None,
) -> list[dict[str, float]]:
    """Time passes of every row count at every context (committed tokens); see `time_passes`.

    Args:
        bandwidth: bytes a second that the machine reads.
        layout: of the K/V cache, see `PassTimer`.

    Returns:
        For each of them ``step_ms``, the median of a whole pass (embed, layers, norm, head of every row), its 10th and
        90th percentiles ``low_ms`` and ``high_ms``; bytes of weights and of K/V that a pass reads; weights read over
        the time; weights and K/V over the time as a share of ``bandwidth``.
    """
    sizes: list[PassSize] = [(1, context, rows, None) for context in config.context for rows in config.rows]
    shape, dtype = layout or (decoder.cache_shape, decoder.dtype)
    per_token, weights = KVPool.bytes_per_token(*shape, dtype), decoder.pass_bytes
    rows_out = []
    for (_, context, rows, _), times in time_passes(decoder, sizes, config.repeats, progress, layout).items():
        low, middle, high = map(float, np.quantile(times, [0.1, 0.5, 0.9]))
        kv = (context + rows) * per_token
        sized = {"rows": rows, "context": context, "weight_bytes": weights, "kv_bytes": kv}
        timed = {"step_ms": middle, "low_ms": low, "high_ms": high, "weights_gb_per_s": weights / middle / 1e6}
        rows_out.append({**sized, **timed, "share_of_bandwidth": (weights + kv) / (middle * 1e-3) / bandwidth})
    return rows_out
