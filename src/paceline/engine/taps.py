"""States of a pass that its drafter requested: which rows have them taken, and which of these it is shown.

A step of a small model takes two milliseconds, and these functions run in every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..draft.base import DrafterSpec, StepFeatures
from ..kernels.calls import pick
from .base import Work
from .passes import Pass, Span


@dataclass(slots=True)
class Tapped:
    """Rows of a pass whose states are taken: of each work all from a first one on. B works."""

    layers: tuple[int, ...]  # after which; as in `DrafterSpec.taps`
    starts: list[int]  # [B] first row of the pass; after the work's last one: none
    whole: bool  # all rows of the pass are taken
    # By layer: states of the rows taken, one after the other, or of all main rows of the pass; once they are there.
    source: Mapping[int, Tensor] = field(default_factory=dict)
    apart: bool = False  # which of the two, where not all rows are taken
    ms: float = 0.0  # that taking them took

    def rows(self, p: Pass) -> list[int]:
        """Return the rows that are taken, in order."""
        parts = zip(self.starts, p.spans, strict=True)
        return [row for start, span in parts for row in range(start, span.stop)]


def rows_to_tap(p: Pass, spec: DrafterSpec) -> Tapped | None:
    """Return the rows whose states a drafter can use; None: no row.

    Where drafts may follow, those of the last `DrafterSpec.past` tokens, of the root and of all drafted nodes.
    """
    if not spec.taps:
        return None
    starts, whole, some = [], True, False
    for work, span in zip(p.works, p.spans, strict=True):
        start = span.stop if not work.may_draft else span.start if work.rows == 1 else _start(work, span, spec.past)
        whole = whole and start == span.start
        some = some or start < span.stop
        starts.append(start)
    return Tapped(spec.taps, starts, whole) if some else None


def _start(work: Work, span: Span, past: int | None) -> int:
    """Return the first row of a part of a prompt that a drafter needs."""
    if past is None:
        return span.start
    cache, length = work.sequence.cache, len(work.sequence.tokens)
    assert cache is not None
    return min(span.stop, span.start + max(0, length - max(1, past) - cache.committed))


def show(p: Pass, tapped: Tapped | None) -> StepFeatures:
    """Return what a drafter is shown of a pass whose tokens are emitted and whose K/V is not yet committed."""
    committed = [w.sequence.tokens[-n:] if n else [] for w, n in zip(p.works, p.emitted, strict=True)]
    return StepFeatures([w.sequence for w in p.works], committed, *(() if tapped is None else _states(p, tapped)))


def _states(p: Pass, tapped: Tapped) -> tuple[Mapping[int, Tensor], Sequence[slice], Sequence[int]]:
    """Return the states of pending tokens and accepted nodes; see `StepFeatures` for all three."""
    if tapped.whole and all(span.tree is None for span in p.spans):  # all rows are kept
        caches = [work.sequence.cache for work in p.works]
        first = [0 if cache is None else cache.committed for cache in caches]
        return tapped.source, [slice(span.start, span.stop) for span in p.spans], first
    rows: list[int] = []
    slices: list[slice] = []
    first, rows_read = [], 0
    for i, (work, span, start) in enumerate(zip(p.works, p.spans, tapped.starts, strict=True)):
        cache, begin = work.sequence.cache, len(rows)
        assert cache is not None
        if start < span.stop:
            shift = rows_read - start if tapped.apart else 0  # from rows of the pass to those of the source
            rows += range(start + shift, span.start + work.rows + shift)
            path = p.paths.get(i)
            if path:
                rows += [span.root + shift + node for node in path]
            first.append(cache.committed + start - span.start)
        else:
            first.append(cache.committed + work.rows)
        slices.append(slice(begin, len(rows)))
        rows_read += span.stop - start
    count, source = len(rows), tapped.source.items()
    if count and rows[-1] - rows[0] + 1 != count:
        return {name: pick(x, rows) for name, x in source}, slices, first
    begin = rows[0] if count else 0  # side by side: without a copy
    return {name: x if len(x) == count else x[begin : begin + count] for name, x in source}, slices, first
