"""Draft sessions of drafters that look texts up: nothing is computed below a node, so a tree is all that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Drafter, DraftRequest, SequenceView
from .proposal import Proposal
from .sessions import Ask, Grown
from .tree_sessions import DraftTree, TreeSessions

if TYPE_CHECKING:
    import torch

    from ..network.decoder import TargetInfo

Found = list[tuple[int, float]]  # tokens and the log of each one's chance, best first


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

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> Found:
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


class LookUps(LookUp):
    """Look-ups as one, in the order in which they are asked.

    Args:
        parts: the look-ups.
        sure: log of the chance from which on none of the others is asked.
    """

    def __init__(self, parts: Sequence[LookUp], sure: float) -> None:
        self._parts, self._sure = parts, sure

    def knows(self, found: Found) -> bool:
        """Whether nobody else need be asked."""
        return bool(found) and found[0][1] >= self._sure

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> Found:
        """What the first says that is sure, else what the surest says."""
        best: Found = []
        for part in self._parts:
            found = part.continuations(sequence, path, width)
            if found and (not best or found[0][1] > best[0][1]):
                best = found
            if self.knows(best):
                break
        return best

    def release(self, keys: Sequence[int]) -> None:
        """See `Drafter`."""
        for part in self._parts:
            part.release(keys)

    def forget(self) -> None:
        """See `Drafter`."""
        for part in self._parts:
            part.forget()


class TextSessions(TreeSessions[DraftTree]):
    """Sessions of one drafter of this kind.

    Args:
        drafter: that says how texts go on.
        vocab_size, eos_ids: of the target.
    """

    def __init__(self, drafter: LookUp, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        super().__init__(vocab_size, eos_ids)
        self._drafter = drafter

    def begin(self, view: SequenceView) -> DraftTree:
        """See `TreeSessions`."""
        return DraftTree(view)

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`."""
        return [self._grow(ask) for ask in asks]

    def _grow(self, ask: Ask) -> Grown:
        tree = self._open[ask.key]
        grown = Grown([tree.add(*one) for one in ask.given])
        for parent in dict.fromkeys([*grown.given, *ask.expand]):
            for token, log_q in self._drafter.continuations(tree.view, tree.tokens(parent), ask.width):
                grown.add(parent, tree.add(parent, token), token, log_q)
        return grown

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        if self._open.pop(key, None) is not None:
            self._drafter.release([key])

    def forget(self) -> None:
        """See `DraftSessions`."""
        self._drafter.forget()
