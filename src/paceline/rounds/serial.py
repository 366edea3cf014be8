"""The serial round: draft, then check, then the next.

propose -> one target pass over pending rows and tree nodes -> verify -> emit -> commit K/V -> observe
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.request import Logprob, token_logprobs
from ..core.tree import TokenTree
from ..drafters.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from ..kv.pool import KVPool
from ..target.applications import adapter_ranges
from ..target.base import Batch, ForwardState, Taps
from ..target.decoder import Decoder
from ..target.packing import RowPacker
from .base import RunningSequence, StepResult, Work
from .verification import DEFAULT_VERIFIER, choose_packed, make_verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence's rows lie in the packed batch."""

    start: int
    stop: int
    root: int  # row of the root; the drafted nodes follow it
    tree_index: int  # which tree of the batch it has; -1: none


class SerialRound:
    """Draft, check, repeat: the schedule of every classical system.

    Args:
        target: the model whose word counts.
        pool: its K/V.
        drafter: who guesses; None: plain decoding.
        verifier: name of the verifier.
    """

    name = "serial"

    def __init__(
        self, target: Decoder, pool: KVPool, drafter: Drafter | None, verifier: str = DEFAULT_VERIFIER
    ) -> None:
        if drafter is not None and self.name not in drafter.spec.rounds:
            raise ConfigError(
                f"round={self.name!r} with drafter {drafter.spec.name!r}",
                "the drafter does not run in this round",
                f"use one of its rounds: {', '.join(sorted(drafter.spec.rounds))}",
            )
        self.target = target
        self.pool = pool
        self.drafter = drafter
        self.verifier = make_verifier(verifier, drafter.spec if drafter else None)
        self.failure: str | None = None  # why the drafter was put aside, if it failed

    # -- the step

    @torch.inference_mode()
    def step(self, works: Sequence[Work]) -> StepResult:
        """One round: at most one proposal and exactly one target pass."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self._propose(drafting) if drafting and self.drafter else None
        drafted = perf_counter()
        spans = _layout(works, drafting if tree is not None else (), tree)
        state, taps = self._forward(works, spans, tree)
        generating = [i for i, w in enumerate(works) if w.generates]
        logits = self._logits(works, spans, state)
        tokens, paths = self._verdicts(works, spans, generating, tree, logits)
        checked = perf_counter()
        emitted = self._emit(works, spans, generating, tree, logits, tokens, paths)
        self._keep(works, paths)
        self._observe(works, spans, emitted, paths, taps)
        ended = perf_counter()
        times = ((drafted - began) * 1e3, (checked - drafted) * 1e3, (ended - checked) * 1e3)
        return StepResult(_said(works, emitted), *times)

    def release(self, sequences: Sequence[RunningSequence]) -> None:
        """Let the drafter forget ended or preempted sequences."""
        if self.drafter is None or not sequences:
            return
        try:
            self.drafter.release([s.view.key for s in sequences])
        except Exception as error:
            self._put_aside(error)

    def _put_aside(self, error: Exception) -> None:
        """Go on without the drafter. It is a guest: its fault must not cost a request."""
        assert self.drafter is not None
        self.failure = f"drafter {self.drafter.spec.name!r} failed: {type(error).__name__}: {error}"
        log.error("%s; decoding goes on without it", self.failure, exc_info=error)

    # -- drafting

    def _propose(self, drafting: Sequence[Work]) -> TokenTree | None:
        """The drafter's trees, checked; None where it failed, which ends drafting but no request."""
        assert self.drafter is not None
        if self.failure is not None:
            return None
        want = DraftRequest(
            sequences=[w.sequence.view for w in drafting],
            budgets=[w.budget for w in drafting],
            max_depths=[w.max_depth for w in drafting],
        )
        try:
            tree = self.drafter.propose(want)
            return self._fit(tree, want)
        except Exception as error:
            if any(view.sampler.fault is not None for view in want.sequences):
                # A request's own rules failed while they were asked what to draft: its verdict will end it. What the
                # drafter had begun for these sequences is dropped.
                self.release([w.sequence for w in drafting])
            else:
                self._put_aside(error)
            return None

    def _fit(self, tree: TokenTree, want: DraftRequest) -> TokenTree | None:
        """Cut what is over budget or too deep; refuse what is no tree over these roots."""
        tree.check()
        lists = tree.lists()
        counts = lists.counts
        if len(counts) != len(want.sequences):
            raise ValueError(f"{tree.tokens.shape[0]} trees proposed for {len(want.sequences)} sequences")
        if [row[0] for row in lists.tokens] != [s.tokens[-1] for s in want.sequences]:
            raise ValueError("a tree's root is not its sequence's last token")
        if max(counts) == 1:
            return None
        low, high = min(map(min, lists.tokens)), max(map(max, lists.tokens))
        if low < 0 or high >= self.target.config.vocab_size:
            raise ValueError(f"a drafted token lies outside the vocabulary: {low} .. {high}")
        over = any(n - 1 > budget for n, budget in zip(counts, want.budgets, strict=True))
        if over or any(n - 1 > depth for n, depth in zip(counts, want.max_depths, strict=True)):
            # Parents come before children, so the first nodes of a tree are a tree.
            keep = torch.arange(tree.tokens.shape[1]) <= torch.tensor(want.budgets)[:, None]
            keep &= tree.depths() <= torch.tensor(want.max_depths)[:, None]
            keep &= torch.arange(tree.tokens.shape[1]) < tree.num_nodes[:, None]
            if not bool(keep.sum() == tree.num_nodes.sum()):
                tree = tree.prune(keep)
        if self.verifier.needs_q and tree.q is None:
            raise ValueError("a tree without the distribution it was drawn from, or cut after the draw")
        return tree

    # -- the target pass

    def _forward(
        self, works: Sequence[Work], spans: Sequence[Span], tree: TokenTree | None
    ) -> tuple[ForwardState, Taps | None]:
        state = self.target.embed(self._pack(works, spans, tree))
        state.adapters = adapter_ranges([w.sequence.application for w in works], [(s.start, s.stop) for s in spans])
        wanted = self.drafter.spec.taps if self.drafter else ()
        taps = Taps(wanted) if wanted else None
        return self.target.run_layers(state, 0, self.target.num_layers, self.pool, taps), taps

    def _pack(self, works: Sequence[Work], spans: Sequence[Span], tree: TokenTree | None) -> Batch:
        """Rows of all sequences, one after the other: pending tokens, then drafted nodes."""
        packer = RowPacker(self.target, self.target.device)
        tokens = tree.lists().tokens if tree is not None else []
        branches = tree is not None and not tree.is_chain
        depths = tree.depth_lists() if tree is not None and branches else []
        masks = tree.ancestor_mask() if tree is not None and branches else None
        for work, span in zip(works, spans, strict=True):
            cache = work.sequence.cache
            assert cache is not None
            first = cache.committed
            stop = first + span.stop - span.start
            row_tokens = work.sequence.view.tokens[first : first + work.rows]
            places: Sequence[int] = range(first, stop)
            nodes = _nodes(span)
            visible = None
            if span.tree_index >= 0:
                row_tokens += tokens[span.tree_index][1:nodes]
                if masks is not None:
                    root = first + work.rows - 1
                    places = [*range(first, root), *(root + depth for depth in depths[span.tree_index][:nodes])]
                    visible = _block_mask(masks[span.tree_index, :nodes, :nodes], work.rows)
            packer.add(
                row_tokens,
                places,
                [-1] * (work.rows - 1) + ([*range(nodes)] if work.generates else [-1]),
                slots=cache.slots(first, stop),
                keys=cache.slots(0, stop),
                num_keys=stop,
                prefix=first,
                visible=visible,
                block_positions=places if visible is not None else None,
            )
        return packer.batch()

    def _logits(self, works: Sequence[Work], spans: Sequence[Span], state: ForwardState) -> Tensor:
        """[nodes of all generating sequences, V]; prompt log-probabilities are taken on the way."""
        for work, span in zip(works, spans, strict=True):
            if work.sequence.params.prompt_logprobs is not None:
                try:
                    self._record_prompt(work, span, state)
                except Exception as error:
                    work.sequence.view.fault = error
        rows = [r for w, s in zip(works, spans, strict=True) if w.generates for r in range(s.root, s.stop)]
        if not rows:
            return state.hidden.new_empty((0, self.target.config.vocab_size))
        if len(rows) == state.hidden.shape[0]:
            return self.target.logits(state)
        return self.target.logits(state, torch.tensor(rows, device=state.hidden.device))

    def _record_prompt(self, work: Work, span: Span, state: ForwardState) -> None:
        """Log-probabilities of the prompt tokens that follow this pass's prompt rows."""
        sequence = work.sequence
        assert sequence.cache is not None
        known = len(sequence.prompt_logprobs)  # of tokens 0 .. known - 1
        first = sequence.cache.committed
        begin = max(known - 1, first)
        end = min(first + work.rows, sequence.view.prompt_len - 1)
        if not known:
            sequence.prompt_logprobs.append(None)
            begin = first
        if begin >= end:
            return
        rows = torch.arange(span.start + begin - first, span.start + end - first, device=state.hidden.device)
        logits = self.target.logits(state, rows)
        if sequence.params.logprobs_mode == "processed":
            logits = sequence.view.sampler.process(logits)
        actual = torch.tensor(sequence.view.tokens[begin + 1 : end + 1], device=logits.device)
        wanted = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += token_logprobs(logits, actual, wanted, sequence.state.token_text)

    # -- the verdict

    def _verdicts(
        self,
        works: Sequence[Work],
        spans: Sequence[Span],
        generating: Sequence[int],
        tree: TokenTree | None,
        logits: Tensor,
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By index of the work: tokens that come out (accepted and next), accepted nodes."""
        tokens: dict[int, list[int]] = {}
        paths: dict[int, list[int]] = {}
        if not generating:
            return tokens, paths
        counts = [spans[i].stop - spans[i].root for i in generating]
        plain = [i for i in generating if spans[i].tree_index < 0]
        treed = [i for i in generating if spans[i].tree_index >= 0]
        ends = accumulate(counts)
        begins = {i: end - count for i, end, count in zip(generating, ends, counts, strict=True)}
        if plain:
            rows = logits if not treed else logits[[begins[i] for i in plain]]
            views = [works[i].sequence.view for i in plain]
            for i, token in zip(plain, choose_packed(views, [1] * len(plain), rows, None).tolist(), strict=True):
                tokens[i], paths[i] = [token], []
        if treed and tree is not None:
            rows = logits if not plain else torch.cat([logits[begins[i] : begins[i] + _nodes(spans[i])] for i in treed])
            outcome = self.verifier.verify([works[i].sequence.view for i in treed], tree, rows)
            nodes = tree.lists().tokens
            for b, (i, path, token) in enumerate(
                zip(treed, outcome.path.tolist(), outcome.next_token.tolist(), strict=True)
            ):
                paths[i] = [n for n in path if n >= 0]
                tokens[i] = [nodes[b][n] for n in paths[i]] + [token]
        return tokens, paths

    def _emit(
        self,
        works: Sequence[Work],
        spans: Sequence[Span],
        generating: Sequence[int],
        tree: TokenTree | None,
        logits: Tensor,
        tokens: dict[int, list[int]],
        paths: dict[int, list[int]],
    ) -> list[int]:
        """Apply the stop rules and count; ``paths`` are cut to what came out. Returns tokens emitted by each work.

        A sequence whose own rules fail, here or in the verdict, ends with that error; the others go on.
        """
        emitted = [0] * len(works)
        begin = 0
        for i in generating:
            sequence, span = works[i].sequence, spans[i]
            if sequence.view.fault is None:
                rows = slice(begin, begin + _nodes(span))
                try:
                    emitted[i] = self._say(sequence, span, tree, logits, rows, tokens[i], paths[i])
                except Exception as error:
                    sequence.view.fault = error
            paths[i] = paths[i][: emitted[i]]
            begin += _nodes(span)
        for work in works:
            if work.sequence.view.fault is not None:
                work.sequence.fail()
        return emitted

    def _say(
        self,
        sequence: RunningSequence,
        span: Span,
        tree: TokenTree | None,
        logits: Tensor,
        rows: slice,  # of ``logits``: the sequence's nodes
        tokens: Sequence[int],
        path: Sequence[int],
    ) -> int:
        """Emit the tokens of one sequence and count them; how many came out."""
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = self._logprobs(sequence, logits[rows], path, tokens, tree, span)
        emitted = sequence.emit(tokens, len(path), logprobs)
        if emitted:
            self._count(sequence, tree, span, path, emitted)
        return emitted

    def _keep(self, works: Sequence[Work], paths: dict[int, list[int]]) -> None:
        """Commit the K/V of pending tokens and accepted nodes; the root is the last pending token."""
        kept = []
        for i, work in enumerate(works):
            assert work.sequence.cache is not None
            kept.append((work.sequence.cache, [*range(work.rows), *(work.rows - 1 + n for n in paths.get(i, ()))]))
        self.pool.commit(kept)
        for work, (cache, _) in zip(works, kept, strict=True):
            cache.publish(work.sequence.view.tokens)

    def _logprobs(
        self,
        sequence: RunningSequence,
        logits: Tensor,  # [nodes, V]
        path: Sequence[int],
        tokens: Sequence[int],
        tree: TokenTree | None,
        span: Span,
    ) -> list[dict[int, Logprob]]:
        """One entry a token of ``tokens``, from the logits of the nodes they follow."""
        nodes = [0, *path]
        rows = logits[nodes]
        if sequence.params.logprobs_mode == "processed":
            paths = tree.path_tokens()[span.tree_index, nodes] if tree is not None and span.tree_index >= 0 else None
            rows = sequence.view.sampler.process(rows, paths)
        wanted = sequence.params.logprobs or 0
        return token_logprobs(rows, torch.tensor(tokens), wanted, sequence.state.token_text)

    def _count(
        self, sequence: RunningSequence, tree: TokenTree | None, span: Span, path: Sequence[int], emitted: int
    ) -> None:
        """Statistics of one pass, after the stop rules' cut."""
        stats = sequence.state.stats
        nodes = _nodes(span)
        stats.row_layers += nodes * self.target.num_layers
        if tree is None or span.tree_index < 0 or self.drafter is None:
            stats.record_pass(drafted=0, accepted=0, emitted=emitted)
            return
        accepted = path[:emitted]
        lists = tree.lists()
        parents = lists.parents[span.tree_index][1:nodes]
        marks = lists.sources[span.tree_index][:nodes]
        frontier = path[-1] if path else 0
        refused = emitted > len(path) and frontier in parents  # all of the path came out, and the next guess was wrong
        stats.record_pass(
            drafted=nodes - 1,
            accepted=len(accepted),
            emitted=emitted,
            offered=len(accepted) + refused,
            sources=_by_source(self.drafter.spec, marks[1:], [marks[n] for n in accepted]),
        )

    def _observe(
        self,
        works: Sequence[Work],
        spans: Sequence[Span],
        emitted: Sequence[int],
        paths: dict[int, list[int]],
        taps: Taps | None,
        stream_logits: Sequence[Tensor | None] = (),
    ) -> None:
        if self.drafter is None or self.failure is not None:
            return
        hidden: dict[int, Tensor] = {}
        slices: list[slice] = []
        if taps is not None:
            rows: list[int] = []
            for i, (work, span) in enumerate(zip(works, spans, strict=True)):
                begin = len(rows)
                rows += [*range(span.start, span.start + work.rows), *(span.root + n for n in paths.get(i, ()))]
                slices.append(slice(begin, len(rows)))
            index = torch.tensor(rows, device=self.target.device)
            hidden = {layer: values[index] for layer, values in taps.hidden.items()}
        seen = StepFeatures(
            sequences=[w.sequence.view for w in works],
            committed=[w.sequence.view.tokens[-n:] if n else [] for w, n in zip(works, emitted, strict=True)],
            num_accepted=[len(paths.get(i, ())) for i in range(len(works))],
            paths=[paths.get(i, []) for i in range(len(works))],
            hidden=hidden,
            hidden_rows=slices,
            stream_logits=stream_logits,
        )
        try:
            self.drafter.observe(seen)
        except Exception as error:
            self._put_aside(error)


def _layout(works: Sequence[Work], drafting: Sequence[Work], tree: TokenTree | None) -> list[Span]:
    """Row ranges of every work; drafting works come in the order of the tree's batch."""
    counts = tree.lists().counts if tree is not None else []
    index = {id(work): b for b, work in enumerate(drafting)}
    spans = []
    start = 0
    for work in works:
        b = index.get(id(work), -1)
        drafts = counts[b] - 1 if b >= 0 else 0
        stop = start + work.rows + drafts
        spans.append(Span(start, stop, start + work.rows - 1, b))
        start = stop
    return spans


def _said(works: Sequence[Work], emitted: Sequence[int]) -> list[tuple[RunningSequence, int]]:
    """Sequences that got tokens or were ended by a fault, and how many tokens they got."""
    rows = zip(works, emitted, strict=True)
    return [(w.sequence, n) for w, n in rows if n or w.sequence.view.fault is not None]


def _nodes(span: Span) -> int:
    return span.stop - span.root


def _by_source(spec: DrafterSpec, drafted: list[int], accepted: list[int]) -> dict[str, tuple[int, int]]:
    """(drafted, accepted) nodes by the name of who proposed them, from the nodes' marks."""
    names = spec.sources or (spec.name,)
    return {names[m] if m < len(names) else f"source {m}": (drafted.count(m), accepted.count(m)) for m in {*drafted}}


def _block_mask(ancestors: Tensor, pending: int) -> Tensor:
    """[pending - 1 + nodes, same] bool: a chain of pending rows, whose last one is the tree's root."""
    if pending == 1:
        return ancestors
    nodes = ancestors.shape[0]
    size = pending - 1 + nodes
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask[pending - 1 :, pending - 1 :] = ancestors
    return mask
