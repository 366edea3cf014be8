"""The contract of a drafter: what it declares, and what the engine calls.

A drafter declares what it reads and can do (`DrafterSpec`, data checked at start-up), is shown every committed token in
`observe`, and returns one token tree a sequence from `draft`.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from math import inf, log
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ..core.tree import TokenTree
from .sessions import ROOT, DraftSessions, Expand, Opening

if TYPE_CHECKING:
    from ..core.sequence import Sequence
    from ..kv.pool import SequenceCache
    from ..model.decoder import TargetInfo


Levels = tuple[list[list[int]], list[list[float]]]  # [depth][k] tokens of each place ahead, best first, and their log q
LevelScores = Tensor | Levels  # logits [depth, V], or the best tokens of each level and their log q


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Describe what a drafter needs and what it can do. Declared once, checked at start-up."""

    name: str
    taps: tuple[int, ...] = ()  # target layers whose outputs it reads; -1 is the last, before the final norm
    past: int | None = 0  # last tokens of a text whose taps it needs; 0: those of the root and after it; None: all
    network: bool = False  # runs a network: its time is budgeted, and it stops at `DraftRequest.floor`
    cached: bool = False  # keeps K/V of its own for every token, and catches up with those that it has not seen
    proposes: Literal["point", "coupled", "sampled"] = "point"
    default_budget: int = 0  # drafted nodes a step where the user names no budget
    context: int | None = None  # tokens of a text that its network has positions for; None: the target's
    ahead: bool = False  # drafts from tokens alone, below nodes that are not decided on: see `Drafter.sessions`
    ahead_levels: int = 0  # tokens of a chain that its sessions draft, if it drafts trees else; 0: the default budget
    observes: bool = True  # whether `observe` does anything: it is not called else
    tree: bool = False  # may propose several children of a node
    sources: tuple[str, ...] = ()  # names of the source marks 0, 1, .. in its trees; empty: one, its own name
    parts: tuple[DrafterSpec, ...] = ()  # of the drafters that it calls, by source mark: see `DraftRule.ask`
    in_pass: bool = False  # drafts from rows of its own in the target's pass, called a step ahead: see `expect`
    scratch: int = 0  # slots a sequence in the target's K/V pool, next to the text's, that its drafts need

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the drafters that a request may choose among, by source mark."""
        return self.sources if self.parts else (self.name,)

    @property
    def window(self) -> int:
        """Tokens of a chain that its sessions draft."""
        return self.ahead_levels or self.default_budget

    def limits(self, tokens: int) -> list[tuple[str, int]]:
        """Return name and `context` of the drafters, parts included, that draft for no text of so many tokens."""
        limits = [] if self.context is None or self.context >= tokens else [(self.name, self.context)]
        return [*limits, *(limit for part in self.parts for limit in part.limits(tokens))]


class DraftRule(Protocol):
    """Describe what a node must be worth, and which source of several is worth asking; see `engine.auto`."""

    def ask(self, source: int, views: abc.Sequence[Sequence], first: abc.Sequence[float]) -> list[int]:
        """Return indices of the sequences to call a source for, given each one's chance of having a next token."""

    def record_cost(self, source: int, passes: int, ms: float) -> None:
        """Learn the time of the last call of a source, and how many passes its network took."""

    def first(self, source: int, view: Sequence, log_scores: abc.Iterable[float]) -> float:
        """Return the chance that one of a source's first tokens is right, from its own log scores of them."""

    def level_chance(self, source: int, count: int) -> float:
        """Return the chance of a path that pays for one more level below it, in a call for ``count`` sequences."""

    def select(
        self, views: abc.Sequence[Sequence], trees: list[TokenTree], passes: int | None = None
    ) -> list[TokenTree]:
        """Return the nodes to check, of drafts that took so many passes (`DraftRequest.passes`); empty: none of all."""


@dataclass(slots=True)
class DraftRequest:
    """The argument of `draft`: a tree is wanted for each sequence, within its budget."""

    sequences: abc.Sequence[Sequence]  # [B]
    budgets: abc.Sequence[int]  # [B] drafted nodes allowed, root not counted; 0: the root alone
    max_depths: abc.Sequence[int]  # [B] deepest node that can still be used (max_tokens, context)
    floor: float = 0.0  # chance of a path below which another level of a network does not pay
    rule: DraftRule | None = None  # for drafters that call others; None: all of them, for all
    # [B] the target's K/V of each: of all tokens but the root, which has the first reserved slot; the reserved ones are
    # free to write to, since verification writes them again. All else is read only
    caches: abc.Sequence[SequenceCache] = ()
    passes: int | None = None  # set by `draft`: passes of its network; None: as many as the deepest node's depth

    def rows(self) -> abc.Iterator[tuple[Sequence, int, int]]:
        """Sequence, budget and depth of each."""
        return zip(self.sequences, self.budgets, self.max_depths, strict=True)

    @property
    def log_floor(self) -> float:
        """Log of `floor`, for scores of paths."""
        return log(min(self.floor, 1.0)) if self.floor > 0 else -inf


