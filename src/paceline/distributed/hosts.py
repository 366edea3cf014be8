"""Workers on other hosts: there a `Host` listens, and starts a process of its own for who connects.

    coordinator                  host
    life:  Begin(key, options) -> pairs both lines by their key, and gives them to a new process
    work:  Hello(key, facts)   ->
                               <- the process: beats on the one, Hello or Refused and all answers on the other

What is run there is the host's own choice: of the coordinator it takes numbers and options, never the name of code.
Whoever reaches the port may use it: it is for a network whose hosts trust each other.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from ..core.errors import ConfigError
from .channels import ChannelClosed, Line
from .clock import Late
from .frames import Codec, FrameError
from .handshake import GREETINGS, LIFE, Begin, Hello, Refused
from .placement import Placement
from .tcp import Listener, SocketChannel, connect
from .worker import Launch, Launched, WorkerSpec

CONNECT_S = 3.0
SEND_S = 2.0  # for a message to who has connected
LEAST_BEAT_S = 0.05
MOST_WAITING = 16  # lines whose other one has not come


def launch_at(address: str) -> Launch:
    """How workers are started on a host that listens at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")

    def launch(spec: WorkerSpec, beat_s: float) -> Launched:
        life = Line(connect(host, int(port), CONNECT_S), Codec(**LIFE))
        work, key = connect(host, int(port), CONNECT_S), secrets.token_hex(16)
        begin = Begin(spec.name, "", dict(spec.options), "", key, [], spec.placement.device, spec.spin_us, beat_s)
        with suppress(ChannelClosed):  # one that has gone already is looked after like any other
            life.send(begin, CONNECT_S)
            Line(work, Codec(**GREETINGS)).send(Hello(key, asdict(spec.expected)), CONNECT_S)
        return Launched(_There(), life, key, lambda: work, work.close)

    return launch


class _There:
    """A process of another host: it ends when its lines are closed."""

    pid: int | None = None

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        pass


@dataclass(slots=True)
class _Session:
    """A process that serves somebody, and the line by which that one's end is seen."""

    process: subprocess.Popen[bytes]
    life: socket.socket

    @property
    def open(self) -> bool:
        """Whether process and asker are there."""
        if self.process.poll() is not None:
            return False
        try:
            return self.life.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.life.close()


class Host:
    """Waits for coordinators, one after the other, and serves each in a process of its own.

    Args:
        listener: where they connect.
        chosen: what is begun for them: what they ask for, with the service and the options of this host.
        placement: of the process.
        note: is told, in words, who comes and goes.
    """

    def __init__(
        self,
        listener: Listener,
        chosen: Callable[[Begin], Begin],
        placement: Placement,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.listener = listener
        self._chosen, self._placement, self._note = chosen, placement, note
        self._session: _Session | None = None
        self._waiting: dict[str, tuple[socket.socket, Begin | None]] = {}  # by key: the line that came first

    @property
    def pid(self) -> int | None:
        """Of the process that serves somebody; None: there is none."""
        return None if self._session is None or self._session.process.poll() is not None else self._session.process.pid

    def turn(self, timeout: float) -> None:
        """Take a connection, if one comes and says something within so many seconds."""
        try:
            channel = self.listener.greeted(timeout)
        except Late:
            return
        try:
            said = Line(channel, Codec(**LIFE, **GREETINGS)).receive(0)
        except FrameError:
            said = None
        if isinstance(said, Begin | Hello):
            self._pair(said, channel.detach())
        else:
            channel.close()

    def _pair(self, said: Begin | Hello, connection: socket.socket) -> None:
        begin = said if isinstance(said, Begin) else None
        other = self._waiting.pop(said.key, None)
        if other is None:
            self._waiting[said.key] = connection, begin
            while len(self._waiting) > MOST_WAITING:
                self._waiting.pop(next(iter(self._waiting)))[0].close()
        elif begin is not None and other[1] is None:
            self._serve(begin, life=connection, work=other[0])
        elif begin is None and other[1] is not None:
            self._serve(other[1], life=other[0], work=connection)
        else:
            connection.close()
            other[0].close()

    def _serve(self, asked: Begin, life: socket.socket, work: socket.socket) -> None:
        if self._session is not None and self._session.open:
            self._refuse(asked, work, "it serves another coordinator", "wait for its end, or start a stage of your own")
            life.close()
            return
        self.stop()
        try:
            begin = self._chosen(asked)
        except ConfigError as error:
            self._refuse(asked, work, error.wrong, error.remedy)
            life.close()
            return
        where = self._placement
        beat_s = min(max(asked.beat_s, LEAST_BEAT_S), CONNECT_S)
        begin = replace(begin, way=f"fd:{work.fileno()}", beat_s=beat_s, waits=False)
        begin = replace(begin, cores=[*where.cores], device=where.device)
        self._session = _Session(_spawn(begin, life, work, where), life)
        work.close()  # the process has its own: with it, it ends
        self._note(f"{asked.name} for {_peer(life)}")

    def _refuse(self, asked: Begin, work: socket.socket, wrong: str, remedy: str) -> None:
        channel = SocketChannel(work)
        with suppress(ChannelClosed):
            Line(channel, Codec(**GREETINGS)).send(Refused(asked.key, asked.name, wrong, remedy), SEND_S)
        channel.close()

    def stop(self) -> None:
        """End the process that serves somebody."""
        session, self._session = self._session, None
        if session is not None:
            session.end()


def _spawn(begin: Begin, life: socket.socket, work: socket.socket, where: Placement) -> subprocess.Popen[bytes]:
    """The process that serves a coordinator, which has both lines from here on."""
    own, theirs = socket.socketpair()
    fds = life.fileno(), work.fileno(), theirs.fileno()
    command = [sys.executable, "-P", "-m", "paceline.distributed.begin", str(life.fileno()), str(theirs.fileno())]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=fds, env=os.environ | where.environment(), process_group=0
    )
    theirs.close()
    channel = SocketChannel(own)
    with suppress(ChannelClosed):
        Line(channel, Codec(**LIFE)).send(begin, SEND_S)
    channel.close()
    return process


def _peer(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return "somebody who has gone"
    return f"{host}:{port}"


def run(host: Host) -> None:
    """Serve until the process is told to end."""
    try:
        while True:
            host.turn(1.0)
    finally:
        host.stop()
        host.listener.close()
