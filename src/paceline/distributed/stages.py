"""Stages in virtual time: the schedule, the frames and the pruning are real, and each stage takes the time it is given.

The wires are those of `stage_workers`, a star: every frame goes from its stage to the coordinator, which prunes it, and
from there to the next stage. A tick lasts until the last one is back. Beside the stages the source drafts; a level that
takes longer than the tick is there in a later one (SpecPipe, algorithm 1).

Whatever is measured here carries the clock's label.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ..core.errors import ConfigError
from ..core.inference import inference
from ..drafters.local_sessions import LocalGrowing, LocalSessions
from ..drafters.sessions import Ask, DraftSessions, Growing, Grown
from ..network.stages import Frame, Stage, StagesInTurn
from .channels import Link
from .clock import Clock, Late, Mailbox, Pace, VirtualClock
from .timeline import Timeline

ROW_BYTES = 16  # of a row in a frame, beside its states: node, position, token, slot
FREE = Link()


class _Lane:
    """One direction of the coordinator's link: frames wait for each other."""

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
        link: of the coordinator's host, which all frames of stages on other hosts share, each way.
        far: stages on other hosts.
        coordinator_s: seconds of the coordinator's own work in a tick, by the rows in flight; nothing runs beside it.
        timeline: notes who does what.

    Raises:
        ConfigError: times of more or fewer stages, or a far one that is none, or the coordinator's own.
    """

    def __init__(
        self,
        clock: VirtualClock,
        stages: Sequence[Stage],
        seconds: Sequence[Callable[[int], float]],
        link: Link = FREE,
        far: Collection[int] = (),
        coordinator_s: Callable[[int], float] = lambda rows: 0.0,
        timeline: Timeline | None = None,
    ) -> None:
        count = len(stages)
        if len(seconds) != count:
            raise ConfigError(f"times of {len(seconds)} stages", f"there are {count} stages", "give each its time")
        if not {*far} <= {*range(count - 1)}:
            wrong = f"of {count} stages the last one is the coordinator's own"
            raise ConfigError(f"far stages {sorted(far)}", wrong, f"name some of 0 to {count - 2}")
        super().__init__(stages)
        self.timeline = timeline or Timeline(clock)
        self._clock, self._far, self._coordinator_s = clock, far, coordinator_s
        self._there, self._back = _Lane(clock, link), _Lane(clock, link)
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
            frame, due = self._inboxes[index].get()
            if frame.rows:
                self._travel(who, frame, due)
                with self.timeline.span(who, "compute", rows=frame.rows), pace.work(frame.rows):
                    frame = stage.run(frame)
                self._travel(who, frame, self._back.due(self._size(frame)) if index in self._far else 0.0)
            else:  # moves alone: their bytes and their copies are next to nothing
                frame = stage.run(frame)
            self._outboxes[index].put(frame)

    def _travel(self, who: str, frame: Frame, due: float) -> None:
        """Wait until a frame has come."""
        if due > self._clock.now():
            with self.timeline.span(who, "transmit", rows=frame.rows):
                self._clock.sleep_until(due)

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """What each stage makes of what it holds, all at the same time."""
        frames = [None if frame is None else self.stages[-1].pruned(frame) for frame in held]
        rows = sum(frame.rows for frame in frames if frame is not None)
        end = self._clock.now() + self._coordinator_s(rows)
        if rows and end > self._clock.now():
            with self.timeline.span("coordinator", "prune", rows=rows):
                self._clock.sleep_until(end)
        for index, frame in enumerate(frames):
            if frame is not None:
                self._inboxes[index].put((frame, self._sent(index, frame)))
        pairs = zip(self._outboxes, frames, strict=True)
        return [None if frame is None else outbox.get() for outbox, frame in pairs]

    def _sent(self, index: int, frame: Frame) -> float:
        """When a frame comes to its stage."""
        if index not in self._far or not frame.rows:
            return 0.0
        return self._there.due(self._size(frame))

    def _size(self, frame: Frame) -> int:
        """Bytes on the link; the first stage's frame is embedded before it is sent."""
        decoder = self.stages[0].decoder
        return frame.rows * (decoder.config.d_model * decoder.dtype.itemsize + ROW_BYTES)


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
            asks: Sequence[Ask] = self._inbox.get()
            rows = sum(len(ask.expand) for ask in asks)
            with self._timeline.span("source", "draft", rows=rows), self._pace.work(rows):
                try:
                    answer: list[Grown] | Exception = self.inner.grow(asks)
                except Exception as error:
                    answer = error
            self._outbox.put(answer)

    def begin(self, asks: Sequence[Ask], levels: Sequence[Sequence[int]]) -> LocalGrowing:
        """See `GoingSessions`."""
        self._inbox.put(asks)
        self._waiting = LocalGrowing.of(asks, levels)
        return self._waiting

    def look(self) -> None:
        """See `GoingSessions`; what the sessions raised is raised."""
        self._take(0)

    def wait(self, growing: Growing) -> None:
        """See `GoingSessions`; what the sessions raised is raised."""
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
