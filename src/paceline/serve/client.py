"""`EngineClient`: an engine in a process of its own, on an event loop.

The engine is watched, and started again where it died or hangs. Seed and position decide every token, so its successor
gets the tokens that an answer has, and continues after them: a stream continues with the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..core.errors import ConfigError, PacelineError
from ..core.outputs import Chunk
from ..runtime.handshake import Fault
from ..runtime.placement import Placement
from ..runtime.remote import Remote, Timeouts, WorkerSpec
from ..runtime.requests import (
    Abort,
    Accepted,
    Describe,
    Description,
    Rejected,
    StatsReply,
    StatsRequest,
    Submit,
    Updates,
)
from ..runtime.wire import Late, Line, MessageError

log = logging.getLogger(__name__)
WATCH_S = 0.05  # between two looks at the engine
LEAST_S = 1e-3  # of a deadline that has passed meanwhile
STUCK_S = 60.0  # at one step, after which an engine is taken to hang
# An engine that was well for `healthy_s` is started again at once.
TIMEOUTS = Timeouts(start_s=600.0, stuck_s=STUCK_S, healthy_s=1.0)
MOST_LIVES = 3  # engines in a row that may fail while nothing comes of a request: it may be what they fail at


class EngineDown(PacelineError):
    """There is no engine at the moment, or it cannot come back."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in flight; made on the event loop."""

    submission: Submit
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    take: Callable[[list[Chunk]], object] | None = None  # is given what comes; None: nobody follows yet
    early: list[Chunk] = field(default_factory=list)  # what came before
    lives: int = 1  # engines that it was sent to since something came of it
    tokens: list[list[int]] = field(default_factory=list)  # of each sample, so far
    finished: set[int] = field(default_factory=set)  # samples
    since: float = field(default_factory=time.monotonic)

    def resumed(self) -> Submit:
        """Return the request that continues it at another engine."""
        deadline_s = self.submission.deadline_s
        if deadline_s is not None:
            deadline_s = max(LEAST_S, deadline_s - (time.monotonic() - self.since))
        tokens = self.tokens if any(self.tokens) else []
        return replace(self.submission, resume_tokens=tokens, deadline_s=deadline_s)

    def new(self, chunk: Chunk) -> Chunk | None:
        """Return the part of a chunk that an earlier engine has not sent; None: nothing."""
        if chunk.index in self.finished:
            return None if chunk.output is None else replace(chunk, finish_reason=None)
        self.lives = 1
        self.tokens[chunk.index] += chunk.token_ids
        if chunk.finish_reason is not None:
            self.finished.add(chunk.index)
        return chunk

    def deliver(self, chunks: list[Chunk]) -> None:
        """Give on what has come at once."""
        if self.take is None:
            self.early += chunks
        elif chunks and not self.ended.done():
            try:
                self.take(chunks)
            except Exception as error:
                self.fail(error)
            else:
                if chunks[-1].output is not None:
                    self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        future = self.ended if self.accepted.done() else self.accepted
        if not future.done():
            future.set_exception(error)
            future.exception()  # whether anybody waits for it or not


