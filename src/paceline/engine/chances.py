"""The chance that a drafted node is accepted, from its source, its depth and its drafter's own score.

A drafter's score of a node is turned into odds, which name one of a few classes, apart for each depth. Of each class a
count is kept of how often nodes whose parent was right were right themselves, for each kind of request; and each
sequence has a shift of all log odds of its own, since texts differ more than drafts of one text do. A proposal is
judged by the text that follows it, whether or not its nodes were checked.

`weigh` judges the last proposals, gives every node of the new ones its chance, and chooses those that pay, in one
compiled call; `_weigh` does the same where there are no compiled kernels, number for number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import exp, inf
from operator import mul
from typing import Any

from ..core.tree import TokenTree
from ..draft.base import SequenceView

# Odds at which classes part; those of look-ups are half of the matched tokens (see `ngram.trust`).
EDGES = (1 / 16, 1 / 8, 1 / 4, 0.45, 0.75, 1.25, 1.75, 2.4, 3.4, 5, 7, 10, 20, 50, 150, 500)
CLASSES = len(EDGES) + 1
DEPTHS = 5  # 1, 2, 3-4, 5-8, deeper
CELLS = DEPTHS * CLASSES
UNKNOWN = 1.0  # odds of a node of which its drafter says nothing

PRIOR = 4.0  # observations that the drafter's own estimate is worth
MEMORY = 0.995  # weight of the past at every observation of a class: about two hundred of them count
SHIFT = 0.25  # how far one observation moves a sequence's log odds
FADE = 0.98  # of a sequence's shift, at every observation: a text changes its nature
MOST_SHIFT = 3.0
FIRST_GAIN = 2.5  # tokens that the first ask of a source is taken to bring: hopeful enough for a try
HORIZON = 32  # tokens over which catching up must pay; fewer where answers are shorter, half of those that are left
TRUSTED = 16  # asks of its kind that a new request's own are added to, at most: few of them mislead
QUICKEST = 0.08  # least weight of an ask in what its sequence's asks bring
KIND_RATE = 1 / 256  # least weight of an ask in what a kind's asks bring: several requests, not the last text
_NUMBERS = array("d", (UNKNOWN, MEMORY, SHIFT, FADE, MOST_SHIFT, *EDGES))


class Chances:
    """How often nodes of each class were right, for one source of drafts and one kind of request."""

    def __init__(self) -> None:
        middles = [EDGES[0] / 2, *((a * b) ** 0.5 for a, b in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1] * 2]
        hits = [PRIOR * odds / (1 + odds) for odds in middles]
        # [3, CELLS]: hits, tries, and the odds that follow from them
        self.table = array("d", hits * DEPTHS + [PRIOR] * CELLS + middles * DEPTHS)

    def odds(self, cell: int) -> float:
        """The odds that a node of a class is right, given that its parent is."""
        return self.table[2 * CELLS + cell]

    def learn(self, cell: int, right: bool) -> None:
        """Count a node whose parent was right."""
        table = self.table
        hits = table[cell] = MEMORY * table[cell] + right
        tries = table[CELLS + cell] = MEMORY * table[CELLS + cell] + 1
        table[2 * CELLS + cell] = (hits + 0.01) / (tries - hits + 0.01)

    def doubted(self) -> Chances:
        """The same odds, of as many observations as a drafter's own estimate is worth."""
        fresh = Chances()
        for cell in range(CELLS):
            fresh.table[cell] = PRIOR * self.table[cell] / self.table[CELLS + cell]
            fresh.table[2 * CELLS + cell] = self.table[2 * CELLS + cell]
        return fresh

    def by_depth(self) -> list[float]:
        """For depths 1, 2, 3-4, 5-8 and beyond, how often a node was right whose parent was, of those met lately."""
        firsts = range(0, CELLS, CLASSES)
        return [sum(self.table[i : i + CLASSES]) / sum(self.table[CELLS + i : CELLS + i + CLASSES]) for i in firsts]


def cell_of(odds: float, depth: int) -> int:
    """The class of a node, from its drafter's estimate given its parent, as odds."""
    return min((depth - 1).bit_length(), DEPTHS - 1) * CLASSES + bisect_right(EDGES, odds)


