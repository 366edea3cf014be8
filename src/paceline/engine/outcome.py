"""After verification: tokens are emitted and counted, K and V of accepted nodes are kept."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ..core.outputs import Logprob
from ..core.request import token_logprobs
from ..core.sequence import Sequence
from ..core.trace import StepTrace
from ..core.tree import TokenTree
from ..draft.base import DrafterSpec
from ..kv.pool import KVPool, SequenceCache
from .passes import Pass


class Emitter:
    """Applies the stop rules and counts.

    Args:
        num_layers: of the target, which every row of a pass goes through.
        spec: of the drafter, for the names of its sources; None: nothing is drafted.
    """

    def __init__(self, num_layers: int, spec: DrafterSpec | None) -> None:
        self.num_layers, self.spec = num_layers, spec

    def emit(self, p: Pass) -> None:
        """Set `Pass.emitted`; cuts `Pass.paths` to the emitted tokens.

        A sequence whose own rules fail, here or in verification, ends with that error; the others continue.
        """
        p.emitted = [0] * len(p.works)
        for i in p.generating:
            sequence = p.works[i].sequence
            if sequence.fault is None:
                try:
                    p.emitted[i] = self._emit(p, i)
                except Exception as error:
                    sequence.fault = error
            if len(p.paths[i]) > p.emitted[i]:
                p.paths[i] = p.paths[i][: p.emitted[i]]
            if sequence.trace is not None and p.emitted[i]:
                self._trace(p, i)
        for work in p.works:
            if work.sequence.fault is not None:
                work.sequence.checker.end("error")

    def _emit(self, p: Pass, i: int) -> int:
        """Emit the tokens of one work and count them; returns how many were emitted."""
        sequence, path = p.works[i].sequence, p.paths[i]
        if p.spans[i].tree is None and sequence.emit_plain(p.tokens[i]):
            stats = sequence.stats
            stats.row_layers += self.num_layers
            stats.record_plain()
            return 1
        logprobs = None
        if sequence.params.logprobs is not None:
            nodes, tree = [0, *path], p.spans[i].tree
            paths = None if tree is None else tree.path_tokens()[nodes]
            logprobs = logprobs_of(sequence, p.logits[p.rows[i]][nodes], p.tokens[i], paths)
        emitted = sequence.emit(p.tokens[i], len(path), logprobs)
        if emitted:
            self._count(p, i, emitted)
        return emitted

    def _count(self, p: Pass, i: int, emitted: int) -> None:
        """Statistics of one work's pass, after the stop rules' cut."""
        stats, span, path = p.works[i].sequence.stats, p.spans[i], p.paths[i]
        nodes = span.nodes
        stats.row_layers += nodes * self.num_layers
        if span.tree is None or self.spec is None:
            stats.record_pass(drafted=0, accepted=0, emitted=emitted)
            return
        accepted = path[:emitted]
        p.counts[i] = nodes - 1, len(accepted)
        marks = span.tree.marks
        # The whole path was emitted, and the next draft token was wrong.
        refused = emitted > len(path) and p.frontier(i) in span.tree.parents
        stats.record_pass(
            drafted=nodes - 1,
            accepted=len(accepted),
            emitted=emitted,
            offered=len(accepted) + refused,
            sources=_by_source(self.spec, marks, [marks[n - 1] for n in accepted]),
        )

    def _trace(self, p: Pass, i: int) -> None:
        """Keep what one work's pass did."""
        sequence, emitted, tree = p.works[i].sequence, p.emitted[i], p.spans[i].tree
        assert sequence.trace is not None
        scores = None if tree is None or len(tree.scores) < len(tree) else [0.0, *tree.scores]
        tree = tree or TokenTree()
        sequence.trace.append(
            StepTrace(
                first=len(sequence.output_ids) - emitted,
                emitted=emitted,
                tokens=[sequence.tokens[-emitted - 1], *tree.tokens],
                parents=[-1, *tree.parents],
                sources=["", *(source_name(self.spec, mark) for mark in tree.marks)],
                scores=scores,
                path=p.paths[i],
                allowed=p.works[i].budget,
            )
        )


def source_name(spec: DrafterSpec | None, mark: int) -> str:
    """Return which source proposed a node with this mark."""
    names = () if spec is None else spec.sources or (spec.name,)
    return names[mark] if mark < len(names) else f"source {mark}"


def logprobs_of(
    sequence: Sequence, logits: Tensor, tokens: abc.Sequence[int], paths: Tensor | None = None
) -> list[dict[int, Logprob]] | None:
    """One entry a token, where the request includes them.

    Args:
        sequence: whose tokens they are.
        logits: [n, V] after the nodes that they follow.
        tokens: [n].
        paths: [n, D] drafted tokens up to each node; None: all follow the text.
    """
    count = sequence.params.logprobs
    if count is None:
        return None
    if sequence.params.logprobs_mode == "processed":
        logits = sequence.sampler.process(logits, paths)
    return token_logprobs(logits, torch.tensor(tokens), count, sequence.token_text)


def _by_source(spec: DrafterSpec, drafted: list[int], accepted: list[int]) -> dict[str, tuple[int, abc.Sequence[int]]]:
    """Drafted nodes, and depths of accepted ones, by the name of the source.

    Args:
        spec: of the drafter.
        drafted: the nodes' marks.
        accepted: those of the accepted path.
    """
    if len(spec.sources) <= 1 and not any(drafted):
        return {source_name(spec, 0): (len(drafted), range(1, len(accepted) + 1))}
    return {
        source_name(spec, m): (
            drafted.count(m),
            [depth for depth, mark in enumerate(accepted, 1) if mark == m],
        )
        for m in {*drafted}
    }


def keep(p: Pass, pool: KVPool) -> None:
    """Commit the K/V of pending tokens and accepted nodes; the root is the last pending token.

    K and V are in the slot of the node's index at the proposal, whatever was pruned since.
    """
    commits: list[tuple[SequenceCache, abc.Sequence[int]]] = []
    for i, work in enumerate(p.works):
        cache, path = work.sequence.cache, p.paths.get(i)
        assert cache is not None
        if path:
            proposed, first = p.remaining.get(i), work.rows - 1
            nodes = path if proposed is None else [proposed[n] for n in path]
            commits.append((cache, [*range(work.rows), *[first + n for n in nodes]]))
        else:
            cache.advance(work.rows)
    if commits:
        pool.commit(commits)
    for work in p.works:
        cache = work.sequence.cache
        assert cache is not None
        cache.publish(work.sequence.tokens)
