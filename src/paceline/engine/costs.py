"""The cost of steps: a measured table, corrected by every step that is run.

    step(B, R)  =  [ plain(B) + chain(B + R) - chain(B) + context ]  x  correction
                    B sequences of one row each, R drafted rows on top

The table is timed when the engine starts, and gives the shape of the costs: eight rows cost little
more than one, and every sequence brings work of its own. The correction follows the machine's present load, and covers
what the table leaves out: sampling, book-keeping, trees.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import mean, median_low

from ..core.errors import ConfigError

Points = tuple[tuple[int, float], ...]  # (count, ms), counts ascending

STEEPEST = 1.5  # a correction moves by a factor of this at most for one observation
WINDOW = 3  # observations of which the median counts: one accident in three changes nothing
SLOWEST = 0.02  # least weight of a new observation in a correction or in the mean of a drafter's calls
MACHINE = 0.2  # weight of a new observation in the correction that all steps share
DEPTH_RATE = 0.1  # least weight of a call in the passes that calls take
RIDGE = 0.05  # variance of passes that the guess of a pass's cost is worth
LEVELS = 6  # passes that a draft takes, before any was seen
NOISE = 0.1  # of a plain step's time, by which a mean of few steps may be off
NEAR = 16  # tokens a sequence; a drafter that is further back catches up, which is priced separately
FEW = 64  # tokens to catch up with, from which a call learns half as much as from many
# Of tables that are predicted:
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one sequence
CONTEXT = 128  # committed tokens of each


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
            raise ConfigError("a cost table", "its context figures are not numbers from 0 on", "measure again")

    def chain_ms(self, rows: float) -> float:
        """Return one sequence with ``rows`` rows."""
        return interpolate(self.chain, rows)

    def step_ms(self, batch_size: int, extra: float, context: int | None = None) -> float:
        """Return a step of ``batch_size`` sequences with ``extra`` drafted rows over all of them.

        Args:
            context: committed tokens over all sequences; None: as in the table.
        """
        grown = 0 if context is None else context - batch_size * self.context
        base = interpolate(self.plain, batch_size) + self.context_ms * grown / 1000
        drafted = self.chain_ms(batch_size + extra) - self.chain_ms(batch_size) if extra > 0 else 0.0
        return max(base, self.chain[0][1] / 2) + drafted  # a short context cannot make a pass free


def _rising(name: str, points: Sequence[tuple[int, float]]) -> Points:
    """Return the points, none below one before it: a pass over more rows is not cheaper, only noise suggests it.

    Neighbours out of order share their mean (isotonic regression by pooling adjacent violators).
    """
    counts = [count for count, _ in points]
    if not points or counts[0] != 1 or any(b <= a for a, b in pairwise(counts)):
        raise ConfigError(f"{name} costs at {counts}", "counts must ascend from 1 on", "measure 1 first")
    if any(not math.isfinite(ms) or ms <= 0 for _, ms in points):
        raise ConfigError(f"{name} costs", "every figure must be a number above 0", "measure again")
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

    def predict(self, batch_size: int, extra: int, context: int | None = None) -> float:
        """Return expected ms of a step, without the drafter's own time."""
        return self.table.step_ms(batch_size, extra, context) * self._factor(bucket(batch_size), bucket(extra))

    def rise(self, batch_size: int, most: int, context: int) -> list[float]:
        """Return [most + 1] ms by which a step grows with 0, 1, .. ``most`` drafted rows; never falling."""
        first, table = bucket(batch_size), self.table
        more, base = self._more.setdefault(batch_size, []), table.chain_ms(batch_size)
        more += [(table.chain_ms(batch_size + rows) - base, bucket(rows)) for rows in range(len(more) + 1, most + 1)]
        factors = [self._factor(first, rows) for rows in range(bucket(most) + 1)]
        plain = table.step_ms(batch_size, 0, context)
        now = plain * factors[0]
        rise = [*accumulate([(plain + ms) * factors[rows] - now for ms, rows in more[:most]], max, initial=0.0)]
        # Where rows cost more than in the table by more than noise may be, rows beyond those seen do, in proportion.
        seen = [rows for rows in range(1, bucket(most)) if self._seen(first, rows)]
        if seen and (last := 1 << max(0, seen[-1] - 1)) < most:
            sure, estimated = rise[last] - NOISE * now, more[last - 1][0]
            if sure > estimated > 0:
                beyond = zip(rise[last + 1 :], more[last:most], strict=True)
                rise[last + 1 :] = [max(cost, ms * sure / estimated) for cost, (ms, _) in beyond]
        return rise

    def _seen(self, sequences: int, rows: int) -> bool:
        """Return whether a correction of this kind of step rests on several."""
        kind = self._kinds.get((sequences, rows))
        return kind is not None and kind.visits >= WINDOW

    def visits(self, batch_size: int, extra: int) -> int:
        """Return steps of this kind that were observed."""
        kind = self._kinds.get((bucket(batch_size), bucket(extra)))
        return kind.visits if kind else 0

    def observe(self, batch_size: int, extra: int, context: int, ms: float) -> bool:
        """Learn from one step: its sequences, drafted rows, committed tokens and ms without the drafter's time.

        Returns:
            Whether it took longer than expected by more than noise.
        """
        if ms <= 0:
            return False
        dear = ms > (1 + NOISE) * self.predict(batch_size, extra, context)
        self._learn((bucket(batch_size), bucket(extra)), math.log(ms / self.table.step_ms(batch_size, extra, context)))
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
        kind = self._kinds.get((sequences, rows))
        if kind is not None:
            return kind.log
        alike = [
            (2 * abs(a - sequences) + abs(b - rows), k.log)
            for (a, b), k in self._kinds.items()
            if bool(b) == bool(rows)
        ]
        return min(alike)[1] if alike else self._deviation(sequences, 0) if rows else 0.0


