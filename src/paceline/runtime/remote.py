"""Client side of a worker process: start, handshake, health checks, restart.

Only `Remote.start` waits: `Remote.poll` looks after the worker once a step, and one that failed is started again while
the engine continues without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import zmq

from ..core.errors import CapabilityError, ConfigError, PacelineError
from .handshake import BEGIN, Begin, Facts, Fault, Hello, Refused, compare
from .placement import Placement
from .wire import Late, Line, MessageError, listening

LOOK_S = 0.05  # between two looks at a worker that is well
LAST_S = 1.0  # for the last message of a process that has ended
HOST_LEFT = "died: its host has left the cluster"
MOST_SILENT_S = 0.5  # of silence that one look counts: a client that was held up does not know whether there was more


class WorkerFailed(PacelineError):
    """A worker that died, hangs or sends what it should not; it is named."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Describe how long a worker is waited for, and how it is started again; in seconds."""

    start_s: float = 120.0  # from its start to its hello
    silent_s: float = 10.0  # without a heartbeat, after which it is taken for dead
    stuck_s: float = 30.0  # at one piece of work, after which it is taken to hang
    rest_s: float = 0.1  # before it is started again, doubled with every failure ..
    most_rest_s: float = 5.0  # .. at most
    healthy_s: float = 10.0  # after which earlier failures do not count


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Describe what a worker is to be."""

    name: str
    service: str  # "module:function" that makes a `Service`; called with ``device`` and the options
    options: Mapping[str, Any] = field(default_factory=dict)  # ready for JSON
    expected: Facts = Facts()
    placement: Placement = field(default_factory=Placement)


class Handle:
    """A worker that was started, with this end of its lines.

    Args:
        spec: what it is.
        beat_s: seconds between two of its heartbeats.
        host: as of `wire.listening`.
    """

    pid: int | None = None  # of its process; None: it runs on another host

    def __init__(self, spec: WorkerSpec, beat_s: float, host: str = "") -> None:
        socket, line = listening(zmq.DEALER, host)
        self.line = Line(socket)
        self._beats, beats = listening(zmq.PULL, host, last_only=True)
        where = spec.placement
        self.begin = Begin(
            spec.name, spec.service, dict(spec.options), [*where.cores], where.device, line, beats, beat_s
        )

    def poll(self) -> int | str | None:
        """Return its exit status, below 0 a signal's number, or how it ended in words; None: it runs."""
        raise NotImplementedError

    def beat(self) -> float | None:
        """Return the seconds at its current piece of work by the heartbeat that arrived; None: none did."""
        with suppress(zmq.ZMQError):
            return float(self._beats.recv(zmq.NOBLOCK))
        return None

    def end(self) -> None:
        """End it at once, and its lines."""
        self.line.close()
        self._beats.close(0)


Launch = Callable[[WorkerSpec, float], Handle]  # of a worker, and the seconds between two of its heartbeats


