"""A worker as who uses it sees it: started, greeted, watched, and started again where it failed.

Nothing here waits but `Worker.start`: `Worker.poll` looks after it in passing, once a step, and one that is gone comes
back while the engine goes on without it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Any, Literal, Protocol

from ..core.errors import CapabilityError, ConfigError, PacelineError
from ..core.options import check, option
from .channels import Channel, ChannelClosed, Line
from .clock import Clock, Late, RealClock
from .frames import Codec, FrameError
from .handshake import GREETINGS, LIFE, Beat, Begin, Facts, Fault, Hello, Refused, compare
from .placement import Placement
from .shared import SPIN_US, SharedChannel, shared_pair, usable
from .sockets import SocketChannel

TELL_S = 0.5  # for a process to take what it is told
LOOK_S = 0.05  # between two looks at a worker that is well
HOST_LEFT = "died: its host has left the cluster"
MOST_SILENT_S = 0.5  # of silence that one look counts: who was held up himself does not know whether there was more


class WorkerFailed(PacelineError):
    """A worker that died, hangs or says what it should not; it is named."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long is waited for a worker, and how it comes back."""

    start_s: float = option(120.0, help="seconds from its start to its hello", above=0.0)
    silent_s: float = option(3.0, help="seconds without a sign of life after which it is taken for dead", above=0.0)
    stuck_s: float = option(30.0, help="seconds at one piece of work after which it is taken to hang", above=0.0)
    rest_s: float = option(0.1, help="seconds before it is started again, doubled with every failure", above=0.0)
    most_rest_s: float = option(5.0, help="seconds, at most", above=0.0)
    healthy_s: float = option(10.0, help="seconds after which earlier failures are forgotten", above=0.0)

    def __post_init__(self) -> None:
        check(self, "patience ")


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is to be."""

    name: str
    service: str  # "module:function" that makes a `Service`; called with ``device`` and the options
    options: Mapping[str, Any] = field(default_factory=dict)  # ready for JSON
    kinds: Sequence[type[Any]] = ()  # the messages of its service
    expected: Facts = Facts()
    placement: Placement = field(default_factory=Placement)
    channel: Literal["shared", "socket"] = "shared"  # "socket": for an event loop, and where memory cannot be shared
    spin_us: int = SPIN_US

    def begin(self, way: str, key: str, beat_s: float) -> Begin:
        """What its process is told; see `Begin`."""
        where = self.placement
        what = self.name, self.service, dict(self.options), way, key, [*where.cores], where.device
        return Begin(*what, self.spin_us, beat_s)


class Launched(Protocol):
    """A worker that was started, here or on another host, and the ways to it."""

    key: str  # that its hello is to say

    @property
    def pid(self) -> int | None:
        """Its process's number; None: it runs on another host."""
        ...

    def poll(self) -> int | str | None:
        """Its exit status, below 0 a signal's number, or how it ended in words; None: it runs."""
        ...

    def beat(self) -> Beat | None:
        """The last sign of life that came since the last call; None: none did."""
        ...

    def connect(self) -> Channel:
        """This end of the way to it; raises `Late` while there is none, and `ChannelClosed` where none will be."""
        ...

    def end(self) -> None:
        """End it at once, and the ways to it."""
        ...


Launch = Callable[[WorkerSpec, float], Launched]  # of a worker, and the seconds between two of its beats


def launch_here(spec: WorkerSpec, beat_s: float) -> Launched:
    """Start a worker on this host.

    Raises:
        ConfigError, CapabilityError: its channel cannot be opened.
    """
    return _Child(spec).begin(beat_s)


