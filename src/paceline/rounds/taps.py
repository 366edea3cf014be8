"""States of a pass that its drafter asked for: which rows have them taken, and which of these it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..drafters.base import DrafterSpec
from .passes import Pass


@dataclass(slots=True)
class Tapped:
    """Rows of a pass whose states are taken. B works."""

    layers: tuple[int, ...]  # behind which; as in `DrafterSpec.taps`
    rows: list[range]  # [B] of the pass; empty: none
    source: Mapping[int, Tensor] = field(default_factory=dict)  # by layer: [rows taken, d_model], once they are
    places: list[int] = field(default_factory=list)  # [B] where each work's rows begin in it
    ms: float = 0.0  # that taking them took

    def take_apart(self, source: Mapping[int, Tensor]) -> None:
        """The states of these rows alone were taken, work by work."""
        self.source = source
        self.places = [*accumulate([0, *map(len, self.rows[:-1])])]

    def take_whole(self, source: Mapping[int, Tensor]) -> None:
        """The states of all rows of the pass were taken."""
        self.source, self.places = source, [rows.start for rows in self.rows]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a drafter sees of them: rows of tokens that are kept. See `StepFeatures`."""

    hidden: dict[int, Tensor]
    rows: list[slice]  # [B]
    first: list[int]  # [B]


def choose_rows(p: Pass, spec: DrafterSpec) -> Tapped | None:
    """The rows whose states a drafter can use: where drafts may follow, those of the last `DrafterSpec.past` tokens, of
    the root and of all drafted nodes; None: no row."""
    if not spec.taps:
        return None
    rows = [_rows(p, i, spec.past) for i in range(len(p.works))]
    return Tapped(spec.taps, rows) if any(rows) else None


def _rows(p: Pass, i: int, past: int | None) -> range:
    work, span = p.works[i], p.spans[i]
    if not work.may_draft:
        return range(0)
    if past is None:
        return range(span.start, span.stop)
    cache, known = work.sequence.cache, len(work.sequence.view.tokens)
    assert cache is not None
    skipped = max(0, known - max(1, past) - cache.committed)
    return range(min(span.stop, span.start + skipped), span.stop)


def show(p: Pass, tapped: Tapped) -> Shown:
    """The states of pending tokens and accepted nodes, of a pass whose tokens are emitted and whose K/V is not yet
    committed."""
    rows: list[int] = []
    slices, first = [], []
    for i, (work, span, own) in enumerate(zip(p.works, p.spans, tapped.rows, strict=True)):
        cache, begin, place = work.sequence.cache, len(rows), tapped.places[i] - own.start
        assert cache is not None
        if own:
            rows += [place + row for row in range(own.start, span.start + work.rows)]
            rows += [place + span.root + node for node in p.paths.get(i, ())]
        slices.append(slice(begin, len(rows)))
        first.append(cache.committed + (own.start - span.start if own else work.rows))
    return Shown(_picked(tapped.source, rows), slices, first)


def _picked(source: Mapping[int, Tensor], rows: list[int]) -> dict[int, Tensor]:
    """The rows of each tensor; without a copy where they lie in a row."""
    start = rows[0] if rows else 0
    if rows == [*range(start, start + len(rows))]:
        return {layer: states[start : start + len(rows)] for layer, states in source.items()}
    index = torch.tensor(rows, device=next(iter(source.values())).device)
    return {layer: states[index] for layer, states in source.items()}
