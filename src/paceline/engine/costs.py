"""Price steps: a table of measured passes, corrected by every step that is run.

    step(B, R)  =  [ plain(B) + chain(B + R) - chain(B) ]  x  correction
                    B sequences of one row each, R drafted rows on top

The table is timed when the engine starts, and gives the shape of the costs: eight rows cost little
more than one, and every sequence brings work of its own. The correction follows the machine's present load, and covers
what the table leaves out: sampling, book-keeping, trees.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_low

Points = Sequence[tuple[int, float]]  # (count, ms), counts ascending from 1 on

STEEPEST = 1.5  # a correction moves by a factor of this at most for one observation
WINDOW = 3  # observations of which the median counts: one accident in three changes nothing
SLOWEST = 0.02  # least weight of a new observation in a correction or in the mean of a drafter's calls
MACHINE = 0.2  # weight of a new observation in the correction that all steps share
DEPTH_RATE = 0.1  # least weight of a call in the passes that calls take
LEVELS = 6  # passes that a draft takes, before any was seen
NOISE = 0.1  # of a plain step's time, by which a mean of few steps may be off
NEAR = 16  # tokens a sequence; a drafter that is further back catches up, which is priced separately
FEW = 64  # tokens to catch up with, from which a call learns half as much as from many


class CostTable:
    """Milliseconds of a target pass, host work included, piecewise linear and never falling.

    Args:
        chain: by rows of one sequence.
        plain: by sequences of one row each.
    """

    def __init__(self, chain: Points, plain: Points) -> None:
        self.chain, self.plain = _rising(chain), _rising(plain)

    def chain_ms(self, rows: float) -> float:
        """Return one sequence with ``rows`` rows."""
        return interpolate(self.chain, rows)

    def step_ms(self, batch_size: int, extra: float) -> float:
        """Return a step of ``batch_size`` sequences with ``extra`` drafted rows over all of them."""
        drafted = self.chain_ms(batch_size + extra) - self.chain_ms(batch_size)
        return interpolate(self.plain, batch_size) + drafted


def _rising(points: Points) -> Points:
    """Return the points, none above one after it: noise only adds to a pass, and fewer rows are not dearer."""
    least = list(accumulate([ms for _, ms in reversed(points)], min))
    return [(count, ms) for (count, _), ms in zip(points, reversed(least), strict=True)]


def interpolate(points: Points, count: float) -> float:
    """Interpolate linearly; beyond the last point, take the slope over all points, or over the last two if steeper."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(1, bisect_left(points, (count,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    slope = (y1 - y0) / (x1 - x0)
    if count > x1:
        slope = max(slope, (y1 - points[0][1]) / (x1 - points[0][0]))
    return y1 + slope * (count - x1)


def bucket(count: int) -> int:
    """Return 0, 1, 2, 3-4, 5-8, 9-16, ..: counts that share a correction."""
    return 0 if count <= 0 else (count - 1).bit_length() + 1


@dataclass(slots=True)
class _Deviation:
    """By what steps of one kind differ from the table, beyond what all steps do."""

    log: float
    visits: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class StepCosts:
    """A cost table that follows the machine.

    The correction is a product of two factors: one that all steps share (the machine's speed now), and one of the kind
    of step, a bucket of sequences and a bucket of drafted rows. The median of the last three observations counts, so
    that a single slow step changes nothing.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._machine = 0.0  # log
        self._first: list[float] = []
        self._kinds: dict[tuple[int, int], _Deviation] = {}
        self._more: dict[int, list[tuple[float, int]]] = {}  # by batch size: the table's times of 1, 2, .. rows

    def predict(self, batch_size: int, extra: int) -> float:
        """Return expected ms of a step, without the drafter's own time."""
        return self.table.step_ms(batch_size, extra) * self._factor(bucket(batch_size), bucket(extra))

    def rise(self, batch_size: int, most: int) -> list[float]:
        """Return [most + 1] ms by which a step grows with 0, 1, .. ``most`` drafted rows; never falling."""
        first, plain = bucket(batch_size), self.table.step_ms(batch_size, 0)
        more = self._more.setdefault(batch_size, [])
        more += [
            (self.table.step_ms(batch_size, rows) - plain, bucket(rows)) for rows in range(len(more) + 1, most + 1)
        ]
        factors = [self._factor(first, rows) for rows in range(bucket(most) + 1)]
        now = plain * factors[0]
        rise = [*accumulate([(plain + ms) * factors[rows] - now for ms, rows in more[:most]], max, initial=0.0)]
        # Where rows cost more than in the table by more than noise may be, rows beyond those seen do, in proportion.
        seen = [rows for rows in range(1, bucket(most)) if self._visits(first, rows) >= WINDOW]
        if seen and (last := 1 << seen[-1] - 1) < most:
            sure, estimated = rise[last] - NOISE * now, more[last - 1][0]
            if sure > estimated > 0:
                beyond = zip(rise[last + 1 :], more[last:most], strict=True)
                rise[last + 1 :] = [max(cost, ms * sure / estimated) for cost, (ms, _) in beyond]
        return rise

    def visits(self, batch_size: int, extra: int) -> int:
        """Return steps of this kind that were observed."""
        return self._visits(bucket(batch_size), bucket(extra))

    def _visits(self, sequences: int, rows: int) -> int:
        kind = self._kinds.get((sequences, rows))
        return kind.visits if kind else 0

    def observe(self, batch_size: int, extra: int, ms: float) -> bool:
        """Learn from one step: its sequences, drafted rows, and ms without the drafter's time.

        Returns:
            Whether it took longer than expected by more than noise.
        """
        if ms <= 0:
            return False
        dear = ms > (1 + NOISE) * self.predict(batch_size, extra)
        self._learn((bucket(batch_size), bucket(extra)), math.log(ms / self.table.step_ms(batch_size, extra)))
        return dear

    def _learn(self, key: tuple[int, int], log: float) -> None:
        extra, kind = key[1], self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Deviation(self._deviation(*key))
        kind.visits += 1
        if len(self._first) < WINDOW and not extra:  # the first steps show how far off the whole table is, however far
            self._first.append(log)
            self._machine = median_low(self._first)
            return
        # As differences from the machine's speed, so that what moved that meanwhile is not counted twice.
        kind.recent.append(log - self._machine)
        most = math.log(STEEPEST) * (1 if kind.visits > WINDOW else WINDOW)
        surprise = max(-most, min(most, median_low(kind.recent) - kind.log))
        if extra and surprise > 0 and len(kind.recent) < WINDOW:  # by accident, perhaps; then it would stay so
            return
        # The costs of a new kind do not describe the machine; later surprises depend little on the kind.
        self._machine += MACHINE * max(0, kind.visits - WINDOW) / (kind.visits + 2) * surprise
        kind.log += (1 if kind.visits <= WINDOW else max(SLOWEST, 2 / kind.visits)) * surprise

    def _factor(self, sequences: int, rows: int) -> float:
        return math.exp(self._machine + self._deviation(sequences, rows))

    def _deviation(self, sequences: int, rows: int) -> float:
        """Return the costs of a kind of steps, or of the most similar one; plain steps are unlike all others."""
        if kind := self._kinds.get((sequences, rows)):
            return kind.log
        alike = [
            (2 * abs(a - sequences) + abs(b - rows), k.log)
            for (a, b), k in self._kinds.items()
            if bool(b) == bool(rows)
        ]
        return min(alike)[1] if alike else self._deviation(sequences, 0) if rows else 0.0


