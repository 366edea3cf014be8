"""The last requests, in files of a fixed size that belong to the user alone: token ids, and the target's states.

One process writes, another reads while it does. A slot that is being written fails its checksum, and is left out. Texts
are never kept. A request's states are those of the target's last layer that its drafter was shown, so that nobody has
to compute them again: the target's logits after each token are its head's product with them.

    file     magic, slots, bytes of a slot's values
    slot     checksum, bytes, number (from 1 on; 0: empty), values: of a request its prompt's length and its ids; of
             states how many tokens of the request lie before the first, then bfloat16
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from ...core.errors import ConfigError

MAGIC = b"paceline ring 2\n"
HEADER = struct.Struct("<16sII")
SLOT = struct.Struct("<IIQ")
COUNT = struct.Struct("<I")
SLOTS, PROMPT, ANSWER = 8192, 352, 160  # 17 MB
STATE_SLOTS, STATE_BYTES = 640, 256 * 10**6  # more requests than a round learns from; fewer of wide targets
_REMEDY = "name another folder in learn=DIR, or remove the file, which loses its requests"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was answered."""

    number: int
    prompt: list[int]
    answer: list[int]


class SlotFile:
    """Slots by number; a new one takes the place of the oldest.

    Args:
        path: made, whole and with mode 0600, where it is missing.
        slots: that it holds.
        size: bytes of a slot's values, at most.

    Raises:
        ConfigError: no room for it, another file, or one that others may read.
    """

    def __init__(self, path: Path, slots: int, size: int) -> None:
        self.path, self.slots, self.bytes = path, slots, SLOT.size + size
        try:
            self._open(HEADER.size + slots * self.bytes, HEADER.pack(MAGIC, slots, size))
        except OSError as error:
            wrong = f"{path.name} cannot be made or read ({error})"
            raise ConfigError(f"learn={path.parent}", wrong, _REMEDY) from error

    def _open(self, size: int, header: bytes) -> None:
        subject = f"learn={self.path.parent}"
        handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            status = os.fstat(handle)
            if status.st_mode & 0o077:
                raise ConfigError(subject, f"others may read {self.path.name}", f"chmod 600 {self.path}")
            if not status.st_size:
                _allocate(handle, size)
                os.pwrite(handle, header, 0)
            elif status.st_size != size or os.pread(handle, HEADER.size, 0) != header:
                raise ConfigError(subject, f"{self.path.name} is not a ring of this version", _REMEDY)
            self._map = mmap.mmap(handle, size, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def put(self, number: int, values: bytes) -> None:
        """Write a slot. By a call, in which other threads run on: a page of a map may have to be waited for."""
        head = SLOT.pack(0, len(values), number)[COUNT.size :]
        slot = COUNT.pack(crc32(values, crc32(head))) + head + values
        os.pwrite(self._handle, slot, HEADER.size + number % self.slots * self.bytes)

    def get(self, slot: int) -> tuple[int, bytes] | None:
        """Return number and values of a slot; None where it is empty or not whole."""
        at = HEADER.size + slot * self.bytes
        head = self._map[at : at + SLOT.size]
        mark, size, number = SLOT.unpack(head)
        values = self._map[at + SLOT.size : at + SLOT.size + size]
        whole = number and size <= self.bytes - SLOT.size and crc32(values, crc32(head[COUNT.size :])) == mark
        return (number, values) if whole else None

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        os.close(self._handle)


class Ring(SlotFile):
    """Requests as token ids.

    Args:
        path, slots: as for `SlotFile`, whose errors it raises.
    """

    def __init__(self, path: Path, slots: int = SLOTS) -> None:
        super().__init__(path, slots, COUNT.size + 4 * (PROMPT + ANSWER))
        self.last = max((one.number for one in self.read()), default=0)

    def add(self, prompt: list[int], answer: list[int]) -> int:
        """Keep the end of a prompt and the beginning of its answer; returns the request's number."""
        head = prompt[-PROMPT:]
        self.last += 1
        self.put(self.last, COUNT.pack(len(head)) + np.array([*head, *answer[:ANSWER]], dtype="<u4").tobytes())
        return self.last

    def read(self, after: int = 0) -> list[ServedRequest]:
        """Return the requests that are whole, oldest first, with numbers above ``after``."""
        requests = []
        for number, values in filter(None, map(self.get, range(self.slots))):
            if number > after:
                (prompt,), ids = COUNT.unpack_from(values), np.frombuffer(values, "<u4", offset=COUNT.size).tolist()
                requests.append(ServedRequest(number, ids[:prompt], ids[prompt:]))
        return sorted(requests, key=lambda one: one.number)


class StateRing(SlotFile):
    """States of the last requests of a `Ring`.

    Args:
        path: as for `SlotFile`, whose errors it raises.
        width: of a state.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.width, size = width, COUNT.size + 2 * width * (PROMPT + ANSWER)
        super().__init__(path, max(1, min(STATE_SLOTS, STATE_BYTES // size)), size)

    def add(self, number: int, skipped: int, states: np.ndarray) -> None:
        """Keep the states [rows, width] (bits of bfloat16) of a request's tokens after the first ``skipped``."""
        self.put(number, COUNT.pack(skipped) + states.tobytes())

    def of(self, number: int) -> tuple[int, np.ndarray] | None:
        """Return what `add` stored; None where it was overwritten."""
        slot = self.get(number % self.slots)
        if slot is None or slot[0] != number:
            return None
        states = np.frombuffer(slot[1], "<u2", offset=COUNT.size).reshape(-1, self.width)
        return int(COUNT.unpack_from(slot[1])[0]), states


def _allocate(handle: int, size: int) -> None:
    """Allocate room for the whole file now: a full disk is then an error here, and not in a step."""
    try:
        os.posix_fallocate(handle, 0, size)
    except AttributeError:  # no POSIX
        os.ftruncate(handle, size)
