"""Measure the cost of passes: the figures that ``budget="auto"`` begins with, and those of ``bench step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..api.assembly.drafting import draft_key
from ..api.llm import LLM
from ..draft import registry
from ..draft.registry import DrafterConfig
from ..engine import calibration
from ..engine.calibration import Calibration, KVLayout, PassTimer
from ..engine.costs import ROWS, CostTable
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from .config import StepConfig

BATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one row each
CONTEXTS = (128, 1024)  # committed tokens: of the table, and to see how costs grow
PassSize = tuple[int, int, int, int | None]  # sequences, tokens that each has, rows of each, layers (None: all)


def calibrate(
    llm: LLM,
    drafter: str | DrafterConfig | None = None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    repeats: int = 15,
    **sizes: Any,
) -> tuple[Calibration, Path]:
    """Measure the target's passes, and those of the model that ``drafter`` runs, and write them down.

    Args:
        llm: the model, loaded as it will be used (dtype, exact, kernels, threads).
        drafter: as ``LLM(drafter=...)`` takes it; None: the target alone.
        progress: called with what is timed.
        repeats: passes of each kind; medians count.
        sizes: ``rows``, ``batches`` and ``contexts`` of `measure`.

    Returns:
        The figures, and the file that they were written to.

    Raises:
        ConfigError: no place to write to, or a drafter that cannot be loaded.
    """

    def measured(of: LLM, name: str) -> CostTable:
        progress(f"timing passes of {name}")
        return measure(of.decoder, repeats=repeats, **sizes)

    chosen = registry.parse(drafter)
    draft, dtype = getattr(chosen, "model", None), str(getattr(chosen, "dtype", "auto"))
    table, drafts = measured(llm, "the target"), {}
    if draft:
        draft_dtype = str(llm.decoder.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        other = LLM(str(draft), dtype=draft_dtype, device=llm.config.device, kernels=llm.config.kernels)
        drafts[draft_key(str(draft), dtype)] = measured(other, str(draft))
    result = Calibration(
        fingerprint=llm.fingerprint,
        table=table,
        drafts=drafts,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        repeats=repeats,
    )
    return result, calibration.save(llm.folder, result)


def measure(
    decoder: Decoder,
    *,
    repeats: int,
    rows: Sequence[int] = ROWS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    progress: Callable[[int], None] | None = None,
) -> CostTable:
    """Measure the table of costs of a model's passes; sizes beyond its positions are left out.

    Args:
        repeats: passes of each kind; medians count.
        rows: rows of one sequence, from 1 on.
        batches: sequences of one row each, from 1 on.
        contexts: committed tokens; the table is that of the first, a second one shows how costs grow.
        progress: called with the number of rounds done, of ``repeats + 1``.
    """
    room = decoder.config.max_position
    rows = [count for count in rows if count < room]
    fitting = [context for context in contexts if context + rows[-1] <= room] or [0]
    near, far = fitting[0], fitting[-1]
    sizes = [(1, near, r, None) for r in rows] + [(b, near, 1, None) for b in batches] + [(1, far, 1, None)]
    medians = {size: median(times) for size, times in time_passes(decoder, sizes, repeats, progress).items()}
    grown = medians[1, far, 1, None] - medians[1, near, 1, None]
    return CostTable(
        chain=tuple((r, medians[1, near, r, None]) for r in rows),
        plain=tuple((b, medians[b, near, 1, None]) for b in batches),
        context=near,
        context_ms=max(0.0, 1000 * grown / (far - near)) if far > near else 0.0,
        source="measured now",
    )


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


# -- against what the memory allows


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
