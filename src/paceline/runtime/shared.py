"""Channels over memory that two processes of a host share: two rings, one each way.

Who waits spins for a bounded time and then parks on an eventfd. Compiled code does both without Python's lock
(``kernels/cpp/channels.cpp``). Memory and eventfds have no names: they are inherited by the process that is to have
them, and are gone with the last one.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.errors import CapabilityError, ConfigError
from ..kernels import channels as native
from .channels import PREFIX, fits, full, gone, size_of
from .clock import Late
from .frames import Buffer, FrameError

CAPACITY = 2**20  # bytes of a ring; larger frames go in pieces
LEAST, MOST = 2**12, 2**30
SPIN_US = 50  # how long is spun before parking: some tens of hops
STAGING = 2**14  # bytes of a frame that is received in one call
CELLS = 256  # bytes in front of a ring's own: its head, its tail, and who is parked, in cache lines of their own


@dataclass(frozen=True, slots=True)
class SharedEnd:
    """What a process needs to open one end: file descriptors, which it inherits under the same numbers."""

    capacity: int
    own: int  # the ring that it writes: 0 or 1
    memory: int
    events: tuple[int, int, int, int]  # of ring 0 bytes came, bytes went; of ring 1
    life: int  # a socket that hangs up when the other process is gone

    def __str__(self) -> str:
        return ",".join(map(str, (self.capacity, self.own, self.memory, *self.events, self.life)))

    @staticmethod
    def parse(text: str) -> SharedEnd:
        """The inverse of ``str``."""
        capacity, own, memory, *rest = map(int, text.split(","))
        a, b, c, d, life = rest
        return SharedEnd(capacity, own, memory, (a, b, c, d), life)

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (self.memory, *self.events, self.life)

    def drop(self) -> None:
        """Close them: they were given to another process."""
        for fd in self.fds:
            os.close(fd)


def shared_pair(capacity: int = CAPACITY) -> tuple[SharedEnd, SharedEnd]:
    """Both ends of a new channel, with file descriptors of their own.

    Raises:
        CapabilityError: this system has no such memory.
        ConfigError: no capacity that a ring may have.
    """
    _check(capacity)
    memory = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 * (CELLS + capacity))
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(4)]
    lives = [s.detach() for s in socket.socketpair()]
    a, b, c, d = events
    first = SharedEnd(capacity, 0, memory, (a, b, c, d), lives[0])
    copies = [os.dup(fd) for fd in (memory, *events)]
    return first, SharedEnd(capacity, 1, copies[0], (copies[1], copies[2], copies[3], copies[4]), lives[1])


def usable() -> bool:
    """Whether this system has such memory, and the compiled code for it."""
    return sys.platform.startswith("linux") and native.library() is not None


def _check(capacity: int) -> None:
    if not usable():
        wrong = "it stands on eventfds, which Linux has, and on compiled code"
        raise CapabilityError("a channel over shared memory", wrong, "use a pair of sockets")
    if capacity & (capacity - 1) or not LEAST <= capacity <= MOST:
        wrong = f"a ring has a power of two from {LEAST} to {MOST}"
        raise ConfigError(f"shared memory of {capacity} bytes", wrong, f"use {CAPACITY}")


class Pipe:
    """An end of one of a channel's two rings in compiled code."""

    def __init__(self, memory: mmap.mmap, end: SharedEnd, ring: int, spin_us: int) -> None:
        library = native.library()
        assert library is not None, "looked at before"
        self._write, self._read = library.pl_ring_write, library.pl_ring_read
        came, went = end.events[2 * ring : 2 * ring + 2]
        self._keep = (ctypes.c_char * CELLS).from_buffer(memory, ring * (CELLS + end.capacity))
        self._pipe = native.Pipe(ctypes.addressof(self._keep), end.capacity, came, went, end.life, spin_us)
        self._staged = bytearray(STAGING)
        self._staging = (ctypes.c_char * STAGING).from_buffer(self._staged)
        self._large: bytearray | None = None
        self._written, self._taken = ctypes.c_int64(0), ctypes.c_int64(0)  # bytes of the frame under way
        self._at = [ctypes.addressof(one) for one in (self._pipe, self._staging, self._written, self._taken)]

    def write(self, data: bytes, timeout: float | None) -> None:
        """Write a frame."""
        pipe, _, written, _ = self._at
        self._written.value = 0
        status = self._write(pipe, data, len(data), written, -1 if timeout is None else int(1e6 * timeout))
        if status:
            self._go_on(status, lambda us: self._write(pipe, data, len(data), written, us), timeout, self._written)

    def read(self, timeout: float | None) -> bytearray:
        """A frame."""
        if self._large is None:
            pipe, staging, _, taken = self._at
            status = self._read(pipe, staging, STAGING, 1, taken, -1 if timeout is None else int(1e6 * timeout))
            if status:
                status = self._go_on(status, self._read_staged, timeout, self._taken)
            size = size_of(self._staged)
            if not status:
                self._taken.value = 0
                return self._staged[PREFIX.size : PREFIX.size + size]
            self._large, self._taken.value = bytearray(size), 0
        self._go_on(native.INTERRUPTED, self._read_large, timeout, None)
        frame, self._large, self._taken.value = self._large, None, 0
        return frame

    def _read_staged(self, us: int) -> int:
        pipe, staging, _, taken = self._at
        return self._read(pipe, staging, STAGING, 1, taken, us)

    def _read_large(self, us: int) -> int:
        assert self._large is not None
        size = len(self._large)
        return self._read(self._at[0], (ctypes.c_char * size).from_buffer(self._large), size, 0, self._at[3], us)

    @staticmethod
    def _go_on(status: int, call: Callable[[int], int], timeout: float | None, begun: ctypes.c_int64 | None) -> int:
        """Until it is done, whatever signals come meanwhile; ``begun``: bytes so far, None: some."""
        end = None if timeout is None else time.monotonic() + timeout
        while status == native.INTERRUPTED:
            status = call(-1 if end is None else max(0, int(1e6 * (end - time.monotonic()))))
        if status not in (native.DONE, native.LARGE):
            raise _refusal(status, begun is None or begun.value > 0)
        return status


