"""Messages between processes: dataclasses over sockets of ZeroMQ; between hosts CURVE encrypts and authenticates them.

A message is a part of JSON with its class and the dtype and shape of each tensor, a part of JSON with its other fields,
and each tensor's memory as a part of its own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import fields
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_type_hints

import zmq
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from ..core.errors import ConfigError, PacelineError
from .clock import Late

if TYPE_CHECKING:
    from torch import Tensor

SPIN_S = 0.005  # for which a message is looked for before its receiver sleeps: a stage's pass on a small model
LINGER_MS = 200  # for which what was sent may still leave after its socket was closed
_HEAD: TypeAdapter[tuple[str, list[tuple[str, list[int]]]]] = TypeAdapter(tuple[str, list[tuple[str, list[int]]]])
_NUMBERS = count()
_FOLDER: list[str] = []  # of sockets, once there is one


class MessageError(PacelineError):
    """Parts that are not a message of the kinds that are expected."""


class Codec:
    """Messages of some dataclasses as parts, and back.

    Fields whose type hint is ``Tensor`` are sent as they are; all others as JSON, checked by their type hints.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: (kind, *_fields(kind)) for kind in kinds}

    def encode(self, message: Any) -> list[Any]:
        """Return a message's parts; its tensors must not change until they are sent."""
        name = type(message).__name__
        _, _, plain, named = self._kinds[name]
        tensors = [getattr(message, field).detach().cpu().contiguous() for field in named]
        head = name, [(str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for tensor in tensors]
        values = to_json({field: getattr(message, field) for field in plain}, inf_nan_mode="constants")
        return [to_json(head), values, *map(_raw, tensors)]

    def decode(self, parts: list[Any]) -> Any:
        """Return the message of these parts, whose memory its tensors share.

        Raises:
            MessageError: they are not a message of one of the kinds.
        """
        try:
            name, described = _HEAD.validate_json(bytes(parts[0]))
            kind, adapter, _, named = self._kinds[name]
            values = adapter.validate_json(bytes(parts[1]))
            tensors = [_tensor(raw, *one) for raw, one in zip(parts[2:], described, strict=True)]
            return kind(**values, **dict(zip(named, tensors, strict=True)))
        except (ValidationError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            raise MessageError(f"a message cannot be read: {' '.join(str(error).split())[:200]}") from None


def _fields(kind: type[Any]) -> tuple[TypeAdapter[Any], list[str], list[str]]:
    """Return what checks a message's fields that are not tensors, their names, and those of the tensors."""
    named = [field.name for field in fields(kind) if field.type == "Tensor"]
    hints = get_type_hints(kind, localns={"Tensor": Any}, include_extras=True)
    plain = {field.name: hints[field.name] for field in fields(kind) if field.name not in named}
    make: Any = TypedDict
    shape = make(kind.__name__, plain)
    shape.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    return TypeAdapter(shape), [*plain], named


def _raw(tensor: Tensor) -> bytes:
    import torch

    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().tobytes()


def _tensor(raw: Any, dtype: str, shape: list[int]) -> Tensor:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(raw, dtype=kind).view(shape) if len(raw) else torch.empty(shape, dtype=kind)


class Line:
    """One end of a connection that carries messages; it is used by one thread at a time.

    Args:
        socket: connected, or bound.
        codec: of the messages of both directions.
    """

    def __init__(self, socket: zmq.Socket[bytes], codec: Codec) -> None:
        self.socket, self.codec = socket, codec

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send a message.

        Args:
            message: of one of the codec's kinds.
            timeout: seconds to wait for room; None: no limit.

        Raises:
            Late: there was no room in time; nothing was sent.
        """
        if not self.socket.poll(_ms(timeout), zmq.POLLOUT):
            raise Late("the other end takes no message in time")
        self.socket.send_multipart(self.codec.encode(message))

    def receive(self, timeout: float | None = None, beside: Line | None = None) -> Any:
        """Return the next message.

        Args:
            timeout: seconds to wait for it; 0: only one that has arrived; None: no limit.
            beside: ends the wait, too, when a message has arrived on it.

        Raises:
            Late: none arrived in time.
            MessageError: what arrived is not a message of these kinds.
        """
        if timeout != 0 and not self._arrives(timeout, beside):
            raise Late("no message arrived in time")
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise Late("no message arrived in time") from None
        return self.codec.decode([part.buffer for part in parts])

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
