"""Suffix look-up where the text repeats itself, a draft model where it does not.

A suffix look-up costs next to nothing and has long accepted runs where an answer copies from its prompt or from itself;
a draft model is accepted more often elsewhere, at the cost of its passes. The drafter tracks the acceptance of both,
deterministically (no clock is read), and each step uses what is cheaper a token:

    suffix   the look-up alone, where it promises more tokens for the time
    both     the draft model's tree with the look-up grafted in; of two chains (topk=1) the more promising one
    none     the look-up, if any, while the draft model's passes do not pay; it is tried again later
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ..core.errors import CapabilityError
from ..core.tree import TokenTree
from .base import DrafterSpec, DraftRequest, SequenceView, StepFeatures
from .draft_model import DraftModel, DraftModelConfig
from .proposal import Proposal, to_tree
from .registry import DrafterConfig, DrafterContext, option
from .suffix import SuffixConfig, SuffixDrafter

if TYPE_CHECKING:
    from ..target.base import TargetInfo

DRAFT, SUFFIX = 0, 1  # source marks
LONGEST = 16  # matched tokens beyond which the chance of a continuation is not told apart
PRIOR_WEIGHT = 4.0  # passes that the first guess of a chance is worth
MEMORY = 0.8  # weight of the past in running means
HORIZON = 64  # tokens over which the draft model's catching up must pay: a request may end any time
RETRY = 12  # steps after which a draft model that did not pay is tried again


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DrafterConfig):
    """Suffix look-up where the text repeats itself, a draft model elsewhere."""

    kind: ClassVar[str] = "hybrid"

    model: str = option(help="folder, hub name or embedded model that drafts")
    depth: int = option(6, help="levels of the draft model's tree", minimum=1, maximum=64)
    topk: int = option(1, help="children of an expanded node; 1: chains only", minimum=1, maximum=64)
    nodes: int = option(10, help="most nodes of a draft that the model takes part in", minimum=1, maximum=256)
    min_prob: float = option(0.3, help="do not expand a path whose probability is under this", minimum=0.0, maximum=1.0)
    lookup: int = option(14, help="longest look-up, in tokens", minimum=1, maximum=64)
    memory: int = option(0, help="tokens of earlier outputs to look up in, beside the request's own", minimum=0)
    pass_cost: float = option(
        0.18, help="what a draft pass costs, in target passes (paceline bench step tells)", minimum=0.0, maximum=1.0
    )
    token_cost: float = option(
        0.008, help="what a token of a prompt costs the draft model, in target passes", minimum=0.0, maximum=1.0
    )
    proposes: Literal["point", "coupled"] = option(
        "coupled", help="point: likeliest tokens; coupled: drawn with the target's noise"
    )
    dtype: str = option("auto", help="of the draft model: auto (the target's), bfloat16, float32, float64, int8")

    def build(self, context: DrafterContext) -> Hybrid:
        """Load the draft model beside the target."""
        if context.load_model is None:
            raise CapabilityError(
                f"drafter {self.kind}:{self.model}", "no model loader was given", "build it through LLM(...)"
            )
        inner = DraftModelConfig(
            model=self.model,
            depth=self.depth,
            topk=self.topk,
            nodes=self.nodes if self.topk > 1 else 0,
            min_prob=self.min_prob,
            proposes=self.proposes,
            dtype=self.dtype,
        )
        return Hybrid(self, inner.build(context))


@dataclass(slots=True)
class _Book:
    """What is known of one sequence."""

    lookup: Proposal | None = None  # the last look-up, to be judged by what came out
    drafted: bool = False  # whether the draft model took part in the last step
    passes: float = 2.0  # running mean: draft passes a step
    gain: float = 1.5  # running mean: tokens accepted in steps with the draft model
    rest: int = 0  # steps until the draft model is tried again


@dataclass(slots=True)
class _Chances:
    """How often the token after a match of m tokens was accepted, by m. Shared by all sequences."""

    hits: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * (1 - 0.75**m) for m in range(LONGEST + 1)])
    tries: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * (LONGEST + 1))

    def of(self, matched: int) -> float:
        """The chance after a match of ``matched`` tokens."""
        m = min(matched, LONGEST)
        return self.hits[m] / self.tries[m]

    def learn(self, matched: int, right: bool) -> None:
        """Count one continuation, the old ones fading."""
        m = min(matched, LONGEST)
        self.hits[m] = 0.98 * self.hits[m] + right
        self.tries[m] = 0.98 * self.tries[m] + 1


class Hybrid:
    """Chooses between look-up and draft model, step by step and sequence by sequence.

    Args:
        config: options.
        draft: the draft model's drafter.
    """

    def __init__(self, config: HybridConfig, draft: DraftModel) -> None:
        self.config = config
        self._draft = draft
        self._suffix = SuffixDrafter(SuffixConfig(depth=config.lookup, max_tokens=config.memory))
        self._books: dict[int, _Book] = {}
        self._chances = _Chances()
        self.spec = DrafterSpec(
            name=config.kind,
            cache=draft.spec.cache,
            proposes=config.proposes,
            default_budget=max(config.nodes, config.lookup),
            tree=config.topk > 1,
            sources=("draft_model", "suffix"),
        )

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the draft model and allocate its K/V."""
        self._draft.bind(target, max_sequences, pool_tokens, device)
        self._suffix.bind(target, max_sequences, pool_tokens, device)

    def release(self, keys: Sequence[int]) -> None:
        """Drop the state of ended or preempted sequences."""
        self._draft.release(keys)
        self._suffix.release(keys)
        for key in keys:
            self._books.pop(key, None)

    def forget(self) -> None:
        """Forget earlier outputs, the draft's K/V of earlier prompts, and the statistics of look-ups."""
        self._draft.forget()
        self._suffix.forget()
        self._chances = _Chances()

    def observe(self, step: StepFeatures) -> None:
        """Update the statistics with what was accepted of the last proposals."""
        self._suffix.observe(step)
        self._draft.observe(step)
        for view, committed, accepted in zip(step.sequences, step.committed, step.num_accepted, strict=True):
            book = self._books.get(view.key)
            if book is None or not committed:
                continue
            if book.lookup is not None:
                self._judge(book.lookup, committed)
                book.lookup = None
            if book.drafted:
                book.gain = MEMORY * book.gain + (1 - MEMORY) * accepted
                book.drafted = False

    def _judge(self, lookup: Proposal, committed: Sequence[int]) -> None:
        for i, (guess, token) in enumerate(zip(lookup.tokens, committed, strict=False)):
            self._chances.learn(lookup.matched + i, guess == token)
            if guess != token:
                break

    def propose(self, want: DraftRequest) -> TokenTree:
        """One tree a sequence."""
        rows = [*zip(want.sequences, want.budgets, want.max_depths, strict=True)]
        lookups = [self._look_up(*row) for row in rows]
        asked = [i for i, ((view, _, _), found) in enumerate(zip(rows, lookups, strict=True)) if self._ask(view, found)]
        drafts = self._drafts(want, asked)
        proposals: list[Proposal] = []
        sources: list[list[int]] = []
        for i, (view, budget, _) in enumerate(rows):
            proposal, marks = self._choice(drafts.get(i), lookups[i], min(budget, self.config.nodes))
            self._books[view.key].drafted = i in drafts
            proposals.append(proposal)
            sources.append(marks)
        return to_tree([view.tokens[-1] for view in want.sequences], proposals, sources)

    def _choice(self, draft: Proposal | None, lookup: Proposal, budget: int) -> tuple[Proposal, list[int]]:
        """What is proposed in the end, and who proposed each node."""
        if draft is None:
            return lookup, [SUFFIX] * len(lookup)
        if self.config.topk > 1:
            return _joined(draft, lookup, budget)
        if lookup.expected_accepted > draft.expected_accepted:
            return lookup, [SUFFIX] * len(lookup)
        return draft, [DRAFT] * len(draft)

    def _look_up(self, view: SequenceView, budget: int, max_depth: int) -> Proposal:
        """The suffix drafter's chain, its scores by what such matches were worth so far."""
        book = self._books.setdefault(view.key, _Book())
        found = self._suffix.propose_paths(view, budget, max_depth)
        chance = 0.0
        for i, score in enumerate(found.log_scores):
            chance += math.log(self._chances.of(found.matched + i))
            found.log_scores[i] = score + chance
        book.lookup = (
            Proposal(found.tokens[:], found.parents, found.log_scores, found.matched) if found.tokens else None
        )
        return found

    def _ask(self, view: SequenceView, lookup: Proposal) -> bool:
        """Whether the draft model's passes give more tokens a second than the look-up alone."""
        book = self._books[view.key]
        alone = lookup.expected_accepted
        together = max(book.gain, alone + 0.3)
        catch_up = self._catch_up(view, 1 + together)
        worth = (1 + together) / (1 + book.passes * self.config.pass_cost + catch_up) > 1 + alone
        if worth:
            book.rest = RETRY
            return True
        book.rest -= 1
        if book.rest <= 0 and alone < 1 and catch_up < 1:  # things change: try again now and then
            book.rest = RETRY
            return True
        return False

    def _catch_up(self, view: SequenceView, tokens_a_step: float) -> float:
        """What the draft model must compute before it can draft, in target passes, spread over the steps to come."""
        left = HORIZON if view.max_len is None else min(HORIZON, view.max_len - len(view.tokens))
        steps = max(1.0, left / tokens_a_step)
        return self._draft.pending_tokens(view) * self.config.token_cost / steps

    def _drafts(self, want: DraftRequest, asked: Sequence[int]) -> dict[int, Proposal]:
        if not asked:
            return {}
        part = DraftRequest(
            sequences=[want.sequences[i] for i in asked],
            budgets=[min(want.budgets[i], self.config.nodes) for i in asked],
            max_depths=[want.max_depths[i] for i in asked],
        )
        found = {}
        for i, (proposal, passes) in zip(asked, self._draft.draft(part), strict=True):
            if passes == 0:  # no room for it: that says nothing about its worth
                continue
            book = self._books[want.sequences[i].key]
            book.passes = MEMORY * book.passes + (1 - MEMORY) * passes
            found[i] = proposal
        return found


def _joined(draft: Proposal, lookup: Proposal, budget: int) -> tuple[Proposal, list[int]]:
    """The best nodes of both, each with the mark of who proposed it first."""
    both = Proposal(draft.tokens[:], draft.parents[:], draft.log_scores[:])
    new = set(both.graft(lookup))
    for i in range(len(both)):  # a grafted score may lie above its parent's: a path is at most as likely as its start
        parent = both.parents[i]
        if parent and both.log_scores[i] > both.log_scores[parent - 1]:
            both.log_scores[i] = both.log_scores[parent - 1]
    return both.best(budget), [SUFFIX if i in new else DRAFT for i in both.ranked(budget)]