class EngineClient:
    """An engine as requests see it; its process is not started yet.

    Args:
        options: fields of `LLMOptions`, all of them.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        spec = WorkerSpec(
            name="engine",
            service="paceline.runtime.engine_worker:service",
            options={"options": {name: value for name, value in options.items() if name != "device"}},
            placement=Placement(device=options["device"]),
        )
        self._worker = Remote(spec, TIMEOUTS)
        self.launched_at = self._attached_at = self._detached_at = 0.0
        self._engine: Line | None = None  # while there is one
        self._descriptor = -1  # readable when messages of the engine may have arrived
        self._open: dict[str, OpenRequest] = {}
        self._looks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self.failed: ConfigError | None = None  # why no engine can be had any more
        self.on_failure: Callable[[], None] = lambda: None  # called when `failed` is set
        self.restarts = 0
        self.described = asyncio.Event()
        self.description: Description | None = None

    @property
    def ready(self) -> bool:
        """Return whether requests are accepted."""
        return self._engine is not None and self.description is not None

    @property
    def num_open(self) -> int:
        """Return the number of requests in flight."""
        return len(self._open)

    def launch(self) -> None:
        """Start the engine's process, before there is an event loop.

        Raises:
            ConfigError, CapabilityError: no process, or no channel to it, can be had.
        """
        self.launched_at = time.monotonic()
        self._worker.poll()

    def start(self) -> None:
        """Begin to start the engine, and to watch it; called on the event loop."""
        self._watch = self._watch or asyncio.get_running_loop().create_task(self._watch_it())

    async def close(self) -> None:
        """End the engine and every request in flight."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        self._unwatch()
        self._worker.stop()
        self.end_all("the server is shutting down")

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self._open:
            await asyncio.sleep(0.02)

    def end_all(self, why: str) -> None:
        """End every request in flight with an error."""
        for request_id in self._open:
            self._send(Abort(request_id))
        self._fail_looks(why)
        ended, self._open = self._open, {}
        for one in ended.values():
            one.fail(EngineDown(why))

    def _fail_looks(self, why: str) -> None:
        for waiting in self._looks.values():
            if not waiting.done():
                waiting.set_exception(EngineDown(why))
        self._looks.clear()

    def _send(self, message: Any) -> None:
        if self._engine is not None:
            try:
                self._engine.send(message, 0)
            except Late:
                self._worker.failed("takes no message")
                self._detach()
            else:
                asyncio.get_running_loop().call_soon(self._drain)  # sending may have taken note of what arrived

    # -- requests

    async def submit(self, submission: Submit) -> OpenRequest:
        """Queue a request; `follow` gives its answer. A seed is chosen where none is given.

        Raises:
            ConfigError: the engine refuses it.
            EngineDown: there is no engine at the moment.
        """
        if not self.ready:
            raise self._down()
        if submission.params.seed is None:
            submission = replace(submission, params=replace(submission.params, seed=secrets.randbits(63)))
        one = OpenRequest(submission, tokens=[[] for _ in range(submission.params.n)])
        self._open[submission.id] = one
        try:
            self._send(submission)
            await one.accepted
        except BaseException:
            self.abort(submission.id)
            raise
        return one

    async def follow(self, one: OpenRequest, take: Callable[[list[Chunk]], object]) -> None:
        """Deliver every update of a request to ``take`` until it finishes; leaving this does not end the request.

        Args:
            take: is given what came at once; it is called where the engine's message is read, without a task between,
                and ends this with what it raises.

        Raises:
            EngineDown: no engine can answer it.
        """
        one.take, early, one.early = take, one.early, []
        one.deliver(early)
        await one.ended

    def abort(self, request_id: str) -> None:
        """End a request, if it is in flight."""
        if (one := self._open.pop(request_id, None)) is not None:
            one.ended.cancel()
            self._send(Abort(request_id))

    async def look(self) -> dict[str, Any]:
        """Return the engine's counters.

        Raises:
            EngineDown: there is no engine at the moment.
        """
        if self._engine is None:
            raise self._down()
        request = StatsRequest(secrets.token_hex(8))
        waiting = self._looks[request.id] = asyncio.get_running_loop().create_future()
        self._send(request)
        return await waiting

    def _down(self) -> EngineDown:
        if self.failed is not None:
            return EngineDown(f"the engine cannot be started again: {self.failed}")
        return EngineDown("the engine is being loaded" if self.description is None else "the engine is started again")

    def _take(self, message: Any) -> None:
        """Read a message of the engine's."""
        if isinstance(message, Updates):
            for request_id, chunks in groupby(message.chunks, attrgetter("request_id")):
                if (one := self._open.get(request_id)) is not None:
                    new = [part for chunk in chunks if (part := one.new(chunk)) is not None]
                    if new and new[-1].output is not None:
                        del self._open[request_id]
                    one.deliver(new)
        elif isinstance(message, Accepted):
            if (one := self._open.get(message.id)) is not None and not one.accepted.done():
                one.accepted.set_result(None)
        elif isinstance(message, Rejected):
            if (one := self._open.pop(message.id, None)) is not None:
                one.fail(ConfigError(message.subject, message.wrong, message.remedy))
        elif isinstance(message, StatsReply):
            if (waiting := self._looks.pop(message.id, None)) is not None and not waiting.done():
                waiting.set_result(message.counters)
        elif isinstance(message, Description):
            self.description = message
            self.described.set()
        elif isinstance(message, Fault):
            log.error("the engine failed: %s", message.why)

    # -- its process

    async def _watch_it(self) -> None:
        while True:
            try:
                self._worker.poll()
            except ConfigError as error:
                self._detach()
                self.failed = error
                self.described.set()
                self.end_all(str(self._down()))
                self.on_failure()
                return
            if self._engine is not None and self._worker.line is not self._engine:
                self._detach()
            if self._engine is None and self._worker.line is not None:
                self._attach(self._worker.line)
            await asyncio.sleep(WATCH_S)

    def _attach(self, line: Line) -> None:
        """Send to an engine that is ready what is open."""
        self._engine, self._attached_at = line, time.monotonic()
        self._descriptor = os.dup(line.socket.fileno())  # the worker's end closes the line
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._drain)
        loop.call_soon(self._drain)  # what arrived before
        if self.restarts:
            log.warning("the engine is back after %.1f s", self._attached_at - self._detached_at)
        if self.description is None:
            self._send(Describe())
        for one in [*self._open.values()]:
            one.lives += 1
            if one.lives > MOST_LIVES:
                del self._open[one.submission.id]
                one.fail(EngineDown(f"{MOST_LIVES} engines have failed while this request was in flight"))
            else:
                self._send(one.resumed())

    def _drain(self) -> None:
        """Read all messages of the engine's that have arrived."""
        try:
            while self._engine is not None and self._engine is self._worker.line:
                self._take(self._engine.receive(0))
        except Late:
            return
        except MessageError as error:
            self._worker.failed(f"sends what is not a message: {error}")
            self._detach()

    def _detach(self) -> None:
        if self._engine is not None:
            self.restarts, self._detached_at = self.restarts + 1, time.monotonic()
            why = self._worker.faults[-1:] or ["its line is closed"]
            log.warning("the engine is gone (%s); %d requests wait for the next one", why[0], len(self._open))
        self._unwatch()
        self._fail_looks("the engine is started again")

    def _unwatch(self) -> None:
        self._engine = None
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
