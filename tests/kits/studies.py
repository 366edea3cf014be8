"""Studies, run in this process, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def values(folder: Path, name: str) -> dict[str, Any]:
    """Return a figure's JSON."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return found


def run(study: Any, out: Path, *arguments: object) -> dict[str, Any]:
    """Run a study into a folder; return the JSON of the figure that is named first."""
    threads = torch.get_num_threads()
    try:
        assert study.run([*map(str, arguments), "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    return values(out, str(arguments[0]))
