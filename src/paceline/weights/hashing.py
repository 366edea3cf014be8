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
_MOST_THREADS = 16


def content_hash(file: Path) -> str:
    """Return the sha256 over the pieces of a file's content, as a hexadecimal number.

    Raises:
        OSError: it cannot be read.
    """
    size, state = _state_of(file)
    record = (user_cache() or Path(os.devnull)) / "hashes" / state
    with suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{64}", digest := record.read_text("ascii")):
            return digest
    settled = time.time() - file.stat().st_ctime > SETTLED_S  # before a byte is read: a change would be seen
    digest = _hash(file, size)
    if settled and _state_of(file) == (size, state):
        with suppress(OSError):  # no such folder: it is computed at every start
            record.parent.mkdir(parents=True, exist_ok=True)
            fresh = record.with_name(f"{state}.{os.getpid()}")  # a concurrent reader finds nothing, or the whole record
            fresh.write_text(digest, "ascii")
            fresh.replace(record)
    return digest


def _state_of(file: Path) -> tuple[int, str]:
    """Return a file's size, and a digest of the facts that change with its content."""
    path = file.resolve(strict=True)  # without links: what several names lead to is read once
    status = path.stat()
    # Nobody can set st_ctime: a file that got its old time back has a new one.
    numbers = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    return status.st_size, hashlib.sha256(json.dumps([KIND, str(path), *numbers]).encode()).hexdigest()


def _hash(file: Path, size: int) -> str:
    starts = range(0, max(size, 1), PIECE_BYTES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _MOST_THREADS)) as pool:
        pieces = pool.map(lambda start: _hash_piece(file, start), starts)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(file: Path, start: int) -> bytes:
    """Hash the piece that begins at this byte; hashlib lets the other threads run meanwhile."""
    with file.open("rb") as stream:
        stream.seek(start)
        return hashlib.sha256(stream.read(PIECE_BYTES)).digest()
