"""Drafters that `paceline adapt` made for a model: a folder whose `SETTINGS` have the options.

The folder is a drafter's name of its own (``--drafter FOLDER``), and ``auto`` finds the last one that was made for a
model by the fingerprint of the model's weights: a file in the user's cache names the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..core.folders import user_cache

SETTINGS, WEIGHTS = "adapted.json", "drafter"
FORMAT = 1
HERE = "{folder}"  # in a drafter's text: the folder of its weights
REFUSED = frozenset(",;:+<>")  # characters that mean something in a drafter's text
_REMEDY = "run paceline adapt again with the same --out, or name another drafter"


def is_adapted(text: str) -> bool:
    """Return whether a text names such a folder."""
    try:
        return (Path(text).expanduser() / SETTINGS).is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def read(folder: Path) -> dict[str, Any]:
    """Return a folder's settings.

    Raises:
        ConfigError: they cannot be read, or are of another format.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        texts = [settings[name] for name in ("drafter", "target", "fingerprint", "dtype")]
        if settings["format"] != FORMAT or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"not of format {FORMAT}")
        dict(settings["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"drafter {folder}", f"{SETTINGS} in it cannot be read ({error!r})", _REMEDY) from error
    values: dict[str, Any] = settings
    return values


def write(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings, with a hash of each file of the weights; whole or not at all."""
    weights = folder / WEIGHTS
    files = {file.name: _hash(file) for file in sorted(weights.iterdir())} if weights.is_dir() else {}
    fresh = folder / f"{SETTINGS}.{os.getpid()}"
    fresh.write_text(json.dumps({"format": FORMAT, **settings, "files": files}, indent=1) + "\n", encoding="utf-8")
    fresh.replace(folder / SETTINGS)


def named(text: str) -> str:
    """Return the drafter, as the registry reads it, that a folder stands for.

    Raises:
        ConfigError: settings that cannot be read, a file that is not the one that was written, a path that a
            drafter's text cannot hold.
    """
    folder = Path(text).expanduser().absolute()
    settings = read(folder)
    check_path(f"drafter {text}", folder)
    for name, digest in settings["files"].items():
        file = folder / WEIGHTS / name
        if not file.is_file() or _hash(file) != digest:
            wrong = f"{WEIGHTS}/{name} is not the file that was made with it"
            raise CapabilityError(f"drafter {text}", wrong, _REMEDY)
    drafter: str = settings["drafter"]
    return drafter.replace(HERE, str(folder / WEIGHTS))


def check_path(subject: str, folder: Path) -> None:
    """Raise ConfigError where a folder's path cannot stand in a drafter's text."""
    if odd := sorted(REFUSED & {*str(folder)}):
        wrong = f"its path holds {odd[0]!r}, which means something in a drafter's name"
        raise ConfigError(subject, wrong, "use a folder of another name")


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# -- found by the model


def pointers() -> Path | None:
    """Return the folder of the files that name the folders; None: the user has none."""
    base = user_cache()
    return None if base is None else base / "adapted"


def remember(folder: Path, fingerprint: str) -> None:
    """Let `found` give ``folder`` for the model of this fingerprint; without a cache folder nothing is remembered."""
    place = pointers()
    if place is not None:
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / fingerprint).write_text(f"{folder.absolute()}\n", encoding="utf-8")
        except OSError:
            return


def any_made() -> bool:
    """Return whether a folder was made for any model: to look for one takes a model's fingerprint."""
    place = pointers()
    return place is not None and place.is_dir() and any(place.iterdir())


def find(model: Path, dtype: str) -> str | None:
    """Return the folder that was last made for a model's weights in this dtype, if it is still there.

    None: there is none.
    """
    from ..weights.files import fingerprint  # here, since it needs torch

    place = pointers()
    if place is None:
        return None
    try:
        mark = fingerprint(model)
        folder = (place / mark).read_text(encoding="utf-8").strip()
        settings = read(Path(folder))
    except (OSError, ConfigError):
        return None
    return folder if (settings["fingerprint"], settings["dtype"]) == (mark, dtype) else None
