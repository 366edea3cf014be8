"""The chance of every drafted node: what its drafter says, corrected by how often such nodes were right.

A node's score is its drafter's own estimate of the chance that the path to it is accepted. Nodes are told apart by who
proposed them, by their depth and by their estimate given their parent; for each such class it is counted how often a
node whose parent was right was right itself. One set of counts belongs to a kind of request (an application); a
sequence shifts from it by a factor on the odds that follows its own text.

A proposal is compared with the text that followed: a node that the target never checked is counted as well. What asks
of a source brought is kept beside it, for a sequence and for its kind of request.

All nodes of a step are weighed in one compiled call, and judged in another, where there are compiled kernels;
`_weigh` and `_judge` give the same numbers without them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import exp
from typing import Any

from ..core.tree import TokenTree
from ..drafters.base import SequenceView

# Odds at which classes part; those of look-ups are half of the matched tokens (see `ngram.trust`).
EDGES = (1 / 16, 1 / 8, 1 / 4, 0.45, 0.75, 1.25, 1.75, 2.4, 3.4, 5, 7, 10, 20, 50, 150, 500)
CLASSES = len(EDGES) + 1
DEPTHS = 5  # 1, 2, 3-4, 5-8, deeper
UNKNOWN = 1.0  # odds of a node of which its drafter says nothing

PRIOR = 4.0  # observations that the drafter's own estimate is worth
MEMORY = 0.995  # weight of the past at every observation of a class: about two hundred of them count
SHIFT = 0.25  # how far one observation moves a sequence's log odds
FADE = 0.98  # of a sequence's shift, at every observation: a text changes its nature
MOST_SHIFT = 3.0
FIRST_GAIN = 2.5  # tokens that the first ask of a source is taken to bring: hopeful enough for a try
TRUSTED = 16  # asks of its kind that a new request's own are added to, at most: few of them mislead
QUICKEST = 0.08  # least weight of an ask in what its sequence's asks bring
KIND_RATE = 1 / 256  # least weight of an ask in what a kind's asks bring: several requests, not the last text
_NUMBERS = array("d", (UNKNOWN, MEMORY, SHIFT, FADE, MOST_SHIFT, *EDGES))

Ranked = list[tuple[float, int, int]]  # chance of a node's path, its tree, its node; the chances fall


class Chances:
    """How often nodes of each class were right, for one source of drafts and one kind of request."""

    __slots__ = ("_hits", "_tries", "odds")

    def __init__(self) -> None:
        middles = [EDGES[0] / 2, *((a * b) ** 0.5 for a, b in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1] * 2]
        self.odds = array("d", middles * DEPTHS)  # by class: the chance over the chance of the contrary
        self._hits = array("d", [PRIOR * odds / (1 + odds) for odds in self.odds])
        self._tries = array("d", [PRIOR] * len(self.odds))

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of hits, tries and odds by class, for compiled code."""
        return self._hits.buffer_info()[0], self._tries.buffer_info()[0], self.odds.buffer_info()[0]

    def learn(self, cell: int, right: bool) -> None:
        """Count a node whose parent was right."""
        hits = self._hits[cell] = MEMORY * self._hits[cell] + right
        tries = self._tries[cell] = MEMORY * self._tries[cell] + 1
        self.odds[cell] = (hits + 0.01) / (tries - hits + 0.01)

    def by_depth(self) -> list[float]:
        """For depths 1, 2, 3-4, 5-8 and beyond, how often a node was right whose parent was, of those met lately."""
        rows = [slice(d * CLASSES, (d + 1) * CLASSES) for d in range(DEPTHS)]
        return [sum(self._hits[row]) / sum(self._tries[row]) for row in rows]


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


