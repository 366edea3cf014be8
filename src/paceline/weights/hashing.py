"""Hashes of large files: every byte counts, and none is read twice.

A file is cut into pieces of 4 MiB; its hash is sha256 over the sha256 of each piece, in order. So all cores can work at
one file, and the hash does not depend on how many there are.

A hash is kept in the user's cache folder, and holds as long as the file's path, size, times and inode stay what they
were. Reading gigabytes again is the worst that happens where that folder cannot be used.
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
from pathlib import Path
from typing import Any

from ..core.folders import user_cache

PIECE_BYTES = 4 * 2**20
KIND = f"sha256 of pieces of {PIECE_BYTES} bytes"
SETTLED_S = 2.0  # a file that was changed later may change again and keep its times: they are as coarse as that
_BUFFER_BYTES = 2**20  # read at once, so that what is hashed is still in the processor's cache
_MOST_THREADS = 16
_RECORD_BYTES = 2**16  # of what is kept of a file, at most

log = logging.getLogger(__name__)


State = dict[str, Any]  # facts that change with a file's content
_found: dict[tuple[Any, ...], str] = {}  # by this process, and the values of a state


def content_hash(file: Path) -> str:
    """Return the sha256 over the pieces of a file's content, as a hexadecimal number.

    Raises:
        OSError: it cannot be read.
    """
    state = _state_of(file)
    key = tuple(state.values())
    known = _found.get(key) or _recall(state)
    if known is None:
        settled = time.time() - state["ctime_ns"] * 1e-9 > SETTLED_S  # before a byte is read: a change would be seen
        known = _hash(file, state["size"])
        if not settled or _state_of(file) != state:
            return known
        _keep(state, known)
    _found[key] = known
    return known


def _state_of(file: Path) -> State:
    path = file.resolve(strict=True)  # without links: what several names lead to is read once
    found = path.stat()
    # Nobody can set st_ctime: a file that got its old time back has a new one.
    numbers = {name: getattr(found, f"st_{name}") for name in ("size", "mtime_ns", "ctime_ns")}
    return {"path": str(path), **numbers, "inode": found.st_ino, "device": found.st_dev}


# -- reading


def _hash(file: Path, size: int) -> str:
    starts = range(0, max(size, 1), PIECE_BYTES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _MOST_THREADS)) as pool:
        pieces = pool.map(lambda start: _hash_piece(file, start), starts)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(file: Path, start: int) -> bytes:
    """Hash the piece that begins at this byte; hashlib lets the other threads run meanwhile."""
    digest, left, room = hashlib.sha256(), PIECE_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(room[:left])):
            digest.update(room[:count])
            left -= count
    return digest.digest()


# -- keeping


def _place(state: State) -> Path | None:
    """Return the file of a path's hash: one each, so that processes that write at once do not collide."""
    base = user_cache()
    name = hashlib.sha256(state["path"].encode(errors="surrogateescape")).hexdigest()[:32]
    return None if base is None else base / "hashes" / f"{name}.json"


def _recall(state: State) -> str | None:
    """Return the stored hash of a file that has not changed; None: nothing is stored, or nothing usable."""
    place = _place(state)
    if place is None:
        return None
    try:
        with place.open("rb") as stream:
            found = json.loads(stream.read(_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    known = found.pop("hash", None) if isinstance(found, dict) else None
    same = found == {"kind": KIND, **state} and isinstance(known, str) and re.fullmatch("[0-9a-f]{64}", known)
    return known if same else None


def _keep(state: State, known: str) -> None:
    place = _place(state)
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(place, json.dumps({"kind": KIND, **state, "hash": known}).encode())
    except (OSError, UnicodeError) as error:
        log.info("the hash of %s is not kept, and is computed at every start: %s", state["path"], error)


def _write(place: Path, content: bytes) -> None:
    """Write in one step: a concurrent reader finds the old file or the new one."""
    handle, fresh = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(fresh, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
