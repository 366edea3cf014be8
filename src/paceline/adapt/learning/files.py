"""The folder of `--learn`: the files through which the server and the learner communicate.

requests/           token ids of requests, and the target's states of the newest (`store`)
learner.json        what the learner is to train for
drafters/N/         drafters that passed their check
offer.json          the last one of them, and how it did
refused.json        numbers of those that did worse at work
learner-seen.json   number of the last request that it has learned from
learner.log         the learner's log
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

REQUESTS, TASK, SEEN, LOG = "requests", "learner.json", "learner-seen.json", "learner.log"
OFFER, REFUSED, DRAFTERS = "offer.json", "refused.json", "drafters"


def write(file: Path, values: Any) -> None:
    """Write JSON for the user alone, whole or not at all."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(values) + "\n")
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


def read(file: Path, default: Any = None) -> Any:
    """Return JSON that another process wrote; ``default`` where there is none, or none that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
