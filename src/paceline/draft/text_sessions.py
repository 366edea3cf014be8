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
from ..core.tree import NONE, KeptNode, KeptTree, TokenTree
from .base import Drafter, DraftRequest
from .sessions import ROOT, Expand, NewNodes, Opening

if TYPE_CHECKING:
    import torch

    from ..model.decoder import TargetInfo

Found = list[tuple[int, float]]  # tokens and the log of each one's chance, best first


class LookUp(Drafter):
    """Base of drafters that look texts up: they add `spec`, `draft_one` or `draft`, and `continuations`."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class DraftCache(KeptTree[KeptNode]):
    """Hold what is computed of one sequence: of its text, and of the nodes below its root by their numbers."""

    view: Sequence
    states: dict[int, Any] = field(default_factory=dict)  # by node: results of its row for rows below it
    cache: Any = None  # K/V of a network
    read: int = 0  # leading tokens of the text that the network has an embedding for

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all nodes: the text's last token is the root."""
        self.states = {}
        self.restart(KeptNode(NONE, self.view.tokens[-1], len(self.view.tokens) - 1))

    @property
    def text_length(self) -> int:
        """Return the tokens of the text that the nodes hang below."""
        return self.nodes[self.root].place + 1

    @property
    def pending(self) -> int:
        """Return the rows that the text's K/V lacks."""
        return len(self.view.tokens) - int(self.cache.committed)

    def number(self, node: int) -> int:
        """Return the number of a node that a message names: `ROOT` is the root, whichever that is."""
        return self.root if node == ROOT else node

    def uncomputed(self, ends: abc.Iterable[int]) -> list[int]:
        """Return the nodes to compute for the logits of some: these, and ancestors without K/V, parents first."""
        return sorted({node for end in ends for node in self.path(end) if node == end or self.nodes[node].row < 0})

    def add(self, parent: int, token: int) -> int:
        """Return a child of a node, new or there already."""
        existing = self.children.get((parent, token))
        if existing is not None:
            return existing
        if (above := self.nodes.get(parent)) is None:
            raise KeyError(f"node {parent} of sequence {self.view.key}")
        return self.put(KeptNode(parent, token, above.place + 1))

    def tokens(self, node: int) -> list[int]:
        """Drafted tokens from below the root to ``node``."""
        return [self.nodes[number].token for number in self.path(node)]

    def cut(self, node: int) -> tuple[list[int], int]:
        """Make a node the root and drop all that is not below it.

        Returns:
            Rows of K/V that stay, ascending, and how many of them, the first ones, are of the text now.
        """
        before = self.reroot(node)
        root = self.nodes[node]
        text = [one.row for one in (*before, root) if one.row != NONE]
        root.row = NONE
        self.states = {number: state for number, state in self.states.items() if number in self.nodes}
        return text + self.pack_rows(), len(text)


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
        return DraftCache(view=view)

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
            added = [session.add(session.number(parent), token) for parent, token in ask.added]
            grown.append(each := NewNodes(added))
            unsure.append(self._look_up(session, ask, each))
            if (one := self._prepare(session, [*unsure[-1]])) is not None:
                one.ask, one.grown = ask, each
                ready.append(one)
        if ready:
            self._expand(ready)
        for ask, each, rest in zip(asks, grown, unsure, strict=True):
            session = self._open[ask.key]
            parents = {*map(session.number, each.parents)}
            for node in [node for node in rest if node not in parents]:  # there is no room, or no such token
                self._put(session, node, *rest[node], each)
        return grown

    def _look_up(self, session: Any, ask: Expand, grown: NewNodes) -> dict[int, tuple[int, Found]]:
        """Return the nodes that no look-up is sure of, and the look-ups' followers there.

        Add children of the others.
        """
        unsure: dict[int, tuple[int, Found]] = {}
        for node in dict.fromkeys([*grown.added, *map(session.number, ask.expand)]):
            source, matches = self.look_ups.find(session.view, session.tokens(node), ask.width)
            if self.look_ups.knows(matches):
                self._put(session, node, source, matches, grown)
            else:
                unsure[node] = source, matches
        return unsure

    @staticmethod
    def _put(session: Any, parent: int, source: int, matches: Found, grown: NewNodes) -> None:
        name = ROOT if parent == session.root else parent
        for token, log_q in matches:
            grown.add(name, session.add(parent, token), token, log_q, source)

    def reroot(self, key: int, node: int) -> None:
        """Implement `DraftSessions`."""
        tree: DraftCache = self._open[key]
        tokens = tree.tokens(tree.number(node))
        rows, done = tree.cut(tree.number(node))
        tree.view.sampler.commit(tokens)
        self._keep(tree, rows, done)

    def commit(self, key: int, tokens: abc.Sequence[int]) -> None:
        """Implement `DraftSessions`."""
        tree: DraftCache = self._open[key]
        tree.view.sampler.commit(tokens)
        self._clear(tree, tokens)

    def _clear(self, tree: Any, tokens: abc.Sequence[int]) -> None:
        """Drop all nodes: the text has gone on with these tokens."""
        tree.clear()

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
