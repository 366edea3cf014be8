"""Stages in virtual time: the schedule, the frames and the pruning are real, and each stage takes the time it is given.

A tick lasts as long as its slowest stage, the way to it included: what a stage holds has come over a link, from the one
before it, and is pruned before it is sent (SpecPipe, algorithm 1). Beside the stages the source drafts; a level that
takes longer than the tick is there in a later one.

Whatever is measured here carries the clock's label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..core.errors import ConfigError
from ..core.inference import inference
from ..drafters.sessions import Ask, DraftSessions, Grown
from ..target.stages import Frame, Stage, StagesInTurn
from .channels import Link
from .clock import Late, Mailbox, Pace, VirtualClock
from .timeline import Timeline

ROW_BYTES = 16  # of a row in a frame, beside its states: node, position, token, slot
FREE = Link()


class VirtualStages(StagesInTurn):
    """Stages that are activities of a virtual clock; the caller, its coordinator, is another.

    Args:
        clock: whose activities they are.
        stages: in order.
        seconds: of each stage, by rows.
        link: into every stage, or into each its own; that into the first one is the coordinator's.
        timeline: notes who does what.

    Raises:
        ConfigError: times, or links, of more or fewer stages.
    """

    def __init__(
        self,
        clock: VirtualClock,
        stages: Sequence[Stage],
        seconds: Sequence[Callable[[int], float]],
        link: Link | Sequence[Link] = FREE,
        timeline: Timeline | None = None,
    ) -> None:
        links = [link] * len(stages) if isinstance(link, Link) else link
        wrong = f"there are {len(stages)} stages"
        if len(seconds) != len(stages):
            raise ConfigError(f"times of {len(seconds)} stages", wrong, "give each stage its time")
        if len(links) != len(stages):
            raise ConfigError(f"links into {len(links)} stages", wrong, "give one link, or each stage its own")
        super().__init__(stages)
        self.timeline = timeline or Timeline(clock)
        self._clock, self._links = clock, links
        self._inboxes = [clock.mailbox() for _ in stages]
        self._outboxes = [clock.mailbox() for _ in stages]
        for index in range(self.count):
            pace = Pace(clock, seconds[index])
            clock.start(f"stage {index}", partial(self._live, index, pace))

    @inference
    def _live(self, index: int, pace: Pace) -> None:
        """A stage's activity."""
        stage, who = self.stages[index], f"stage {index}"
        while True:
            frame: Frame = stage.pruned(self._inboxes[index].get())
            if frame.rows:
                self._travel(index, frame)
                with self.timeline.span(who, "compute", rows=frame.rows), pace.work(frame.rows):
                    frame = stage.run(frame)
            else:  # moves alone: their bytes and their copies are next to nothing
                frame = stage.run(frame)
            self._outboxes[index].put(frame)

    def _travel(self, index: int, frame: Frame) -> None:
        """Wait until a frame has come."""
        link = self._links[index]
        way = link.transfer_s(frame.bytes + ROW_BYTES * frame.rows) + link.latency_ms * 1e-3
        if way:
            with self.timeline.span(f"stage {index}", "transmit", rows=frame.rows):
                self._clock.sleep_until(self._clock.now() + way)

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """What each stage makes of what it holds, all at the same time."""
        for inbox, frame in zip(self._inboxes, held, strict=True):
            if frame is not None:
                inbox.put(frame)
        pairs = zip(self._outboxes, held, strict=True)
        return [None if frame is None else outbox.get() for outbox, frame in pairs]


class VirtualLevels:
    """Levels of draft sessions that take time, beside the stages.

    Args:
        clock: whose activity it is.
        sessions: what drafts.
        seconds: of a level, by the nodes that are expanded.
        timeline: notes them.
    """

    def __init__(
        self,
        clock: VirtualClock,
        sessions: DraftSessions,
        seconds: Callable[[int], float],
        timeline: Timeline | None = None,
    ) -> None:
        self._sessions, self._pace = sessions, Pace(clock, seconds)
        self._timeline = timeline or Timeline(clock)
        self._inbox: Mailbox = clock.mailbox()
        self._outbox: Mailbox = clock.mailbox()
        clock.start("source", self._live)

    def _live(self) -> None:
        while True:
            asks: Sequence[Ask] = self._inbox.get()
            rows = sum(len(ask.expand) for ask in asks)
            with self._timeline.span("source", "draft", rows=rows), self._pace.work(rows):
                try:
                    answer: list[Grown] | Exception = self._sessions.grow(asks)
                except Exception as error:
                    answer = error
            self._outbox.put(answer)

    def begin(self, asks: Sequence[Ask]) -> None:
        """See `rounds.pipeline.source.Levels`."""
        self._inbox.put(asks)

    def take(self, wait: bool = False) -> Sequence[Grown] | None:
        """See `rounds.pipeline.source.Levels`; what the sessions raised is raised."""
        try:
            answer = self._outbox.get(None if wait else 0)
        except Late:
            return None
        if isinstance(answer, Exception):
            raise answer
        found: Sequence[Grown] = answer
        return found
