"""The chance that a drafted node is accepted: moving averages by source, depth and the drafter's own score.

A drafter's score of a node is turned into odds, which name one of a few classes, separately for each depth. Of each
class the share of nodes that were right is kept, of those whose parent was right; and each sequence has a shift of all
log odds of its own, since texts differ more than drafts of one text do. A proposal is judged by the text that follows
it, whether or not its nodes were checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from itertools import accumulate
from math import exp
from operator import mul

from ..core.sequence import Sequence
from ..core.tree import TokenTree

# Odds at which classes part; those of look-ups are half of the matched tokens (see `ngram.log_trust`).
EDGES = (1 / 16, 1 / 8, 1 / 4, 0.45, 0.75, 1.25, 1.75, 2.4, 3.4, 5, 7, 10, 20, 50, 150, 500)
CLASSES = len(EDGES) + 1
DEPTHS = 5  # 1, 2, 3-4, 5-8, deeper
UNKNOWN = 1.0  # odds of a node of which its drafter gives nothing

PRIOR = 4.0  # observations that the drafter's own estimate is worth
SLOWEST = 1 / 200  # least weight of an observation in the average of its class
SHIFT = 0.25  # how far one observation moves a sequence's log odds
FADE = 0.98  # of a sequence's shift, at every observation: a text changes its nature
MOST_SHIFT = 3.0
FIRST_GAIN = 1.5  # expected gain of the first call of a source, in tokens
HORIZON = 32  # tokens over which catching up must pay; half of those that are left, where these are fewer
TRUSTED = 16  # calls of all sequences that a new sequence's own are added to, at most
QUICKEST = 0.08  # least weight of a call in the gains of its sequence
SHARED = 1 / 256  # least weight of a call in the gains of all sequences


class Chances:
    """Describe how often nodes of each class were right, for one source of drafts."""

    def __init__(self) -> None:
        middles = [EDGES[0] / 2, *((a * b) ** 0.5 for a, b in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1] * 2]
        self.odds = middles * DEPTHS  # that a node of a class is right, given that its parent is
        self._share = [odds / (1 + odds) for odds in self.odds]
        self._tries = [PRIOR] * len(self.odds)

    def learn(self, cell: int, right: bool) -> None:
        """Take in a node whose parent was right."""
        self._tries[cell] += 1
        share = self._share[cell]
        share += max(SLOWEST, 1 / self._tries[cell]) * (right - share)
        self._share[cell] = share
        self.odds[cell] = (share + 5e-5) / (1 - share + 5e-5)

    def doubt(self) -> None:
        """Keep the averages as a first guess alone: another drafter takes the place of this source."""
        self._tries = [PRIOR] * len(self.odds)


def cell_of(log_chance: float, depth: int) -> int:
    """Return the class of a node, from its drafter's estimate given its parent (NaN: none)."""
    odds = UNKNOWN
    if log_chance == log_chance:
        chance = exp(min(0.0, log_chance))
        odds = chance / max(1 - chance, 1e-4)
    return min((depth - 1).bit_length(), DEPTHS - 1) * CLASSES + bisect_right(EDGES, odds)


@dataclass(slots=True)
class AskGain:
    """Moving averages of what calling a source brings, for one sequence or for all."""

    gain: float = FIRST_GAIN  # tokens of a call beyond the price of their rows
    open: float = 1.0  # chance that the sources before it did not have the next token
    asks: int = 0

    def learn(self, gain: float, open_: float, slowest: float) -> None:
        """Add one call."""
        rate = max(slowest, 2 / (self.asks + 2))  # later ones count more: the chances are known better
        self.gain += rate * (gain - self.gain)
        self.open += rate * (open_ - self.open)
        self.asks += 1


