"""Weights that do not come along: where they are published, and where they lie once they were fetched.

A card of the zoo names one file by the Python package that carries it, its SHA-256, and the hub's name of the same
model. The file is looked for in that package, where it is installed (it is never imported), then in the user's cache.
The hub's copy is a folder of safetensors, kept by the hub's own client.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..core.folders import user_cache


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model's weights."""

    package: str  # a requirement, version pinned: ``name==version``
    module: str  # its folder among the installed packages
    file: str  # in that folder, and in the cache
    sha256: str  # of the file
    bytes: int  # of the file
    hub: str  # ``organisation/name``: the same model, in its own precision
    licence: str

    def locate(self) -> Path | None:
        """Return the file in the installed package or in the cache, else the hub's folder, where its client has it."""
        return next((place for place in self.files() if place.is_file()), None) or self._of_hub()

    def files(self) -> list[Path]:
        """Return the paths of the file, in the order in which they are tried."""
        spec = None
        with suppress(ImportError, ValueError):
            spec = find_spec(self.module)
        installed = [Path(spec.origin).parent / self.file] if spec is not None and spec.origin else []
        return [*installed, cache() / self.file]

    def is_whole(self, path: Path) -> bool:
        """Return whether the file exists, with the expected content."""
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest() == self.sha256

    def _of_hub(self) -> Path | None:
        """Return the hub's folder, where its client has it whole."""
        home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
        snapshots = Path(home).expanduser() / f"models--{self.hub.replace('/', '--')}" / "snapshots"
        configs = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        whole = [file.parent for file in configs if any(file.parent.glob("*.safetensors"))]
        return whole[-1] if whole else None


def cache() -> Path:
    """Return the folder where fetched files are kept."""
    named = os.environ.get("PACELINE_WEIGHTS")
    return Path(named).expanduser() if named else (user_cache() or Path(os.devnull)) / "weights"