class LocalHandle(Handle):
    """A worker in a process of this host, with which it ends."""

    def __init__(self, spec: WorkerSpec, beat_s: float) -> None:
        super().__init__(spec, beat_s)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.runtime.begin"],
            stdin=subprocess.PIPE,
            env=os.environ | spec.placement.environment(),
            process_group=0,  # Ctrl-C is for its parent, with which it ends
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # one that has ended already is found by the next look
            self._process.stdin.write(BEGIN.dump_json(self.begin) + b"\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Implement `Handle`."""
        return self._process.poll()

    def end(self) -> None:
        """Implement `Handle`."""
        super().end()
        self._process.kill()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


class Remote:
    """One worker and its successors.

    Args:
        spec: what it is.
        timeouts: how long it is waited for.
        launch: how it is started: here, or on another host (`ray_cluster`).
        clock: the time in seconds.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        timeouts: Timeouts | None = None,
        launch: Launch = LocalHandle,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec, self.timeouts = spec, timeouts or Timeouts()
        self.line: Line | None = None  # to it, while it is ready
        self.hello: Hello | None = None  # of the present one
        self.faults: list[str] = []  # each names the worker and its process
        self.starts = 0
        self.busy_s = 0.0  # at its current piece of work, by its last heartbeat ..
        self.silent_s = 0.0  # .. which came so long ago
        self._launch, self._clock = launch, clock
        self._handle: Handle | None = None
        self._refused: ConfigError | None = None
        self._next = self._clock()  # when to start it
        self._since = self._looked = 0.0
        self._in_a_row = 0
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Return its process; None: there is none at the moment, or it is not known yet."""
        if self._handle is None:
            return None
        return self._handle.pid or (None if self.hello is None else self.hello.pid)

    @property
    def host(self) -> str:
        """Return where it runs; empty: here, or not known yet."""
        return "" if self.hello is None else self.hello.host

    def start(self) -> Line:
        """Start it, and wait until it is ready.

        Raises:
            ConfigError: it cannot serve what it is to serve, or is not what is expected.
            CapabilityError: a process, or a line to it, cannot be opened.
            WorkerFailed: it failed before.
        """
        while not self.poll():
            if self.faults:
                self.stop()
                raise WorkerFailed(self.faults[-1])
            time.sleep(LOOK_S / 10)
        assert self.line is not None
        return self.line

    def poll(self) -> bool:
        """Look after it, without waiting; return whether it is ready.

        Raises:
            ConfigError: it can no longer serve what it is to serve; it is not started again.
        """
        if self._refused is not None:
            raise copy(self._refused)
        now = self._clock()
        if self._stopped or (self.line is not None and now - self._looked < LOOK_S):
            return self.line is not None
        self.silent_s += min(now - self._looked, MOST_SILENT_S)
        self._looked = now
        if self._handle is None:
            if now >= self._next:
                self._begin(now)
            return False
        status = self._handle.poll()
        if self.line is None:
            self._greet(self._handle, 0.0 if status is None else LAST_S)
        if self._handle is not None and (why := self._wrong(self._handle, status, now)):
            self.failed(why)
        return self.line is not None

    def failed(self, why: str) -> None:
        """End it, and start it again after a rest.

        Args:
            why: what it did; `faults` gets it with the worker's name.
        """
        if self._handle is None:
            return
        now = self._clock()
        healthy = self.line is not None and now - self._since - self.silent_s > self.timeouts.healthy_s
        self._in_a_row = 1 if healthy else self._in_a_row + 1
        process = "" if self.pid is None else f" (pid {self.pid}{self.host and f' on {self.host}'})"
        self.faults.append(f"worker {self.spec.name}{process} {why}")
        self._end()
        rest = self.timeouts.rest_s * 2.0 ** min(self._in_a_row - 1, 60)
        self._next = now + min(rest, self.timeouts.most_rest_s)

    def stop(self) -> None:
        """End it for good."""
        self._stopped = True
        self._end()

    def _begin(self, now: float) -> None:
        self._since, self.silent_s = now, 0.0
        try:
            self._handle = self._launch(self.spec, self.timeouts.silent_s / 20)
        except (OSError, PacelineError) as error:
            if not self.starts and isinstance(error, PacelineError):
                raise
            if not self.starts:
                wrong = f"its process or the line to it cannot be opened ({error})"
                remedy = "look at the limits on open files, processes and memory (ulimit -a)"
                raise CapabilityError(f"worker {self.spec.name}", wrong, remedy) from error
            self.faults.append(f"worker {self.spec.name} could not be started: {error}")
            self._next = now + self.timeouts.most_rest_s
        self.starts += 1

    def _end(self) -> None:
        handle, self._handle = self._handle, None
        self.line, self.hello, self.busy_s = None, None, 0.0
        if handle is not None:
            handle.end()
            _status(handle)

    def _wrong(self, handle: Handle, status: int | str | None, now: float) -> str:
        """Return what is wrong with it; empty: nothing."""
        if status == HOST_LEFT and self.line is None and self.faults:
            self._end()  # its place has gone with what was wrong: another one is found
            self._next = now + self.timeouts.rest_s
            return ""
        if status is not None:
            return ended(status)
        if (beat := handle.beat()) is not None:
            self.silent_s, self.busy_s = 0.0, beat
        if self.silent_s > self.timeouts.silent_s and self.line is not None:
            return f"hangs: no heartbeat for {self.silent_s:.1f} s"
        if beat is not None and beat > self.timeouts.stuck_s:
            return f"hangs: at one piece of work for {beat:.1f} s"
        if self.line is None and now - self._since > self.timeouts.start_s:
            return f"is not ready {now - self._since:.1f} s after its start"
        return ""

    def _greet(self, handle: Handle, seconds: float) -> None:
        """Read its hello, if it arrives within so many seconds."""
        try:
            hello = handle.line.receive(seconds)
        except Late:
            return
        except MessageError as error:
            self.failed(f"sent no hello: {error}")
            return
        if isinstance(hello, Fault):
            self.failed(f"failed at its start: {hello.why}")
        elif isinstance(hello, Refused):
            subject = f"{hello.subject}, for {self.spec.name} on {hello.host}" if hello.host else hello.subject
            self._refuse(ConfigError(subject, hello.wrong, hello.remedy))
        elif isinstance(hello, Hello):
            try:
                name = f"{self.spec.name} on {hello.host}" if hello.host else self.spec.name
                compare(name, self.spec.expected, hello.facts)
            except ConfigError as error:
                self._refuse(error)
            self.line, self.hello, self._since = handle.line, hello, self._clock()

    def _refuse(self, error: ConfigError) -> None:
        self._refused = copy(error)  # the exception holds frames, and they hold this worker
        self._end()
        raise error


def send(worker: Remote, message: Any, seconds: float) -> None:
    """Send a worker a message, if it is ready; one that takes none within so many seconds has failed."""
    end = time.monotonic() + seconds
    while worker.line is not None:
        try:
            return worker.line.send(message, LOOK_S)
        except Late:
            if time.monotonic() > end:
                worker.failed(f"takes no message for {seconds:g} s")
            worker.poll()


def receive(worker: Remote, seconds: float) -> Any:
    """Return a worker's next message; None: there was none within so many seconds, or it has no ``line`` any more."""
    if worker.line is None:
        return None
    try:
        message = worker.line.receive(seconds)
    except Late:
        return None
    except MessageError as error:
        worker.failed(f"sends what is not a message: {error}")
    else:
        if not isinstance(message, Fault):
            return message
        worker.failed(f"failed: {message.why}")
    return None


def ended(status: int | str) -> str:
    """Return an exit status in words."""
    if isinstance(status, str):
        return status
    return f"died: killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _status(handle: Handle) -> int | str | None:
    """Return the exit status of a process that is about to end, which leaves no zombie."""
    for _ in range(100):
        if (status := handle.poll()) is not None:
            return status
        time.sleep(0.001)
    return None
