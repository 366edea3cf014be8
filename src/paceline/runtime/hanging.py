"""How long a stage may be at a frame before it is taken to hang.

Weights are read once for all rows of a frame, arithmetic is done for each, and which of the two counts changes with
their number: times of small frames predict large ones badly. For every stage a
frame takes no longer than one of more rows, and no longer than one of fewer rows as many times as it has more of them.
So what frames of any size took bounds all others, and the lowest bound is believed.
"""

from __future__ import annotations

from collections import deque

HANG_S = 3.0  # after which a stage is taken to hang ..
SLACK = 4.0  # .. and so many times what a frame of these rows is expected to take
MOST_S, MOST_ROW_S = 60.0, 1.0  # the most: for a frame, and for each of its rows; for the first frames, too
RECENT = 16  # frames of about a size that are looked at


class HangLimit:
    """Estimate the times of one stage from its latest frames."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[int, float]]] = {}  # by powers of two: rows, and seconds

    def note(self, rows: int, seconds: float) -> None:
        """Record that a frame of so many rows came back after so long."""
        self._recent.setdefault(rows.bit_length(), deque(maxlen=RECENT)).append((rows, seconds))

    def seconds(self, rows: int) -> float:
        """For which a frame of so many rows is waited for."""
        each = [sorted(took * max(1.0, rows / its_rows) for its_rows, took in one) for one in self._recent.values()]
        bounds = [times[-2] for times in each if len(times) > 1]  # a slow outlier does not count
        most = MOST_S + MOST_ROW_S * rows
        return min(most, HANG_S + SLACK * min(bounds)) if bounds else most
