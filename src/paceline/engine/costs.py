"""The cost of steps: a measured table, corrected by every step that is run.

    step(B, R)  =  [ plain(B) + chain(B + R) - chain(B) + context ]  x  correction
                    B sequences of one row each, R drafted rows on top

The table comes from a calibration or from a quick estimate; it knows the shape (eight rows cost little more than
one; every sequence brings work of its own). The correction follows the machine's present load, and covers what the
table does not: sampling, book-keeping, trees.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any

from ..core.errors import ConfigError

Points = tuple[tuple[int, float], ...]  # (count, ms), counts ascending

STEEPEST = 1.5  # a correction moves by a factor of this at most for one observation
WINDOW = 3  # observations of which the median counts: one accident in three changes nothing
SLOWEST = 0.02  # least weight of a new observation in a correction
FEW = 64  # tokens to catch up with; of fewer a drafter's first call tells less of what one of them costs
SLOWEST_CATCH_UP = 0.1  # least weight of a new observation of what catching up costs
LEVELS = 6  # passes that a draft takes at most, before anything else was seen; more nodes are siblings or looked up
NEAR = 16  # tokens a sequence that a drafter has not seen which a call takes in its stride
RIDGE = 0.05  # variance of levels that the guess of a level's cost is worth
MACHINE = 0.2  # weight of a new observation in the correction that all steps share


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Milliseconds of a target pass, host work included, piecewise linear and never falling.

    Args:
        chain: by rows of one sequence.
        plain: by sequences of one row each.
        context: committed tokens of each sequence in those passes.
        context_ms: by what a pass grows for every further 1,000 committed tokens, over all sequences.
        source: where the figures come from, in words.
    """

    chain: Points
    plain: Points
    context: int = 0
    context_ms: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        for name in ("chain", "plain"):
            object.__setattr__(self, name, _rising(name, getattr(self, name)))
        if not (math.isfinite(self.context_ms) and self.context_ms >= 0 and self.context >= 0):
            raise ConfigError("a cost table", "its context figures are not numbers from 0 on", "calibrate again")

    def chain_ms(self, rows: float) -> float:
        """One sequence with ``rows`` rows."""
        return interpolate(self.chain, rows)

    def step_ms(self, batch_size: int, extra: float, context: int | None = None) -> float:
        """A step of ``batch_size`` sequences with ``extra`` drafted rows over all of them.

        Args:
            context: committed tokens over all sequences; None: as in the calibration.
        """
        grown = 0 if context is None else context - batch_size * self.context
        base = interpolate(self.plain, batch_size) + self.context_ms * grown / 1000
        drafted = self.chain_ms(batch_size + extra) - self.chain_ms(batch_size) if extra > 0 else 0.0
        return max(base, self.chain[0][1] / 2) + drafted  # a short context cannot make a pass free

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "chain": [list(p) for p in self.chain],
            "plain": [list(p) for p in self.plain],
            "context": self.context,
            "context_ms": self.context_ms,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> CostTable:
        """The inverse of `as_dict`.

        Raises:
            ConfigError: not a cost table.
        """
        try:
            points = {n: tuple((int(count), float(ms)) for count, ms in values[n]) for n in ("chain", "plain")}
            extra = {"context": int(values["context"]), "context_ms": float(values["context_ms"])}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("a cost table", f"it cannot be read ({error!r})", "calibrate again") from error
        return cls(**points, **extra, source=source)  # type: ignore[arg-type]


def _rising(name: str, points: Sequence[tuple[int, float]]) -> Points:
    """The points, none below one before it: a pass over more rows is not cheaper, only noise says so.

    Neighbours that say so share their mean (isotonic regression by pooling adjacent violators).
    """
    counts = [count for count, _ in points]
    if not points or counts[0] != 1 or any(b <= a for a, b in pairwise(counts)):
        raise ConfigError(f"{name} costs at {counts}", "counts must ascend from 1 on", "measure 1 first")
    if any(not math.isfinite(ms) or ms <= 0 for _, ms in points):
        raise ConfigError(f"{name} costs", "every figure must be a number above 0", "calibrate again")
    pools: list[list[float]] = []
    for _, ms in points:
        pools.append([ms])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [mean(pool) for pool in pools for _ in pool]
    return tuple(zip(counts, accumulate(level, max), strict=True))


