"""Time passes of the target by their rows and context."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..engine.calibration import KVLayout, PassTimer
from ..model.decoder import Decoder

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