@dataclass(slots=True)
class History:
    """State of one sequence: its last proposal, the shift of its odds, and the gain of each source.

    Args:
        view: of the sequence.
        chances: by source mark, shared by all sequences.
        sources: how many drafters may be called for it.
        born: step of its first draft.
    """

    view: Sequence
    chances: abc.Sequence[Chances]
    sources: InitVar[int]
    born: int = 0
    base: int = 0  # tokens of the text at the last proposal
    proposal: list[tuple[int, int, int, int, float]] = field(default_factory=list)  # token, parent, mark, class, chance
    shared: abc.Sequence[AskGain] = ()  # by source: gains over all sequences at this batch size
    gains: list[AskGain] = field(default_factory=list)  # by source: its own; until it was called, the shared one
    shift: list[float] = field(init=False)  # by source mark: log odds against those of all sequences
    seen: list[int] = field(init=False)  # tokens of the text that each source has processed
    asked_at: list[int] = field(init=False)  # step of the last call
    begun: list[bool] = field(init=False)  # whether the last call only prepared the next one

    def __post_init__(self, sources: int) -> None:
        self.shift, self.seen = [0.0] * len(self.chances), [0] * sources
        self.asked_at, self.begun = [-1] * sources, [False] * sources

    def at_batch(self, shared: abc.Sequence[AskGain]) -> None:
        """Begin with the gains at another batch size."""
        if self.shared is not shared:
            self.shared, self.gains = shared, [*shared]

    def chance(self, mark: int, log_score: float, depth: int) -> tuple[int, float]:
        """Return the class of a node and its chance of being right, given that its parent is."""
        cell = cell_of(log_score, depth)
        odds = self.chances[mark].odds[cell]
        if shift := self.shift[mark]:
            odds *= exp(shift)
        return cell, odds / (1 + odds)

    def first(self, source: int, log_scores: Iterable[float]) -> float:
        """Return the chance that one of the first tokens that a source proposes is right."""
        return min(1.0, sum([self.chance(source, score, 1)[1] for score in log_scores]))

    def unscored(self, depth: int) -> list[float]:
        """Return the chances of the paths of a chain of which its drafter gives nothing, by depth."""
        return [*accumulate([self.chance(0, float("nan"), d)[1] for d in range(1, depth + 1)], mul)]

    def asks_left(self, source: int) -> float:
        """Return the calls of a source over which catching up with the text must pay."""
        tokens = HORIZON
        if self.view.max_len is not None:
            tokens = min(tokens, (self.view.max_len - len(self.view.tokens)) // 2)
        return max(1.0, tokens / (1 + max(1.0, self.gains[source].gain)))

    def learn(self, source: int, gain: float, open_: float) -> None:
        """Add the gain of a call; the sequence's own averages begin with its first."""
        shared = self.shared[source]
        if self.gains[source] is shared:
            self.gains[source] = replace(shared, asks=min(shared.asks, TRUSTED))
        self.gains[source].learn(gain, open_, QUICKEST)
        shared.learn(gain, open_, SHARED)

    def judge(self) -> None:
        """Compare the last proposal with the text that followed.

        Every node is counted whose parent was right and whose place in the text is known.
        """
        if not self.proposal:
            return
        tokens, shift, places = self.view.tokens, self.shift, {0: self.base}  # of right nodes: their children's place
        for node, (token, parent, mark, cell, chance) in enumerate(self.proposal, start=1):
            place = places.get(parent, len(tokens))
            if place >= len(tokens):
                continue
            right = tokens[place] == token
            self.chances[mark].learn(cell, right)
            shift[mark] = max(-MOST_SHIFT, min(MOST_SHIFT, FADE * (shift[mark] + SHIFT * (right - chance))))
            if right:
                places[node] = place + 1
        self.proposal = []

    def propose(self, tree: TokenTree, blind: bool) -> tuple[list[float], int]:
        """Keep a new proposal until the text shows what it was worth.

        Args:
            blind: whether its drafter's estimates of the paths may not be used.

        Returns:
            Chances of the paths to its nodes, the root included, and the deepest node's depth.
        """
        paths, depths = [1.0], [0]
        scores = [float("nan")] * (len(tree) + 1) if blind or not tree.scores else [0.0, *tree.scores]
        for token, parent, mark, score in zip(tree.tokens, tree.parents, tree.marks, scores[1:], strict=True):
            depth = depths[parent] + 1
            cell, chance = self.chance(mark, score - scores[parent], depth)
            self.proposal.append((token, parent, mark, cell, chance))
            paths.append(paths[parent] * chance)
            depths.append(depth)
        self.base = len(self.view.tokens)
        return paths, max(depths)


def best_count(chances: Iterable[float], prices: abc.Sequence[float]) -> int:
    """Return how many nodes pay, of chances that fall, where so many rows cost ``prices`` tokens."""
    total, best, count = 0.0, 0.0, 0
    for k, chance in enumerate(chances, start=1):
        total += chance
        if total - prices[k] > best:
            best, count = total - prices[k], k
    return count
