"""Stages in virtual time: schedule, frames and pruning are real, and each stage takes the time it is given.

Straight, as in `runtime.stage_workers`, a frame goes on to the next stage as soon as it is computed, and verdicts go to
all stages at once. Through the coordinator, which prunes it, every frame goes from its stage to there, and from there
to the next one; a tick lasts until the last one is back. Beside the stages the source drafts; a level that takes longer
than the tick is there in a later one (SpecPipe, algorithm 1).

Whatever is measured here carries the clock's label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.core.inference import inference
from paceline.draft.local_sessions import LocalGrowing, LocalSessions
from paceline.draft.sessions import DraftSessions, Expand, NewNodes, Pending
from paceline.model.stages import Frame, Stage, StagesInTurn
from paceline.runtime.stage_workers import InFlight, Sent
from paceline.runtime.wire import Late

from .clock import Clock, Mailbox, VirtualClock
from .links import Link
from .paced import Pace
from .timeline import Timeline

ROW_BYTES = 16  # of a row in a frame, beside its states: node, position, token, slot
FREE = Link()
Frames = Literal["straight", "coordinator"]


class _Lane:
    """One direction of a host's link: frames wait for each other."""

    def __init__(self, clock: Clock, link: Link) -> None:
        self._clock, self._link = clock, link
        self._free = 0.0

    def due(self, size: int) -> float:
        """When so many bytes that are sent now have come."""
        self._free = max(self._clock.now(), self._free) + self._link.transfer_s(size)
        return self._free + self._link.latency_ms * 1e-3


class VirtualStages(StagesInTurn):
    """Stages that are activities of a virtual clock; the caller, their coordinator, is another.

    Args:
        clock: whose activities they are.
        stages: in order; the last one is the coordinator's own.
        seconds: of each stage, by rows.
        link: of every host, which all frames that leave it share; through the coordinator those that come to it, too.
        hosts: of each stage, by any number; None: all are on one.
        coordinator_s: seconds of the coordinator's own work in a tick, by the rows that it has in hand; nothing runs
            beside it.
        frames: the way that they go.
        timeline: notes who does what.

    Raises:
        ConfigError: times or hosts of more or fewer stages.
    """

    def __init__(
        self,
        clock: VirtualClock,
        stages: Sequence[Stage],
        seconds: Sequence[Callable[[int], float]],
        link: Link = FREE,
        hosts: Sequence[int] | None = None,
        coordinator_s: Callable[[int], float] = lambda rows: 0.0,
        frames: Frames = "coordinator",
        timeline: Timeline | None = None,
    ) -> None:
        count = len(stages)
        self._hosts = [0] * count if hosts is None else [*hosts]
        for what, given in (("times", seconds), ("hosts", self._hosts)):
            if len(given) != count:
                raise ConfigError(f"{what} of {len(given)} stages", f"there are {count} stages", "give each its own")
        super().__init__(stages)
        self.timeline = timeline or Timeline(clock)
        self._clock, self._coordinator_s = clock, coordinator_s
        self._lanes = {host: _Lane(clock, link) for host in self._hosts}  # what leaves each host
        self._back = _Lane(clock, link)  # what comes to the coordinator, where all frames do
        self._latency_s = link.latency_ms * 1e-3
        self._inboxes = [clock.mailbox() for _ in stages]
        self._outboxes = [clock.mailbox() for _ in stages]
        self._seconds, self._paces = seconds, [Pace(clock, own) for own in seconds]
        self._straight = frames == "straight"
        self._in_flight = InFlight(count, clock.now)
        self._news: list[list[tuple[float, Callable[[], None]]]] = [[] for _ in stages]  # with when it comes
        live = self._relay if self._straight else self._live
        for index in range(self.count - self._straight):
            clock.start(f"stage {index}", partial(live, index))

    # -- through the coordinator

    @inference
    def _live(self, index: int) -> None:
        """A stage's activity."""
        while True:
            frame, due = self._inboxes[index].get()
            if frame.rows:
                frame = self._computed(index, frame, due)
                due = self._back.due(self._size(frame)) if self._hosts[index] != self._hosts[-1] else 0.0
                self._travel(index, frame, due)
            else:  # moves alone: their bytes and their copies are next to nothing
                frame = self.stages[index].run(frame)
            self._outboxes[index].put(frame)

    def _computed(self, index: int, frame: Frame, due: float) -> Frame:
        """What a stage makes of a frame, once it has come."""
        self._travel(index, frame, due)
        with self.timeline.span(f"stage {index}", "compute", rows=frame.rows), self._paces[index].work(frame.rows):
            return self.stages[index].run(frame)

    def _travel(self, index: int, frame: Frame, due: float) -> None:
        """Wait until a frame has come."""
        if due > self._clock.now():
            with self.timeline.span(f"stage {index}", "transmit", rows=frame.rows):
                self._clock.sleep_until(due)

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """What each stage makes of what it holds, all at the same time."""
        frames = [None if frame is None else self.stages[-1].pruned(frame) for frame in held]
        self._work(sum(frame.rows for frame in frames if frame is not None))
        for index, frame in enumerate(frames):
            if frame is not None:
                self._inboxes[index].put((frame, self._sent(-1, index, frame)))
        pairs = zip(self._outboxes, frames, strict=True)
        return [None if frame is None else outbox.get() for outbox, frame in pairs]

    def _work(self, rows: int) -> None:
        """The coordinator's own, on so many rows."""
        end = self._clock.now() + self._coordinator_s(rows)
        if rows and end > self._clock.now():
            with self.timeline.span("coordinator", "prune", rows=rows):
                self._clock.sleep_until(end)

    def _sent(self, giver: int, taker: int, frame: Frame) -> float:
        """When a frame comes from one stage to another."""
        host = self._hosts[giver]
        if host == self._hosts[taker] or not frame.rows:
            return 0.0
        return self._lanes[host].due(self._size(frame))

    def _size(self, frame: Frame) -> int:
        """Bytes on the link; the first stage's frame is embedded before it is sent."""
        decoder = self.stages[0].decoder
        return frame.rows * (decoder.config.d_model * decoder.dtype.itemsize + ROW_BYTES)

    # -- straight

    def tick(self, entering: Frame | None) -> Frame | None:
        """See `StageLine`."""
        if not self._straight:
            return super().tick(entering)
        due = self._in_flight.tick(entering)
        self._work(sum(f.rows for f in (entering, due and due.frame) if f is not None))
        if entering is not None:
            self._inboxes[0].put((entering, self._sent(-1, 0, entering)))
        return None if due is None else self._last(due)

    def _last(self, due: Sent) -> Frame:
        """The last stage, in the caller's own time."""
        frame, arrives = self._inboxes[-1].get()
        self._travel(self.count - 1, frame, arrives)
        self._in_flight.came(max(own(due.frame.rows) for own in self._seconds[:-1]))
        return self._run(self.count - 1, frame)

    def _run(self, index: int, frame: Frame) -> Frame:
        """What a stage makes of a frame that is there; one of which nothing is left takes no time."""
        frame = self.stages[index].pruned(frame)
        return self._computed(index, frame, 0.0) if frame.rows else self.stages[index].run(frame)

    def rest(self) -> bool:
        """See `StageLine`."""
        left = self._in_flight.rest_s() if self._straight else 0.0
        self._clock.sleep_until(self._clock.now() + left)
        return left > 0

    @inference
    def _relay(self, index: int) -> None:
        """A stage's activity: a frame goes on once it is computed."""
        while True:
            frame, due = self._inboxes[index].get()
            self._clock.sleep_until(due)
            self._hear(index)
            frame = self._run(index, frame)
            self._hear(index)
            frame = self.stages[index].pruned(frame)
            self._inboxes[index + 1].put((frame, self._sent(index, index + 1, frame)))

    def _hear(self, index: int) -> None:
        """What has come of verdicts by now."""
        now, news = self._clock.now(), self._news[index]
        while news and news[0][0] <= now:
            news.pop(0)[1]()

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """See `StageLine`; a verdict travels, where frames go straight."""
        self._broadcast(lambda stage: stage.tell(request, version, alive))

    def close(self, request: int) -> None:
        """See `StageLine`."""
        self._broadcast(lambda stage: stage.close(request))

    def _broadcast(self, say: Callable[[Stage], None]) -> None:
        for index, stage in enumerate(self.stages):
            far = self._straight and self._hosts[index] != self._hosts[-1]
            if far:
                self._news[index].append((self._clock.now() + self._latency_s, partial(say, stage)))
            else:
                say(stage)