@dataclass(slots=True)
class StepFeatures:
    """Describe what a drafter is shown after a target forward pass, prefill included."""

    sequences: abc.Sequence[Sequence]  # [B] sequences that had rows in the pass
    committed: abc.Sequence[abc.Sequence[int]]  # [B] tokens that this pass committed as output; none in mid-prefill
    hidden: abc.Mapping[int, Tensor] = field(default_factory=dict)  # by tapped layer: [kept rows, d_model]; read only
    # [B] rows of `hidden` that belong to each sequence, of consecutive positions; none where no draft will follow.
    # Tokens whose K/V was found in the cache are in none: see `DrafterSpec.past`
    hidden_rows: abc.Sequence[slice] = ()
    first: abc.Sequence[int] = ()  # [B] position of the first of them
    levels: abc.Sequence[LevelScores | None] = ()  # [B] of places ahead, read from rows of the last accepted node


class Drafter:
    """Drafts tokens. A drafter has a `spec`, and `sessions` or `draft`.

    `draft` grows `sessions` level by level. A drafter overrides it where one compiled call grows a whole draft, for
    example, or where drafts are not chains.
    """

    spec: DrafterSpec
    parts: abc.Sequence[Drafter] = ()  # the drafters that it calls
    trusted: ClassVar[bool] = False  # whether what `draft` returns needs no `TokenTree.check`
    own_sessions: DraftSessions | None = None  # that it keeps; `draft` grows them, or does what they do in one call
    _lengths: dict[int, int]  # sequence -> tokens that its own session knows

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the target, load weights, allocate caches: called once, before the first request.

        Args:
            target: the target's shape and context.
            max_sequences: sequences that may run at once.
            pool_tokens: tokens that the target's K/V pool holds, over all sequences.
            device: where the target runs.
        """

    def observe(self, step: StepFeatures) -> None:
        """Learn from a target forward pass, where `DrafterSpec.observes`: called after each."""

    def sessions(self, rows: int) -> DraftSessions:
        """Return sessions that draft from tokens alone, where `DrafterSpec.ahead`.

        Called once, after `bind`; rounds that use them call `observe` where there are taps, and never `draft`.

        Args:
            rows: drafted nodes that a sequence may hold at once.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither sessions nor draft")

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return [B] trees below each sequence's last token, within each budget and max depth.

        Here: chains of the sessions, all sequences together, as deep as is requested and `DraftRequest.floor` allows.
        """
        if self.own_sessions is None:
            self.own_sessions, self._lengths = self.sessions(self.spec.window), {}
        sessions, trees = self.own_sessions, [TokenTree() for _ in want.sequences]
        open_: dict[int, tuple[TokenTree, int, int]] = {}  # sequence -> its tree, its last node, tokens to draft
        for tree, (view, budget, max_depth) in zip(trees, want.rows(), strict=True):
            if (count := min(budget, max_depth)) > 0:
                length = self._lengths.get(view.key)
                if length is None:
                    sessions.open(Opening.of(view))
                else:
                    sessions.commit(view.key, view.tokens[length:])
                self._lengths[view.key] = len(view.tokens)
                open_[view.key] = tree, ROOT, min(count, self.spec.window)
        floor = want.log_floor
        while open_:
            asks = [Expand(key, expand=[tip]) for key, (_, tip, _) in open_.items()]
            for ask, grown in zip(asks, sessions.grow(asks), strict=True):
                tree, _, count = open_.pop(ask.key)
                if grown.nodes:
                    tree.add(len(tree), grown.tokens[0], grown.log_q[0] + tree.score(len(tree)))
                    if count > 1 and tree.scores[-1] >= floor:
                        open_[ask.key] = tree, grown.nodes[0], count - 1
        return trees

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop all state of sequences that ended or were preempted."""
        if self.own_sessions is not None:
            for key in keys:
                self._lengths.pop(key, None)
                self.own_sessions.close(key)

    def forget(self) -> None:
        """Drop what is kept of requests that have ended: outputs, K/V of prompts, statistics.

        What belongs to running sequences stays. Called before a prompt that may have been answered before, so that what
        is timed does not depend on that: see `LLM.forget`.
        """
        if self.own_sessions is not None:
            self.own_sessions.forget()

    def expect(self, requested: abc.Mapping[int, bool]) -> None:
        """Note, by key, whether the calling drafter needs a sequence in the next step.

        Called before a pass, where `DrafterSpec.in_pass`. Until then it may need any.
        """

    def idle_reason(self, view: Sequence) -> str | None:
        """Return why nothing more is drafted for a sequence; None: this drafter has no reason of its own."""
        for name, context in self.spec.limits(len(view.tokens)):
            return f"drafter {name!r} has {context:,} positions, and prompt and answer have {len(view.tokens):,} tokens"
        return None

    def scratch_slots(self, rows: int, sequences: int) -> int:
        """Return the K/V slots of the target's pool that drafts need, for passes of so many rows and sequences."""
        return self.spec.scratch * sequences
