"""The folder of a run: completed phases, the time that they took, and a lock.

Each phase's result is written when it is complete, as JSON and whole; a run that ended at any point continues after the
last one. A phase continues from its partial results (answers, a cache, a checkpoint) by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ..core.errors import ConfigError
from ..draft import adapted
from ..train.files import plain, require_same, writing

STATE, LOCK = "adapt.json", "adapt.lock"
FORMAT = 6
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
        self.folder, self.allowed_s = folder, hours * 3600
        adapted.check_path(f"--out {folder}", folder.absolute())
        with writing(f"--out {folder}", "name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
        self._state: dict[str, Any] = {"format": FORMAT, "facts": plain(facts), "spent_s": 0.0, "done": {}}
        try:
            self._state |= self._read(facts)
        except ConfigError:
            os.close(self._lock)
            raise
        self._began, self._saved = monotonic() - float(self._state["spent_s"]), monotonic()

    def _read(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        file = self.folder / STATE
        if not file.is_file():
            return {}
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            stored = record["facts"], record["spent_s"] + 0.0, record["done"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            wrong = f"{STATE} in it cannot be read ({error!r})"
            raise ConfigError(f"--out {self.folder}", wrong, "name another folder, or remove the file") from error
        subject, remedy = f"--out {self.folder}", "name another folder, or repeat the first command"
        if record.get("format") != FORMAT:
            raise ConfigError(subject, "the folder holds a run of another version of Paceline", "name another folder")
        if stored[0].get("model") != facts.get("model"):
            raise ConfigError(subject, "it holds a run for another model, or for other weights of this one", remedy)
        wrong = "it holds a run of something else: there {name} is {found!r}, here {own!r}"
        require_same(subject, stored[0], facts, remedy, wrong)
        values: dict[str, Any] = record
        return values

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

    def done(self, phase: str) -> Any:
        """Return the result of a phase; None: it is not complete."""
        return self._state["done"].get(phase)

    def once(self, phase: str, make: Callable[[], Any]) -> Any:
        """Return the result of a phase: computed now, or stored when it was complete; ready for JSON."""
        if self.done(phase) is None:
            self._state["done"][phase] = plain({"": make()})[""]
            self._save()
        return self.done(phase)

    def _save(self) -> None:
        self._saved, self._state["spent_s"] = monotonic(), round(self.spent_s, 1)
        fresh = self.folder / f"{STATE}.{os.getpid()}"
        with writing(f"--out {self.folder}", FULL):
            try:
                fresh.write_text(json.dumps(self._state, indent=1) + "\n", encoding="utf-8")
                fresh.replace(self.folder / STATE)
            finally:
                fresh.unlink(missing_ok=True)


def _locked(folder: Path) -> int:
    """Return a descriptor that keeps others out of the folder while it is open.

    Raises:
        ConfigError: somebody holds it.
    """
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        import fcntl
    except ImportError:  # no POSIX: nobody is kept out
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        wrong = "another run is under way in it"
        raise ConfigError(f"--out {folder}", wrong, "wait for it, end it, or name another folder") from error
    return handle
