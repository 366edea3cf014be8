"""Applications: trained sets that requests name, over one base model.

The rows of a request that names an application go through the base's linear layers plus the application's adapters, and
may have rows next to them that draft; rows of other requests in the same pass are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..core.errors import ConfigError
from ..core.options import shown
from ..core.registry import APPLICATIONS
from ..weights.files import fingerprint
from ..weights.source import resolve_folder
from .adapters import AdapterRange, LowRank, joined
from .decoder import Decoder

BASE = "base"  # what the base model is called where a word is needed, so no application may be


@dataclass(frozen=True, kw_only=True, eq=False)
class Application:
    """One trained set in shared mode, ready to run."""

    name: str  # the name that requests use
    identity: str  # sha256 of the set's files: K/V is shared among requests with the same one
    adapter: LowRank | None  # of its rows and of those next to them; None: it has none
    beside: Any = None  # makes rows next to every generated row, which attends to them; None: there are none
    rows: int = 0  # so many next to each


def locate(named: Mapping[str, str], offline: bool = False) -> dict[str, Path]:
    """Return the folder of every application's trained set.

    Raises:
        ConfigError: no such folder, or an invalid name; names the application.
    """
    folders = {}
    for name, where in named.items():
        if not name or name == BASE or name != name.strip():
            wrong = f"{shown(name)} cannot name an application"
            remedy = f"choose another; {BASE!r} is the base model"
            raise ConfigError(f"application {shown(name)} ({shown(str(where))})", wrong, remedy)
        try:
            folders[name] = resolve_folder(where, offline=offline)
        except ConfigError as error:
            subject = f"application {shown(name)}: {str(where)[:300]}"
            raise ConfigError(subject, "no such trained set", f"check the folder ({error})") from error
    return folders


def load_applications(
    folders: Mapping[str, Path], decoder: Decoder, target: str, target_folder: Path
) -> dict[str, Application]:
    """Load trained sets by the names that requests use, for the target whose checkpoint lies in a folder.

    Raises:
        ConfigError: an invalid name, files that are missing or broken, a set in lossless mode, or one that was trained
            for another target.
    """
    if not folders:
        return {}
    target_mark, load = fingerprint(target_folder), resolve_name(f"{APPLICATIONS}:load")
    return {name: load(name, folder, decoder, target, target_mark) for name, folder in folders.items()}


def rows_beside(folder: Path) -> int:
    """Return how many rows the generated rows of a trained set have next to each; 0: it has adapters alone."""
    return int(resolve_name(f"{APPLICATIONS}:read_config")(folder).gamma)


def adapter_ranges(
    applications: Sequence[Application | None], rows: Sequence[tuple[int, int]]
) -> tuple[AdapterRange, ...]:
    """Return which rows of a pass have which adapters.

    They are disjoint ranges in ascending order; neighbours with the same adapters are one.

    Args:
        applications: [B] of each sequence.
        rows: [B] (first, one past the last) packed row of each sequence, ascending.
    """
    adapters = [None if application is None else application.adapter for application in applications]
    return joined((start, stop, adapter) for adapter, (start, stop) in zip(adapters, rows, strict=True))