@dataclass(slots=True)
class _Calls:
    """Running means over a drafter's calls for about so many sequences: ms as a straight line over passes."""

    sequences: float
    passes: float
    ms: float
    variance: float = 0.0  # of passes
    covariance: float = 0.0  # of passes and ms
    count: int = 0

    def learn(self, sequences: int, passes: int, ms: float) -> None:
        """Take in one call; one that took many times as long as usual was interrupted."""
        if self.count >= WINDOW:
            ms = min(ms, STEEPEST * STEEPEST * self.ms)
        # The first calls of a process are slow (memory is met for the first time): they are forgotten soon, lest a
        # price that is too high keep anybody from asking again.
        rate = max(SLOWEST, 2 / (self.count + 2))
        far, late = passes - self.passes, ms - self.ms
        self.sequences += rate * (sequences - self.sequences)
        self.passes += rate * far
        self.ms += rate * late
        self.variance = (1 - rate) * (self.variance + rate * far * far)
        self.covariance = (1 - rate) * (self.covariance + rate * far * late)
        self.count += 1

    def slope(self, guess: float) -> float:
        """Return ms of a pass; where all calls took about the same number of passes, near the guess."""
        estimate = (self.covariance + RIDGE * guess) / (self.variance + RIDGE)
        return max(0.0, min(estimate, self.ms / max(1.0, self.passes)))


class DraftCosts:
    """Describe what calling a drafter takes, learned call by call.

        ms = call + level x passes + catch_up x tokens back    of a drafter with a network
        ms = call x sequences + catch_up x tokens back         of one that looks up

    What calls take is learned by the number of sequences, from calls with little to catch up with (the last step's
    tokens are part of every call); what a token back costs, from the others.

    Args:
        ask: ms of a look-up for one sequence, to begin with.
        level: ms of a network's pass, to begin with; 0: a look-up.
        catch_up: ms of a token back, to begin with.
    """

    def __init__(self, ask: float = 0.03, level: float = 0.0, catch_up: float = 0.002) -> None:
        self.network = level > 0
        self.catch_up_ms = max(0.0, catch_up)
        self.usual_calls = 0  # those with little to catch up with
        self._calls = self._caught_up = 0
        self._level = level
        self._passes = float(LEVELS)  # of calls lately, for however many sequences
        self._guess = _Calls(1, LEVELS, level * LEVELS if self.network else max(0.0, ask))
        self._known: dict[int, _Calls] = {}  # by bucket of sequences

    @classmethod
    def of_network(cls, target: CostTable, catches_up: bool = True) -> DraftCosts:
        """Return a guess for a drafter with a network: a whole draft costs a target pass at most, lest nobody chose it.

        Args:
            target: the target's costs.
            catches_up: whether it has to compute something for every token that it has not seen.
        """
        catch_up = target.chain_ms(128) / 128 / 3 if catches_up else 0.0
        return cls(level=target.chain_ms(1) / LEVELS, catch_up=catch_up)

    def level_ms(self, sequences: int) -> float:
        """Return one more pass of a network for so many sequences."""
        return self._usual(sequences).slope(self._level) if self.network else 0.0

    def predict(self, sequences: int) -> float:
        """Return expected ms of a call for so many sequences, none of them far back, as deep as calls were lately."""
        usual = self._usual(sequences)
        if not self.network:
            return usual.ms * sequences / usual.sequences
        return max(0.0, usual.ms + usual.slope(self._level) * (self._passes - usual.passes))

    def _usual(self, sequences: int) -> _Calls:
        """Return the calls for about so many sequences."""
        if not self._known:
            return self._guess
        size = bucket(sequences)
        return self._known.get(size) or self._known[min(self._known, key=lambda other: abs(other - size))]

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
            self._known.setdefault(bucket(sequences), _Calls(sequences, passes, ms)).learn(sequences, passes, ms)
