"""Hashes of large files: every byte counts, and none is read twice.

A file is cut into pieces of 4 MiB; its hash is sha256 over the sha256 of each piece, in order. So all cores can work at
one file, and the hash does not depend on how many there are.

A hash is kept in the user's cache folder, and holds as long as the file's path, size, times and inode stay what they
were. Reading gigabytes anew is the worst that happens where that folder cannot be used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.folders import user_cache

PIECE_BYTES = 4 * 2**20
KIND = f"sha256 of pieces of {PIECE_BYTES} bytes"
SETTLED_S = 2.0  # a file that was changed later may change again and keep its times: they are as coarse as that
_BUFFER_BYTES = 2**20  # read at once, so that what is hashed is still in the processor's cache
_MOST_THREADS = 16
_RECORD_BYTES = 2**16  # of what is kept of a file, at most

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _State:
    """What changes with a file's content."""

    path: str  # without links: what several names lead to is read once
    size: int
    mtime_ns: int
    ctime_ns: int  # which nobody can set: a file that got its old time back has a new one
    inode: int
    device: int

    @property
    def settled(self) -> bool:
        """Whether a change from now on would be seen."""
        return time.time() - self.ctime_ns * 1e-9 > SETTLED_S


_found: dict[_State, str] = {}  # by this process


def content_hash(file: Path) -> str:
    """sha256 over the pieces of a file's content, as a hexadecimal number.

    Raises:
        OSError: it cannot be read.
    """
    state = _state_of(file)
    known = _found.get(state) or _recall(state)
    if known is None:
        settled = state.settled  # before a byte is read
        known = _hash(file, state.size)
        if not settled or _state_of(file) != state:
            return known
        _keep(state, known)
    _found[state] = known
    return known


def _state_of(file: Path) -> _State:
    path = file.resolve(strict=True)
    found = path.stat()
    return _State(str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


# -- reading


def _hash(file: Path, size: int) -> str:
    starts = range(0, max(size, 1), PIECE_BYTES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _MOST_THREADS)) as pool:
        pieces = pool.map(lambda start: _hash_piece(file, start), starts)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(file: Path, start: int) -> bytes:
    """Of the piece that begins at this byte; hashlib lets the other threads run meanwhile."""
    digest, left, room = hashlib.sha256(), PIECE_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(room[:left])):
            digest.update(room[:count])
            left -= count
    return digest.digest()


# -- keeping


def _place(state: _State) -> Path | None:
    """The file that keeps a path's hash: one each, so that processes that write at once do not meet."""
    base = user_cache()
    name = hashlib.sha256(state.path.encode(errors="surrogateescape")).hexdigest()[:32]
    return None if base is None else base / "hashes" / f"{name}.json"


def _recall(state: _State) -> str | None:
    """What was kept of a file that is as it was; None: nothing, or nothing that can be used."""
    place = _place(state)
    if place is None:
        return None
    try:
        with place.open("rb") as stream:
            found = json.loads(stream.read(_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.pop("kind", None) != KIND:
        return None
    known = found.pop("hash", None)
    same = found == asdict(state) and isinstance(known, str) and re.fullmatch("[0-9a-f]{64}", known)
    return known if same else None


def _keep(state: _State, known: str) -> None:
    place = _place(state)
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(place, json.dumps({"kind": KIND, **asdict(state), "hash": known}).encode())
    except (OSError, UnicodeError) as error:
        log.info("the hash of %s is not kept, and is computed at every start: %s", state.path, error)


def _write(place: Path, content: bytes) -> None:
    """In one step: who reads it meanwhile finds the old file or the new one."""
    handle, fresh = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(fresh, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
