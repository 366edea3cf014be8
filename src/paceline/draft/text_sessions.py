"""Draft sessions in this process: a text and a tree of drafted nodes for each sequence.

Drafters that look texts up compute nothing below a node: a tree is all that their sessions keep.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from ..core.inference import inference
from ..core.sampling import SequenceSampler
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import Drafter, DraftRequest
from .sessions import ROOT, Expand, NewNodes, Opening

if TYPE_CHECKING:
    import torch

    from ..model.decoder import TargetInfo

Found = list[tuple[int, float]]  # tokens and the log of each one's chance, best first


class LookUp(Drafter):
    """Base of drafters that look texts up: they add `spec`, `draft_one` and `continuations`."""

    trusted = True
    target: TargetInfo | None = None

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Note the target, for sessions."""
        self.target = target

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """`draft_one` for every sequence. The result is read only."""
        return [self.draft_one(*row) for row in want.rows()]

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Draft for one sequence, without a tensor; tokens that are new since the last call are taken in now."""
        raise NotImplementedError(f"{type(self).__name__}.draft_one")

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> Found:
        """Tokens that may follow the text and the drafted ``path`` after it, which is not decided on.

        Args:
            sequence: its new tokens are taken in; ``path`` is not.
            path: drafted tokens.
            width: tokens wanted, at most.

        Returns:
            Different tokens and the log of each one's estimated chance, best first.
        """
        raise NotImplementedError(f"{type(self).__name__}.continuations")

    def sessions(self, rows: int) -> TextSessions:
        """Implement `Drafter`."""
        assert self.target is not None, "bind comes before sessions"
        return TextSessions(LookUps({0: self}), self.target.vocab_size, self.target.eos_ids)


class LookUps:
    """Look-ups as one, in the order in which they are called.

    Args:
        parts: the look-ups, by their source marks.
        sure: log of the chance from which on none of the others is called.
    """

    def __init__(self, parts: abc.Mapping[int, LookUp], sure: float = 0.0) -> None:
        self._parts, self._sure = parts, sure

    def knows(self, matches: Found) -> bool:
        """Return whether nobody else need be used."""
        return bool(matches) and matches[0][1] >= self._sure

    def find(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> tuple[int, Found]:
        """Return the followers of the first look-up that is sure, else of the surest, and its source mark.

        Tokens that the sequence's grammar does not allow are left out.
        """
        best: tuple[int, Found] = 0, []
        for source, part in self._parts.items():
            if sequence.sources is not None and source not in sequence.sources:
                continue
            try:
                matches = part.continuations(sequence, path, width)
                if matches and (matcher := sequence.sampler.matcher) is not None:
                    paths = [[*path, token] for token, _ in matches]
                    allowed = matcher.within(sequence.sampler.output_ids, paths)
                    matches = [one for one, fits in zip(matches, allowed, strict=True) if fits]
            except ConfigError:  # of the request's grammar: the target meets it, too, and ends the request
                continue
            if matches and (not best[1] or matches[0][1] > best[1][0][1]):
                best = source, matches
            if self.knows(matches):
                break
        return best

    def release(self, keys: abc.Sequence[int]) -> None:
        """Implement `Drafter`."""
        for part in self._parts.values():
            part.release(keys)

    def forget(self) -> None:
        """Implement `Drafter`."""
        for part in self._parts.values():
            part.forget()


@dataclass(slots=True)
class Node:
    """A node of a session's tree."""

    parent: int
    token: int
    depth: int  # below the root, as of now
    score: float = 0.0  # log q of the drafted tokens after the last given one
    row: int = -1  # of its K/V, after the text's; -1: not computed


