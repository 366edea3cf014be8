"""`EngineClient`: an engine in a process of its own, on an event loop.

The engine is watched, and started again where it died or hangs. Seed and position decide every token, so its successor
is given what was already said of an answer and goes on behind it: a stream goes on with the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..core.errors import ConfigError, PacelineError
from ..distributed.channels import Line
from ..distributed.frames import Codec
from ..distributed.handshake import GREETINGS, Fault
from ..distributed.placement import Placement
from ..distributed.requests import (
    KINDS,
    Abort,
    Accepted,
    Describe,
    Description,
    Look,
    Looked,
    News,
    Rejected,
    SampleUpdate,
    Submit,
)
from ..distributed.sockets import SocketChannel
from ..distributed.worker import Patience, Spare, Worker, WorkerSpec, launch_here
from .config import ServeConfig
from .line import LoopLine

log = logging.getLogger(__name__)
WATCH_S = 0.25  # between two looks at an engine that is well
START_WATCH_S = 0.05  # and at one that starts
LEAST_S = 1e-3  # of a deadline that has passed meanwhile
SPARE_S = 2.0  # that an engine is ready before a spare process gets ready beside it
SILENT_S = 2.5  # without one of the beats, of which six come in this time; a pass, however long, does not hold them up
HEALTHY_S = 1.0  # an engine that was well for so long is started again at once
MOST_LIVES = 3  # engines in a row that may fail while nothing comes of a request: it may be what they fail at


class EngineDown(PacelineError):
    """There is no engine at the moment, or it cannot come back."""


class TooMany(PacelineError):
    """As many requests wait as may."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in flight; made on the event loop."""

    asked: Submit
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    take: Callable[[list[SampleUpdate]], object] | None = None  # is given what comes; None: nobody asks for that yet
    early: list[SampleUpdate] = field(default_factory=list)  # what came before
    lives: int = 1  # engines that were asked since something came of it
    said: list[list[int]] = field(default_factory=list)  # of each sample
    finished: set[int] = field(default_factory=set)  # samples
    since: float = field(default_factory=time.monotonic)

    def again(self) -> Submit:
        """What another engine is asked: to go on."""
        asked, deadline_s = self.asked, self.asked.deadline_s
        if deadline_s is not None:
            asked = replace(asked, deadline_s=max(LEAST_S, deadline_s - (time.monotonic() - self.since)))
        said = self.said if any(self.said) else []
        return replace(asked, said=said, taken=self.accepted.done())

    def news(self, piece: SampleUpdate) -> SampleUpdate | None:
        """What of a piece was not told before; None: nothing."""
        if piece.index in self.finished:  # by an engine that was lost
            return None if piece.ended is None else replace(piece, finish_reason=None)
        self.lives = 1
        self.said[piece.index] += piece.token_ids
        if piece.finish_reason is not None:
            self.finished.add(piece.index)
        return piece

    def tell(self, pieces: list[SampleUpdate]) -> None:
        """Give on what has come at once."""
        if self.take is None:
            self.early += pieces
        elif pieces and not self.ended.done():
            try:
                self.take(pieces)
            except Exception as error:
                self.fail(error)
            else:
                if pieces[-1].ended is not None:
                    self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """It ends with an error."""
        future = self.ended if self.accepted.done() else self.accepted
        if not future.done():
            future.set_exception(error)
            future.exception()  # whether anybody waits for it or not


