"""w while requests run: from the ranks of the tokens that were said, and from what ticks took (section 3.3.3)."""

from __future__ import annotations

from collections import deque

from ...planning.pipeline import Candidate, choose_tree, hit_rates

EVERY = 16  # tokens between two choices
KNOWN = 256  # tokens that the hit rates are of
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

    A token that a level had no room for counts with the rank that it had there, so that wider levels than the current
    one can be judged, too; how much more would have hung below it nobody knows.

    Where all ticks had as many rows it tries another width for a few tokens: some hundred ticks later it knows no more
    what rows take, and tries again.

    Args:
        most: the largest, with which it begins.
        stages: m.
    """

    def __init__(self, most: int, stages: int) -> None:
        self.width, self.time = most, TickTime()
        self._stages = stages
        self._widths = [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
        self._ranks: deque[int] = deque(maxlen=KNOWN)
        self._since = 0

    def said(self, rank: int) -> None:
        """A token, with its rank in its level; below 0: it was not drafted."""
        self._ranks.append(rank)
        self._since += 1
        if self._since >= EVERY:
            self._since = 0
            self.width = self._best() if self.time.known else self._neighbour()

    def _best(self) -> int:
        rates = hit_rates(self._ranks, self._widths)
        candidates = [Candidate(width, 1, rates[width]) for width in self._widths]
        return choose_tree(candidates, self.time, self._stages).width

    def _neighbour(self) -> int:
        """Another width, so that ticks tell what rows take: the next one below, or above the smallest."""
        place = self._widths.index(self.width)
        return self._widths[place - 1] if place else self._widths[min(1, len(self._widths) - 1)]
