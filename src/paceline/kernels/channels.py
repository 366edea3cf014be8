"""The compiled ends of a ring in shared memory; see ``channels.cpp``."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from . import opened

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "channels.cpp"
DONE, LATE, CLOSED, INTERRUPTED, BROKEN, LARGE = range(6)  # what the functions give


class Pipe(ctypes.Structure):
    """See ``struct Pipe`` in the source."""

    _fields_ = [
        ("ring", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("capacity", "data_fd", "room_fd", "life_fd", "spin_us")),
    ]


@cache
def library() -> Any:
    """The functions, built if need be; None where they cannot be had."""
    try:
        found = opened(SOURCE)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("no compiled channels, Python's are used: %s", error)
        return None
    number, at = ctypes.c_int64, ctypes.c_void_p
    found.pl_ring_write.argtypes = [at, at, number, at, number]
    found.pl_ring_read.argtypes = [at, at, number, ctypes.c_int, at, number]
    return found