@dataclass(slots=True)
class DraftCache:
    """Hold what is computed of one sequence: of its text, and of the nodes below its root by their numbers."""

    view: Sequence
    nodes: dict[int, Node] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # parent and token -> node
    states: dict[int, Any] = field(default_factory=dict)  # by node: results of its row for rows below it
    fresh: int = ROOT + 1  # the next number
    cache: Any = None  # K/V of a network
    read: int = 0  # leading tokens of the text that the network has an embedding for
    text_length: int = 0  # tokens of the text that the nodes hang below

    @property
    def pending(self) -> int:
        """Return the rows that the text's K/V lacks."""
        return len(self.view.tokens) - int(self.cache.committed)

    def uncomputed(self, ends: abc.Iterable[int]) -> list[int]:
        """Return the nodes to compute for the logits of some: these, and ancestors without K/V, parents first."""
        nodes = {node for end in ends for node in self.path(end) if node == end or self.nodes[node].row < 0}
        return sorted(nodes, key=lambda node: (self.nodes[node].depth, node))

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """Return a child of a node, new or there already."""
        existing = self.children.get((parent, token))
        if existing is not None:
            return existing
        if parent != ROOT and parent not in self.nodes:
            raise KeyError(f"node {parent} of sequence {self.view.key}")
        number, self.fresh = self.fresh, self.fresh + 1
        self.nodes[number] = Node(parent, token, self.depth(parent) + 1, score)
        self.children[parent, token] = number
        return number

    def depth(self, node: int) -> int:
        """Return the depth of a node; the root's is 0."""
        return self.nodes[node].depth if node != ROOT else 0

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to ``node``."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.nodes[node].parent
        return nodes[::-1]

    def tokens(self, node: int) -> list[int]:
        """Drafted tokens from below the root to ``node``."""
        return [self.nodes[number].token for number in self.path(node)]

    def cut(self, root: int) -> tuple[list[int], int]:
        """Make a node the root and drop all that is not below it.

        Returns:
            Rows of K/V that stay, ascending, and how many of them, the first ones, are of the text now.
        """
        path, depth = self.path(root), self.depth(root)
        below = {root}
        for number in sorted(self.nodes):  # children have higher numbers than their parents
            if self.nodes[number].parent in below:
                below.add(number)
        stays = [number for number in [*path, *sorted(below - {root})] if self.nodes[number].row >= 0]
        done = sum(self.nodes[number].row >= 0 for number in path)
        rows = sorted(self.nodes[number].row for number in stays)
        moved = {row: place - done for place, row in enumerate(rows)}
        remaining = {number: self.nodes[number] for number in below - {root}}
        for node in remaining.values():
            node.depth -= depth
            node.parent = ROOT if node.parent == root else node.parent
            node.row = moved.get(node.row, -1)
        states = self.states.items()
        self.states = {ROOT if n == root else n: state for n, state in states if n == root or n in remaining}
        self.nodes = remaining
        self.children = {(node.parent, node.token): number for number, node in remaining.items()}
        return rows, done


NOBODY = Expand(-1)  # of a pass without a requested level


@dataclass(slots=True)
class Expansion:
    """One sequence's part of a pass."""

    session: Any
    parents: list[int]  # nodes to expand
    computed: list[int]  # nodes without K/V that the pass computes, parents first
    ask: Expand = NOBODY  # the level that was requested, where it is one
    grown: NewNodes = field(default_factory=NewNodes)  # the answer


