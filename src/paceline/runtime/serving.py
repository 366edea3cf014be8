"""A worker's side: the main loop, which a thread or an activity of virtual time may run as well as a process.

A process begins with `begin`, which pins it before anything imports torch.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from ..core.errors import ConfigError
from .channels import Channel, ChannelClosed, Line
from .clock import Late
from .frames import Codec, FrameError
from .handshake import GREETINGS, LIFE, Beat, Begin, Facts, Fault, Hello, Refused
from .shared import SharedChannel, SharedEnd
from .sockets import SocketChannel


class Service:
    """What a worker does."""

    kinds: Sequence[type[Any]]  # messages of both directions; see `Codec`
    facts = Facts()

    def handle(self, message: Any) -> Iterable[Any]:
        """Answer a message; the answers are sent as they come."""
        raise NotImplementedError

    def work(self) -> Iterable[Any] | None:
        """Do a piece of the work that is left, such as a level of a draft, and say what there is to say; None: there is
        none. Messages that came meanwhile are handled between two pieces: they may call off the rest."""
        return None


class Progress:
    """What a worker is at, for who watches it."""

    since: float | None = None  # when its present piece of work began; None: it waits for work

    def busy_s(self) -> float:
        """How long it has been at that."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since


def serve(service: Service, line: Line, progress: Progress | None = None) -> None:
    """Answer messages, and work while none comes, until the other end is gone.

    Bytes that are no message are answered with a `Fault`, and work goes on. Where the service itself fails, its state
    is not known any more: a last `Fault` is sent.

    Raises:
        Exception: what the service raised.
    """
    progress, left = progress or Progress(), False
    while True:
        try:
            left = _turn(service, line, progress, left)
        except ChannelClosed:
            return


def _turn(service: Service, line: Line, progress: Progress, left: bool) -> bool:
    """One message or, where none has come, one piece of work; whether work may be left."""
    try:
        message = line.receive(0 if left else None)
    except FrameError as error:
        line.send(Fault(str(error)))
        return left
    except Late:
        return _do(service.work, line, progress)
    _do(lambda: service.handle(message), line, progress)
    return True


def _do(work: Callable[[], Iterable[Any] | None], line: Line, progress: Progress) -> bool:
    """Do a piece of work and send what comes of it; False: there was none."""
    progress.since = time.monotonic()
    try:
        said = work()
        for answer in said or ():
            line.send(answer)
    except ChannelClosed:
        raise
    except Exception as error:
        line.send(Fault(f"{type(error).__name__}: {error}"))
        raise
    finally:
        progress.since = None
    return said is not None


def main(asked: Begin, life: SocketChannel) -> int:
    """A worker process of this host from here on; the exit status."""
    progress = Progress()
    threading.Thread(target=_beat, args=(life, progress, asked.beat_s), daemon=True).start()
    return answer(asked, _opened(asked), progress)


def answer(asked: Begin, channel: Channel, progress: Progress, host: str = "") -> int:
    """Build the service, say hello, serve until the other end is gone; an exit status.

    Args:
        asked: what it is.
        channel: to who asks.
        progress: told what it is at.
        host: where it runs; empty: where who asks does.
    """
    try:
        service = built(asked)
    except ConfigError as error:
        Line(channel, Codec(*GREETINGS)).send(Refused(asked.key, error.asked, error.wrong, error.remedy, host))
        return 2
    except Exception as error:
        traceback.print_exc()
        Line(channel, Codec(*GREETINGS)).send(Fault(f"{type(error).__name__}: {error}"))
        return 1
    line = Line(channel, Codec(*GREETINGS, *service.kinds))
    line.send(Hello(asked.key, asdict(service.facts), os.getpid(), host))
    serve(service, line, progress)
    return 0


def built(asked: Begin) -> Any:
    """What the function that it names returns."""
    module, _, name = asked.service.partition(":")
    return getattr(import_module(module), name)(device=asked.device, **asked.options)


def _opened(asked: Begin) -> Channel:
    kind, _, where = asked.way.partition(":")
    if kind == "shared":
        return SharedChannel(SharedEnd.parse(where), asked.spin_us)
    return SocketChannel(socket.socket(fileno=int(where)))


def _beat(life: SocketChannel, progress: Progress, seconds: float) -> None:
    """Say that this process lives, until nobody is there: then it ends, whatever it is at.

    Where nobody looks for a long time, beats are left out.
    """
    codec = Codec(*LIFE)
    while True:
        try:
            if life.takes():
                life.send(codec.encode(Beat(progress.busy_s())))
        except ChannelClosed:
            os._exit(1)
        time.sleep(seconds)
