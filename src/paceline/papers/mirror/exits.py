"""Early exits: a target's predictions in the middle of its layers, and the trained maps that make it readable.

The trained exit after layer e maps a state to what the target's own final norm and head can read:

    f(h) = h + W2 ReLU(W1 h),    logits = W_LM norm(f(h))        W1 [H/2, H], W2 [H, H/2]

The final norm applies to what the map makes. The paper leaves it out of eq. 6; but W_LM was trained on states after
it, and the length of f(h), which would else have to be learned, then does not count. There is no bias: a head has
H^2 parameters, by the paper's shares. The state that is added is ours, with W2 = 0 to begin with: an exit begins as
what the head reads of the state as it is, which the paper's map first has to learn again.

Source: Mirror Speculative Decoding, section 3.1, eq. 6, and E.2.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from ...core.errors import CapabilityError, ConfigError
from ...core.options import check
from ...model.adapters import fill_normal
from ...model.decoder import Decoder
from ...model.linear import nan_parameter
from ...weights.files import check_target
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "exits.json", "exits.safetensors"
FILES = TrainedFiles("early exits", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the exits again")
MOST_EXITS = 16


@dataclass(frozen=True, kw_only=True)
class ExitsConfig(TrainedConfig):
    """Exits that were trained for a target."""

    what: ClassVar[str] = "early exits"
    retired = (("skip", True),)

    layers: tuple[int, ...]  # layers of the target in front of each exit, ascending
    num_layers: int  # of the target
    d_model: int  # in the same way
    vocab_size: int  # in the same way

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        inside = all(0 < layer < self.num_layers for layer in self.layers)
        rising = list(self.layers) == sorted(set(self.layers))
        self.require("layers", inside and rising, f"must rise, from 1 to {self.num_layers - 1}")
        self.require("layers", 0 < len(self.layers) <= MOST_EXITS, f"must be 1 to {MOST_EXITS}")
        self.require("d_model", 2 <= self.d_model <= 2**20 and self.d_model % 2 == 0, "must be even")
        self.require("vocab_size", 2 <= self.vocab_size <= 2**24, "must be 2 or more")


class ExitHeads(nn.Module):
    """The parameters of K exits; NaN until loaded, or made by `fresh`."""

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
        """Return exits to be trained, in float32, which add nothing yet."""
        heads = ExitHeads(config)
        fill_normal(heads.down, config.d_model**-0.5, generator)
        heads.up.zero_()
        return heads

    def adapt(self, exit_: int, hidden: Tensor) -> Tensor:
        """f(h) of one exit, for states [.., d_model] after its layers."""
        return hidden + F.linear(torch.relu(F.linear(hidden, self.down[exit_])), self.up[exit_])

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing."""
        FILES.write(dict(self.named_parameters()), asdict(self.config), folder, dtype)


def load(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> ExitHeads:
    """Return trained exits from a folder that `ExitHeads.save` wrote.

    Raises:
        ConfigError: files or tensors that are missing, broken, misshaped or left over.
    """
    config = FILES.config(ExitsConfig, folder)
    values = FILES.tensors(folder)
    return FILES.fill(ExitHeads(config, dtype, "meta"), values, folder / WEIGHTS_FILE, device).requires_grad_(False)


@dataclass(frozen=True, slots=True)
class ExitHead:
    """Scores of the next token from states in the middle of a target's layers.

    Without ``heads`` the target's own final norm and head read the state as it is (a logit lens).
    """

    target: Decoder
    layer: int  # layers in front of it: it reads the states that layer ``layer`` (counted from 0) would read
    heads: ExitHeads | None = None  # trained ones, among them one after these layers

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, V] float32 or wider, from states [rows, d_model] after the first ``layer`` layers."""
        if self.heads is not None:
            hidden = self.heads.adapt(self.heads.config.layers.index(self.layer), hidden)
        return self.target.read(hidden)


def exit_of(folder: Path, target: Decoder, layer: int, name: str, mark: str | None = None) -> ExitHead:
    """Return the trained exit of a folder after the first ``layer`` layers of the target ``name``.

    ``mark`` is its checkpoint's `fingerprint`, None: not compared.

    Raises:
        ConfigError: as of `load`.
        CapabilityError: exits of another target, or none after that layer.
    """
    heads = load(folder, target.dtype, target.device)
    subject = f"early exits {str(folder)!r}"
    check_target(subject, heads.config, name, target.config, mark)
    if layer not in heads.config.layers:
        there = ", ".join(map(str, heads.config.layers))
        raise CapabilityError(f"{subject} at layer {layer}", f"they lie after layers {there}", "name one of these")
    return ExitHead(target, layer, heads)


def exit_layer(text: str, num_layers: int, subject: str) -> int:
    """Return layers before an exit, from a number of them or a share such as ``1/2``, which is rounded down.

    ``subject`` begins messages.

    Raises:
        ConfigError: neither, or outside the target: at least one layer is in front of it, and one after.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*(?:/\s*(\d{1,6})\s*)?", text, re.ASCII)
    if match is None or (match[2] is not None and not 0 < int(match[1]) < int(match[2])):
        raise ConfigError(subject, "neither a number of layers nor a share of them", "write exit=12 or exit=1/2")
    layer = int(match[1]) if match[2] is None else max(1, num_layers * int(match[1]) // int(match[2]))
    if not 0 < layer < num_layers:
        wrong = f"the target has {num_layers} layers, and at least one lies on either side of an exit"
        remedy = f"give 1 to {num_layers - 1}, or a share" if num_layers > 1 else "use round='serial'"
        raise ConfigError(subject, wrong, remedy)
    return layer


def shares(num_layers: int) -> tuple[int, ...]:
    """Return layers in front of exits at a quarter, half and three quarters of the depth (E.2), 1 at least."""
    return tuple(sorted({max(1, num_layers * quarters // 4) for quarters in (1, 2, 3)}))
