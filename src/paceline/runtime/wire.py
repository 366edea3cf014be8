"""Messages between processes: dataclasses over sockets of ZeroMQ; between hosts CURVE encrypts and authenticates them.

A message has three parts: its class, its fields in JSON, which are checked by their types, and the memory of its
tensors (`model.fields`).
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from dataclasses import is_dataclass
from functools import cache
from itertools import count
from time import perf_counter
from types import GenericAlias
from typing import Any

import zmq
from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_json

from ..core.errors import ConfigError, PacelineError

SPIN_S = 0.005  # for which a message is looked for before its receiver sleeps: a stage's pass on a small model
LINGER_MS = 200  # for which what was sent may still leave after its socket was closed
ALIGNED = 8  # bytes of the largest number of a tensor
_NUMBERS = count()
_FOLDER: list[str] = []  # of sockets, once there is one


class Late(PacelineError, TimeoutError):
    """Nothing came in time."""


class MessageError(PacelineError):
    """Parts that are not a message."""


def encode(message: Any) -> list[bytes | bytearray]:
    """Return the parts of a message, a dataclass of plain data and tensors."""
    memory = bytearray()

    def plain(value: Any) -> Any:
        """Return what JSON has in place of a slice, a tensor or a sequence of another type."""
        if isinstance(value, slice):
            return value.start, value.stop
        if not hasattr(value, "detach"):
            return [*value]
        import torch  # which has been imported

        at = len(memory)
        memory.extend(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        memory.extend(bytes(-len(memory) % ALIGNED))
        return str(value.dtype).removeprefix("torch."), [*value.shape], at

    kind, fields = type(message), to_json((message,), fallback=plain, inf_nan_mode="constants")
    return [f"{kind.__module__}:{kind.__name__}".encode(), fields, memory]


def decode(parts: list[Any]) -> Any:
    """Return the message of these parts, whose memory its tensors share.

    Raises:
        MessageError: they are not a message.
    """
    try:
        kind, fields, memory = parts
        return _adapter(bytes(kind).decode()).validate_json(bytes(fields), context=memory)[0]
    except Exception as error:  # what the fields' types raise
        raise MessageError(f"a message cannot be read: {' '.join(str(error).split())[:200]}") from None


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return what checks the fields of a class of a module that is loaded."""
    module, _, part = name.partition(":")
    kind = getattr(sys.modules[module], part)
    if not is_dataclass(kind):
        raise TypeError(f"{name} is not a dataclass")
    alone: Any = GenericAlias(tuple, kind)  # a dataclass itself takes no configuration
    return TypeAdapter(alone, config=ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True))


class Line:
    """One end of a connection that carries messages; it is used by one thread at a time.

    Args:
        socket: connected, or bound.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send a message.

        Args:
            message: a dataclass.
            timeout: seconds to wait for room; None: no limit.

        Raises:
            Late: there was no room in time; nothing was sent.
        """
        if not self.socket.poll(_ms(timeout), zmq.POLLOUT):
            raise Late("the other end takes no message in time")
        self.socket.send_multipart(encode(message))

    def receive(self, timeout: float | None = None, beside: Line | None = None) -> Any:
        """Return the next message.

        Args:
            timeout: seconds to wait for it; 0: only one that has arrived; None: no limit.
            beside: ends the wait, too, when a message has arrived on it.

        Raises:
            Late: none arrived in time.
            MessageError: what arrived is not a message.
        """
        if timeout != 0 and not self._arrives(timeout, beside):
            raise Late("no message arrived in time")
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise Late("no message arrived in time") from None
        return decode([part.buffer for part in parts])

    def _arrives(self, timeout: float | None, beside: Line | None) -> bool:
        sockets = [(line.socket, zmq.POLLIN) for line in (self, beside) if line is not None]
        until, ready = perf_counter() + SPIN_S, list[Any]()
        while (timeout is None or timeout > SPIN_S) and not ready and perf_counter() < until:
            os.sched_yield()  # to whoever computes: the cores may be fewer than those that wait
            ready = zmq.zmq_poll(sockets, 0)
        return self.socket in dict(ready or zmq.zmq_poll(sockets, _ms(timeout)))

    def close(self) -> None:
        """Close this end."""
        self.socket.close(LINGER_MS)


def _ms(seconds: float | None) -> int:
    return -1 if seconds is None else int(1e3 * seconds)


def listening(kind: int, host: str = "", last_only: bool = False) -> tuple[zmq.Socket[bytes], str]:
    """Return a socket that others can connect to, and its address.

    Args:
        kind: of ZeroMQ, such as `zmq.PULL`.
        host: address of this host at which others reach it; empty: processes of this host and user alone.
        last_only: of several messages that wait keep the last one.

    Raises:
        ConfigError: this host cannot listen at the address.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.conflate = int(last_only)
    if not host:
        address = f"ipc://{_folder()}/{os.getpid()}-{next(_NUMBERS)}"
        socket.bind(address)
        return socket, address
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_server = public, True
    try:
        port = socket.bind_to_random_port(f"tcp://{host}")
    except zmq.ZMQError as error:
        wrong = f"this host cannot listen at it ({error.strerror})"
        raise ConfigError(f"messages to {host}", wrong, "give the address of an interface") from error
    return socket, f"tcp://{host}:{port} {public.decode()}"


def connected(kind: int, address: str, last_only: bool = False) -> zmq.Socket[bytes]:
    """Return a socket that connects to an address of `listening`, and again whenever the connection breaks."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.conflate = int(last_only)
    where, _, key = address.partition(" ")
    if key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key.encode()
    socket.connect(where)
    return socket


def use_folder_of(address: str) -> None:
    """Keep the sockets of this process next to one of its parent, which removes them."""
    if address.startswith("ipc://"):
        _FOLDER[:] = [os.path.dirname(address.removeprefix("ipc://"))]


def _folder() -> str:
    """Return a folder that no other user may enter."""
    if not _FOLDER:
        _FOLDER.append(tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, _FOLDER[0], ignore_errors=True)
    return _FOLDER[0]
