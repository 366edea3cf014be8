"""What a run has measured so far, on disk as soon as it is measured: a run that is cut off can go on.

The journal is one JSON object a line: a header with the settings, then trials and answers as they come. A last line
that was cut in the middle is dropped when the journal is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..core.errors import ConfigError
from .records import Trial

NAME = "journal.jsonl"
FORMAT = 1


class Journal:
    """An append-only file of trials.

    Args:
        path: of the file; None keeps nothing.
        settings: everything on which the trials depend. A journal of other settings is refused.
        resume: go on with the file that is there, if there is one.

    Raises:
        ConfigError: the file cannot be read or written, or it belongs to other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], *, resume: bool) -> None:
        self.trials: list[Trial] = []
        self.answers: dict[str, list[list[int]]] = {}  # by conversation, token ids of the answers to earlier turns
        self._file: TextIO | None = None
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # as it will be read back: tuples are lists, for one
        try:
            size = self._read(path, settings) if resume and path.exists() else 0
            self._file = open(path, "r+" if size else "w", encoding="utf-8", newline="\n")  # noqa: SIM115  (closed by close)
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise ConfigError(
                f"journal {path}", f"cannot be used ({error})", "name another folder with --out"
            ) from error
        if not size:
            self._write({"journal": FORMAT, "settings": settings})

    def add(self, trial: Trial) -> None:
        """Keep a finished trial."""
        self.trials.append(trial)
        self._write({"trial": trial.as_dict()})

    def add_answer(self, conversation: str, ids: list[int]) -> None:
        """Keep the answer to one turn of a conversation, on which the next turn's prompt is built."""
        self.answers.setdefault(conversation, []).append(ids)
        self._write({"answer": ids, "conversation": conversation})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()

    def _read(self, path: Path, settings: dict[str, Any]) -> int:
        """Take in what is there. Returns how many bytes of it are whole lines."""
        records = list(_whole_lines(path))
        if not records:
            return 0
        header, _ = records[0]
        if header.get("journal") != FORMAT:
            raise ConfigError(
                f"--resume with {path}", "it is no journal of this version", "use --overwrite to start again"
            )
        theirs = header.get("settings", {})
        differing = [key for key in {**theirs, **settings} if theirs.get(key) != settings.get(key)]
        if differing:
            said = "; ".join(
                f"{key} was {_brief(theirs.get(key))}, is {_brief(settings.get(key))}" for key in differing
            )
            raise ConfigError(
                f"--resume with {path}",
                f"it was begun with other settings: {said}",
                "give the same settings, or start again with --overwrite",
            )
        try:
            for record, _ in records[1:]:
                if "trial" in record:
                    self.trials.append(Trial.from_dict(record["trial"]))
                else:
                    self.answers.setdefault(record["conversation"], []).append(record["answer"])
        except (KeyError, ValueError) as error:
            wrong = f"it holds what no run writes ({error})"
            raise ConfigError(f"--resume with {path}", wrong, "start again with --overwrite") from error
        return records[-1][1]


def holds_trials(path: Path) -> bool:
    """Whether anything was measured that would be lost."""
    return any("trial" in record for record, _ in _whole_lines(path))


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, offset of the byte behind it) of every whole line, up to the first that is none."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record, end


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:100] + "..."
