"""A round's drafter, guarded: its faults cost no request."""

from __future__ import annotations

import logging
from collections import abc
from contextlib import suppress
from time import monotonic

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

    def propose(self, drafting: abc.Sequence[Work], rule: DraftRule | None = None) -> TokenTree | None:
        """Return the drafter's trees, checked, and of them the nodes that the rule chooses.

        None if nothing is drafted, or if it failed.
        """
        if self.drafter is None or self.failure is not None or not drafting:
            return None
        want = DraftRequest(
            sequences=[w.sequence for w in drafting],
            budgets=[w.budget for w in drafting],
            max_depths=[w.max_depth for w in drafting],
            floor=rule.level_chance(0, len(drafting)) if rule is not None and self._grows else 0.0,
            rule=rule,
            caches=[w.sequence.cache for w in drafting if w.sequence.cache is not None],
        )
        try:
            tree = self._fit(self.drafter.propose(want), want)
        except Exception as error:
            if self._spare(drafting):  # what the drafter had begun for these sequences is dropped
                self.release([w.sequence for w in drafting])
            else:
                self._put_aside(error, want.sequences)
            return None
        if any(view.sampler.matcher is not None for view in want.sequences):
            tree = self._within_grammars(tree, want.sequences)
        self._spare(drafting)
        if rule is not None:
            return rule.select(want.sequences, tree, want.passes)
        return tree if max(tree.counts) > 1 else None

    def _within_grammars(self, tree: TokenTree, sequences: abc.Sequence[Sequence]) -> TokenTree:
        """Return the nodes that the sequences' grammars allow.

        Others would be rows for nothing: no choice ever meets them.
        """
        if self.verifier.needs_q:  # it weighs what was drawn as it was drawn
            return tree
        valid = []
        for b, view in enumerate(sequences):
            nodes = [*range(tree.counts[b])]
            if (matcher := view.sampler.matcher) is not None:
                allowed = matcher.within(view.sampler.output_ids, tree.paths(b))
                nodes = [node for node in nodes if node == 0 or allowed[node]]
            valid.append(nodes)
        return tree if [*map(len, valid)] == tree.counts else tree.subset(valid)

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

    def _fit(self, tree: TokenTree, want: DraftRequest) -> TokenTree:
        """Cut what is over budget or too deep; refuse what is not a tree over these roots."""
        tree.check()
        counts = tree.counts
        if len(counts) != len(want.sequences):
            raise ValueError(f"{len(counts)} trees proposed for {len(want.sequences)} sequences")
        if [row[0] for row in tree.tokens] != [s.tokens[-1] for s in want.sequences]:
            raise ValueError("a tree's root is not its sequence's last token")
        if max(counts) == 1:
            return tree
        low, high = min(map(min, tree.tokens)), max(map(max, tree.tokens))
        if low < 0 or high >= self._vocab_size:
            raise ValueError(f"a drafted token lies outside the vocabulary: {low} .. {high}")
        tree = _cut(tree, want)
        if self.verifier.needs_q and tree.q is None:
            raise ValueError("a tree without the distribution it was drawn from, or cut after the draw")
        return tree


def _cut(tree: TokenTree, want: DraftRequest) -> TokenTree:
    """Return the tree within budgets and depths.

    Parents come before children, so the first nodes of a tree are a tree.
    """
    limits = [*zip(tree.counts, want.budgets, want.max_depths, strict=True)]
    if all(count - 1 <= min(budget, depth) for count, budget, depth in limits):
        return tree
    rows = [*zip(tree.depths(), limits, strict=True)]
    if all(count - 1 <= budget and max(depths) <= deep for depths, (count, budget, deep) in rows):
        return tree
    nodes_left = [[n for n, d in enumerate(depths[: budget + 1]) if d <= deep] for depths, (_, budget, deep) in rows]
    return tree.subset(nodes_left)
