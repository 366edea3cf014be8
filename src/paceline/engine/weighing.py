"""The honest chances of all nodes of a step, and what came of those of the step before: in one compiled call each where
there are compiled kernels. `chances.weigh` and `Offer.judge` are the long way, which gives the same numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from ..core.tree import TokenTree
from .chances import DEPTHS, EDGES, FADE, MEMORY, MOST_SHIFT, SHIFT, UNKNOWN, Offer, weigh
from .histories import History

Ranked = list[tuple[float, int, int]]  # chance of a node's path, its tree, its node; the chances fall
_NUMBERS = array("d", (UNKNOWN, MEMORY, SHIFT, FADE, MOST_SHIFT, *EDGES))


class Offers:
    """The proposals of a step as compiled code reads and writes them; see `Offer`. Flat, tree after tree."""

    __slots__ = ("bases", "cells", "chances", "counts", "nodes", "starts")

    def __init__(self, histories: Sequence[History], lists: TokenTree) -> None:
        self.counts = lists.counts
        self.bases = [len(history.view.tokens) for history in histories]
        self.starts, total = [0], 0
        for count in self.counts:
            total += count
            self.starts.append(total)
        # Tokens, parents and marks.
        self.nodes = array("q", chain(*lists.tokens, *lists.parents, *lists.sources))
        self.cells, self.chances = array("q", bytes(8 * total)), array("d", bytes(16 * total))

    def addresses(self, b: int) -> tuple[int, ...]:
        """Where one tree's tokens, parents, marks, classes and chances given the parent lie."""
        start, total = 8 * self.starts[b], 8 * self.starts[-1]
        first = self.nodes.buffer_info()[0] + start
        places = first, first + total, first + 2 * total
        return *places, self.cells.buffer_info()[0] + start, self.chances.buffer_info()[0] + start


def weigh_all(
    library: Any, histories: Sequence[History], lists: TokenTree, scores: Sequence[Sequence[float]] | None, most: int
) -> tuple[Ranked, int]:
    """Weigh the proposals for several sequences, and note them in their histories.

    Args:
        library: the compiled kernels; None: the long way.
        histories: [B] of the sequences.
        lists: [B] what is proposed, drafted nodes among it.
        scores: [B] log of the drafter's own estimates; None: it gives none, or none that may be used.
        most: nodes to rank at most.

    Returns:
        The likeliest nodes of all, and the depth of the deepest.

    Raises:
        ValueError: these are no trees, or a node's mark is none of the drafter's kinds.
    """
    if library is None:
        return _weigh_long(histories, lists, scores, most)
    offers, kinds = Offers(histories, lists), len(histories[0].shift)
    most = min(most, offers.starts[-1] - len(histories))
    numbers = [len(histories), kinds, DEPTHS, len(EDGES), most]
    for history, count in zip(histories, lists.counts, strict=True):
        numbers += (count, history.shift.buffer_info()[0], *history.kind.odds_at)
    given = array("q", numbers) + offers.nodes[offers.starts[-1] :]
    own = None if scores is None else array("d", chain(*scores))
    if len(offers.nodes) != 3 * offers.starts[-1] or (own is not None and len(own) != offers.starts[-1]):
        raise ValueError("trees whose columns have different lengths")
    places, best = array("q", bytes(16 * most)), array("d", bytes(8 * most))
    made = [part.buffer_info()[0] for part in (offers.cells, offers.chances, places, best)]
    own_at = None if own is None else own.buffer_info()[0]
    deepest = library.pl_weigh(given.buffer_info()[0], _NUMBERS.buffer_info()[0], own_at, *made)
    if deepest < 0:
        raise ValueError("trees whose parents or marks are out of range")
    for b, history in enumerate(histories):
        history.offer = offers, b
    return [*zip(best.tolist(), places[:most].tolist(), places[most:].tolist(), strict=True)], deepest


def _weigh_long(
    histories: Sequence[History], lists: TokenTree, scores: Sequence[Sequence[float]] | None, most: int
) -> tuple[Ranked, int]:
    offers = []
    for b, history in enumerate(histories):
        columns = lists.tokens[b], lists.parents[b], lists.sources[b], None if scores is None else scores[b]
        history.offer = weigh(len(history.view.tokens), *columns, history.kind.chances, history.shift)
        offers.append(history.offer)
    ranked = [(chance, b, i) for b, offer in enumerate(offers) for i, chance in enumerate(offer.path) if i]
    ranked.sort(key=_by_chance)
    return ranked[:most], max(offer.levels for offer in offers)


def _by_chance(node: tuple[float, int, int]) -> float:
    return -node[0]


def judge_all(library: Any, histories: Iterable[History]) -> None:
    """Compare the last proposals for these sequences with what followed, one after the other."""
    numbers: list[int] = []
    texts: list[int] = []
    held: list[Offers] = []  # what the addresses mean must stay until the call
    kinds = 0
    for history in histories:
        offer, history.offer = history.offer, None
        if isinstance(offer, Offer):
            offer.judge(history.view.tokens, history.kind.chances, history.shift)
        elif offer is not None:
            made, b = offer
            nodes = made.counts[b]
            followed = history.view.tokens[made.bases[b] : made.bases[b] + nodes - 1]
            if followed and nodes > 1:
                numbers += (
                    *made.addresses(b),
                    nodes,
                    len(followed),
                    history.shift.buffer_info()[0],
                    *history.kind.counts_at,
                )
                texts += followed
                held.append(made)
                kinds = len(history.shift)
    if held:
        given = array("q", [len(held), kinds, DEPTHS, len(EDGES), *numbers, *texts])
        library.pl_judge(given.buffer_info()[0], _NUMBERS.buffer_info()[0])