class EngineClient:
    """An engine as requests see it.

    Args:
        spec: of its worker; see `engine_worker`.
        patience: how long is waited for it.
        spare: what a spare process calls ahead to take over sooner (see `Spare`); None: there is no such process.
    """

    def __init__(self, spec: WorkerSpec, patience: Patience, spare: str | None = None) -> None:
        self._spare = None if spare is None else Spare(spec, spare)
        self._worker = Worker(spec, patience, launch_here if self._spare is None else self._spare.launch)
        self.launched_at = self._attached_at = self._detached_at = 0.0
        self._codec = Codec(*GREETINGS, *KINDS)
        self._line: LoopLine | None = None
        self._attached: Line | None = None
        self._open: dict[str, OpenRequest] = {}
        self._looks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self.failed: ConfigError | None = None  # why no engine can be had any more
        self.on_failure: Callable[[], None] | None = None  # called when `failed` is set
        self.restarts = 0
        self.described = asyncio.Event()
        self.description: Description | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._line is not None and self.description is not None

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None: there is none at the moment."""
        return self._worker.pid

    def launch(self) -> None:
        """Start the engine's process, before there is an event loop.

        Raises:
            ConfigError, CapabilityError: no process, or no channel to it, can be had.
        """
        self.launched_at = time.monotonic()
        self._worker.poll()

    def start(self) -> None:
        """Begin to start the engine, and to watch it, unless that has begun; called on the event loop."""
        self._watch = self._watch or asyncio.get_running_loop().create_task(self._watch_it())

    async def close(self) -> None:
        """End the engine and every request in flight."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._line is not None:
            self._line.close()
            self._line = self._attached = None
        self._fail_looks("the server ends")
        self._worker.stop()
        if self._spare is not None:
            self._spare.close()
        self._fail_all(EngineDown("the server ends"))

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self._open:
            await asyncio.sleep(0.02)

    def end_all(self, why: str) -> None:
        """End every request in flight with an error."""
        for request_id in self._open:
            if self._line is not None:
                self._line.send(Abort(request_id))
        self._fail_looks(why)
        self._fail_all(EngineDown(why))

    # -- requests

    async def submit(self, asked: Submit) -> OpenRequest:
        """Queue a request; `follow` gives its answer. A seed is chosen where none is given.

        Raises:
            ConfigError: the engine refuses it.
            TooMany: as many wait as may.
            EngineDown: there is no engine at the moment.
        """
        if self._line is None or not self.ready:
            raise self._down()
        if asked.params.get("seed") is None:
            asked = replace(asked, params={**asked.params, "seed": secrets.randbits(63)})
        samples = int(asked.params.get("n", 1))
        one = self._open[asked.id] = OpenRequest(asked, said=[[] for _ in range(samples)])
        self._line.send(asked)
        try:
            await one.accepted
        except BaseException:
            self.abort(asked.id)
            raise
        return one

    async def follow(self, one: OpenRequest, take: Callable[[list[SampleUpdate]], object]) -> None:
        """Have all that comes of a request taken, as it comes, until it has ended. Leaving this does not end it.

        Args:
            take: is given what came at once; it is called where the engine's message is read, without a task between,
                and ends this with what it raises.

        Raises:
            EngineDown: no engine can answer it.
        """
        one.take, early, one.early = take, one.early, []
        one.tell(early)
        await one.ended

    def abort(self, request_id: str) -> None:
        """End a request, if it is in flight."""
        one = self._open.pop(request_id, None)
        if one is None:
            return
        one.ended.cancel()
        if self._line is not None:
            self._line.send(Abort(request_id))

    async def look(self) -> dict[str, Any]:
        """The engine's counters.

        Raises:
            EngineDown: there is no engine at the moment.
        """
        if self._line is None:
            raise self._down()
        asked = Look(secrets.token_hex(8))
        self._looks[asked.id] = asyncio.get_running_loop().create_future()
        self._line.send(asked)
        return await self._looks[asked.id]

    def _down(self) -> EngineDown:
        if self.failed is not None:
            return EngineDown(f"the engine cannot be started again: {self.failed}")
        return EngineDown("the engine is being loaded" if self.description is None else "the engine is started again")

    # -- what the engine says

    def _heard(self, message: Any) -> None:
        if isinstance(message, News):
            for request_id, pieces in groupby(message.pieces, attrgetter("id")):
                if (one := self._open.get(request_id)) is not None:
                    self._tell(one, pieces)
        elif isinstance(message, Accepted | Rejected):
            self._answered(message)
        elif isinstance(message, Looked):
            if (waiting := self._looks.pop(message.id, None)) is not None and not waiting.done():
                waiting.set_result(message.counters)
        elif isinstance(message, Description):
            self.description = message
            self.described.set()
        elif isinstance(message, Fault):
            log.error("the engine failed: %s", message.why)

    def _tell(self, one: OpenRequest, pieces: Iterable[SampleUpdate]) -> None:
        news = [found for piece in pieces if (found := one.news(piece)) is not None]
        if news and news[-1].ended is not None:
            del self._open[one.asked.id]
        one.tell(news)

    def _answered(self, message: Accepted | Rejected) -> None:
        one = self._open.get(message.id)
        if one is None:
            return
        if isinstance(message, Rejected):
            del self._open[message.id]
            refused = ConfigError(message.asked, message.wrong, message.remedy)
            one.fail(TooMany(message.wrong) if message.full else refused)
        elif not one.accepted.done():
            one.accepted.set_result(None)

    # -- its process

    async def _watch_it(self) -> None:
        while True:
            try:
                ready = self._worker.poll()
            except ConfigError as error:
                self._detach()
                self.failed = error
                self.described.set()
                self._fail_all(self._down())
                if self.on_failure is not None:
                    self.on_failure()
                return
            if self._attached is not None and self._worker.line is not self._attached:
                self._detach()
            if ready and self._attached is None:
                self._attach()
            if ready and self._spare is not None and time.monotonic() - self._attached_at > SPARE_S:
                self._prepare(self._spare)
            await asyncio.sleep(WATCH_S if ready else START_WATCH_S)

    def _prepare(self, spare: Spare) -> None:
        try:
            spare.prepare()
        except (OSError, PacelineError) as error:
            log.warning("no spare process for the engine can be had: %s", error)
            self._spare = None

    def _attach(self) -> None:
        """An engine is ready: ask it what is open."""
        line = self._worker.line
        assert line is not None and isinstance(line.channel, SocketChannel)
        copy = socket.socket(fileno=socket.dup(line.channel.fileno()))
        self._attached_at = time.monotonic()
        if self.restarts:
            log.warning("the engine is back after %.1f s", self._attached_at - self._detached_at)
        self._attached, self._line = line, LoopLine(copy, self._codec, self._heard, self._lost)
        if self.description is None:
            self._line.send(Describe())
        for one in list(self._open.values()):
            one.lives += 1
            if one.lives > MOST_LIVES:
                del self._open[one.asked.id]
                one.fail(EngineDown(f"{MOST_LIVES} engines have failed while this request was in flight"))
            else:
                self._line.send(one.again())

    def _lost(self) -> None:
        """The connection is gone."""
        self._worker.lost()  # it says why
        self._detach()

    def _detach(self) -> None:
        if self._line is not None:
            self._line.close()
            self.restarts, self._detached_at = self.restarts + 1, time.monotonic()
            why = self._worker.faults[-1:] or ["its line is closed"]
            log.warning("the engine is gone (%s); %d requests wait for the next one", why[0], len(self._open))
        self._line = self._attached = None
        self._fail_looks("the engine is started again")

    def _fail_looks(self, why: str) -> None:
        for waiting in self._looks.values():
            if not waiting.done():
                waiting.set_exception(EngineDown(why))
        self._looks.clear()

    def _fail_all(self, error: Exception) -> None:
        ended, self._open = self._open, {}
        for one in ended.values():
            one.fail(error)


def engine_client(config: ServeConfig, options: Mapping[str, Any]) -> EngineClient:
    """A client whose engine is not started yet.

    Args:
        config: the server's.
        options: fields of `LLMOptions`, all of them.
    """
    spec = WorkerSpec(
        name="engine",
        service="paceline.engine_worker:service",
        options={"options": {name: value for name, value in options.items() if name != "device"}},
        kinds=KINDS,
        placement=Placement(device=options["device"]),
        channel="socket",
    )
    patience = Patience(start_s=config.start_s, stuck_s=config.stuck_s, silent_s=SILENT_S, healthy_s=HEALTHY_S)
    return EngineClient(spec, patience, None if config.no_spare else "paceline.engine_worker:prepare")
