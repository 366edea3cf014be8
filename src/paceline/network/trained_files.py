"""A small trained module in a folder: a JSON file that says its shape, and a safetensors file with its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.options import shown
from .files import opened, read_json

Config = TypeVar("Config")
Made = TypeVar("Made", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class TrainedFiles:
    """How modules of one sort are kept.

    Args:
        what: their name in messages.
        config_file, weights_file: names of the two files.
        restore: what to do where one of them is broken.
        format: number of the JSON file's form.
    """

    what: str
    config_file: str
    weights_file: str
    restore: str
    format: int = 1

    def save(self, module: nn.Module, config: Any, folder: Path, dtype: torch.dtype) -> None:
        """Write both files; the folder is made where it is missing.

        Args:
            module: whose parameters are kept.
            config: its shape, a dataclass.
            dtype: of the numbers in the file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: value.detach().to("cpu", dtype).contiguous() for name, value in module.named_parameters()}
        save_file(values, folder / self.weights_file, metadata={"format": "pt"})
        text = json.dumps({"format": self.format, **asdict(config)}, indent=1)
        (folder / self.config_file).write_text(text + "\n", encoding="utf-8")

    def read(self, folder: Path) -> dict[str, Any]:
        """What the JSON file holds.

        Raises:
            ConfigError: no JSON object.
        """
        file = folder / self.config_file
        values = read_json(file, self.restore, "not JSON")
        if not isinstance(values, dict):
            raise ConfigError(str(file), "not a JSON object", self.restore)
        return values

    def config(
        self,
        kind: Callable[..., Config],
        values: Mapping[str, Any],
        where: str,
        readers: Mapping[str, Callable[[Any], Any]],
    ) -> Config:
        """The shape that a JSON object says.

        Args:
            kind: its dataclass.
            values: the object.
            where: it came from, for messages.
            readers: of entries that JSON spells in another way, by their names.

        Raises:
            ConfigError: another format, an entry that is unknown or missing, a value that cannot be.
        """
        given = dict(values)
        if given.pop("format", None) != self.format:
            raise ConfigError(where, f"not written in format {self.format}", "train it again, or update Paceline")
        known: Any = kind
        if unknown := sorted({*given} - {f.name for f in fields(known)}):
            raise ConfigError(where, f"unknown entries: {', '.join(unknown)[:200]}", self.restore)
        try:
            return kind(**{name: readers.get(name, _as_it_is)(value) for name, value in given.items()})
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(where, f"not the configuration of {self.what} ({error})", self.restore) from error

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """What the safetensors file holds.

        Raises:
            ConfigError: it is broken.
        """
        with opened(folder / self.weights_file, self.restore):
            return load_file(folder / self.weights_file)

    def fill(self, module: Made, values: Mapping[str, Tensor], file: Path, device: torch.device | str) -> Made:
        """A module on the meta device as one with numbers, which are not trained on: memory comes after the check.

        Args:
            module: on the meta device; not to be used any more.
            values: its parameters.
            file: they came from, for messages.
            device: of the result.

        Raises:
            ConfigError: parameters that are missing, misshaped, left over or NaN.
        """
        wanted = {name: tuple(value.shape) for name, value in module.named_parameters()}
        found = {name: tuple(value.shape) for name, value in values.items()}
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                said = [f"{shape}" if shape else "not there" for shape in (found.get(name), wanted.get(name))]
                raise ConfigError(str(file), f"{name} is {said[0]}, wanted: {said[1]}", self.restore)
        module = module.to_empty(device=device)
        for name, parameter in module.named_parameters():
            parameter.data.copy_(values[name])
            if bool(parameter.isnan().any()):
                raise ConfigError(str(file), f"{name} holds NaN", self.restore)
        return module.requires_grad_(False)


def correct(what: str, config: Any, name: str, holds: bool, rule: str) -> None:
    """Refuse an entry of a shape unless the condition holds.

    Raises:
        ConfigError: ``name`` and the sentence ``rule``.
    """
    if not holds:
        asked = f"{what} with {name}={shown(getattr(config, name))}"
        raise ConfigError(asked, f"{name} {rule}", f"correct {name}")


def _as_it_is(value: Any) -> Any:
    return value
