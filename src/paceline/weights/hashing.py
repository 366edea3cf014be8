"""Hashes of large files: every byte counts, and none is read twice.

A file is cut into pieces of 4 MiB; its hash is sha256 over the sha256 of each piece, in order. So all cores can work at
one file, and the hash does not depend on how many there are.

A hash is kept in the user's cache folder, and holds as long as the file's path, size, times and inode stay what they
were. Reading gigabytes again is the worst that happens where that folder cannot be used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..core.folders import user_cache

PIECE_BYTES = 4 * 2**20
KIND = f"sha256 of pieces of {PIECE_BYTES} bytes"
SETTLED_S = 2.0  # a file that was changed later may change again and keep its times: they are as coarse as that
_BUFFER_BYTES = 2**20  # read at once, so that what is hashed is still in the processor's cache
_MOST_THREADS = 16

_found: dict[str, str] = {}  # by this process, and the digest of a state


def content_hash(file: Path) -> str:
    """Return the sha256 over the pieces of a file's content, as a hexadecimal number.

    Raises:
        OSError: it cannot be read.
    """
    size, state = _state_of(file)
    digest = _found.get(state) or _recall(state)
    if digest is None:
        settled = time.time() - file.stat().st_ctime > SETTLED_S  # before a byte is read: a change would be seen
        digest = _hash(file, size)
        if not settled or _state_of(file) != (size, state):
            return digest
        _keep(state, digest)
    _found[state] = digest
    return digest


def _state_of(file: Path) -> tuple[int, str]:
    """Return a file's size, and a digest of the facts that change with its content."""
    path = file.resolve(strict=True)  # without links: what several names lead to is read once
    status = path.stat()
    # Nobody can set st_ctime: a file that got its old time back has a new one.
    numbers = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    return status.st_size, hashlib.sha256(json.dumps([KIND, str(path), *numbers]).encode()).hexdigest()


# -- reading


def _hash(file: Path, size: int) -> str:
    starts = range(0, max(size, 1), PIECE_BYTES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _MOST_THREADS)) as pool:
        pieces = pool.map(lambda start: _hash_piece(file, start), starts)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(file: Path, start: int) -> bytes:
    """Hash the piece that begins at this byte; hashlib lets the other threads run meanwhile."""
    digest, remaining, room = hashlib.sha256(), PIECE_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while remaining and (count := stream.readinto(room[:remaining])):
            digest.update(room[:count])
            remaining -= count
    return digest.digest()


# -- keeping: a file for each state


def _place(state: str) -> Path | None:
    base = user_cache()
    return None if base is None else base / "hashes" / state


def _recall(state: str) -> str | None:
    """Return the stored hash of a file in this state; None: nothing is stored, or nothing usable."""
    with suppress(OSError, ValueError, AttributeError):
        digest = _place(state).read_text("ascii")  # type: ignore[union-attr]
        return digest if re.fullmatch("[0-9a-f]{64}", digest) else None
    return None


def _keep(state: str, digest: str) -> None:
    """Write in one step: a concurrent reader finds nothing, or the whole record."""
    with suppress(OSError, AttributeError):  # no such folder: it is computed at every start
        place: Path = _place(state)  # type: ignore[assignment]
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(f"{state}.{os.getpid()}")
        fresh.write_text(digest, "ascii")
        fresh.replace(place)
