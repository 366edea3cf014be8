"""The folder of a run: completed phases, the time that they took, and a lock.

Each phase's result is written when it is complete, as JSON and whole; a run that ended at any point continues after the
last one. A phase continues from its partial results (answers, a cache, a checkpoint) by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ..core.errors import ConfigError
from ..draft import adapted
from ..train.files import plain, replacing, require_same, writing

STATE, LOCK = "adapt.json", "adapt.lock"
FORMAT = 7
SAVE_S = 2.0  # between two times that the clock is written down
FULL = "free space there and repeat the command, which continues"


class RunFolder:
    """A run's folder, as long as it is open.

    Args:
        folder: is made where it is missing.
        facts: the options that a continued run must share.
        hours: how long all of it may take.

    Raises:
        ConfigError: it cannot be written to, holds a run of something else, or a run is under way in it.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], hours: float) -> None:
        self.folder, self.allowed_s, subject = folder, hours * 3600, f"--out {folder}"
        adapted.check_path(subject, folder.absolute())
        with writing(subject, "name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._state = self._read(plain({"format": FORMAT, **facts}))
        except BlockingIOError as error:
            os.close(self._lock)
            remedy = "wait for it, end it, or name another folder"
            raise ConfigError(subject, "another run is under way in it", remedy) from error
        except (OSError, ConfigError):
            os.close(self._lock)
            raise
        self._began, self._saved = monotonic() - float(self._state["spent_s"]), monotonic()

    def _read(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a run with these facts: a new one, or the one in the folder."""
        file, subject = self.folder / STATE, f"--out {self.folder}"
        if not file.is_file():
            return {"facts": facts, "spent_s": 0.0, "done": {}}
        try:
            state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            stored = state["facts"], state["spent_s"] + 0.0, state["done"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            wrong = f"{STATE} in it cannot be read ({error!r})"
            raise ConfigError(subject, wrong, "name another folder, or remove the file") from error
        wrong = "it holds a run of something else: there {name} is {found!r}, here {own!r}"
        require_same(subject, stored[0], facts, "name another folder, or repeat the first command", wrong)
        return state

    def close(self) -> None:
        """Write the clock down and let others in."""
        with suppress(ConfigError):  # a full disk: already reported
            self._save()
        os.close(self._lock)

    # -- the clock

    @property
    def spent_s(self) -> float:
        """Return the seconds so far, over all parts of the run."""
        return monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.allowed_s - self.spent_s

    def tick(self) -> None:
        """Record the time now and then, so that a run that is killed loses little of its clock."""
        if monotonic() - self._saved > SAVE_S:
            self._save()

    # -- phases

    def once(self, phase: str, make: Callable[[], Any]) -> Any:
        """Return the result of a phase: computed now, or stored when it was complete; ready for JSON."""
        if phase not in self._state["done"]:
            self._state["done"][phase] = plain({"": make()})[""]
            self._save()
        return self._state["done"][phase]

    def _save(self) -> None:
        self._saved, self._state["spent_s"] = monotonic(), round(self.spent_s, 1)
        with writing(f"--out {self.folder}", FULL), replacing(self.folder / STATE) as fresh:
            fresh.write_text(json.dumps(self._state, indent=1) + "\n", encoding="utf-8")
