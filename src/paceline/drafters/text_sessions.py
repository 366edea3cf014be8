"""Draft sessions of drafters that look texts up: nothing is computed below a node, so a tree is all that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.sampling import SequenceSampler
from .base import Drafter, DraftRequest, SequenceView
from .proposal import Proposal
from .sessions import ROOT, Ask, Grown, Opening

if TYPE_CHECKING:
    import torch

    from ..network.decoder import TargetInfo


class LookUp(Drafter):
    """Base of drafters that look texts up: they add `spec`, `draft_one` and `continuations`."""

    trusted = True
    target: TargetInfo | None = None

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Note the target, for sessions."""
        self.target = target

    def draft(self, want: DraftRequest) -> list[Proposal]:
        """`draft_one` for every sequence. What comes out is read only."""
        return [self.draft_one(*row) for row in want.rows()]

    def draft_one(self, seq: SequenceView, budget: int, max_depth: int) -> Proposal:
        """Draft for one sequence, without a tensor; tokens that are new since the last call are taken in now."""
        raise NotImplementedError(f"{type(self).__name__}.draft_one")

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> list[tuple[int, float]]:
        """Tokens that may follow the text and the drafted ``path`` behind it, which is not decided on.

        Args:
            sequence: the text is taken in as far as it is new; ``path`` is not.
            path: drafted tokens.
            width: tokens wanted, at most.

        Returns:
            Different tokens and the log of each one's estimated chance, best first.
        """
        raise NotImplementedError(f"{type(self).__name__}.continuations")

    def sessions(self, rows: int) -> TextSessions:
        """See `Drafter`."""
        assert self.target is not None, "bind comes before sessions"
        return TextSessions(self, self.target.vocab_size, self.target.eos_ids)


def opened(opening: Opening, vocab_size: int, eos_ids: tuple[int, ...]) -> SequenceView:
    """A sequence with a sampler of its own, for a target of so many tokens."""
    tokens, prompt = [*opening.tokens], [*opening.tokens[: opening.prompt_len]]
    sampler = SequenceSampler(
        opening.params,
        prompt,
        seed=opening.seed,
        sample_index=opening.sample_index,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
    )
    sampler.commit(tokens[opening.prompt_len :])
    return SequenceView(opening.key, tokens, opening.prompt_len, sampler, opening.max_len)


@dataclass(slots=True)
class _Tree:
    """One sequence, and the nodes below its root by their number."""

    view: SequenceView
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)  # parent and token
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # the inverse
    fresh: int = ROOT + 1

    def add(self, parent: int, token: int) -> int:
        """A child of a node, new or there already."""
        if parent != ROOT and parent not in self.nodes:
            raise KeyError(f"node {parent} of sequence {self.view.key}")
        number = self.numbers.get((parent, token))
        if number is None:
            number, self.fresh = self.fresh, self.fresh + 1
            self.nodes[number], self.numbers[parent, token] = (parent, token), number
        return number

    def path(self, node: int) -> list[int]:
        """Tokens from below the root to a node."""
        found = []
        while node != ROOT:
            node, token = self.nodes[node]
            found.append(token)
        return found[::-1]

    def cut(self, root: int) -> None:
        """Make a node the root, and keep what is below it."""
        below, kept = {root}, {}
        for number, (parent, token) in self.nodes.items():  # parents come first
            if parent in below:
                below.add(number)
                kept[number] = ROOT if parent == root else parent, token
        self.nodes, self.numbers = kept, {place: number for number, place in kept.items()}


class TextSessions:
    """Sessions of one drafter of this kind.

    Args:
        drafter: that says how texts go on.
        vocab_size, eos_ids: of the target.
    """

    def __init__(self, drafter: LookUp, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._drafter, self._target = drafter, (vocab_size, eos_ids)
        self._open: dict[int, _Tree] = {}

    def open(self, opening: Opening) -> None:
        """See `DraftSessions`."""
        self.close(opening.key)
        self._open[opening.key] = _Tree(opened(opening, *self._target))

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`."""
        return [self._grow(ask) for ask in asks]

    def _grow(self, ask: Ask) -> Grown:
        tree = self._open[ask.key]
        grown = Grown([tree.add(*one) for one in ask.given])
        for parent in dict.fromkeys([*grown.given, *ask.expand]):
            for token, log_q in self._drafter.continuations(tree.view, tree.path(parent), ask.width):
                grown.parents.append(parent)
                grown.nodes.append(tree.add(parent, token))
                grown.tokens.append(token)
                grown.log_q.append(log_q)
        return grown

    def reroot(self, key: int, node: int) -> None:
        """See `DraftSessions`."""
        tree = self._open[key]
        said = tree.path(node)
        tree.cut(node)
        self._go_on(tree, said)

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """See `DraftSessions`."""
        tree = self._open[key]
        tree.nodes, tree.numbers = {}, {}
        self._go_on(tree, tokens)

    @staticmethod
    def _go_on(tree: _Tree, said: Sequence[int]) -> None:
        tree.view.tokens += said
        tree.view.sampler.commit(said)

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        if self._open.pop(key, None) is not None:
            self._drafter.release([key])

    def forget(self) -> None:
        """See `DraftSessions`."""
        self._drafter.forget()
