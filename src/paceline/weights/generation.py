"""``generation_config.json``: how a model's text ends and how it is sampled, by its makers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..model.config_fields import token_ids
from .files import is_file, read_json

FILE = "generation_config.json"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # the fields that are read, as in vLLM
CHAT = {"temperature": 0.7, "top_p": 0.95}  # where it does not set how tokens are drawn
_REMEDY = "restore or remove the file"


def ends(folder: Path) -> tuple[int, ...]:
    """Return its end-of-text ids; none where there is no such file or it names none.

    Raises:
        ConfigError: it is broken.
    """
    return token_ids("eos_token_id", _read(folder).get("eos_token_id"), FILE)


def sampling(folder: Path, overrides: dict[str, Any]) -> SamplingParams:
    """Return how a model is sampled: as `recommended`, but for ``overrides`` fields, which the user has chosen.

    Raises:
        ConfigError: the file is broken, or has a value that cannot be; a given one that cannot be.
    """
    return SamplingParams(**{**recommended(folder, overrides), **overrides})


def recommended(folder: Path, overrides: Collection[str] = ()) -> dict[str, Any]:
    """Return how a model is sampled, as fields of `SamplingParams`.

    They are those of the file in its folder, else of `CHAT`. ``do_sample: false`` is temperature 0; a penalty counts
    there as well. Values of ``overrides`` fields do not matter.

    Raises:
        ConfigError: the file is broken, or has a value that cannot be.
    """
    file = _read(folder)
    values = {name: file[name] for name in SAMPLED if file.get(name) is not None}
    if file.get("do_sample") is False:
        values = {"temperature": 0.0, **{name: values[name] for name in ("repetition_penalty",) if name in values}}
    _check(folder / FILE, {name: value for name, value in values.items() if name not in overrides})
    return values if values.keys() - {"repetition_penalty"} else {**CHAT, **values}


def _check(file: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        try:
            SamplingParams(**{name: value})
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.subject}", error.wrong, f"correct the file, or give {name}") from error


def _read(folder: Path) -> dict[str, Any]:
    """Return the file's content; empty where there is none."""
    file = folder / FILE
    if not is_file(file):
        return {}
    content = read_json(file, _REMEDY)
    if not isinstance(content, dict):
        raise ConfigError(str(file), f"it holds a {type(content).__name__}, not an object", _REMEDY)
    return content