class History:
    """What is known of one sequence: the chances of its drafts, its last proposal until the text tells what that was
    worth, and what asking each source brought."""

    __slots__ = (
        *("asked_at", "begun", "born", "bucket", "chances", "counts_at", "gains", "kind", "odds_at", "proposal"),
        *("rested_before", "seen", "shift", "view"),
    )

    def __init__(self, view: SequenceView, kind: RequestKind, sources: int, born: int, rested: int) -> None:
        self.view, self.kind, self.chances = view, kind, kind.chances  # by source mark
        self.shift = array("d", [0.0] * len(kind.chances))  # by source mark: log odds against those of the kind
        # Addresses for compiled code, by source mark: of hits, tries and odds; and of odds alone.
        self.counts_at = [place for source in kind.chances for place in source.addresses]
        self.odds_at = self.counts_at[2::3]
        self.proposal: tuple[Proposals, int] | None = None
        self.born, self.rested_before = born, rested  # step of its first plan; rests before it
        self.bucket = -1  # of the batch sizes that `gains` are about
        self.gains: list[AskGain] = []  # by source; until it was asked for this sequence, that of the kind
        self.seen = [0] * sources  # tokens of the text that each source has processed
        self.asked_at = [-1] * sources  # step of the last ask
        self.begun = [False] * sources  # the last ask only prepared the next one

    def first(self, source: int, log_scores: Iterable[float]) -> float:
        """The chance that one of the first tokens that a source proposes is right."""
        odds, factor = self.chances[source].odds, exp(self.shift[source])
        own = [odds[cell_of(odds_of(score), 1)] * factor for score in log_scores]
        return min(1.0, sum(o / (1 + o) for o in own))

    def unscored(self, depth: int) -> list[float]:
        """Chances of the paths of a chain of which its drafter says nothing, by depth."""
        odds = [self.chances[0].odds[cell_of(UNKNOWN, d)] for d in range(1, depth + 1)]
        return [*accumulate((o / (1 + o) for o in odds), lambda path, chance: path * chance)]

    def at_batch(self, size: int) -> None:
        """The batch sizes are now those of a bucket, in which asks are worth something else."""
        if self.bucket != size:
            self.bucket, known = size, self.kind.gains
            self.gains = [known.setdefault((source, size), AskGain()) for source in range(len(self.seen))]

    def learn(self, source: int, gain: float, open_: float) -> None:
        """An ask brought so many tokens; the sequence's own means begin with its first."""
        known = self.kind.gains[source, self.bucket]
        if self.gains[source] is known:
            self.gains[source] = replace(known, asks=min(known.asks, TRUSTED))
        self.gains[source].learn(gain, open_, QUICKEST)
        known.learn(gain, open_, KIND_RATE)


@dataclass(slots=True)
class SourceStep:
    """One source in the coming step."""

    opens: dict[int, float] = field(default_factory=dict)  # sequence -> chance that it is needed; of those asked for
    unseen: int = 0  # tokens that it had to process first
    ms: float = 0.0  # that it took, where it was told
    passes: int = 0  # of its network; as many as its deepest proposal has levels, where it does not say


@dataclass(slots=True)
class Proposals:
    """The trees that one step proposes, flat, tree after tree, as compiled code reads and writes them."""

    nodes: array[int]  # tokens, then parents, then sources
    bases: list[int]  # [B] tokens of the text, the root included
    starts: list[int]  # [B + 1] place of each root
    cells: array[int] = field(init=False)  # class of each node
    chances: array[float] = field(init=False)  # of each node given its parent, then of the path to each

    def __post_init__(self) -> None:
        total = self.starts[-1]
        if len(self.nodes) != 3 * total:
            raise ValueError("trees whose columns have different lengths")
        self.cells, self.chances = array("q", bytes(8 * total)), array("d", bytes(16 * total))

    def columns(self, b: int) -> list[array[int]]:
        """Tokens, parents and sources of one tree."""
        total, start, stop = self.starts[-1], self.starts[b], self.starts[b + 1]
        return [self.nodes[start + at : stop + at] for at in (0, total, 2 * total)]

    def addresses(self, b: int) -> tuple[int, ...]:
        """Where one tree's tokens, parents, sources, classes and chances given the parent lie."""
        start, total = 8 * self.starts[b], 8 * self.starts[-1]
        first = self.nodes.buffer_info()[0] + start
        places = first, first + total, first + 2 * total
        return *places, self.cells.buffer_info()[0] + start, self.chances.buffer_info()[0] + start


def weigh_all(
    library: Any, texts: Sequence[History], tree: TokenTree, scores: Sequence[Sequence[float]] | None, most: int
) -> tuple[Ranked, int]:
    """Weigh the proposals for several sequences, and note them for `judge_all`.

    Args:
        library: the compiled kernels; None: there are none.
        texts: [B] of the sequences.
        tree: [B] what is proposed, drafted nodes among it.
        scores: [B] log of the drafter's own estimates; None: it gives none, or none that may be used.
        most: nodes to rank at most.

    Returns:
        The likeliest nodes of all, and the depth of the deepest.

    Raises:
        ValueError: these are no trees, or a node's source is none of the drafter's.
    """
    made = Proposals(
        array("q", chain(*tree.tokens, *tree.parents, *tree.sources)),
        [len(text.view.tokens) for text in texts],
        [*accumulate(tree.counts, initial=0)],
    )
    own = None if scores is None else array("d", chain(*scores))
    if own is not None and len(own) != made.starts[-1]:
        raise ValueError("trees whose columns have different lengths")
    most = min(most, made.starts[-1] - len(texts))
    found = _weigh(texts, made, own, most) if library is None else _weigh_compiled(library, texts, made, own, most)
    for b, text in enumerate(texts):
        text.proposal = made, b
    return found


