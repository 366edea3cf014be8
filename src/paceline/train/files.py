"""Files of runs: reading and writing them with errors that give a remedy, and refusing those of another run."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, StorageError

OTHER_RUN = "it is of another run: its {name} is {found!r}, this run's {own!r}"


def read_lines(path: Path, what: str, remedy: str) -> Iterator[str]:
    """Yield the lines of a text file, which is compressed if its name ends in .gz; they end at newlines alone.

    Raises:
        ConfigError: it cannot be read as text.
    """
    opener: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:  # a file may begin with a mark
            yield from lines
    except FileNotFoundError as error:
        raise ConfigError(what, "there is no such file", "check the path") from error
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(what, f"it cannot be read as text ({error})", remedy) from error


def read_records(path: Path, what: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of JSON lines, each with its place for messages; blank lines are left out.

    Raises:
        ConfigError: as of `read_lines`; a line that is not a JSON object.
    """
    for number, line in enumerate(read_lines(path, what, remedy), 1):
        if line.strip():
            place = f"{what}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(place, f"it is not JSON ({error})", remedy) from error
            if not isinstance(record, dict):
                raise ConfigError(place, f"it is a {type(record).__name__}, not an object", remedy)
            yield place, record


@contextmanager
def writing(what: str, remedy: str, *more: type[Exception]) -> Iterator[None]:
    """Around what writes a file: OSError, and ``more`` that a writer raises, become a StorageError."""
    kinds: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except kinds as error:
        raise StorageError(what, f"it cannot be written ({error})", remedy) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; the file takes the place of ``path`` once it is whole, else nothing is left of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def require_same(
    what: str, stored: Mapping[str, Any], current: Mapping[str, Any], remedy: str, wrong: str = OTHER_RUN
) -> None:
    """Refuse a file whose facts ``stored``, as JSON gave them, are not the ``current`` ones that it must have.

    Raises:
        ConfigError: a fact differs; ``wrong`` gets the ``name`` of the first, what was ``stored``, what is ``current``.
    """
    expected = plain(current)
    differ = [name for name in {*stored, *expected} if stored.get(name) != expected.get(name)]
    if differ:
        name = min(differ, key=lambda name: (name != "recipe", name))  # of another recipe much else differs, too
        raise ConfigError(what, wrong.format(name=name, found=stored.get(name), own=expected.get(name)), remedy)


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as they come back from a JSON file."""
    values: dict[str, Any] = json.loads(json.dumps(facts))
    return values
