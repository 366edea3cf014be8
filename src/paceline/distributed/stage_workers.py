"""Stages in processes, as their coordinator sees them: a stage_line whose last stage is its own.

    coordinator: tokens embedded -> stage 0 -> coordinator -> stage 1 -> .. -> coordinator: last stage, head, verdicts

All frames of a tick are computed at once, each in its stage's process, the last one here. A frame goes from a stage to
the next one straight (`straight`), and verdicts to all stages at once; or through the coordinator, which knows every
verdict first and prunes on the way: a hop more, and no verdict that comes too late.

A stage that is lost is named and started again. Its K/V is gone, and so `PassesLost` asks the engine to compute that of
all requests anew, from their tokens. Where the same stage is lost again before a frame has come through, they end
(`WorkerFailed`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..core.errors import PassesLost
from ..network.stages import Frame, Stage
from .channels import ChannelClosed, Line
from .clock import Late
from .frames import Codec, FrameError
from .handshake import Fault
from .hanging import HANG_S, HangLimit
from .messages import KINDS, AskStage, Clear, Computed, Dropped, StageState, Verdicts, message_of
from .relay import CoordinatorEnds
from .straight import FrameWays, Sent
from .ways import Hop
from .worker import Patience, Worker, WorkerFailed, lost

LOOK_S = 0.05  # between two looks at stages that are waited for
SEND_S = 3.0  # for which a stage may take nothing of what it is sent
RANKS_S = 2.0  # a stage of ranks is waited for so much longer: it is to name one that hangs first, and end it
PATIENCE = Patience(start_s=600.0, stuck_s=3600.0)  # a stage's work is timed here, by its rows


class StageWorkers:
    """A `rounds.pipeline.stage_line.StageLine` of workers, each with a stage, and of a last stage in this process.

    Args:
        workers: of the stages but the last one, in order, started. They end with this object's `stop`.
        last: the last stage; its decoder embeds tokens, too.
        layers: of all stages.
        hop: makes a way between two stages, on which frames go straight; None: they go through here. From two stages,
            of which one is here, there is no other way.
    """

    def __init__(self, workers: Sequence[Worker], last: Stage, layers: int, hop: Hop | None = None) -> None:
        self.workers, self.last, self.layers = workers, last, layers
        self._hop = hop if len(workers) > 1 else None
        self._ring: FrameWays | None = None
        self._opening: CoordinatorEnds | None = None
        self._broke = 0  # how often the ways broke, and no stage was at fault, since a frame came through
        self.count = len(workers) + 1
        self.faults: list[str] = []  # each names a stage and its process
        self._held: list[Frame | None] = [None] * self.count
        self._known = [len(worker.faults) for worker in workers]
        self._owed = [0] * len(workers)  # rows of the frame whose answer is still to come; 0: none is
        self._limits = [HangLimit() for _ in workers]
        self._codec = Codec(*KINDS)
        self._sending: int | None = None  # to which stage
        self._lost: set[int] = set()  # stages, since a frame has come through
        self._clear = True  # whether the stages are to be told the epoch
        self._ranks_s = 0.0 if last.decoder.ranks is None else RANKS_S
        self._away: set[int] = set()  # stages that come back by themselves

    def tick(self, entering: Frame | None) -> Frame | None:
        """See `StageLine`.

        Raises:
            PassesLost: a stage was lost; what is in flight does not count any more, nor what the stages' K/V holds.
            WorkerFailed: a second one in a row.
            ConfigError: one that came back is not what it was.
        """
        self._ready()
        out = self._through_here(entering) if self._ring is None else self._straight(self._ring, entering)
        if out is not None and out.rows:
            self._lost.clear()
            self._broke = 0
        return out

    def rest(self) -> bool:
        """See `StageLine`."""
        left = 0.0 if self._ring is None else self._ring.in_flight.rest_s()
        time.sleep(left)
        return left > 0

    # -- through here

    def _through_here(self, entering: Frame | None) -> Frame | None:
        self._held[0] = entering
        held = [None if frame is None else self.last.pruned(frame) for frame in self._held]
        for index, frame in enumerate(held[:-1]):
            if frame is not None and (frame.rows or frame.moves):
                self._send(index, frame if index else self._embedded(frame))
        own = held[-1]
        out = None if own is None else self.last.run(own)
        began = time.monotonic()  # to wait: what the last stage takes is not charged to the others
        done = [None if f is None else self._computed(i, f, began) for i, f in enumerate(held[:-1])]
        self._held = [None, *done]
        return out

    def _embedded(self, frame: Frame) -> Frame:
        if not frame.rows:
            return frame
        decoder = self.last.decoder
        rows = [[*part.tokens] for part in frame.parts], [[*part.positions] for part in frame.parts]
        tokens, positions = (torch.tensor(sum(lists, []), device=decoder.device) for lists in rows)
        return replace(frame, hidden=decoder.embed_tokens(tokens, positions))

    def _computed(self, index: int, frame: Frame, began: float) -> Frame:
        """A frame as the stage gives it back."""
        if not frame.rows:
            return frame
        said = self._receive(index, began, frame.rows)
        self._limits[index].note(frame.rows, max(said.seconds, time.monotonic() - began))  # a slow way counts, too
        return replace(frame, hidden=said.hidden.to(self.last.decoder.device))

    # -- straight

    def _straight(self, ring: FrameWays, entering: Frame | None) -> Frame | None:
        carries = entering is not None and bool(entering.rows or entering.moves or entering.ended)
        due = ring.in_flight.tick(entering if carries else None)
        if entering is not None and carries:
            try:
                ring.send(self._embedded(entering), self._limits[0].seconds(ring.in_flight.rows))
            except ChannelClosed:
                self._broken("the first stage takes no frame")
        if due is None:
            return None
        frame = self._arrived(ring, due)
        out = self.last.run(frame)
        if frame.ended:
            self._say(Verdicts(ended=[*frame.ended]))
        return out

    def _arrived(self, ring: FrameWays, due: Sent) -> Frame:
        """A frame, once it comes out of the stages before the last one."""
        began, limit = time.monotonic(), self._limits[0]
        while True:
            try:
                frame, most_s = ring.receive(due, LOOK_S, self.last.decoder.device)
                break
            except Late:
                pass
            except (ChannelClosed, FrameError) as error:
                self._broken(f"the way of frames broke: {error}")
            self._look()
            waited = time.monotonic() - began
            if waited > limit.seconds(due.rows) + self._ranks_s:
                self._broken(f"no stage gives {due.rows} rows for {waited:.1f} s", hangs=True)
        ring.in_flight.came(due)
        limit.note(due.rows, max(time.monotonic() - began, most_s * len(self.workers)))
        return frame

    def _broken(self, why: str, hangs: bool = False) -> NoReturn:
        """Find out which stage it is: raises as `tick`."""
        said: dict[int, StageState] = {}
        self._say(AskStage(self.last.epoch))
        began = time.monotonic()
        for index, worker in enumerate(self.workers):
            while worker.line is not None and index not in said:
                message = self._message(index)
                if isinstance(message, StageState) and message.epoch == self.last.epoch:
                    said[index] = message
                elif isinstance(message, Fault):
                    worker.failed(f"failed: {message.why}")
                elif time.monotonic() - began > HANG_S:
                    worker.failed("does not answer any more")
                worker.poll()
        busiest = max(said, key=lambda index: said[index].busy_s, default=None)
        if hangs and busiest is not None and said[busiest].rows:
            one = said[busiest]
            self.workers[busiest].failed(f"hangs: at {one.rows} rows for {one.busy_s:.1f} s")
        self._look()
        for index, one in said.items():
            if one.dropped:
                self._dropped(index, one.dropped)
        self._broke += 1
        if self._broke > 1:
            self._broke = 0
            raise WorkerFailed(f"{why}, twice in a row, and each stage says that it is well")
        raise PassesLost(why)

    def _dropped(self, index: int, why: str) -> NoReturn:
        """A stage lost its K/V, and comes back by itself."""
        self._away.add(index)
        self.faults.append(f"worker {self.workers[index].spec.name}: {why}")
        raise PassesLost(self.faults[-1])

    def _say(self, message: Any) -> None:
        """Tell all stages the same; of one that is gone is heard with the next frame."""
        parts = self._codec.encode(message)
        for index, worker in enumerate(self.workers):
            if worker.line is None:
                continue
            self._sending = index
            try:
                worker.line.channel.send(parts, SEND_S)
            except ChannelClosed:
                worker.lost()
            self._sending = None

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """See `StageLine`."""
        self.last.tell(request, version, alive)
        if self._ring is not None:
            self._say(Verdicts(told=[(request, version, sorted(alive))]))

    def close(self, request: int) -> None:
        """See `StageLine`."""
        self.last.close(request)
        if self._ring is not None and not self._clear:
            self._say(Verdicts(closed=[request]))

    def clear(self) -> int:
        """See `StageLine`; the stages hear of it before the next tick."""
        self._held = [None] * self.count
        self.last.forget(self.last.epoch + 1)
        self._clear = True
        self._leave()
        return self.last.epoch

    def _leave(self) -> None:
        """Leave the ways of this epoch."""
        for way in (self._ring, self._opening):
            if way is not None:
                way.close()
        self._ring = self._opening = None

    def stop(self) -> None:
        """End the workers."""
        self._leave()
        for worker in self.workers:
            worker.stop()

    # -- the lines

    def _send(self, index: int, frame: Frame) -> None:
        line, message, self._sending = self._line(index), message_of(frame), index
        try:
            line.send(message, SEND_S)
        except ChannelClosed:
            self._sending = None
            self.workers[index].lost()
            self._line(index)
        self._sending = None
        self._owed[index] += frame.rows

    def _receive(self, index: int, began: float, rows: int) -> Computed:
        """The stage's answer to its last frame.

        Args:
            index: which stage.
            began: when its answer began to be waited for.
            rows: of the frame.
        """
        limit = self._limits[index].seconds(rows) + self._ranks_s
        while True:
            message = self._message(index)
            if isinstance(message, Computed) and self._owed[index] == rows == len(message.hidden):
                self._owed[index] = 0
                return message
            if isinstance(message, Dropped):
                self._owed[index] = 0
                self._dropped(index, message.why)
            waited = time.monotonic() - began
            if message is not None:
                why = f"failed: {message.why}" if isinstance(message, Fault) else "says what is no answer"
                self.workers[index].failed(why)
            elif waited > limit:
                self.workers[index].failed(f"hangs: at {rows} rows for {waited:.1f} s")
            self._look()

    def _message(self, index: int) -> Any:
        """What a stage says; None: nothing yet."""
        try:
            return self._line(index).receive(LOOK_S)
        except Late:
            return None
        except ChannelClosed:
            self.workers[index].lost()
        except FrameError as error:
            self.workers[index].failed(f"says what is no message: {error}")
        return None

    def _line(self, index: int) -> Line:
        """To a stage; raises as `tick` where it is not there."""
        line = self.workers[index].line
        if line is None:
            self._look()
            raise PassesLost(f"stage {index} is not there")
        return line

    # -- faults

    def _look(self) -> None:
        """Look after all stages; raises as `tick`, if one was lost since the last look."""
        for worker in self.workers:
            worker.poll()
        fallen = [i for i, worker in enumerate(self.workers) if len(worker.faults) > self._known[i]]
        for index in fallen:
            self._known[index], self._owed[index] = len(self.workers[index].faults), 0
        if fallen:
            raise lost(self.workers, fallen, self.faults, self._lost)

    def _ready(self) -> None:
        """Wait until all stages are there, and have them begin the epoch where another one began."""
        self._look()
        if not self._clear:
            return
        if self._sending is not None:  # that was interrupted
            self.workers[self._sending].failed("was sent half a frame")
            self._sending = None
            self._look()
        while any(worker.line is None for worker in self.workers):
            time.sleep(LOOK_S / 10)
            self._look()
        ways = self._ways()
        for index in range(len(self.workers)):
            self._drain(index)
            self._line(index).send(Clear(self.last.epoch, *ways[index]), SEND_S)
        self._until_back()
        if self._opening is not None:
            self._opening.begin()
            try:
                self._ring = FrameWays(*self._opening.wait(self._look, LOOK_S / 10), self.count)
            except ChannelClosed as error:
                self._broken(f"the way of frames does not come about: {error}")
        self._clear = False

    def _until_back(self) -> None:
        """Wait until the stages that lost K/V have all that they need; no frame's time is theirs."""
        began = time.monotonic()
        for index in sorted(self._away):
            self._line(index).send(AskStage(self.last.epoch), SEND_S)
            said: Any = None
            while not isinstance(said, StageState) or said.epoch != self.last.epoch:
                said = self._message(index)
                if isinstance(said, Fault):
                    self.workers[index].failed(f"failed: {said.why}")
                elif time.monotonic() - began > PATIENCE.start_s:
                    self.workers[index].failed("does not come back")
                self._look()
        self._away.clear()

    def _ways(self) -> list[tuple[str, str]]:
        """On which each stage takes frames, and on which it gives them; those of the coordinator are begun."""
        if self._hop is None:
            return [("", "")] * len(self.workers)
        self._leave()
        hosts = ["", *(worker.host for worker in self.workers), ""]
        hops = [self._hop(a, b) for a, b in zip(hosts[:-1], hosts[1:], strict=True)]
        self._opening = CoordinatorEnds(hops[0][0], hops[-1][1])
        return [(into, out) for (_, into), (out, _) in zip(hops[:-1], hops[1:], strict=True)]

    def _drain(self, index: int) -> None:
        """Take what a stage still answers to a frame of another epoch."""
        began, limit = time.monotonic(), self._limits[index].seconds(self._owed[index])
        while self._owed[index]:
            if self._message(index) is not None:
                self._owed[index] = 0
            elif time.monotonic() - began > limit:
                self.workers[index].failed("does not answer any more")
            self._look()
