"""Lines between hosts over torch.distributed: groups of their own, a store where they meet, and channels over them.

A group has a name that nobody else's has, and never is the process's default one: several engines live in a process. It
is never mended. After any fault it is left, and another one is made under another name.

Gloo says of a receive neither whether it has come nor that it is late, without closing the lines to all members. So a
thread of each channel receives all that comes, with no limit, and hands it over.
"""

from __future__ import annotations

import atexit
import queue
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ..core.errors import ConfigError
from .channels import MARK, PREFIX, ChannelClosed, full, gone, prefix, size_of
from .clock import Late
from .frames import Buffer, FrameError

PIECE = 2**18  # bytes that are sent at once, at most
AHEAD = 4  # pieces that may come before anybody has looked at one: so many receives wait
UNSENT_BYTES, UNSENT = 2**22, 1024  # how much, and how many pieces, may be on their way before the oldest is waited for
BYE = PREFIX.pack(MARK, 2**32 - 1)  # in place of a frame: the other end is left
EVER = timedelta(days=365)
JOIN_S = 60.0  # for all members to come
LEAVE_S = 1.0  # for the others to answer when this process ends
TAG = 0
_HERE = "here/{}"  # a member's key in the store
_OPEN: WeakSet[GroupChannel] = WeakSet()


@dataclass(frozen=True, slots=True)
class Member:
    """What a process needs to be one of a group."""

    host: str  # of the store
    port: int
    group: str  # its name
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.rank}/{self.size}/{self.group}"

    @staticmethod
    def parse(text: str) -> Member:
        """The inverse of ``str``."""
        where, rank, size, group = text.split("/", 3)
        host, _, port = where.rpartition(":")
        return Member(host, int(port), group, int(rank), int(size))


class Store:
    """Where the members of groups find each other; it is there as long as this object.

    Args:
        host: address of this host at which it listens, and at no other one.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str) -> None:
        try:
            listening = socket.create_server((host, 0))
        except OSError as error:
            wrong = f"this host cannot listen at it ({error.strerror or error})"
            raise ConfigError(f"groups that meet at {host}", wrong, "give the address of an interface") from error
        self.host, self.port = host, listening.getsockname()[1]
        self._store = _store(host, self.port, listening.detach())

    def member(self, group: str, rank: int, size: int) -> Member:
        """What one of a group's processes is told."""
        return Member(self.host, self.port, group, rank, size)

    def waits(self, group: str, rank: int = 1) -> bool:
        """Whether one of a group's members is there."""
        return bool(self._store.check([f"{group}/{_HERE.format(rank)}"]))


def _store(host: str, port: int, listening: int | None = None) -> dist.TCPStore:
    given: Any = {} if listening is None else {"master_listen_fd": listening, "wait_for_workers": False}
    return dist.TCPStore(host, port, None, listening is not None, timedelta(seconds=JOIN_S), **given)


