"""Estimates of how many drafted tokens will be accepted: exponential averages by depth, for each sequence and shared.

The averages count steps without a proposal, too: ``arrive[d]`` is the probability that a step which allowed depth d and
accepted d - 1 tokens also accepted a d-th. A look-up that proposes in one step of five and is then accepted has 0.2 at
depth 1; the rows it costs are averaged separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log1p


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """Initial estimates, and how fast they change."""

    arrive: float = 0.6  # chance of one more accepted token; hopeful enough for a first try
    offer: float = 0.7  # chance that a drafter proposes anything
    go_on: float = 0.8  # chance that a proposal has one more node
    weight: float = 3.0  # observations that the first belief is worth: few, so that a bad drafter is found out at once
    weight_own: float = 8.0  # the same for what a sequence takes from all: many, lest luck be taken for its nature
    fastest_shared: float = 0.02  # least weight of an observation in what all sequences share
    fastest_own: float = 0.1  # the same for a sequence: about ten steps of memory, texts change their nature


@dataclass(slots=True)
class _Average:
    """An exponential average with larger weights for the first observations."""

    value: float
    count: int = field(default=0)

    def move(self, seen: float, weight: float, floor: float) -> None:
        self.value += max(floor, 1 / (self.count + weight)) * (seen - self.value)
        self.count += 1


class Acceptance:
    """One set of averages, starting from those of a parent (or a config).

    Args:
        config: initial estimates and rates.
        parent: the shared averages, for those of one sequence.
    """

    __slots__ = ("_config", "_floor", "_parent", "_weight", "arrive", "go_on", "offer", "strength", "tries")

    offer: _Average
    go_on: _Average
    strength: _Average

    def __init__(self, config: AcceptanceConfig, parent: Acceptance | None = None) -> None:
        self._config = config
        self._parent: Acceptance | None = parent
        # What all share is worth no more than what it was learned from.
        self._weight = config.weight
        if parent is not None:
            self._weight = max(config.weight, min(config.weight_own, parent.offer.count))
        self._floor = config.fastest_shared if parent is None else config.fastest_own
        self.arrive: list[float] = []  # [d - 1]
        self.tries: list[int] = []  # [d - 1]
        self.offer = _Average(parent.offer.value if parent else config.offer)
        self.go_on = _Average(parent.go_on.value if parent else config.go_on)
        self.strength = _Average(parent.strength.value if parent else config.arrive)

    def observe(self, budget: int, drafted: int, accepted: int, ended: bool) -> None:
        """Update from one step.

        Args:
            budget: nodes that were allowed.
            drafted: nodes that were checked.
            accepted: tokens that were accepted.
            ended: the sequence ended with this step, so that the first token not accepted is no evidence.
        """
        weight, floor = self._weight, self._floor
        self.offer.move(drafted > 0, weight, floor)
        if drafted:
            for _ in range(min(drafted - 1, 3)):
                self.go_on.move(True, weight, floor)
            if drafted < budget:
                self.go_on.move(False, weight, floor)
            self.strength.move(accepted / log1p(drafted), weight, floor)
        last = min(budget, accepted if ended else accepted + 1)
        while len(self.arrive) < last:
            self.arrive.append(self._belief(len(self.arrive) + 1))
            self.tries.append(0)
        for depth in range(last):
            rate = max(floor, 1 / (self.tries[depth] + weight))
            self.arrive[depth] += rate * ((depth < accepted) - self.arrive[depth])
            self.tries[depth] += 1

    def chance(self, depth: int) -> float:
        """Probability that a token at ``depth`` is accepted, given that all before it are."""
        return self.arrive[depth - 1] if depth <= len(self.arrive) else self._belief(depth)

    def _belief(self, depth: int) -> float:
        if self._parent is not None:
            return self._parent.chance(depth)
        if depth == 1 or not self.arrive:
            return self._config.arrive
        # Deeper than ever tried: as the deepest known one from depth 2 on, for depth 1 also counts empty proposals.
        return max(self._config.arrive, self.arrive[0]) if len(self.arrive) == 1 else self.arrive[-1]

    def curve(self, most: int, tree: bool) -> tuple[list[float], list[float]]:
        """Expected tokens and rows of the n-th node of a budget, n = 1 .. most.

        Args:
            most: nodes to look at.
            tree: siblings are possible: the n-th node is not the n-th level. Then the tokens that n nodes bring are
                taken to grow with log(1 + n), as for trees whose best nodes come first.

        Returns:
            [most] expected tokens, and [most] expected rows, of each node; neither increases with n.
        """
        rows = []
        row = self.offer.value
        for _ in range(most):
            rows.append(row)
            row *= self.go_on.value
        if tree:
            return [self.strength.value * (log1p(n + 1) - log1p(n)) * self.offer.value for n in range(most)], rows
        gains = []
        reach = 1.0
        for depth in range(1, most + 1):
            reach *= self.chance(depth)
            gains.append(min(reach, rows[depth - 1]))  # no more tokens than rows
        return gains, rows
