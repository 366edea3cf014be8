"""A small trained module in a folder: a JSON file with its shape, and a safetensors file with its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.options import shown
from .files import fill, free_bytes, is_file, opened, read_json

Made = TypeVar("Made", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TrainedConfig:
    """The shape of a trained module, and the target that it was trained for."""

    what: ClassVar[str]  # in messages
    retired: ClassVar[tuple[tuple[str, Any], ...]] = ()  # entries of older files that are constants now
    target: str = ""  # name of the target, for messages; empty: not recorded
    fingerprint: str = ""  # of the target's checkpoint; empty: not recorded

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Refuse an entry unless the condition holds.

        Raises:
            ConfigError: ``name`` and the sentence ``rule``.
        """
        if not holds:
            subject = f"{self.what} with {name}={shown(getattr(self, name))}"
            raise ConfigError(subject, f"{name} {rule}", f"correct {name}")


Config = TypeVar("Config", bound=TrainedConfig)


@dataclass(frozen=True, slots=True)
class TrainedFiles:
    """The files of one kind of modules."""

    what: str
    config_file: str
    weights_file: str
    restore: str  # what to do where one of them is broken
    format: int | None = 1  # number of the JSON file's form; None: it has none
    # A module's parameters under their names in the file.
    tensors_of: Callable[[Any], dict[str, Tensor]] = lambda module: dict(module.named_parameters())

    def write(
        self, tensors: Mapping[str, Tensor], entries: Mapping[str, Any], folder: Path, dtype: torch.dtype | None
    ) -> None:
        """Write both files, tensors by their names and ``entries`` of the JSON file, into a folder.

        A missing folder is made. ``dtype`` is that of floating-point numbers, None: their own.

        Raises:
            ConfigError: a tensor that holds NaN or infinity.
        """
        self._check_numbers(tensors, folder / self.weights_file)
        folder.mkdir(parents=True, exist_ok=True)
        values = {}
        for name, value in tensors.items():
            # parts of one tensor share no memory
            values[name] = value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous().clone()
        save_file(values, folder / self.weights_file, metadata={"format": "pt"})
        form = {} if self.format is None else {"format": self.format}
        text = json.dumps({**form, **entries}, indent=1)
        (folder / self.config_file).write_text(text + "\n", encoding="utf-8")

    def entries(self, folder: Path) -> dict[str, Any]:
        """Return the entries of the JSON file.

        Raises:
            ConfigError: no such file, no JSON object, another format.
        """
        file = self._file(folder, self.config_file)
        content = read_json(file, self.restore, "not JSON")
        if not isinstance(content, dict):
            raise ConfigError(str(file), "the file does not hold a JSON object", self.restore)
        if self.format is not None and content.pop("format", None) != self.format:
            raise ConfigError(str(file), f"it is not in format {self.format}", "train it again, or update Paceline")
        return content

    def config(self, kind: type[Config], folder: Path) -> Config:
        """Return the shape in the JSON file; errors as for `build_config` and `entries`."""
        return self.build_config(kind, self.entries(folder), folder / self.config_file)

    def build_config(self, kind: type[Config], values: Mapping[str, Any], file: Path) -> Config:
        """Return a dataclass ``kind`` from entries of the JSON file; errors as of `fill`."""
        values = {name: value for name, value in values.items() if (name, value) not in kind.retired}
        config: Config = fill(kind, values, str(file), self.restore)
        return config

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors of the safetensors file.

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
        """Return a module on the meta device, not to be used any more, as one with the file's ``values``.

        Memory is taken after the check.
        """
        self._check_shapes(self.tensors_of(module), values, file)
        module = module.to_empty(device=device)
        self.copy(self.tensors_of(module), values, file)
        return module

    @torch.no_grad()
    def copy(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor], file: Path) -> None:
        """Copy the tensors of a file into those that they belong in, both by their names in the file.

        Raises:
            ConfigError: tensors that are missing, misshaped, left over, NaN or infinite.
        """
        self._check_shapes(targets, values, file)
        self._check_numbers(values, file)
        for name, value in targets.items():
            value.data.copy_(values[name])

    def _check_shapes(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor], file: Path) -> None:
        for name in sorted({*targets, *values}):
            if name not in values:
                wrong = "is missing"
            elif name not in targets:
                wrong = "has no place here"
            elif values[name].shape != targets[name].shape:
                wrong = f"is {tuple(values[name].shape)}, wanted {tuple(targets[name].shape)}"
            elif targets[name].is_floating_point() and not values[name].is_floating_point():
                wrong = f"is {values[name].dtype}, no floating-point numbers"
            else:
                continue
            raise ConfigError(str(file), f"{name} {wrong}", self.restore)

    def _file(self, folder: Path, name: str) -> Path:
        if not is_file(folder / name):
            wrong = f"it holds no {name}" if folder.is_dir() else "there is no such folder"
            lost = name != self.config_file and is_file(folder / self.config_file)
            remedy = self.restore if lost else f"name a folder that holds {self.what}"
            raise ConfigError(f"{self.what} {str(folder)!r}", wrong, remedy)
        return folder / name

    def _check_numbers(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        for name, value in tensors.items():
            if not bool(value.isfinite().all()):
                wrong = f"{name} holds NaN or infinity: not loaded, or broken in the file"
                raise ConfigError(str(file), wrong, self.restore)


def continued(stored: Any, current: Any, folder: Path, other: Iterable[str] = ()) -> None:
    """Refuse to train on from a module of a folder whose shape, a dataclass, is not the wanted one.

    ``other`` fields and the target's may differ. Its target may have been an earlier state of this run's.

    Raises:
        ConfigError: the first field that differs.
    """
    for name in (f.name for f in fields(current)):
        theirs, ours = getattr(stored, name), getattr(current, name)
        if theirs != ours and name not in ("target", "fingerprint", *other):
            wrong = f"its {name} is {shown(theirs)}, this run's {shown(ours)}"
            raise ConfigError(f"training from {folder}", wrong, "train with its options, or without --init")


def resumed(target: Made, config: Any, folder: Path, other: Iterable[str] = ()) -> Made:
    """Return a module loaded from ``folder``, with this run's ``config``; arguments and errors as for `continued`."""
    module: Any = target
    continued(module.config, config, folder, other)
    module.config = config
    return target
