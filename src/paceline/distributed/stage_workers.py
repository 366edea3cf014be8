"""Stages in processes, as their coordinator sees them: a stage_line whose last stage is its own.

    coordinator: tokens embedded -> stage 0 -> coordinator -> stage 1 -> .. -> coordinator: last stage, head, verdicts

All frames of a tick are computed at once, each in its stage's process, the last one here. Each goes from a stage to the
next one through the coordinator, which knows every verdict first and prunes on the way: a hop more than from stage to
stage, and no verdict that comes too late.

A stage that is lost is named and started again. Its K/V is gone, and so `PassesLost` asks the engine to compute that of
all requests anew, from their tokens. Where the same stage is lost again before a frame has come through, they end
(`WorkerFailed`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.errors import PassesLost
from ..network.stages import Frame, Stage
from .channels import ChannelClosed, Line
from .clock import Late
from .frames import FrameError
from .handshake import Fault
from .hanging import HangLimit
from .stage_service import Clear, Computed, message_of
from .worker import Patience, Worker, lost

LOOK_S = 0.05  # between two looks at stages that are waited for
SEND_S = 3.0  # for which a stage may take nothing of what it is sent
PATIENCE = Patience(start_s=600.0, stuck_s=3600.0)  # a stage's work is timed here, by its rows


class StageWorkers:
    """A `rounds.pipeline.stage_line.StageLine` of workers, each with a stage, and of a last stage in this process.

    Args:
        workers: of the stages but the last one, in order, started. They end with this object's `stop`.
        last: the last stage; its decoder embeds tokens, too.
        layers: of all stages.
    """

    def __init__(self, workers: Sequence[Worker], last: Stage, layers: int) -> None:
        self.workers, self.last, self.layers = workers, last, layers
        self.count = len(workers) + 1
        self.faults: list[str] = []  # each names a stage and its process
        self._held: list[Frame | None] = [None] * self.count
        self._known = [len(worker.faults) for worker in workers]
        self._owed = [0] * len(workers)  # rows of the frame whose answer is still to come; 0: none is
        self._limits = [HangLimit() for _ in workers]
        self._sending: int | None = None  # to which stage
        self._lost: set[int] = set()  # stages, since a frame has come through
        self._clear = True  # whether the stages are to be told the epoch

    def tick(self, entering: Frame | None) -> Frame | None:
        """See `StageLine`.

        Raises:
            PassesLost: a stage was lost; what is in flight does not count any more, nor what the stages' K/V holds.
            WorkerFailed: a second one in a row.
            ConfigError: one that came back is not what it was.
        """
        self._ready()
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
        if out is not None and out.rows:
            self._lost.clear()
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

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """See `StageLine`."""
        self.last.tell(request, version, alive)

    def close(self, request: int) -> None:
        """See `StageLine`."""
        self.last.close(request)

    def clear(self) -> int:
        """See `StageLine`; the stages hear of it before the next tick."""
        self._held = [None] * self.count
        self.last.forget(self.last.epoch + 1)
        self._clear = True
        return self.last.epoch

    def stop(self) -> None:
        """End the workers."""
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
        limit = self._limits[index].seconds(rows)
        while True:
            message = self._message(index)
            if isinstance(message, Computed) and self._owed[index] == rows == len(message.hidden):
                self._owed[index] = 0
                return message
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
        for index in range(len(self.workers)):
            self._drain(index)
            self._line(index).send(Clear(self.last.epoch), SEND_S)
        self._clear = False

    def _drain(self, index: int) -> None:
        """Take what a stage still answers to a frame of another epoch."""
        began, limit = time.monotonic(), self._limits[index].seconds(self._owed[index])
        while self._owed[index]:
            if self._message(index) is not None:
                self._owed[index] = 0
            elif time.monotonic() - began > limit:
                self.workers[index].failed("does not answer any more")
            self._look()