def join(member: Member, address: str, seconds: float | None = None) -> Any:
    """Be one of a group of gloo, and wait until all are.

    Args:
        member: which one.
        address: of this host, at which the others reach it; nothing listens elsewhere.
        seconds: to wait for the others; None: for ever.

    Returns:
        The process group of torch.

    Raises:
        ChannelClosed: the others did not come in time, or cannot be reached.
    """
    store = None
    try:
        store = dist.PrefixStore(member.group, _store(member.host, member.port))
        store.set(_HERE.format(member.rank), address)
        return _gloo(store, member, address, EVER if seconds is None else timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        why = _why_not(store, member, address)
        raise ChannelClosed(f"{why}: {str(error).splitlines()[0]}") from error


def _why_not(store: dist.Store | None, member: Member, address: str) -> str:
    """Why a group did not come together, with both ends."""
    if store is None:
        return f"{address} does not reach the store at {member.host}:{member.port}: is that port closed between them?"
    others = [rank for rank in range(member.size) if rank != member.rank]
    with suppress(RuntimeError):
        came = [rank for rank in others if store.check([_HERE.format(rank)])]
        if len(came) == len(others):
            there = ", ".join(store.get(_HERE.format(rank)).decode() for rank in came)
            return f"{address} and {there} do not reach each other: are ports closed between them?"
    return f"{address} waits in group {member.group} at {member.host}:{member.port}, and the others have not come"


def _gloo(store: dist.Store, member: Member, address: str, limit: timedelta) -> Any:
    made: Any = dist.ProcessGroupGloo
    options = made._Options()
    options._devices = [made.create_device(hostname=address)]
    options._timeout = limit
    return made(store, member.rank, member.size, options)


class GroupChannel:
    """A channel to another member of a group (see `Channel`); a pair has one.

    Args:
        group: as of `join`.
        peer: rank of the other one.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        self._came: queue.SimpleQueue[bytearray | Exception] = queue.SimpleQueue()
        self._closed = False
        self._unsent: deque[tuple[torch.Tensor, Any]] = deque()  # pieces on their way, oldest first, or there already
        self._bytes = 0  # of these
        self._left = False  # whether the other end was told
        told = group, peer, self._came, self._bye
        self._thread = Thread(target=_receive_all, args=told, daemon=True, name="paceline-group")
        self._thread.start()
        _OPEN.add(self)

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame."""
        if self._closed:
            raise gone(False)
        data = bytearray().join([prefix(sum(map(len, parts))), *parts])
        limit = EVER if timeout is None else timedelta(seconds=timeout)
        for start in range(0, len(data), PIECE):
            piece = torch.frombuffer(data, dtype=torch.uint8, count=min(PIECE, len(data) - start), offset=start)
            self._send(piece, limit)

    def _send(self, piece: torch.Tensor, limit: timedelta) -> None:
        """Begin to send a piece; who is at other work for a while is not waited for."""
        try:
            self._unsent.append((piece, self._group.send([piece], self._peer, TAG)))
            self._bytes += len(piece)
            while self._bytes > UNSENT_BYTES or len(self._unsent) > UNSENT:
                oldest, sending = self._unsent[0]
                sending.wait(limit)
                self._unsent.popleft()
                self._bytes -= len(oldest)
        except RuntimeError as error:
            self._closed = True
            if "Timed out" in str(error):
                raise full(limit.total_seconds()) from None
            raise gone(False) from error

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame."""
        try:
            if self._closed:
                raise gone(False)
            came = self._came.get(timeout != 0, timeout)
        except queue.Empty:
            raise Late("nothing came in time") from None
        if isinstance(came, Exception):
            self.close()
            raise came
        return came

    def close(self) -> None:
        """Be gone for the other end."""
        self._closed = True
        self._bye()

    def ended(self, timeout: float) -> bool:
        """Whether the other end knows that this one is closed, or does so within so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _bye(self) -> None:
        """Tell the other end, once, that this one is left; its answer ends the thread here."""
        if not self._left:
            self._left = True
            piece = torch.frombuffer(bytearray(BYE), dtype=torch.uint8)
            with suppress(RuntimeError):
                self._unsent.append((piece, self._group.send([piece], self._peer, TAG)))


@atexit.register
def _leave_all() -> None:
    """Before the interpreter ends: a thread that wakes up in C++ afterwards would end the process by a signal."""
    end, channels = time.monotonic() + LEAVE_S, [*_OPEN]
    for channel in channels:
        channel.close()
    for channel in channels:
        channel.ended(max(0.0, end - time.monotonic()))


def _receive_all(group: Any, peer: int, came: queue.SimpleQueue[Any], bye: Any) -> None:
    """Hand over what a peer sends until it is gone; no channel is kept alive by this."""
    buffers = [torch.empty(PIECE, dtype=torch.uint8) for _ in range(AHEAD)]
    waits = [group.recv([buffer], peer, TAG) for buffer in buffers]
    frame, left, turn = bytearray(), 0, 0
    while True:
        try:
            waits[turn].wait(EVER)
        except RuntimeError:
            came.put(gone(bool(left)))
            return
        raw: Any = buffers[turn].numpy()
        piece = memoryview(raw)
        if not left:
            if piece[: PREFIX.size] == BYE:
                came.put(gone(False))
                bye()
                return
            try:
                frame, left = bytearray(), PREFIX.size + size_of(piece)
            except FrameError as error:
                came.put(error)
                return
        frame += piece[: min(left, PIECE)]
        left = max(0, left - PIECE)
        if not left:
            came.put(frame[PREFIX.size :])
        try:
            waits[turn] = group.recv([buffers[turn]], peer, TAG)
        except RuntimeError:  # it has gone since
            came.put(gone(bool(left)))
            return
        turn = (turn + 1) % AHEAD