class VirtualSessions(LocalSessions):
    """Draft sessions whose levels take time, beside the stages. A growth is one level.

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
        super().__init__(sessions)
        self._pace = Pace(clock, seconds)
        self._timeline = timeline or Timeline(clock)
        self._inbox: Mailbox = clock.mailbox()
        self._outbox: Mailbox = clock.mailbox()
        clock.start("source", self._live)

    def _live(self) -> None:
        while True:
            asks: Sequence[Expand] = self._inbox.get()
            rows = sum(len(ask.expand) for ask in asks)
            with self._timeline.span("source", "draft", rows=rows), self._pace.work(rows):
                try:
                    answer: list[NewNodes] | Exception = self.inner.grow(asks)
                except Exception as error:
                    answer = error
            self._outbox.put(answer)

    def begin(self, asks: Sequence[Expand]) -> LocalGrowing:
        """See `AsyncSessions`."""
        self._inbox.put(asks)
        self._waiting = LocalGrowing.of(asks)
        return self._waiting

    def look(self) -> None:
        """See `AsyncSessions`; what the sessions raised is raised."""
        self._take(0)

    def wait(self, growing: Pending, first: bool = False) -> None:
        """See `AsyncSessions`; what the sessions raised is raised."""
        self._take(None)

    def _take(self, timeout: float | None) -> None:
        try:
            answer = self._outbox.get(timeout)
        except Late:
            return
        if isinstance(answer, Exception):
            raise answer
        self._waiting.levels.append(dict(zip(self._waiting.asks, answer, strict=True)))
        self._waiting.done = True
