"""Stages in processes, as their coordinator sees them: a stage_line whose last stage is its own.

    coordinator: tokens embedded -> stage 0 -> coordinator -> stage 1 -> .. -> coordinator: last stage, head, verdicts

All frames of a tick are computed at once, each in its stage's process, the last one here. A frame goes from a stage to
the next one straight (`straight`), and verdicts to all stages at once; or through the coordinator, which knows every
verdict first and prunes on the way: a hop more, and no verdict that comes too late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..core.errors import PassesLost
from ..model.stages import Frame, Stage
from .channels import ChannelClosed
from .clock import Late
from .frames import FrameError
from .hanging import HANG_S, HangLimit
from .messages import KINDS, AskStage, Clear, Computed, StageState, Verdicts, message_of
from .straight import FrameWays, Sent
from .ways import Hop
from .worker import Worker, WorkerFailed
from .workers import LOOK_S, PATIENCE, Workers

RANKS_S = 2.0  # a stage of ranks is waited for so much longer: it is to name one that hangs first, and end it


class StageWorkers(Workers):
    """A `model.stage_line.StageLine` of workers, each with a stage, and of a last stage in this process.

    Args:
        workers: of the stages but the last one, in order.
        last: the last stage; its decoder embeds tokens, too.
        layers: of all stages.
        hop: makes a way between two stages, on which frames go straight; None: they go through here. From two stages,
            of which one is here, there is no other way.
    """

    def __init__(self, workers: Sequence[Worker], last: Stage, layers: int, hop: Hop | None = None) -> None:
        super().__init__(workers, KINDS)
        self.last, self.layers = last, layers
        self._hop = hop if len(workers) > 1 else None
        self._ring: FrameWays | None = None
        self._broke = 0  # how often the ways broke, and no stage was at fault, since a frame came through
        self.count = len(workers) + 1
        self._held: list[Frame | None] = [None] * self.count
        self._owed = [0] * len(workers)  # rows of the frame whose answer is still to come; 0: none is
        self._limits = [HangLimit() for _ in workers]
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
            self._before.clear()
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
                self.send_to([index], message_of(frame if index else self._embedded(frame)))
                self._owed[index] += frame.rows
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
        tokens = torch.tensor([token for part in frame.parts for token in part.tokens], device=decoder.device)
        return replace(frame, hidden=decoder.embed_tokens(tokens))

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
            except Late:  # the stages are looked at, and the frame is waited for again
                pass
            except (ChannelClosed, FrameError) as error:
                self._broken(f"the way of frames broke: {error}")
            self.look()
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
                message = self.receive(index)
                if self._is_state(message):
                    said[index] = message
                elif time.monotonic() - began > HANG_S and worker.line is not None:
                    worker.failed("does not answer any more")
                worker.poll()
        busiest = max(said, key=lambda index: said[index].busy_s, default=None)
        if hangs and busiest is not None and said[busiest].rows:
            one = said[busiest]
            self.workers[busiest].failed(f"hangs: at {one.rows} rows for {one.busy_s:.1f} s")
        self.look()
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
        parts = self.codec.encode(message)
        for index in range(len(self.workers)):
            self.give(index, parts)

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """See `StageLine`."""
        self.last.tell(request, version, alive)
        if self._ring is not None and not self._clear:
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
        if self._ring is not None:
            self._ring.close()
        self._ring = None

    def stop(self) -> None:
        """End the workers."""
        self._leave()
        super().stop()

    # -- the lines

    def _computed(self, index: int, frame: Frame, began: float) -> Frame:
        """A frame as the stage gives it back.

        Args:
            index: which stage.
            frame: that it was sent.
            began: when its answer began to be waited for.
        """
        if not (rows := frame.rows):
            return frame

        def fits(said: Any) -> bool:
            if isinstance(said, Computed):
                good = self._owed[index] == rows == len(said.hidden)
            else:
                good = isinstance(said, StageState) and bool(said.dropped)
            if good:
                self._owed[index] = 0
            else:
                self.workers[index].failed("says what is no answer")
            return good

        limit = self._limits[index].seconds(rows) + self._ranks_s
        left = limit - (time.monotonic() - began)
        said = self.answer(index, fits, left, f"hangs: at {rows} rows for {limit:.1f} s")
        if isinstance(said, StageState):
            self._dropped(index, said.dropped)
        self._limits[index].note(rows, max(said.seconds, time.monotonic() - began))  # a slow way counts, too
        return replace(frame, hidden=said.hidden.to(self.last.decoder.device))

    def _is_state(self, said: Any) -> bool:
        return isinstance(said, StageState) and said.epoch == self.last.epoch

    # -- faults

    def fell(self, fallen: Sequence[int]) -> None:
        """See `Workers`."""
        for index in fallen:
            self._owed[index] = 0

    def _ready(self) -> None:
        """Wait until all stages are there, and have them begin the epoch where another one began."""
        self.look()
        if not self._clear:
            return
        self.back()
        ways = self._ways()
        for index in range(len(self.workers)):
            self._drain(index)
            self.send_to([index], Clear(self.last.epoch, *ways[index]))
        self._until_back()
        if self._ring is not None:
            try:
                self._ring.open(self.look, LOOK_S / 10)
            except ChannelClosed as error:
                self._broken(f"the way of frames does not come about: {error}")
        self._clear = False

    def _until_back(self) -> None:
        """Wait until the stages that lost K/V have all that they need; no frame's time is theirs."""
        for index in sorted(self._away):
            self.send_to([index], AskStage(self.last.epoch))
            self.answer(index, self._is_state, PATIENCE.start_s, "does not come back")
        self._away.clear()

    def _ways(self) -> list[tuple[str, str]]:
        """On which each stage takes frames, and on which it gives them; those of the coordinator are begun."""
        if self._hop is None:
            return [("", "")] * len(self.workers)
        self._leave()
        hosts = ["", *(worker.host for worker in self.workers), ""]
        hops = [self._hop(a, b) for a, b in zip(hosts[:-1], hosts[1:], strict=True)]
        self._ring = FrameWays(hops[0][0], hops[-1][1], self.count)
        return [(into, out) for (_, into), (out, _) in zip(hops[:-1], hops[1:], strict=True)]

    def _drain(self, index: int) -> None:
        """Take what a stage still answers to a frame of another epoch."""
        if self._owed[index]:
            limit = self._limits[index].seconds(self._owed[index])
            self.answer(index, lambda _: True, limit, "does not answer any more")
            self._owed[index] = 0
