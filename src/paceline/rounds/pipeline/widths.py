"""w while requests run: from what trees of each width would have cost, and from what ticks took (section 3.3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .flight import Flight
from .replay import Replay

SURVEY = 64  # tokens that are replayed ..
REST = 256  # .. before so many with the width that was chosen
KNOWN = 2 * SURVEY  # tokens that a choice is made from
FORGET = 0.98  # of what is known of ticks, with each that comes: some fifty of them count
LEAST_TICKS = 8.0


class TickTime:
    """t(w) as a straight line through what ticks took, the newest ones most: one that leaps is followed late."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0

    def saw(self, rows: int, seconds: float) -> None:
        """A tick whose largest frame had so many rows."""
        for name, value in (
            ("_count", 1.0),
            ("_rows", rows),
            ("_seconds", seconds),
            ("_squares", rows * rows),
            ("_products", rows * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    @property
    def known(self) -> bool:
        """Whether ticks were seen, some of them with other rows than the others."""
        return self._count > LEAST_TICKS and self._spread > 1e-3 * self._squares

    @property
    def _spread(self) -> float:
        return self._squares - self._rows**2 / max(self._count, 1.0)

    def __call__(self, rows: float) -> float:
        """Seconds; more rows never take less."""
        slope = (self._products - self._rows * self._seconds / self._count) / self._spread
        mean = self._seconds / self._count
        return mean + max(0.0, slope) * (rows - self._rows / self._count) if slope > 0 else mean


class Widths:
    """Chooses the width with the least expected time between tokens, among 1, 2, 4, .. and the largest.

    In a survey the largest width runs, so that the drafts of all others are known, and `Replay` counts the ticks that
    each would have taken. Then the best one runs for a while. Where all ticks had as many rows nobody knows what rows
    take: another width runs, so that the next survey does.

    Args:
        most: the largest, with which it begins.
        stages: m.
    """

    def __init__(self, most: int, stages: int) -> None:
        self.width, self.time, self.surveying = most, TickTime(), True
        self._stages = stages
        self._widths = [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
        self._ticks: deque[Mapping[int, int]] = deque(maxlen=KNOWN)
        self._left = SURVEY

    def replay(self, flight: Flight, farthest: int, fresh: bool = False) -> Replay:
        """Of a request whose tree may be older than the survey, or is ``fresh``.

        What was drafted before, by a narrower tree, has left the stages after m tokens, and what was chosen from it
        after m more.
        """
        return Replay(flight, self._widths, self._stages, farthest, 0 if fresh else 2 * self._stages)

    def said(self, ticks: Mapping[int, int]) -> None:
        """A token, with the ticks that trees of each width would have taken; empty: not known."""
        if self.surveying and not ticks:
            return
        if self.surveying:
            self._ticks.append(ticks)
        self._left -= 1
        if not self._left:
            self.surveying = not self.surveying
            self._left = SURVEY if self.surveying else REST
            self.width = self._widths[-1] if self.surveying else self._next()

    def _next(self) -> int:
        """The width between two surveys."""
        if not self.time.known:
            return self._widths[max(0, len(self._widths) - 2)]
        return min(self._widths, key=lambda width: (self.time(width) * (1 + self.bubbles(width)), width))

    def bubbles(self, width: int) -> float:
        """Ticks without a token for each one with a token, as the surveys found them."""
        return sum(ticks[width] for ticks in self._ticks) / len(self._ticks) - 1
