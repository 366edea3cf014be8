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
from .files import free_bytes, is_file, opened, read_json

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
        tensors_of: a module's parameters under their names in the file.
    """

    what: str
    config_file: str
    weights_file: str
    restore: str
    format: int = 1
    tensors_of: Callable[[Any], dict[str, Tensor]] = lambda module: dict(module.named_parameters())

    def save(self, module: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None) -> None:
        """Write both files; the folder is made where it is missing.

        Args:
            module: whose parameters are kept.
            config: its shape, a dataclass.
            dtype: of the numbers in the file; None: the parameters' own.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        tensors = self.tensors_of(module)
        self._assert_loaded(tensors, folder / self.weights_file)
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: value.detach().to("cpu", dtype).contiguous() for name, value in tensors.items()}
        save_file(values, folder / self.weights_file, metadata={"format": "pt"})
        text = json.dumps({"format": self.format, **asdict(config)}, indent=1)
        (folder / self.config_file).write_text(text + "\n", encoding="utf-8")

    def config(self, kind: Callable[..., Config], folder: Path, readers: Mapping[str, Callable[[Any], Any]]) -> Config:
        """The shape that the JSON file says.

        Args:
            kind: its dataclass.
            readers: of entries that JSON spells in another way, by their names.

        Raises:
            ConfigError: no such file, no JSON object, another format, an entry that is unknown or missing, a value that
                cannot be.
        """
        file = self._file(folder, self.config_file)
        given = read_json(file, self.restore, "not JSON")
        if not isinstance(given, dict):
            raise ConfigError(str(file), "not a JSON object", self.restore)
        if given.pop("format", None) != self.format:
            raise ConfigError(str(file), f"not written in format {self.format}", "train it again, or update Paceline")
        known: Any = kind
        if unknown := sorted({*given} - {f.name for f in fields(known)}):
            raise ConfigError(str(file), f"unknown entries: {', '.join(unknown)[:200]}", self.restore)
        try:
            return kind(**{name: readers[name](value) if name in readers else value for name, value in given.items()})
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(str(file), f"not the configuration of {self.what} ({error})", self.restore) from error

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """What the safetensors file holds.

        Raises:
            ConfigError: it is not there, is broken, or takes more memory than is free.
        """
        file = self._file(folder, self.weights_file)
        size, free = file.stat().st_size, free_bytes(torch.device("cpu"))
        if free is not None and size > free:
            wrong = f"it takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            raise ConfigError(str(file), wrong, "free some memory, or use a smaller set")
        with opened(file, self.restore):
            return load_file(file)

    def fill(self, module: Made, values: Mapping[str, Tensor], file: Path, device: torch.device | str) -> Made:
        """A module on the meta device as one with numbers: memory comes after the check.

        Args:
            module: on the meta device; not to be used any more.
            values: its parameters.
            file: they came from, for messages.
            device: of the result.

        Raises:
            ConfigError: parameters that are missing, misshaped, left over or NaN.
        """
        wanted = self.tensors_of(module)
        for name in sorted({*wanted, *values}):
            if name not in values:
                wrong = "is missing"
            elif name not in wanted:
                wrong = "has no place here"
            elif values[name].shape != wanted[name].shape:
                wrong = f"is {tuple(values[name].shape)}, wanted {tuple(wanted[name].shape)}"
            elif not values[name].is_floating_point():
                wrong = f"is {values[name].dtype}, no floating-point numbers"
            else:
                continue
            raise ConfigError(str(file), f"{name} {wrong}", self.restore)
        module = module.to_empty(device=device)
        tensors = self.tensors_of(module)
        for name, parameter in tensors.items():
            parameter.data.copy_(values[name])
        self._assert_loaded(tensors, file)
        return module

    def _file(self, folder: Path, name: str) -> Path:
        if not is_file(folder / name):
            wrong = f"it holds no {name}" if folder.is_dir() else "there is no such folder"
            raise ConfigError(f"{self.what} {str(folder)!r}", wrong, f"name a folder that holds {self.what}")
        return folder / name

    def _assert_loaded(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        for name, value in tensors.items():
            if bool(value.isnan().any()):
                wrong = f"{name} holds NaN: not loaded, or broken in the file"
                raise ConfigError(str(file), wrong, self.restore)


def correct(what: str, config: Any, name: str, holds: bool, rule: str) -> None:
    """Refuse an entry of a shape unless the condition holds.

    Raises:
        ConfigError: ``name`` and the sentence ``rule``.
    """
    if not holds:
        asked = f"{what} with {name}={shown(getattr(config, name))}"
        raise ConfigError(asked, f"{name} {rule}", f"correct {name}")