class TextSessions:
    """Sessions of look-ups, and what those of a network share with them.

    Args:
        look_ups: are called first, for every node.
        vocab_size, eos_ids: of the target.
    """

    def __init__(self, look_ups: LookUps, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.look_ups, self._vocab, self._eos_ids = look_ups, vocab_size, eos_ids
        self._open: dict[int, Any] = {}  # by sequence: its tree

    def _begin(self, view: Sequence) -> DraftCache:
        """Return a sequence's tree, without nodes."""
        return DraftCache(view)

    def open(self, opening: Opening) -> None:
        """Implement `DraftSessions`."""
        self.close(opening.key)
        self._open[opening.key] = self._begin(opened(opening, self._vocab, self._eos_ids))

    def _prepare(self, session: Any, nodes: abc.Sequence[int]) -> Expansion | None:
        """Return what a pass computes to expand some of these nodes, with room for it; None: none can be expanded."""
        return None

    def _expand(self, ready: abc.Sequence[Expansion]) -> None:
        """Add children of nodes that no look-up is sure of."""

    @inference
    def grow(self, asks: abc.Sequence[Expand]) -> list[NewNodes]:
        """Implement `DraftSessions`: nodes that a look-up is sure of are not computed."""
        grown, unsure = list[NewNodes](), list[dict[int, tuple[int, Found]]]()
        ready: list[Expansion] = []
        for ask in asks:
            session = self._open[ask.key]
            grown.append(each := NewNodes([session.add(*child) for child in ask.added]))
            unsure.append(self._look_up(session, ask, each))
            if (one := self._prepare(session, [*unsure[-1]])) is not None:
                one.ask, one.grown = ask, each
                ready.append(one)
        if ready:
            self._expand(ready)
        for ask, each, rest in zip(asks, grown, unsure, strict=True):
            for node in [node for node in rest if node not in each.parents]:  # there is no room, or no such token
                self._put(self._open[ask.key], node, *rest[node], each)
        return grown

    def _look_up(self, session: Any, ask: Expand, grown: NewNodes) -> dict[int, tuple[int, Found]]:
        """Return the nodes that no look-up is sure of, and the look-ups' followers there.

        Add children of the others.
        """
        unsure: dict[int, tuple[int, Found]] = {}
        for node in dict.fromkeys([*grown.added, *ask.expand]):
            source, matches = self.look_ups.find(session.view, session.tokens(node), ask.width)
            if self.look_ups.knows(matches):
                self._put(session, node, source, matches, grown)
            else:
                unsure[node] = source, matches
        return unsure

    @staticmethod
    def _put(session: Any, parent: int, source: int, matches: Found, grown: NewNodes) -> None:
        above = 0.0 if parent == ROOT else session.nodes[parent].score
        for token, log_q in matches:
            grown.add(parent, session.add(parent, token, above + log_q), token, log_q, source)

    def reroot(self, key: int, node: int) -> None:
        """Implement `DraftSessions`."""
        tree: DraftCache = self._open[key]
        tokens = tree.tokens(node)
        rows, done = tree.cut(node)
        tree.view.sampler.commit(tokens)
        self._keep(tree, rows, done)

    def commit(self, key: int, tokens: abc.Sequence[int]) -> None:
        """Implement `DraftSessions`."""
        tree: DraftCache = self._open[key]
        tree.view.sampler.commit(tokens)
        self._clear(tree, tokens)

    def _clear(self, tree: Any, tokens: abc.Sequence[int]) -> None:
        """Drop all nodes: the text has gone on with these tokens."""
        tree.nodes, tree.children, tree.states = {}, {}, {}

    def _keep(self, tree: Any, rows: abc.Sequence[int], done: int) -> None:
        """Keep these rows of K/V, of which the first are of the text, where there is any."""

    def close(self, key: int) -> None:
        """Implement `DraftSessions`."""
        self._open.pop(key, None)
        self.look_ups.release([key])

    def forget(self) -> None:
        """Implement `DraftSessions`."""
        self.look_ups.forget()


def opened(opening: Opening, vocab_size: int, eos_ids: tuple[int, ...]) -> Sequence:
    """Return a sequence with a sampler of its own, for a target of so many tokens."""
    sampler = SequenceSampler(
        opening.params,
        opening.tokens[: opening.prompt_len],
        seed=opening.seed,
        sample_index=opening.sample_index,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        matcher=opening.matcher,
    )
    sampler.commit(opening.tokens[opening.prompt_len :])
    shape = opening.key, sampler.tokens, opening.prompt_len, sampler, opening.max_len
    return Sequence(*shape, sources=opening.sources, prediction=opening.prediction)
