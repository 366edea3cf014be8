"""The folder of `--learn`: the files through which the server and the learner communicate.

requests/           token ids of requests (`store`)
learner.json        what the learner is to train for
drafters/N/         drafters that passed their check
offer.json          the last one of them, and how it did
refused.json        numbers of those that did worse at work
learner-seen.json   number of the last request that it has learned from
learner.log         the learner's log
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...train.files import replacing

REQUESTS, TASK, SEEN, LOG = "requests", "learner.json", "learner-seen.json", "learner.log"
OFFER, REFUSED, DRAFTERS = "offer.json", "refused.json", "drafters"


def write(file: Path, values: Any) -> None:
    """Write JSON for the user alone, whole or not at all."""
    with replacing(file) as fresh:
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(values) + "\n", encoding="utf-8")


def read(file: Path, default: Any = None) -> Any:
    """Return JSON that another process wrote; ``default`` where there is none, or none that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
