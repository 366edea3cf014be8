"""Folders of the user's that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return where Paceline keeps what it can make again; None: the user has no such folder.

    It need not be there yet. Source: XDG Base Directory Specification, which has relative paths ignored: they would
    mean another folder wherever a process starts.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        return None
    return base / "paceline" if base.is_absolute() else None