def _refusal(status: int, begun: bool) -> Exception:
    if status == native.LATE:
        return Late("nothing came in time")
    return gone(begun) if status == native.CLOSED else FrameError("the shared memory holds what no end writes")


class SharedChannel:
    """One end of a channel over shared memory.

    Args:
        end: which; its file descriptors are taken over.
        spin_us: how long a wait spins before it parks.

    Raises:
        ConfigError: the memory is not what the end says.
        CapabilityError: it cannot be used here.
    """

    def __init__(self, end: SharedEnd, spin_us: int = SPIN_US) -> None:
        _check(end.capacity)
        size = 2 * (CELLS + end.capacity)
        try:
            self._memory = mmap.mmap(end.memory, size)
        except (OSError, ValueError) as error:
            raise ConfigError(f"shared memory of {size} bytes", f"{error}", "open the end that was made") from error
        self._end = end
        self._out: Pipe | None = Pipe(self._memory, end, end.own, spin_us)
        self._into: Pipe | None = Pipe(self._memory, end, 1 - end.own, spin_us)

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame."""
        if self._out is None:
            raise gone(False)
        data = b"".join(parts)
        fits(len(data))
        try:
            self._out.write(data, timeout)
        except Late:
            self.close()
            raise full(timeout) from None

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame."""
        if self._into is None:
            raise gone(False)
        try:
            return self._into.read(timeout)
        except FrameError:
            self.close()
            raise

    def close(self) -> None:
        """Be gone for the other end. The memory itself is given back with the process, or when nobody looks at it."""
        if self._into is not None:
            self._out = self._into = None
            self._end.drop()
