"""The last requests as token ids, in a file of a fixed size that belongs to the user alone.

One process writes, another reads while it does. A slot holds one request: the end of its prompt and the beginning of
its answer. A slot that is being written fails its checksum, and is left out. Texts are never kept.

    header   magic, slots, tokens a slot
    slot     checksum, prompt tokens, tokens, number (from 1 on; 0: empty), tokens
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from ..core.errors import ConfigError

MAGIC = b"paceline ring 1\n"
HEADER = struct.Struct("<16sII")
SLOT = struct.Struct("<IIIQ")
SLOTS, PROMPT, ANSWER = 8192, 352, 160  # 17 MB
_REMEDY = "name another folder for --learn, or remove the file: what is kept in it is forgotten then"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was answered."""

    number: int
    prompt: list[int]
    answer: list[int]


class Ring:
    """The file.

    Args:
        path: made, whole and with mode 0600, where it is missing.
        slots: requests that it holds.

    Raises:
        ConfigError: no room for it, no ring, or one that others may read.
    """

    def __init__(self, path: Path, slots: int = SLOTS) -> None:
        self.path, self.slots, self.tokens = path, slots, PROMPT + ANSWER
        self.bytes = SLOT.size + 4 * self.tokens
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"learn={path.parent}", f"{path.name} cannot be made or read ({error})", _REMEDY
            ) from error
        self.last = max((one.number for one in self.read()), default=0)

    def _open(self) -> None:
        size, own = HEADER.size + self.slots * self.bytes, HEADER.pack(MAGIC, self.slots, self.tokens)
        asked = f"learn={self.path.parent}"
        handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            found = os.fstat(handle)
            if found.st_mode & 0o077:
                raise ConfigError(asked, f"others may read {self.path.name}", f"chmod 600 {self.path}")
            if not found.st_size:
                _allocate(handle, size)
                os.pwrite(handle, own, 0)
            elif found.st_size != size or os.pread(handle, HEADER.size, 0) != own:
                raise ConfigError(asked, f"{self.path.name} is no ring of this version", _REMEDY)
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Keep a request in the place of the oldest one."""
        head, said = prompt[-PROMPT:], answer[:ANSWER]
        ids = np.array([*head, *said], dtype="<u4").tobytes()
        self.last += 1
        at = HEADER.size + self.last % self.slots * self.bytes
        rest = struct.pack("<IIQ", len(head), len(head) + len(said), self.last) + ids
        self._map[at : at + 4] = b"\0\0\0\0"  # what is read from now on fails its checksum
        self._map[at + 4 : at + 4 + len(rest)] = rest
        self._map[at : at + 4] = struct.pack("<I", crc32(rest))

    def read(self, after: int = 0) -> list[ServedRequest]:
        """The requests that are whole, oldest first, with numbers above ``after``."""
        found = [self._read(slot) for slot in range(self.slots)]
        return sorted((one for one in found if one is not None and one.number > after), key=lambda one: one.number)

    def _read(self, slot: int) -> ServedRequest | None:
        at = HEADER.size + slot * self.bytes
        mark, prompt, count, number = SLOT.unpack_from(self._map, at)
        if not number or not prompt <= count <= self.tokens:
            return None
        rest = self._map[at + 4 : at + SLOT.size + 4 * count]
        if crc32(rest) != mark:
            return None
        ids = np.frombuffer(rest, dtype="<u4", offset=SLOT.size - 4).tolist()
        return ServedRequest(number, ids[:prompt], ids[prompt:])

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()


def _allocate(handle: int, size: int) -> None:
    """Room for the whole file now: a full disk is then an error here, and no fault of a step."""
    try:
        os.posix_fallocate(handle, 0, size)
    except AttributeError:  # no POSIX
        os.ftruncate(handle, size)