def odds_of(log_chance: float) -> float:
    """Odds of the log of a chance; one that says nothing (NaN) is `UNKNOWN`."""
    if log_chance != log_chance:
        return UNKNOWN
    chance = exp(min(0.0, log_chance))
    return chance / max(1 - chance, 1e-4)


@dataclass(slots=True)
class AskGain:
    """Running means of what asking a source brings: for a sequence, or for a kind of requests at a batch size."""

    gain: float = FIRST_GAIN  # tokens of an ask beyond the price of their rows
    open: float = 1.0  # chance that the sources before it had not the next token
    asks: int = 0

    def learn(self, gain: float, open_: float, slowest: float) -> None:
        """Take in one ask."""
        rate = max(slowest, 2 / (self.asks + 2))  # later ones count more: the chances behind them are known better
        self.gain += rate * (gain - self.gain)
        self.open += rate * (open_ - self.open)
        self.asks += 1


@dataclass(slots=True)
class RequestKind:
    """What requests of one kind (an application, or none) have in common."""

    chances: list[Chances]  # by source mark
    gains: dict[tuple[int, int], AskGain] = field(default_factory=dict)  # by source and bucket of batch sizes
    expected: dict[int, float] = field(
        default_factory=dict
    )  # by source: what its first ask is taken to bring, if known
    usual: float = inf  # tokens of an answer
    answers: int = 0  # that are counted in it

    def ended(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self.answers += 1
        self.usual = tokens if self.answers == 1 else self.usual + max(1 / self.answers, 1 / 64) * (tokens - self.usual)

    def renewed(self, source: int, marks: Collection[int], gain: float | None) -> RequestKind:
        """The same requests, for which another drafter drafts in the place of a source; its nodes have ``marks``. What
        was counted of the old one stands until the new one is met: a drafter that has hardly learned thinks too well of
        its own drafts."""
        chances = [each.doubted() if mark in marks else each for mark, each in enumerate(self.chances)]
        gains = {key: known for key, known in self.gains.items() if key[0] != source}
        expected = {of: first for of, first in self.expected.items() if of != source}
        if gain is not None:
            expected[source] = gain
        return RequestKind(chances, gains, expected, self.usual, self.answers)


class History:
    """What is known of one sequence: the chances of its drafts, its last proposal until the text tells what that was
    worth, and what asking each source brought.

    Args:
        view, kind: of the sequence.
        sources: how many drafters may be asked for it.
        room: most nodes of a proposal.
    """

    __slots__ = ("asked_at", "base", "begun", "born", "bucket", "count", "gains", "kind", "last", "places", "proposal",
                 "rested_before", "room", "seen", "shift", "view")  # fmt: skip

    def __init__(
        self, view: SequenceView, kind: RequestKind, sources: int, room: int, born: int = 0, rested: int = 0
    ) -> None:
        self.view, self.kind = view, kind
        self.shift = array("d", [0.0] * len(kind.chances))  # by source mark: log odds against those of the kind
        self.room, self.base, self.count = room, 0, 0  # of the last proposal: tokens of the text, nodes
        # Its nodes' tokens, parents, marks, classes and chances given the parent, for compiled code and for `_weigh`.
        self.last, self.proposal = array("q", bytes(40 * (room + 1))), list[tuple[int, int, int, int, float]]()
        parts: list[array[Any]] = [self.shift, self.last, *(chances.table for chances in kind.chances)]
        self.places = [part.buffer_info()[0] for part in parts]  # for compiled code
        self.born, self.rested_before = born, rested  # step of its first plan; rests before it
        self.bucket = -1  # bucket of the batch sizes that `gains` are about
        self.gains: list[AskGain] = []  # by source; until it was asked for this sequence, that of the kind
        self.seen = [0] * sources  # tokens of the text that each source has processed
        self.asked_at = [-1] * sources  # step of the last ask
        self.begun = [False] * sources  # the last ask only prepared the next one

    def first(self, source: int, log_scores: Iterable[float]) -> float:
        """The chance that one of the first tokens that a source proposes is right."""
        chances, factor = self.kind.chances[source], exp(self.shift[source])
        own = [chances.odds(cell_of(odds_of(score), 1)) * factor for score in log_scores]
        return min(1.0, sum([o / (1 + o) for o in own]))

    def unscored(self, depth: int) -> list[float]:
        """Chances of the paths of a chain of which its drafter says nothing, by depth."""
        odds = [self.kind.chances[0].odds(cell_of(UNKNOWN, d)) for d in range(1, depth + 1)]
        return [*accumulate([o / (1 + o) for o in odds], mul)]

    def at_batch(self, size: int) -> None:
        """The batch sizes are now those of a bucket, in which asks are worth something else."""
        if self.bucket != size:
            self.bucket, known = size, self.kind.gains
            first = [self.kind.expected.get(source, FIRST_GAIN) for source in range(len(self.seen))]
            self.gains = [known.setdefault((source, size), AskGain(gain)) for source, gain in enumerate(first)]

    def asks_left(self, source: int) -> float:
        """Asks of a source over which catching up with the text must pay."""
        tokens = min(HORIZON, self.kind.usual)
        if self.view.max_len is not None:
            tokens = min(tokens, (self.view.max_len - len(self.view.tokens)) // 2)
        return max(1.0, tokens / (1 + max(1.0, self.gains[source].gain)))

    def learn(self, source: int, gain: float, open_: float) -> None:
        """An ask brought so many tokens; the sequence's own means begin with its first."""
        known = self.kind.gains[source, self.bucket]
        if self.gains[source] is known:
            self.gains[source] = replace(known, asks=min(known.asks, TRUSTED))
        self.gains[source].learn(gain, open_, QUICKEST)
        known.learn(gain, open_, KIND_RATE)


@dataclass(slots=True)
class Weighed:
    """What a step's proposals are worth."""

    counts: Sequence[int]  # [B] nodes of each tree that pay, the root included
    nodes: Sequence[int]  # which they are, ascending, tree after tree
    gains: Sequence[float]  # [B x marks] tokens expected of those beyond what their rows cost
    tokens: float  # expected of all of them
    levels: int  # depth of the deepest node, whether it pays or not

    @property
    def kept(self) -> list[list[int]]:
        """[B] the nodes of each tree that pay."""
        ends = [*accumulate(self.counts, initial=0)]
        return [[*self.nodes[start:stop]] for start, stop in pairwise(ends)]


def best_count(chances: Iterable[float], prices: Sequence[float]) -> int:
    """How many nodes pay, of chances that fall, where so many rows cost ``prices`` tokens."""
    total, best, count = 0.0, 0.0, 0
    for k, chance in enumerate(chances, start=1):
        total += chance
        if total - prices[k] > best:
            best, count = total - prices[k], k
    return count


def weigh(
    library: Any,
    texts: Sequence[History],
    tree: TokenTree,
    scores: Sequence[Sequence[float]] | None,
    prices: array[float],
    every: bool = False,
) -> Weighed:
    """Judge the last proposals for several sequences, and choose among the nodes of new ones.

    Args:
        library: the compiled kernels; None: there are none.
        texts: [B] of the sequences.
        tree: [B] what is proposed.
        scores: [B] log of the drafter's own estimates; None: it gives none, or none that may be used.
        prices: what 0, 1, .. drafted rows cost over all sequences, in tokens; no more rows are chosen.
        every: whether all nodes are kept, as far as there are prices.

    Raises:
        ValueError: these are no trees, a node's source is none of the drafter's, or there is no room for so many.
    """
    columns = array("q", chain(*tree.tokens, *tree.parents, *tree.sources))
    own = None if scores is None else array("d", chain(*scores))
    total = sum(tree.counts)
    if len(columns) != 3 * total or (own is not None and len(own) != total):
        raise ValueError("trees whose columns have different lengths")
    if any([count > text.room + 1 for count, text in zip(tree.counts, texts, strict=True)]):
        raise ValueError("trees whose nodes are more than the cap")
    followed = [text.view.tokens[text.base : text.base + text.count] for text in texts]
    if library is None:
        found = _weigh(texts, followed, tree, scores, prices, every)
    else:
        found = _weigh_compiled(library, texts, followed, tree.counts, columns, own, prices, every)
    for text, count in zip(texts, tree.counts, strict=True):
        text.base, text.count = len(text.view.tokens), count - 1 if found.levels >= 0 else 0
    if found.levels < 0:
        raise ValueError("trees whose parents or marks are out of range")
    return found


def _weigh_compiled(
    library: Any,
    texts: Sequence[History],
    followed: Sequence[Sequence[int]],
    counts: Sequence[int],
    columns: array[int],
    scores: array[float] | None,
    prices: array[float],
    every: bool,
) -> Weighed:
    trees, kinds = len(texts), len(texts[0].shift)
    numbers = [trees, kinds, DEPTHS, len(EDGES), len(prices) - 1, every]
    for text, count, known in zip(texts, counts, followed, strict=True):
        numbers += (count, text.count + 1, len(known), *text.places)
    given = array("q", chain(numbers, *followed)) + columns
    kept, gains = array("q", bytes(8 * (trees + len(columns) // 3))), array("d", bytes(8 * (1 + trees * kinds)))
    at = [None if part is None else part.buffer_info()[0] for part in (given, _NUMBERS, scores, prices, kept, gains)]
    levels = library.pl_weigh(*at)
    return Weighed(kept[:trees], kept[trees:], gains[1:], gains[0], levels)


def _weigh(
    texts: Sequence[History],
    followed: Sequence[Sequence[int]],
    tree: TokenTree,
    scores: Sequence[Sequence[float]] | None,
    prices: array[float],
    every: bool,
) -> Weighed:
    for text, known in zip(texts, followed, strict=True):
        _judge(text, known)
    ranked: list[tuple[float, int, int, int]] = []  # chance of the path, tree, node, mark
    kinds, levels = len(texts[0].shift), 0
    for b, text in enumerate(texts):
        cells, given, path, depths = [0], [1.0], [1.0], [0]
        for node, (parent, mark) in enumerate(zip(tree.parents[b][1:], tree.sources[b][1:], strict=True), start=1):
            if not (0 <= parent < node and 0 <= mark < kinds):
                return Weighed((), (), (), 0.0, -1)
            depths.append(depths[parent] + 1)
            own = UNKNOWN if scores is None else odds_of(scores[b][node] - scores[b][parent])
            cells.append(cell_of(own, depths[node]))
            odds = text.kind.chances[mark].odds(cells[node]) * (exp(text.shift[mark]) if text.shift[mark] else 1.0)
            given.append(odds / (1 + odds))
            path.append(path[parent] * given[node])
            ranked.append((path[node], b, node, mark))
        text.proposal = [*zip(tree.tokens[b], tree.parents[b], tree.sources[b], cells, given, strict=True)]
        levels = max(levels, *depths)
    ranked = sorted(ranked, key=lambda node: -node[0])[: len(prices) - 1]
    count = len(ranked) if every else best_count([chance for chance, *_ in ranked], prices)
    kept, gains = [[0] for _ in texts], [0.0] * (len(texts) * kinds)
    for chance, b, node, mark in ranked[:count]:
        kept[b].append(node)
        gains[b * kinds + mark] += chance - prices[count] / count
    tokens = sum([chance for chance, *_ in ranked[:count]])
    return Weighed([*map(len, kept)], [*chain(*map(sorted, kept))], gains, tokens, levels)


def _judge(text: History, known: Sequence[int]) -> None:
    """Compare the last proposal with the tokens behind its root, and count every node whose parent turned out right and
    whose place in the text is known."""
    shift, places = text.shift, {0: 0}  # by node that was right: the place of its children in ``known``
    for node, (token, parent, mark, cell, given) in enumerate(text.proposal):
        place = places.get(parent, len(known))
        if not node or place >= len(known):
            continue
        right = known[place] == token
        text.kind.chances[mark].learn(cell, right)
        shift[mark] = max(-MOST_SHIFT, min(MOST_SHIFT, FADE * (shift[mark] + SHIFT * (right - given))))
        if right:
            places[node] = place + 1