class DraftCosts:
    """Describe what calling a drafter takes, learned call by call.

        ms = unit x passes + catch_up x tokens back       of a drafter with a network
        ms = unit x sequences + catch_up x tokens back    of one that looks up

    A unit is learned by the number of sequences, from calls with little to catch up with (the last step's tokens are
    part of every call); what a token back costs, from the others.

    Args:
        ask: ms of a look-up for one sequence, to begin with.
        level: ms of a network's pass, to begin with; 0: a look-up.
        catch_up: ms of a token back, to begin with.
    """

    def __init__(self, ask: float = 0.03, level: float = 0.0, catch_up: float = 0.002) -> None:
        self.network, self.catch_up_ms = level > 0, catch_up
        self.usual_calls = 0  # those with little to catch up with
        self._calls = self._caught_up = 0
        self._passes = float(LEVELS)  # of calls lately, for however many sequences
        self._first = level or ask, level
        self._units: dict[int, tuple[float, float]] = {}  # by bucket of sequences: ms of a unit, and of it, of a level
        self._counts: Counter[int] = Counter()  # calls, by bucket of sequences

    @classmethod
    def of_network(cls, target: CostTable, catches_up: bool = True) -> DraftCosts:
        """Return a guess for a drafter with a network: a whole draft costs a target pass at most.

        Args:
            target: the target's costs.
            catches_up: whether it has to compute something for every token that it has not seen.
        """
        catch_up = target.chain_ms(128) / 128 / 3 if catches_up else 0.0
        return cls(level=target.chain_ms(1) / LEVELS, catch_up=catch_up)

    def level_ms(self, sequences: int) -> float:
        """Return one more pass of a network for so many sequences."""
        return self._unit(sequences)[1]

    def predict(self, sequences: int) -> float:
        """Return expected ms of a call for so many sequences, none of them far back, as deep as calls were lately."""
        return self._unit(sequences)[0] * (self._passes if self.network else sequences)

    def _unit(self, sequences: int) -> tuple[float, float]:
        size = bucket(sequences)
        nearest = min(self._units, key=lambda other: abs(other - size), default=size)
        return self._units.get(nearest, self._first)

    def observe(self, sequences: int, passes: int, unseen: int, ms: float) -> None:
        """Learn from one call: its sequences, its network's passes, and the tokens that it processed first."""
        behind, self._calls = unseen - NEAR * sequences, self._calls + 1
        if behind > 0:
            # Of few tokens little is learned: the first call does what is done once, too.
            rate = max(0.1, 1 / (self._caught_up + 1)) * behind / (behind + FEW)
            each = max(0.0, ms - self.predict(sequences)) / behind
            if self._caught_up >= WINDOW:  # one that took many times as long was interrupted
                each = min(each, 3 * self.catch_up_ms)
            self.catch_up_ms += rate * (each - self.catch_up_ms)
            self._caught_up += 1
        elif self._calls > 1:
            self.usual_calls += 1
            self._passes += max(DEPTH_RATE, 1 / self.usual_calls) * (passes - self._passes)
            size, units = bucket(sequences), max(1, passes if self.network else sequences)
            unit, level = ms / units, max(0.0, ms - self.catch_up_ms * unseen) / units if self.network else 0.0
            mean, mean_level = self._units.get(size, (unit, level))
            if self._counts[size] >= WINDOW and unit > (most := STEEPEST * STEEPEST * mean):
                unit, level = most, level * most / unit
            # The first calls of a process are slow (memory is met for the first time): they are forgotten soon, or a
            # price that is too high would keep anybody from asking again.
            rate = max(SLOWEST, 2 / (self._counts[size] + 2))
            self._units[size] = mean + rate * (unit - mean), mean_level + rate * (level - mean_level)
            self._counts[size] += 1
