"""Recipe files: model, data and settings of a training. TOML, read into dataclasses by pydantic.

Unknown keys are refused. A recipe names its data by file names; whoever trains names the folder that holds the files.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..weights.files import fill
from .data import STDLIB, SourceSpec
from .trainer import Phase, TrainConfig


@dataclass(kw_only=True)
class RecipeFile:
    """Describe what is trained, on which data, how: what a recipe file states."""

    kind: str  # target, draft_model, streams, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind
    config: TrainConfig = field(default_factory=TrainConfig)
    phases: Sequence[Phase] = (Phase(),)
    sources: Sequence[SourceSpec] = ()
    held_out: Sequence[SourceSpec] = ()
    prompt_weight: float = 0.0
    where: Path = Path("command line")  # the file; for messages


@dataclass(frozen=True, kw_only=True)
class RecipeTable:
    """The tables of a file, as TOML has them."""

    recipe: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    phase: tuple[dict[str, Any], ...] = ({},)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """The table [data]."""

    source: tuple[dict[str, Any], ...] = ()
    held_out: tuple[dict[str, Any], ...] = ()
    prompt_weight: float = 0.0


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
    table: RecipeTable = fill(RecipeTable, values, f"recipe {path}")
    data: DataTable = fill(DataTable, table.data, f"recipe {path}")
    if not table.recipe:
        raise ConfigError(f"recipe {path}", 'it does not name its kind (recipe = "eagle")', "add it")
    return RecipeFile(
        kind=table.recipe,
        options=table.options,
        config=fill(TrainConfig, table.train, f"recipe {path}"),
        phases=tuple(fill(Phase, p, f"recipe {path}") for p in table.phase),
        sources=tuple(fill(SourceSpec, s, f"recipe {path}") for s in data.source),
        held_out=tuple(fill(SourceSpec, s, f"recipe {path}") for s in data.held_out),
        prompt_weight=data.prompt_weight,
        where=path,
    )


def locate(recipe: RecipeFile, folder: Path) -> RecipeFile:
    """Return the recipe with its files in ``folder``."""

    def located(sources: Sequence[SourceSpec]) -> list[SourceSpec]:
        places = [s.file if s.file == STDLIB else str(folder / s.file) for s in sources]
        return [replace(s, file=place, domain=s.name) for s, place in zip(sources, places, strict=True)]

    return replace(recipe, sources=located(recipe.sources), held_out=located(recipe.held_out))
