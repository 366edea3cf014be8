"""A round's drafter, guarded: its faults cost no request."""

from __future__ import annotations

import logging
from collections import abc
from contextlib import suppress
from time import monotonic

from ..core.errors import WorkerRestarted
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..draft.base import Drafter, DraftRequest, DraftRule, StepFeatures
from .base import Work
from .passes import Pass
from .taps import Tapped, rows_to_tap
from .verification import make_verifier

log = logging.getLogger(__name__)

REST_S = 60.0  # before a drafter that failed is called again, doubled with every failure
MOST_RESTS = 6  # doublings of it


class GuardedDrafter:
    """Calls a drafter and checks its trees.

    A drafter that fails is put aside for a while, and decoding continues without it; a request whose own rules fail on
    drafts is drafted for no more.

    Args:
        drafter: the drafter; None: nothing is drafted.
        verifier: name of the verifier of the drafts.
        vocab_size: of the target.

    Raises:
        ConfigError: an unknown verifier.
        CapabilityError: a verifier that these drafts do not fit.
    """

    def __init__(self, drafter: Drafter | None, verifier: str, vocab_size: int) -> None:
        self.drafter = drafter
        spec = None if drafter is None else drafter.spec
        # Whether it respects the floor: look-ups do not, and one that calls others gives each its own.
        self._grows = spec is not None and not spec.parts and (spec.network or spec.in_pass)
        self.verifier = make_verifier(verifier, None if drafter is None else drafter.spec)
        self._failures, self._why, self._rests_until = 0, "", 0.0
        self._vocab_size = vocab_size

    @property
    def failure(self) -> str | None:
        """Why the drafter is put aside."""
        return self._why if monotonic() < self._rests_until else None

    @property
    def past(self) -> int | None:
        """Implement `Round.past`."""
        return 0 if self.drafter is None or self.failure is not None else self.drafter.spec.past

    def draft(self, drafting: abc.Sequence[Work], rule: DraftRule | None = None) -> list[TokenTree]:
        """Return the drafter's trees, checked, and of them the nodes that the rule chooses.

        Empty if nothing is drafted, or if it failed.
        """
        if self.drafter is None or self.failure is not None or not drafting:
            return []
        want = DraftRequest(
            sequences=[w.sequence for w in drafting],
            budgets=[w.budget for w in drafting],
            max_depths=[w.max_depth for w in drafting],
            floor=rule.level_chance(0, len(drafting)) if rule is not None and self._grows else 0.0,
            rule=rule,
            caches=[w.sequence.cache for w in drafting if w.sequence.cache is not None],
        )
        try:
            trees = self._fit(self.drafter.draft(want), want)
        except WorkerRestarted:  # of the target's ranks: the engine computes all again
            raise
        except Exception as error:
            if self._spare(drafting):  # what the drafter had begun for these sequences is dropped
                self.release([w.sequence for w in drafting])
            else:
                self._put_aside(error, want.sequences)
            return []
        for b, view in enumerate(want.sequences):
            # Nodes that a grammar forbids would be rows for nothing: no choice ever meets them. A verifier that reads q
            # weighs what was drawn as it was drawn.
            if (matcher := view.sampler.matcher) is not None and not self.verifier.needs_q:
                allowed = matcher.within(view.sampler.output_ids, trees[b].paths())
                if not all(allowed[1:]):
                    trees[b] = trees[b].subset([node for node, fits in enumerate(allowed) if node and fits])
        self._spare(drafting)
        if rule is not None:
            return rule.select(want.sequences, trees, want.passes)
        return trees if any(map(len, trees)) else []

    def _spare(self, drafting: abc.Sequence[Work]) -> bool:
        """Draft no more for requests whose own rules failed on drafts; whether there are any."""
        any_ = False
        for work in drafting:
            sampler = work.sequence.sampler
            fault = sampler.fault or (None if sampler.matcher is None else sampler.matcher.fault)
            if fault is not None:
                any_, work.sequence.max_nodes = True, 0
                work.sequence.stats.off_reason = f"the rules of the request failed on a draft: {fault}"
        return any_

    def tapped(self, p: Pass) -> Tapped | None:
        """Return the rows of a pass whose states the drafter is to be shown; None: none."""
        return None if self.drafter is None or self.failure is not None else rows_to_tap(p, self.drafter.spec)

    def observe(self, seen: StepFeatures | None) -> None:
        """Show the drafter the results of a pass."""
        if seen is None or self.drafter is None or self.failure is not None or not self.drafter.spec.observes:
            return
        try:
            self.drafter.observe(seen)
        except Exception as error:
            self._put_aside(error, seen.sequences)

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let the drafter drop the state of ended or preempted sequences."""
        if self.drafter is None or not sequences:
            return
        try:
            self.drafter.release([s.key for s in sequences])
        except Exception as error:
            self._put_aside(error)

    def forget(self) -> None:
        """Let the drafter forget sequences that ended."""
        if self.drafter is None:
            return
        try:
            self.drafter.forget()
        except Exception as error:
            self._put_aside(error)

    def _put_aside(self, error: Exception, sequences: abc.Sequence[Sequence] = ()) -> None:
        """Continue without the drafter: its fault must not cost a request.

        It is called again later, for what it failed on may have been one request's; what it has of these sequences is
        dropped.
        """
        assert self.drafter is not None
        self._why = f"drafter {self.drafter.spec.name!r} failed: {type(error).__name__}: {error}"
        rest_s = REST_S * 2 ** min(self._failures, MOST_RESTS)
        self._failures, self._rests_until = self._failures + 1, monotonic() + rest_s
        log.error("%s; decoding continues without it for %.0f s", self._why, rest_s, exc_info=error)
        with suppress(Exception):
            self.drafter.release([view.key for view in sequences])

    def _fit(self, trees: list[TokenTree], want: DraftRequest) -> list[TokenTree]:
        """Cut what is over budget or too deep; refuse what is not a tree of each sequence."""
        assert self.drafter is not None
        if len(trees) != len(want.sequences):
            raise ValueError(f"{len(trees)} trees drafted for {len(want.sequences)} sequences")
        fitting = []
        for tree, (_, budget, max_depth) in zip(trees, want.rows(), strict=True):
            if not self.drafter.trusted:
                tree.check()
            if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self._vocab_size:
                wrong = f"{min(tree.tokens)} .. {max(tree.tokens)}"
                raise ValueError(f"a drafted token lies outside the vocabulary: {wrong}")
            if len(tree) > min(budget, max_depth) and (len(tree) > budget or tree.depth > max_depth):
                depths = tree.depths()[: budget + 1]  # parents come before children: the first nodes are a tree
                tree = tree.subset([node for node, depth in enumerate(depths) if node and depth <= max_depth])
            if self.verifier.needs_q and tree.tokens and not tree.q:
                raise ValueError("a tree without the distribution it was drawn from, or cut after the draw")
            fitting.append(tree)
        return fitting