def interpolate(points: Points, count: float) -> float:
    """Linear between points; beyond the last one on as between the first and the last, or the last two if steeper."""
    if len(points) == 1 or count <= points[0][0]:
        return points[0][1]
    i = bisect_right(points, (count, math.inf))
    if i < len(points):
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)
    (first, low), (before, near), (last, high) = points[0], points[-2], points[-1]
    slope = max((high - low) / (last - first), (high - near) / (last - before))
    return high + slope * (count - last)


def bucket(count: int) -> int:
    """0, 1, 2, 3-4, 5-8, 9-16, ..: counts that share a correction."""
    return 0 if count <= 0 else (count - 1).bit_length() + 1


@dataclass(slots=True)
class _Deviation:
    """By what one kind differs from the expectation, beyond what all kinds do."""

    log: float = 0.0
    visits: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Corrections:
    """Logs of measured times over expected ones.

    The correction is a sum of two: one that all kinds share (the machine's speed now) and one of the kind, a pair of
    buckets. Both are exponential averages, of which the median of the last three counts, so that a single slow step
    changes nothing.
    """

    def __init__(self) -> None:
        self._machine = 0.0
        self._first: list[float] = []
        self._kinds: dict[tuple[int, int], _Deviation] = {}
        self._known: dict[tuple[int, int], float] = {}  # corrections asked for since the last observation

    def factor(self, kind: tuple[int, int]) -> float:
        """Measured over expected times of a kind."""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = math.exp(self._machine + self._deviation(*kind))
        return known

    def visits(self, kind: tuple[int, int]) -> int:
        """Observations of a kind."""
        found = self._kinds.get(kind)
        return found.visits if found else 0

    def observe(self, key: tuple[int, int], log: float) -> None:
        """Learn from one time: the log of measured over expected."""
        self._known.clear()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Deviation(self._nearest(*key))
        kind.visits += 1
        if len(self._first) < WINDOW:  # the first times tell how far off all expectations are, however far
            self._first.append(log)
            self._machine = sorted(self._first)[(len(self._first) - 1) // 2]
            return
        # As differences from the machine's speed, so that what moved that meanwhile is not counted twice.
        kind.recent.append(log - self._machine)
        middle = sorted(kind.recent)[(len(kind.recent) - 1) // 2]
        # Of a new kind the table may be far off; an accident in the first of them is outweighed by the next.
        most = math.log(STEEPEST) * (1 if kind.visits > WINDOW else WINDOW)
        surprise = max(-most, min(most, middle - kind.log))
        # What a new kind costs says nothing of the machine; later surprises say little of the kind.
        self._machine += MACHINE * max(0, kind.visits - WINDOW) / (kind.visits + 2) * surprise
        kind.log += (1 if kind.visits <= WINDOW else max(SLOWEST, 2 / kind.visits)) * surprise

    def _deviation(self, first: int, second: int) -> float:
        """The correction of a kind, from its own times or, where there are none, from its likes'."""
        kind = self._kinds.get((first, second))
        return self._nearest(first, second) if kind is None else kind.log

    def _nearest(self, first: int, second: int) -> float:
        """The correction of the most similar kind met; a second bucket of 0 is like no other."""
        best, distance = 0.0, 99
        for (a, b), kind in self._kinds.items():
            if (b > 0) == (second > 0):
                apart = 2 * abs(a - first) + abs(b - second)
                if apart < distance:
                    best, distance = kind.log, apart
        if distance == 99 and second > 0:  # none was met yet: as far off as those of bucket 0
            return self._deviation(first, 0)
        return best


class StepCosts:
    """A cost table that follows the machine, by kinds of steps: sequences and drafted rows."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._corrections = Corrections()
        self._more: dict[int, list[float]] = {}  # by batch size: what the table says of 0, 1, .. drafted rows

    def predict(self, batch_size: int, extra: float, context: int | None = None) -> float:
        """Expected ms of a step, without the drafter's own time."""
        factor = self._corrections.factor((bucket(batch_size), bucket(math.ceil(extra))))
        return self.table.step_ms(batch_size, extra, context) * factor

    def rise(self, batch_size: int, most: int, context: int) -> list[float]:
        """[most + 1] ms by which a step grows with 0, 1, .. ``most`` drafted rows; never falling."""
        first, table = bucket(batch_size), self.table
        more = self._more.setdefault(batch_size, [0.0])
        base = table.chain_ms(batch_size)
        while len(more) <= most:
            more.append(table.chain_ms(batch_size + len(more)) - base)
        plain = table.step_ms(batch_size, 0, context)
        now = plain * self._corrections.factor((first, 0))
        found, start, highest = [0.0], 1, 0.0
        while start <= most:
            stop = min(most, 1 << (start - 1).bit_length())  # the last of its bucket
            factor = self._corrections.factor((first, bucket(start)))
            for rows in range(start, stop + 1):
                highest = max(highest, (plain + more[rows]) * factor - now)
                found.append(highest)
            start = stop + 1
        return found

    def visits(self, batch_size: int, extra: int) -> int:
        """Steps of this kind that were observed."""
        return self._corrections.visits((bucket(batch_size), bucket(extra)))

    def observe(self, batch_size: int, extra: int, context: int, ms: float) -> None:
        """Learn from one step: its sequences, drafted rows, committed tokens and ms without the drafter's time."""
        if ms > 0:
            expected = self.table.step_ms(batch_size, extra, context)
            self._corrections.observe((bucket(batch_size), bucket(extra)), math.log(ms / expected))


@dataclass(slots=True)
class _Line:
    """Running means of the calls for about so many sequences: ms as a straight line over levels."""

    sequences: float = 0.0
    levels: float = 0.0
    ms: float = 0.0
    variance: float = 0.0  # of levels
    covariance: float = 0.0  # of levels and ms
    calls: int = 0

    def learn(self, sequences: int, levels: int, ms: float) -> None:
        """Take in one call; one that took many times as long as usual was interrupted."""
        if self.calls >= WINDOW:
            ms = min(ms, STEEPEST * STEEPEST * self.ms)
        # The first calls of a process are slow (memory is met for the first time): they are forgotten soon, lest a
        # price that is too high keep anybody from asking again.
        rate = max(SLOWEST, 2 / (self.calls + 2))
        far, late = levels - self.levels, ms - self.ms
        self.sequences += rate * (sequences - self.sequences)
        self.levels += rate * far
        self.ms += rate * late
        self.variance = (1 - rate) * (self.variance + rate * far * far)
        self.covariance = (1 - rate) * (self.covariance + rate * far * late)
        self.calls += 1

    def slope(self, guess: float) -> float:
        """Ms of a level; where all calls had about the same number of levels, near the guess."""
        found = (self.covariance + RIDGE * guess) / (self.variance + RIDGE)
        return max(0.0, min(found, self.ms / max(1.0, self.levels)))


class DraftCosts:
    """What asking a drafter takes, learned call by call.

        ms = ask + level x levels + catch_up x tokens behind

    A draft model pays for levels and for what it has not computed, a look-up for sequences. What calls take is learned
    by the number of sequences, from calls with little to catch up with (the last step's tokens are part of every
    call); what a token behind costs, from the others. The first call of all does what is done once: only what it
    caught up with is learned from.

    Args:
        ask, level, catch_up: ms to begin with, for one sequence.
    """

    def __init__(self, ask: float = 0.03, level: float = 0.0, catch_up: float = 0.002) -> None:
        self._ask, self._level = max(0.0, ask), max(0.0, level)
        self._guess = self.catch_up_ms = max(0.0, catch_up)  # a token
        self.usual_calls = 0  # those with little to catch up with
        self._lines: dict[int, _Line] = {}  # by bucket of sequences
        self._calls = self._caught_up = 0
        self._waiting: deque[tuple[int, int, int, float]] = deque(maxlen=8)  # calls that caught up, not learned yet

    @classmethod
    def of_network(cls, target: CostTable, own: CostTable | None = None, catches_up: bool = True) -> DraftCosts:
        """A guess for a drafter with a network: a whole draft costs a target pass at most, lest nobody chose it.

        Args:
            target: the target's costs.
            own: the calibrated costs of the draft model, if there are any.
            catches_up: whether it has to compute something for every token that it has not seen.
        """
        level = target.chain_ms(1) / LEVELS
        if own is None:
            return cls(level / 10, level, target.chain_ms(128) / 128 / 3 if catches_up else 0.0)
        return cls(own.step_ms(2, 0) - own.step_ms(1, 0), min(level, own.chain_ms(1)), own.chain_ms(128) / 128)

    @property
    def network(self) -> bool:
        """Whether levels cost anything."""
        return self._level > 0

    def level_ms(self, sequences: int) -> float:
        """One more level of a call for so many sequences."""
        line = self._line(sequences)
        return self._level if line is None else line.slope(self._level) if self._level else 0.0

    def predict(self, sequences: int) -> float:
        """Expected ms of a call for so many sequences, none of them far behind, as deep as calls were lately."""
        line = self._line(sequences)
        if line is None:
            return self._ask * sequences + self._level * LEVELS
        if not self._level:
            return line.ms * sequences / line.sequences
        return max(0.0, line.ms + self._ask * (sequences - line.sequences))

    def _line(self, sequences: int) -> _Line | None:
        """What is known of calls for about so many sequences."""
        size = bucket(sequences)
        found = self._lines.get(size)
        if found is None and self._lines:
            found = self._lines[min(self._lines, key=lambda known: abs(known - size))]
        return found

    def observe(self, sequences: int, levels: int, unseen: int, ms: float) -> None:
        """Learn from one call: its sequences, the deepest node proposed, and tokens that it processed first."""
        if unseen > NEAR * sequences:
            self._waiting.append((sequences, levels, unseen, ms))
            if not self._caught_up and self.usual_calls < WINDOW:
                # For the time being all of it was catching up. The first call does what is done once, too: with few
                # tokens to divide that by, the drafter would seem too dear to be asked again.
                behind = unseen - NEAR * sequences
                guessed = max(0, FEW - behind)
                self.catch_up_ms = (guessed * self._guess + ms) / (guessed + behind)
        elif self._calls:
            self._lines.setdefault(bucket(sequences), _Line()).learn(sequences, levels, ms)
            self.usual_calls += 1
        self._calls += 1
        if self.usual_calls >= WINDOW:  # before, all that the guess is off by would be taken for catching up
            for call in self._waiting:
                self._learn_catch_up(*call)
            self._waiting.clear()

    def _learn_catch_up(self, sequences: int, levels: int, unseen: int, ms: float) -> None:
        behind = unseen - NEAR * sequences
        line = self._line(sequences)
        assert line is not None, "usual calls were seen"
        usual = max(0.0, self.predict(sequences) + self.level_ms(sequences) * (levels - line.levels))
        guess = usual + self.catch_up_ms * behind
        self._caught_up += 1
        # A call that took many times longer than expected was interrupted, or the guess is off: move some way. Of
        # the first few nobody knows what is many.
        error = max(-guess, min(ms - guess, (2 if self._caught_up > WINDOW else 50) * guess))
        rate = max(SLOWEST_CATCH_UP, 1 / (self._caught_up + 1))
        self.catch_up_ms = max(0.0, self.catch_up_ms + rate * error / behind)
