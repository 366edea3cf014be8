"""Recipe files: what is trained, on which data, how. TOML, read into dataclasses; unknown keys are refused.

A recipe names its data by file names. A manifest beside it says for each file its hash, its public source, its
licence and how it is made from that source; the folder that holds the files is named by whoever trains.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import ConfigError
from .data import STDLIB, SourceSpec, sha256
from .trainer import Phase, TrainConfig

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """One recipe file."""

    path: Path
    recipe: str  # its kind: target, draft_model, streams, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind
    train: TrainConfig = field(default_factory=TrainConfig)
    phases: Sequence[Phase] = (Phase(),)
    sources: Sequence[SourceSpec] = ()
    held_out: Sequence[SourceSpec] = ()
    prompt_weight: float = 0.0
    manifest: str = MANIFEST


def read_recipe(path: Path) -> RecipeFile:
    """Read a recipe file.

    Raises:
        ConfigError: not there, not TOML, unknown keys, wrong values.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {path}", "there is no such file", "see zoo/recipes for examples") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}", f"not TOML ({error})", "correct it") from error
    data = _table(values.pop("data", {}), path, "data")
    made = RecipeFile(
        path=path,
        recipe=str(values.pop("recipe", "")),
        options=_table(values.pop("options", {}), path, "options"),
        train=fill(TrainConfig, values.pop("train", {}), path),
        phases=tuple(fill(Phase, p, path) for p in values.pop("phase", [{}])),
        sources=tuple(fill(SourceSpec, s, path) for s in data.pop("source", [])),
        held_out=tuple(fill(SourceSpec, s, path) for s in data.pop("held_out", [])),
        prompt_weight=float(data.pop("prompt_weight", 0.0)),
        manifest=str(data.pop("manifest", MANIFEST)),
    )
    for left in (values, data):
        if left:
            raise ConfigError(f"recipe {path}", f"it has an unknown key {next(iter(left))!r}", "remove or correct it")
    if not made.recipe:
        raise ConfigError(f"recipe {path}", 'it does not say its kind (recipe = "target")', "add it")
    return made


def fill(kind: type[Any], values: Any, path: Path) -> Any:
    """A dataclass from a table; unknown keys and wrong types are refused."""
    values = _table(values, path, kind.__name__)
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        remedy = f"{hint}known: {', '.join(sorted(known))}"
        raise ConfigError(f"recipe {path}", f"{kind.__name__} has no {unknown[0]!r}", remedy)
    hints = get_type_hints(kind)
    try:
        return kind(**{name: _value(name, value, hints[name], path) for name, value in values.items()})
    except TypeError as error:
        raise ConfigError(f"recipe {path}", str(error), "correct it") from error


def _value(name: str, value: Any, hint: Any, path: Path) -> Any:
    """A value as its field wants it: lists become tuples, whole numbers fractions.

    Raises:
        ConfigError: it is of another type.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, list | tuple):
        value = tuple(value)
    elif float in kinds and int not in kinds and type(value) is int:
        value = float(value)
    if not any(_fits(value, kind) for kind in kinds):
        wanted = " or ".join(str(getattr(kind, "__name__", kind)) for kind in kinds)
        raise ConfigError(f"recipe {path}", f"{name}={value!r} is not of type {wanted}", "correct it")
    return value


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(part, get_args(kind)[0]) for part in value)
    return type(value) is kind


def _table(value: Any, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"recipe {path}", f"{name} is no table", "correct it")
    return dict(value)


def locate(recipe: RecipeFile, folder: Path) -> RecipeFile:
    """The recipe with its files found in ``folder`` and checked against the manifest.

    Raises:
        ConfigError: a file that is missing, or is not the one that the manifest names.
    """
    known = read_manifest(recipe.path.parent / recipe.manifest)
    found = {s.file: _check(s.file, folder, known) for s in (*recipe.sources, *recipe.held_out)}

    def moved(sources: Sequence[SourceSpec]) -> tuple[SourceSpec, ...]:
        return tuple(SourceSpec(**{**_values(s), "file": found[s.file], "domain": s.name}) for s in sources)

    values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    return RecipeFile(**{**values, "sources": moved(recipe.sources), "held_out": moved(recipe.held_out)})


def _values(spec: SourceSpec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec)}


def read_manifest(path: Path) -> dict[str, Any]:
    """file name -> its hash, source, licence and how it is obtained."""
    try:
        files: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["files"]
        return files
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"manifest {path}", f"it cannot be read ({error})", "restore it") from error


def _check(name: str, folder: Path, known: Mapping[str, Any]) -> str:
    if name == STDLIB:
        return name
    entry = known.get(name)
    if entry is None:
        raise ConfigError(f"data file {name}", "the manifest does not name it", "add it to the manifest")
    path = folder / name
    if not path.is_file():
        raise ConfigError(
            f"data file {name}", f"it is not in {folder}", f"obtain it: {entry['source']}; {entry['obtain']}"
        )
    if entry["sha256"] is not None and sha256(path) != entry["sha256"]:  # derived files differ by machine
        remedy = f"obtain it again: {entry['source']}; {entry['obtain']}"
        raise ConfigError(f"data file {path}", "its hash is not the manifest's", remedy)
    return str(path)
