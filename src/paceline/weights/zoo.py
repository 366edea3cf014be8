"""The embedded models: their folders and cards.

A model of the zoo is a Hugging Face folder with one more file, ``zoo.json``, which has its role and names its draft
and its drafter. A trained set (role "streams" or "adapter": ``streams.json`` and ``streams.safetensors``; role "head":
weights of its drafter, of Lyanna, EAGLE, Medusa or SPIRe, or early exits for the mirror round) names in its
``zoo.json`` the target it was trained for. ``read_by`` in a draft's or a set's card is the drafter (or the round) that
means this one where it is named without weights: ``--drafter lyanna``; adapters, which change answers, have none.
Folders are looked for in ``$PACELINE_ZOO``, in the ``zoo/`` of a source checkout, then in the ``_zoo`` of the wheel.

A model too large for the package has a card without weights, which names where they are published (`published`):
``paceline models get NAME`` fetches them, and the name is then one like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.errors import ConfigError
from ..core.options import check
from .published import Published

_PACKAGE = Path(__file__).resolve().parents[1]
CARD = "zoo.json"
LOOK_UP = "suffix"  # drafts for any model
Role = Literal["target", "draft", "head", "streams", "adapter"]
ROLES: tuple[Role, ...] = get_args(Role)  # in the order in which they are listed
TRAINED_SETS = ("head", "streams", "adapter")


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """One embedded model."""

    name: str
    role: Role
    description: str
    parameters: int
    bytes: int  # of the weights on disk
    path: Path | None  # its folder or file; None: published weights that are not on this machine
    draft: str | None = None  # the zoo's own draft model for this target
    drafter: str | None = None  # the default drafter of the command line for this target
    drafter_in: Mapping[str, str] = field(default_factory=dict)  # the same in a dtype where another one pays
    target: str | None = None  # the zoo's target that a trained set belongs to
    read_by: str | None = None  # the drafter, or the round, that reads it where the user names no weights
    published: Published | None = None  # where its weights are, which do not come along

    def __post_init__(self) -> None:
        check(self)
        if (self.role in TRAINED_SETS) != (self.target is not None):
            raise ValueError("a trained set, and nothing else, names its target")


def find(name: str) -> Path | None:
    """Return the folder (or GGUF file) of the zoo's model ``name``, or None where the zoo has no such model.

    Raises:
        ConfigError: ``$PACELINE_ZOO`` is set and is not a folder; the weights are published, and not fetched yet.
    """
    entry = _entries().get(name)
    if entry is not None and entry.path is None:
        wrong = f"its weights ({entry.bytes / 1e6:.0f} MB) are not on this machine"
        raise ConfigError(f"model {name}", wrong, f"fetch them: paceline models get {name}")
    return entry.path if entry else None


def available() -> list[ZooEntry]:
    """Return every embedded model and trained set, in the order of `ROLES`, then by name."""
    return sorted(_entries().values(), key=lambda entry: (ROLES.index(entry.role), entry.name))


def default_drafter(name: str, dtype: str = "auto") -> str | None:
    """Return the drafter, as ``--drafter`` takes it, of a target in ``dtype``, or None where the zoo has none.

    Args:
        name: the target's name, its folder or its file.
    """
    entry = _entry(name)
    return entry.drafter_in.get(dtype, entry.drafter) if entry else None


def trained_for(model: str) -> list[ZooEntry]:
    """Return the zoo's draft and trained sets for a model, which is a name or a folder."""
    entry = _entry(model)
    return [e for e in _entries().values() if entry and (e.target == entry.name or e.name == entry.draft)]


def weights(kind: str, model: str) -> str | None:
    """Return the name of the weights for ``model`` that the drafter or round ``kind`` reads; None: there are none.

    Of several it is the first by name, and one of ``$PACELINE_ZOO`` before all others.
    """
    return next((entry.name for entry in trained_for(model) if entry.read_by == kind), None)


def readable(kind: str) -> dict[str, str]:
    """Return by model the names of the weights that `weights` returns for it."""
    folders = {entry.name: weights(kind, entry.name) for entry in available()}
    return {model: name for model, name in folders.items() if name is not None}


def _entry(model: str) -> ZooEntry | None:
    """Return the entry of a name, of a folder or of a file."""
    place = None
    with suppress(OSError, RuntimeError, ValueError):  # no path at all
        place = Path(model).expanduser().resolve()
    return next((e for e in _entries().values() if model == e.name or (e.path and e.path.resolve() == place)), None)


def roots() -> list[Path]:
    """Return the folders that are searched; the first match wins."""
    chosen = os.environ.get("PACELINE_ZOO")
    if chosen and not Path(chosen).is_dir():
        raise ConfigError(f"PACELINE_ZOO={chosen}", "there is no such folder", "unset it or name a folder of models")
    checkout = _PACKAGE.parents[1]
    candidates = [Path(chosen)] if chosen else []
    if (checkout / "pyproject.toml").is_file():  # an editable install: src/paceline inside the repository
        candidates.append(checkout / "zoo")
    candidates.append(_PACKAGE / "_zoo")
    return [folder for folder in candidates if folder.is_dir()]


def _entries() -> dict[str, ZooEntry]:
    entries: dict[str, ZooEntry] = {}
    for root in roots():
        for card in sorted(root.glob(f"*/{CARD}")):
            entry = _read(card)
            entries.setdefault(entry.name, entry)
    return entries


def _read(card: Path) -> ZooEntry:
    try:
        facts: dict[str, Any] = json.loads(card.read_text(encoding="utf-8"))
        values: dict[str, Any] = {name: facts[name] for name in ("role", "description", "parameters")}
        values |= {name: facts.get(name) for name in ("draft", "drafter", "target", "read_by")}
        values["drafter_in"] = facts.get("drafter_in", {})
        path: Path | None = card.parent
        size = sum(file.stat().st_size for file in card.parent.glob("*.safetensors"))
        published = Published(**facts["published"]) if "published" in facts else None
        if published is not None:
            path, size = published.locate(), published.bytes
        return ZooEntry(name=card.parent.name, path=path, bytes=size, published=published, **values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = f"not a readable zoo card ({error!r})"
        raise ConfigError(str(card), wrong, "restore it or remove its folder") from error