class _Child:
    """A process of this host, which waits to be told what it is; see `Launched`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self.key = spec, secrets.token_hex(16)
        self._channel, self._way, inherited, given = _way(spec)
        own, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "paceline.runtime.begin", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *inherited),
            env=os.environ | spec.placement.environment(),
            process_group=0,  # Ctrl-C is for who started it, with whom it ends
        )
        theirs.close()
        given()
        self._life, self.pid, self.poll = Line(SocketChannel(own), Codec(*LIFE)), self.process.pid, self.process.poll

    def begin(self, beat_s: float) -> _Child:
        """Have it be the worker."""
        self._tell(self._spec.begin(self._way, self.key, beat_s))
        return self

    def wait(self, ahead: str) -> None:
        """Have it call a function that gets it ready, and wait."""
        self._tell(replace(self._spec.begin("", "", 0.0), service=ahead, waits=True))

    def _tell(self, what: Begin) -> None:
        """Tell it; one that has ended already is looked after like any other."""
        with suppress(ChannelClosed):
            self._life.send(what, timeout=TELL_S)

    def beat(self) -> Beat | None:
        beat: Beat | None = None
        try:
            while True:
                beat = self._life.receive(0)
        except (Late, ChannelClosed, FrameError):  # there is no further one
            return beat

    def connect(self) -> Channel:
        return self._channel

    def end(self) -> None:
        self._life.close()
        self.process.kill()
        self._channel.close()


class Spare:
    """A process that has imported what the next worker of a kind will need, and waits to be that worker.

    It costs memory, and no time while it waits; it ends with this process.

    Args:
        spec: of the worker.
        ahead: "module:function" that the process calls ahead, with ``device`` and the worker's options.
    """

    def __init__(self, spec: WorkerSpec, ahead: str) -> None:
        self._spec, self._ahead = spec, ahead
        self._child: _Child | None = None

    def prepare(self) -> None:
        """Have one, if there is none yet; one that ended is not replaced before the next worker.

        Raises:
            OSError, ConfigError, CapabilityError: none can be had.
        """
        if self._child is None:
            self._child = _Child(self._spec)
            self._child.wait(self._ahead)

    def launch(self, spec: WorkerSpec, beat_s: float) -> Launched:
        """Start the worker in it, or in a process of its own if there is none; errors as of `launch_here`."""
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            return launch_here(spec, beat_s)
        child, self._child = self._child, None
        return child.begin(beat_s)

    def close(self) -> None:
        """End it."""
        child, self._child = self._child, None
        if child is not None:
            child.end()
            child.process.wait()


def _way(spec: WorkerSpec) -> tuple[Channel, str, tuple[int, ...], Callable[[], None]]:
    """A channel to a process that is to be started: this end; for `Begin.way` the address of the other one, and its
    file descriptors; what closes these here, once the process has its own."""
    if spec.channel == "socket" or not usable():
        mine, its = socket.socketpair()
        return SocketChannel(mine), f"fd:{its.fileno()}", (its.fileno(),), its.close
    own, theirs = shared_pair()
    return SharedChannel(own, spec.spin_us), f"shared:{theirs}", theirs.fds, theirs.drop


class Worker:
    """One worker and its successors.

    Args:
        spec: what it is.
        patience: how long is waited for it.
        launch: how it is started: here, or on another host (`ray_cluster`).
        clock: its time.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        patience: Patience | None = None,
        launch: Launch = launch_here,
        clock: Clock | None = None,
    ) -> None:
        self.spec, self.patience = spec, patience or Patience()
        self.line: Line | None = None  # to it, while it is ready
        self.faults: list[str] = []  # each names the worker and its process
        self.starts = 0
        self._launch, self._clock = launch, clock or RealClock()
        self._codec = Codec(*GREETINGS, *spec.kinds)
        self._launched: Launched | None = None
        self._greeted: Line | None = None  # it is connected, and has not said hello
        self._refused: ConfigError | None = None
        self._next = self._clock.now()  # when to start it
        self._since = self._looked = self._silent_s = 0.0
        self._in_a_row = 0
        self._stopped = False
        self._there: Hello | None = None  # what the present one said

    @property
    def pid(self) -> int | None:
        """Of its process; None: there is none at the moment, or it is not known yet."""
        if self._launched is None:
            return None
        return self._launched.pid or (None if self._there is None else self._there.pid)

    @property
    def host(self) -> str:
        """Where it runs; empty: here, or not known yet."""
        return "" if self._there is None else self._there.host

    def start(self) -> Line:
        """Start it, and wait until it is ready.

        Raises:
            ConfigError: it cannot serve what it is asked to, or is not what is expected.
            CapabilityError: no process, or no channel to it, can be opened.
            WorkerFailed: it did not come to that.
        """
        while not self.poll():
            if self.faults:
                self.stop()
                raise WorkerFailed(self.faults[-1])
            time.sleep(LOOK_S / 10)
        assert self.line is not None
        return self.line

    def poll(self) -> bool:
        """Look after it, without waiting. Whether it is ready: its `line` may be used.

        Raises:
            ConfigError: it cannot serve any more what it is asked to; it is not started again.
        """
        if self._refused is not None:
            raise copy(self._refused)
        now = self._clock.now()
        if self._stopped or (self.line is not None and now - self._looked < LOOK_S):
            return self.line is not None
        self._silent_s += min(now - self._looked, MOST_SILENT_S)
        self._looked, launched = now, self._launched
        if launched is None:
            if now >= self._next:
                self._begin(now)
        elif why := self._wrong(launched, now):
            self.failed(why)
        elif self._launched is launched and self.line is None:
            self._look_for_hello(launched)
        return self.line is not None

    def failed(self, why: str) -> None:
        """It is of no use as it is: end it, and start it again in a while.

        Args:
            why: what it did; `faults` gets it with the worker's name.
        """
        now = self._clock.now()
        healthy = self.line is not None and now - self._since > self.patience.healthy_s
        self._in_a_row = 1 if healthy else self._in_a_row + 1
        process = "" if self.pid is None else f" (pid {self.pid}{self.host and f' on {self.host}'})"
        self.faults.append(f"worker {self.spec.name}{process} {why}")
        self._end()
        rest = self.patience.rest_s * 2.0 ** min(self._in_a_row - 1, 60)
        self._next = now + min(rest, self.patience.most_rest_s)

    def lost(self) -> None:
        """Its line is closed: note why, and start it again in a while."""
        if self._launched is not None:
            status = _status(self._launched)
            self.failed("closed its line" if status is None else ended(status))

    def stop(self) -> None:
        """End it for good."""
        self._stopped = True
        self._end()

    def _begin(self, now: float) -> None:
        self._since, self._silent_s = now, 0.0
        try:
            self._launched = self._launch(self.spec, self.patience.silent_s / 6)
        except (OSError, PacelineError) as error:
            if not self.starts:
                raise self._hopeless(error) from error
            self.failed(f"could not be started: {error}")
        self.starts += 1

    def _hopeless(self, error: OSError | PacelineError) -> PacelineError:
        """What is said where not even the first process, or the channel to it, can be had."""
        if isinstance(error, PacelineError):
            return error
        wrong = f"its process or the channel to it cannot be opened ({error})"
        remedy = "look at the limits on open files, processes and memory (ulimit -a)"
        return CapabilityError(f"worker {self.spec.name}", wrong, remedy)

    def _end(self) -> None:
        """End its process and the ways to it."""
        for line in (self.line, self._greeted):
            if line is not None:
                line.close()
        launched, self._launched = self._launched, None
        self.line = self._greeted = self._there = None
        if launched is not None:
            launched.end()
            _status(launched)

    def _wrong(self, launched: Launched, now: float) -> str:
        """What is wrong with it; empty: nothing."""
        status = launched.poll()
        if status == HOST_LEFT and self.line is None and self.faults:
            self._end()  # the place that it was to come back at has gone with what was wrong: another one is found
            self._next = now + self.patience.rest_s
            return ""
        if status is not None:
            return "" if self._explained(launched) else ended(status)
        if (beat := launched.beat()) is not None:
            self._silent_s = 0.0
        if self._silent_s > self.patience.silent_s and self.line is not None:
            return f"hangs: no sign of life for {self._silent_s:.1f} s"
        if beat is not None and beat.busy_s > self.patience.stuck_s:
            return f"hangs: at one piece of work for {beat.busy_s:.1f} s"
        if self.line is None and now - self._since > self.patience.start_s:
            return f"is not ready {now - self._since:.1f} s after its start"
        return ""

    def _explained(self, launched: Launched) -> bool:
        """Whether one that ended before its hello had said why."""
        if self.line is not None:
            return False
        try:
            self._greet(launched)
        except (Late, ChannelClosed, FrameError):
            return False
        return self._launched is None

    def _look_for_hello(self, launched: Launched) -> None:
        try:
            self._greet(launched)
        except Late:
            return
        except (ChannelClosed, FrameError) as error:
            self.failed(f"said no hello: {error}")

    def _greet(self, launched: Launched) -> None:
        """Take its hello; errors as of `Channel.receive`."""
        line = self._greeted = self._greeted or Line(launched.connect(), self._codec)
        said = line.receive(0)
        if isinstance(said, Fault):
            self.failed(f"failed at its start: {said.why}")
        elif not isinstance(said, Hello | Refused) or not compare_digest(launched.key.encode(), said.key.encode()):
            line.close()
            self._greeted = None  # a stranger; the worker itself may still come
        elif isinstance(said, Refused):
            asked = f"{said.asked}, for {self.spec.name} on {said.host}" if said.host else said.asked
            self._refuse(ConfigError(asked, said.wrong, said.remedy))
        else:
            self._welcome(line, said)

    def _welcome(self, line: Line, said: Hello) -> None:
        try:
            name = f"{self.spec.name} on {said.host}" if said.host else self.spec.name
            compare(name, self.spec.expected, Facts(**said.facts))
        except ConfigError as error:
            self._refuse(error)
        self.line, self._greeted, self._there, self._since = line, None, said, self._clock.now()

    def _refuse(self, error: ConfigError) -> None:
        self._refused = copy(error)  # what is raised holds the frames that it goes through, and they hold this worker
        self._end()
        raise error


def received(worker: Worker, seconds: float) -> Any:
    """What a worker says within so many seconds; None: nothing, or it is lost now, and has no ``line`` any more."""
    if worker.line is None:
        return None
    try:
        said = worker.line.receive(seconds)
    except Late:
        return None
    except ChannelClosed:
        worker.lost()
    except FrameError as error:
        worker.failed(f"says what is no message: {error}")
    else:
        if not isinstance(said, Fault):
            return said
        worker.failed(f"failed: {said.why}")
    return None


def ended(status: int | str) -> str:
    """An exit status in words."""
    if isinstance(status, str):
        return status
    return f"died: killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _status(launched: Launched) -> int | str | None:
    """The exit status of a process that is about to end; so it leaves no zombie."""
    for _ in range(100):
        if (status := launched.poll()) is not None:
            return status
        time.sleep(0.001)
    return None
