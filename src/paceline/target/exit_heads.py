"""Trained early exits: their numbers, their files, and what they say.

The exit behind layer e maps a state to what the target's own final norm and head can read:

    f(h) = W2 ReLU(W1 h),    logits = W_LM norm(f(h))        W1 [H/2, H], W2 [H, H/2]

The final norm applies to what the map makes. The paper leaves it out of eq. 6; but W_LM was trained on states behind
it, and the length of f(h), which would else have to be learned, then does not count. There is no bias: a head has
H^2 parameters, as the paper's shares say.

Source: Mirror Speculative Decoding, section 3.1, eq. 6, and E.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.errors import CapabilityError, ConfigError
from ..core.options import check, shown
from .adapters import fill_normal
from .decoder import Decoder
from .files import check_target, is_file, opened, read_json
from .linear import nan_parameter

CONFIG_FILE, WEIGHTS_FILE = "exits.json", "exits.safetensors"
FORMAT = 1
MOST_EXITS = 16
RESTORE = "restore the file, or train the exits again"


@dataclass(frozen=True, kw_only=True)
class ExitsConfig:
    """Exits that were trained for a target."""

    layers: tuple[int, ...]  # of the target in front of each exit, ascending
    num_layers: int  # of the target
    d_model: int  # likewise
    vocab_size: int  # likewise
    target: str = ""  # its name; empty: not recorded
    fingerprint: str = ""  # of its checkpoint; empty: not recorded

    def __post_init__(self) -> None:
        check(self, "early exits with ")
        inside = all(0 < layer < self.num_layers for layer in self.layers)
        rising = list(self.layers) == sorted(set(self.layers))
        self._require("layers", inside and rising, f"must rise, from 1 to {self.num_layers - 1}")
        self._require("layers", 0 < len(self.layers) <= MOST_EXITS, f"must be 1 to {MOST_EXITS}")
        self._require("d_model", 2 <= self.d_model <= 2**20 and self.d_model % 2 == 0, "must be even")
        self._require("vocab_size", 2 <= self.vocab_size <= 2**24, "must be 2 or more")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            asked = f"early exits with {name}={shown(getattr(self, name))}"
            raise ConfigError(asked, f"{name} {rule}", f"correct {name}")

    @staticmethod
    def from_json(values: Mapping[str, Any], where: str) -> ExitsConfig:
        """What `ExitHeads.save` wrote.

        Raises:
            ConfigError: another format, a key that is unknown or missing, a value that cannot be.
        """
        given = dict(values)
        if given.pop("format", None) != FORMAT:
            raise ConfigError(where, f"not written in format {FORMAT}", "train it again, or update Paceline")
        if unknown := sorted({*given} - {f.name for f in fields(ExitsConfig)}):
            raise ConfigError(where, f"unknown entries: {', '.join(unknown)[:200]}", RESTORE)
        try:
            return ExitsConfig(**{**given, "layers": tuple(given.get("layers", ()))})
        except TypeError as error:
            raise ConfigError(where, f"not the configuration of early exits ({error})", RESTORE) from error


class ExitHeads(nn.Module):
    """The parameters of K exits; NaN until loaded, or made by `fresh`.

    Args:
        config: their shape.
        dtype, device: of the parameters.
    """

    def __init__(
        self, config: ExitsConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        count, d = len(config.layers), config.d_model
        self.down = nan_parameter((count, d // 2, d), dtype, device, True)  # W1 of each
        self.up = nan_parameter((count, d, d // 2), dtype, device, True)  # W2

    @staticmethod
    @torch.no_grad()
    def fresh(config: ExitsConfig, generator: torch.Generator | None = None) -> ExitHeads:
        """Exits to be trained, in float32: random, of a length that keeps that of the states."""
        heads, d = ExitHeads(config), config.d_model
        fill_normal(heads.down, d**-0.5, generator)
        fill_normal(heads.up, (d / 4) ** -0.5, generator)  # ReLU leaves half of d/2 numbers
        return heads

    def adapt(self, exit_: int, hidden: Tensor) -> Tensor:
        """f(h) of one exit, for states [.., d_model] behind its layers."""
        return F.linear(torch.relu(F.linear(hidden, self.down[exit_])), self.up[exit_])

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.named_parameters()}
        save_file(values, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps({"format": FORMAT, **asdict(self.config)}, indent=1)
        (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")


def load(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> ExitHeads:
    """Trained exits from a folder that `ExitHeads.save` wrote.

    Raises:
        ConfigError: files or tensors that are missing, broken, misshaped or left over.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not is_file(folder / name):
            raise ConfigError(f"early exits {str(folder)!r}", f"it holds no {name}", "name a folder of trained exits")
    where, file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    values = read_json(where, RESTORE, "not JSON")
    if not isinstance(values, dict):
        raise ConfigError(str(where), "not a JSON object", RESTORE)
    heads = ExitHeads(ExitsConfig.from_json(values, str(where)), dtype, "meta")
    with opened(file, RESTORE):
        found = load_file(file)
    wanted = {name: tuple(value.shape) for name, value in heads.named_parameters()}
    for name in sorted({*wanted, *found}):
        shape = tuple(found[name].shape) if name in found else None
        if shape != wanted.get(name):
            raise ConfigError(str(file), f"{name} is {shape}, wanted: {wanted.get(name)}", RESTORE)
        if bool(found[name].isnan().any()):
            raise ConfigError(str(file), f"{name} holds NaN", RESTORE)
    heads = heads.to_empty(device=device)
    for name, parameter in heads.named_parameters():
        parameter.data.copy_(found[name])
    return heads.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class TrainedExit:
    """One exit of a target, as an `ExitHead`."""

    target: Decoder
    heads: ExitHeads
    place: int  # among the exits

    @property
    def layer(self) -> int:
        """See `ExitHead`."""
        return self.heads.config.layers[self.place]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ExitHead`."""
        return self.target.read(self.heads.adapt(self.place, hidden))


def exit_of(folder: Path, target: Decoder, layer: int, name: str, mark: str | None = None) -> TrainedExit:
    """The trained exit behind the first ``layer`` layers of a target.

    Args:
        folder: of trained exits.
        target: that they are to read.
        layer: layers in front of the exit.
        name, mark: of the target, and its checkpoint's `fingerprint`; None: not looked at.

    Raises:
        ConfigError: as of `load`.
        CapabilityError: exits of another target, or none behind that layer.
    """
    heads = load(folder, target.dtype, target.device)
    asked = f"early exits {str(folder)!r}"
    check_target(asked, heads.config, name, target.config, mark)
    if layer not in heads.config.layers:
        there = ", ".join(map(str, heads.config.layers))
        raise CapabilityError(f"{asked} at layer {layer}", f"they lie behind layers {there}", "name one of these")
    return TrainedExit(target, heads, heads.config.layers.index(layer))


def shares(num_layers: int, parts: Sequence[float] = (0.25, 0.5, 0.75)) -> tuple[int, ...]:
    """Layers in front of exits at these shares of the depth (E.2), rounded down, 1 at least."""
    return tuple(sorted({max(1, int(num_layers * part)) for part in parts}))
