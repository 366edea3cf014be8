"""Files of runs: writing them with errors that give a remedy, and refusing those of another run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.errors import ConfigError, StorageError

OTHER_RUN = "it is of another run: its {name} is {found!r}, this run's {own!r}"


@contextmanager
def writing(what: str, remedy: str, *more: type[Exception]) -> Iterator[None]:
    """Around what writes a file: OSError, and ``more`` that a writer raises, become a StorageError."""
    kinds: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except kinds as error:
        raise StorageError(what, f"it cannot be written ({error})", remedy) from error


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
