"""A worker's side: the main loop, which may run in a process, a thread or an activity of virtual time."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any, NoReturn

import zmq

from ..core.errors import ConfigError
from .handshake import Begin, Facts, Fault, Hello, Refused
from .wire import Late, Line, MessageError, connected, use_folder_of


class Service:
    """Describe what a worker does."""

    facts = Facts()
    inbox: Line | None = None  # further messages, which `work` reads

    def listen(self, host: str) -> str:
        """Open `inbox`, if there is one, and return its address; ``host`` is as of `wire.listening`."""
        return ""

    def handle(self, message: Any) -> Iterable[Any]:
        """Answer a message; the answers are sent as they come."""
        raise NotImplementedError

    def work(self) -> Iterable[Any] | None:
        """Do a piece of the remaining work and return its answers; None: there is none.

        Messages that arrive meanwhile are handled between two pieces.
        """
        return None


class Progress:
    """The current piece of work, read by the heartbeat."""

    since: float | None = None  # when it began; None: the worker waits

    def busy_s(self) -> float:
        """Return the seconds since it began; 0: the worker waits."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since


def serve(service: Service, line: Line, progress: Progress | None = None) -> NoReturn:
    """Answer messages, and work while none arrives.

    Messages that cannot be read are answered with a `Fault`. Where the service fails, a last `Fault` is sent.

    Raises:
        Exception: what the service raised.
    """
    progress, busy = progress or Progress(), False
    while True:
        message = None
        try:
            message = line.receive(0 if busy else None, service.inbox)
        except MessageError as error:
            line.send(Fault(str(error)))
            continue
        except Late:
            pass
        progress.since = time.monotonic()
        try:
            answers = service.work() if message is None else service.handle(message)
            for answer in answers or ():
                line.send(answer)
        except Exception as error:
            line.send(Fault(f"{type(error).__name__}: {error}"))
            raise
        finally:
            progress.since = None
        busy = answers is not None


def answer(begin: Begin, host: str = "") -> int:
    """Build the service, send a greeting and serve; return an exit status where that cannot be.

    Args:
        begin: what it is.
        host: address of the host where it runs; empty: the client's.
    """
    use_folder_of(begin.line)
    progress = Progress()
    threading.Thread(target=_beat, args=(begin, progress), daemon=True).start()
    line = Line(connected(zmq.DEALER, begin.line))
    try:
        try:
            service: Service = resolve_name(begin.service)(device=begin.device, **begin.options)
        except ConfigError as error:
            line.send(Refused(error.subject, error.wrong, error.remedy, host))
            return 2
        except Exception as error:
            traceback.print_exc()
            line.send(Fault(f"{type(error).__name__}: {error}"))
            return 1
        line.send(Hello(service.facts, os.getpid(), host, service.listen(host)))
        serve(service, line, progress)
    finally:
        zmq.Context.instance().destroy(linger=1000)


def _beat(begin: Begin, progress: Progress) -> None:
    socket = connected(zmq.PUSH, begin.beats, last_only=True)
    try:
        while True:
            socket.send(str(progress.busy_s()).encode())
            time.sleep(begin.beat_s)
    except zmq.ZMQError:  # the process ends
        return
