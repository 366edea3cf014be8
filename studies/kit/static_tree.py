"""Whole trees in the stages of the pipeline round, in place of levels: SpecInfer in the same framework.

A root enters with all that is drafted below it, and the next tree when that one has left the last stage.

Source: SpecPipe, section 4; SpecInfer (Miao et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.options import option
from paceline.draft.sessions import ROOT, AsyncSessions, Expand
from paceline.engine.base import RoundParts, Work
from paceline.model.stage_line import StageLine
from paceline.model.stages import StageRows
from paceline.papers.specpipe.config import PipelineConfig
from paceline.papers.specpipe.flight import InFlightTree, Offer
from paceline.papers.specpipe.records import Running
from paceline.papers.specpipe.round import PipelineRound
from paceline.papers.specpipe.source import Source

SPECINFER = "1x1x3x1x1x1x1x1"


@dataclass(frozen=True, kw_only=True)
class StaticTreeConfig(PipelineConfig):
    """Trees of so many children by level enter whole."""

    kind: ClassVar[str] = "static_tree"

    tree: str = option(SPECINFER, help="children by level")

    @property
    def factors(self) -> list[int]:
        """Children by level."""
        return [int(part) for part in self.tree.split("x")]

    @property
    def nodes(self) -> int:
        """See `PipelineConfig`: the next tree hangs below each leaf."""
        return (self.stages + 2 + len(self.factors)) * math.prod(self.factors) ** 2

    def over(self, parts: RoundParts, stage_line: StageLine) -> PipelineRound:
        """See `PipelineConfig`."""
        sessions = self.sessions(parts, self.nodes)
        source = TreeSource(sessions, parts.target.config.vocab_size, self.factors)
        return StaticTreeRound(self, parts, stage_line, source)


class TreeSource(Source):
    """A source that is asked for levels of static trees."""

    def __init__(self, sessions: AsyncSessions, vocab_size: int, factors: Sequence[int]) -> None:
        super().__init__(sessions, 1, vocab_size)
        self.factors = factors
        self.tops: dict[int, int] = {}  # by sequence: place of the root of its newest tree; all follow each other

    def ask(self, flights: Mapping[int, tuple[InFlightTree, int]]) -> None:
        """See `Source`: below the last level of a tree is the root of the next."""
        if self._asked:
            return
        asks, self._flights = [], flights
        for request in sorted(self.open):
            flight, farthest = flights[request]
            tips = flight.tips(farthest)
            if not tips:
                continue
            flight.ask(tips)
            self._asked[request] = {ROOT if n == flight.root else flight.nodes[n].source: n for n in tips}
            level = (flight.nodes[tips[0]].place - self.tops[request]) % (len(self.factors) + 1)
            width = [*self.factors, 1][level]
            asks.append(Expand(request, expand=[*self._asked[request]], width=width))
        if asks:
            self._growing = self.sessions.begin(asks)


class StaticTreeRound(PipelineRound):
    """The pipeline round with whole trees."""

    source: TreeSource
    config: StaticTreeConfig

    def _levels(self, begun: Container[int]) -> list[StageRows]:
        return []

    def _text(self, running: Running, work: Work) -> StageRows:
        if work.rows == 1 and work.generates and running.flight is not None:
            return self._whole_tree(running)
        return super()._text(running, work)

    def _begin(self, running: Running, work: Work) -> None:
        begun = running.flight is None
        if begun:  # the first root enters alone: its child is the root of the first tree
            place = len(running.sequence.tokens) - 1
            self.source.tops[running.sequence.key] = place - len(self.config.factors)
        super()._begin(running, work)

    def _whole_tree(self, running: Running) -> StageRows:
        """A root with all that is drafted below it, within the tree; what is missing is waited for."""
        flight, source = running.flight, self.source
        assert flight is not None
        deepest = flight.place + len(self.config.factors)
        while running.sequence.key in source.open and flight.tips(min(running.farthest, deepest)):
            self._asked(self._ask)
            if not self._asked(self._wait):
                break
        running.cache.reserve(0)  # what was reserved for the root alone
        room, own = self._room(running), running.sequence.max_nodes
        most = max(1, room if own is None else min(room, 1 + own))
        level = [n for n in flight.waiting if flight.nodes[n].place <= deepest][:most]
        for number in level:
            node = flight.nodes[number]
            node.row, flight.rows = flight.rows, flight.rows + 1
        running.counted.update(flight.nodes[number].mark for number in level[1:])
        return self._rows(running, flight, level)

    def _wait(self, source: Any) -> bool:
        if source._growing is not None:
            source.sessions.wait(source._growing)
        self._extend(found := source.take())
        return bool(found)

    def _append(self, running: Running, flight: InFlightTree, offers: Sequence[Offer]) -> None:
        flight.extend(offer for offer in offers if offer.parent in flight.nodes)

    def _go_on(self, running: Running, flight: InFlightTree, token: int) -> bool:
        known = flight.child(token) is not None
        hit = super()._go_on(running, flight, token)
        if not known:
            self.source.tops[running.sequence.key] = flight.place
        return hit