def _weigh_compiled(
    library: Any, texts: Sequence[History], made: Proposals, own: array[float] | None, most: int
) -> tuple[Ranked, int]:
    numbers = [len(texts), len(texts[0].shift), DEPTHS, len(EDGES), most]
    for b, text in enumerate(texts):
        numbers += (made.starts[b + 1] - made.starts[b], text.shift.buffer_info()[0], *text.odds_at)
    given = array("q", numbers) + made.nodes[made.starts[-1] :]
    places, best = array("q", bytes(16 * most)), array("d", bytes(8 * most))
    results = [part.buffer_info()[0] for part in (made.cells, made.chances, places, best)]
    own_at = None if own is None else own.buffer_info()[0]
    deepest = library.pl_weigh(given.buffer_info()[0], _NUMBERS.buffer_info()[0], own_at, *results)
    if deepest < 0:
        raise ValueError("trees whose parents or marks are out of range")
    return [*zip(best.tolist(), places[:most].tolist(), places[most:].tolist(), strict=True)], deepest


def _weigh(texts: Sequence[History], made: Proposals, scores: array[float] | None, most: int) -> tuple[Ranked, int]:
    ranked: Ranked = []
    deepest, total = 0, made.starts[-1]
    for b, text in enumerate(texts):
        start = made.starts[b]
        _, parents, sources = made.columns(b)
        factors = [exp(x) if x else 1.0 for x in text.shift]
        cells, given, path, depths = [0], [1.0], [1.0], [0]
        for node, (parent, source) in enumerate(zip(parents[1:], sources[1:], strict=True), start=1):
            depths.append(depths[parent] + 1)
            own = UNKNOWN if scores is None else odds_of(scores[start + node] - scores[start + parent])
            cells.append(cell_of(own, depths[-1]))
            odds = text.chances[source].odds[cells[-1]] * factors[source]
            given.append(odds / (1 + odds))
            path.append(path[parent] * given[-1])
            ranked.append((path[-1], b, node))
        stop, deepest = start + len(cells), max(deepest, *depths)
        made.cells[start:stop] = array("q", cells)
        made.chances[start:stop], made.chances[total + start : total + stop] = array("d", given), array("d", path)
    ranked.sort(key=lambda node: -node[0])
    return ranked[:most], deepest


def judge_all(library: Any, texts: Iterable[History]) -> None:
    """Compare the last proposals for these sequences with what followed, and count every node whose parent turned out
    right and whose place in the text is known."""
    numbers: list[int] = []
    followed: list[int] = []
    held: list[Proposals] = []  # what the addresses mean must stay until the call
    kinds = 0
    for text in texts:
        if text.proposal is None:
            continue
        (made, b), text.proposal = text.proposal, None
        count = made.starts[b + 1] - made.starts[b]
        new = text.view.tokens[made.bases[b] : made.bases[b] + count - 1]
        if not new:
            continue
        if library is None:
            _judge(text, made, b, new)
            continue
        numbers += (*made.addresses(b), count, len(new), text.shift.buffer_info()[0], *text.counts_at)
        followed += new
        held.append(made)
        kinds = len(text.shift)
    if held:
        given = array("q", [len(held), kinds, DEPTHS, len(EDGES), *numbers, *followed])
        library.pl_judge(given.buffer_info()[0], _NUMBERS.buffer_info()[0])


def _judge(text: History, made: Proposals, b: int, new: Sequence[int]) -> None:
    tokens, parents, sources = made.columns(b)
    start, shift = made.starts[b], text.shift
    places = {0: 0}  # by node that was right: the place of its children in ``new``
    for node in range(1, len(tokens)):
        place = places.get(parents[node], len(new))
        if place >= len(new):
            continue
        right, source = new[place] == tokens[node], sources[node]
        text.chances[source].learn(made.cells[start + node], right)
        moved = FADE * (shift[source] + SHIFT * (right - made.chances[start + node]))
        shift[source] = max(-MOST_SHIFT, min(MOST_SHIFT, moved))
        if right:
            places[node] = place + 1
