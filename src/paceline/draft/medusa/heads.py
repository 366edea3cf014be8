"""Medusa's heads: their numbers, their files, and what they make of a state.

Head j (0, 1, ..) reads the target's last state after its final norm and predicts what comes j + 2 tokens after that
state's own token; the target's head predicts what comes one after it:

    x_j = x + SiLU(W_j x + b_j),    logits_j = H_j x_j

H_j is a matrix of its own, as published, or the target's head for all of them.

Source: Medusa (Cai et al. 2024), section 3.1.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.errors import CapabilityError, ConfigError
from ...core.options import check, shown
from ...model.adapters import fill_normal
from ...model.linear import nan_parameter
from ...weights.files import is_file, opened, read_json
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "medusa.json", "medusa.safetensors"
FILES = TrainedFiles("Medusa heads", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the heads again")
PUBLISHED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MOST_HEADS = 16
# A published tensor: head, place in its sequence of modules, and of the block's linear layer or the head after it.
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
# Hit rates of heads of which nothing is known: of head j's likeliest tokens the i-th so often.
_FIRST, _NEXT_HEAD, _NEXT_TOKEN = 0.5, 0.75, 0.35


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(TrainedConfig):
    """Heads that were trained for a target."""

    what: ClassVar[str] = "Medusa heads"

    heads: int  # tokens drafted ahead
    d_model: int  # of the target
    vocab_size: int  # in the same way
    rank: int = 0  # of each W_j; 0: a full matrix
    own: bool = False  # each has an output head of its own; else the target's serves all
    accuracies: tuple[tuple[float, ...], ...] = ()  # [heads][k] how often each of a head's likeliest tokens is right

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        for name, least, most in (("heads", 1, MOST_HEADS), ("d_model", 1, 2**20), ("vocab_size", 2, 2**24)):
            self.require(name, least <= getattr(self, name) <= most, f"must be {least} to {most:,}")
        self.require("rank", 0 <= self.rank <= self.d_model, "must be 0 to d_model")
        rates = [rate for row in self.accuracies for rate in row]
        self.require("accuracies", not rates or len(self.accuracies) == self.heads, "must have a row for each head")
        self.require("accuracies", all(self.accuracies), "must have no empty row")
        self.require("accuracies", all(0 <= rate <= 1 for rate in rates), "must be 0 to 1")

    def hit_rates(self, count: int) -> list[list[float]]:
        """Return [heads][count] of the likeliest tokens of each head, never rising; where none are known, a guess."""
        guess = [[_FIRST * _NEXT_HEAD**j * _NEXT_TOKEN**i for i in range(count)] for j in range(self.heads)]
        rates = []
        for row in self.accuracies or guess:
            level = [max(rate, 1e-6) for rate in row[:count]]
            rates.append([min(level[: i + 1]) for i in range(len(level))])
        return rates


class Heads(nn.Module):
    """The parameters of K heads; NaN until loaded, or made by `fresh`.

    Args:
        config: their shape.
        dtype, device: of the parameters.
    """

    def __init__(
        self, config: HeadsConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        k, d, rank = config.heads, config.d_model, config.rank

        def parameter(*shape: int) -> nn.Parameter:
            return nan_parameter(shape, dtype, device, True)

        self.weight = None if rank else parameter(k, d, d)  # W [K, out, in]
        self.down = parameter(k, rank, d) if rank else None  # W = up down
        self.up = parameter(k, d, rank) if rank else None
        self.bias = parameter(k, d)
        self.own = parameter(k, config.vocab_size, d) if config.own else None  # H

    @staticmethod
    @torch.no_grad()
    def fresh(config: HeadsConfig, generator: torch.Generator | None = None) -> Heads:
        """Return heads to be trained, in float32: W = 0 and b = 0, so that x_j = x."""
        heads = Heads(config)
        heads.bias.zero_()
        if heads.weight is not None:
            heads.weight.zero_()
        elif heads.down is not None and heads.up is not None:
            fill_normal(heads.down, config.d_model**-0.5, generator)
            heads.up.zero_()
        return heads

    def forward(self, normed: Tensor) -> Tensor:
        """Return [rows, K, d_model] x_j, from states [rows, d_model] after the final norm."""
        if self.weight is not None:
            projected = F.linear(normed, self.weight.flatten(0, 1)).unflatten(1, (self.config.heads, -1))
        else:
            assert self.down is not None and self.up is not None, "a full matrix or two"
            projected = torch.einsum("rkn,ken->rke", torch.einsum("rd,knd->rkn", normed, self.down), self.up)
        return normed[:, None] + F.silu(projected + self.bias)

    def matrices(self) -> Tensor:
        """Return [K d_model, d_model] the W_j, one below the other."""
        if self.weight is not None:
            return self.weight.detach().flatten(0, 1)
        assert self.down is not None and self.up is not None, "a full matrix or two"
        products = self.up.detach().float() @ self.down.detach().float()
        return products.to(self.bias.dtype).flatten(0, 1)

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing."""
        FILES.write(dict(self.named_parameters()), asdict(self.config), folder, dtype)


def read_config(folder: Path) -> HeadsConfig | None:
    """Return the configuration in a folder of heads; None: they are published ones, which have none.

    Raises:
        ConfigError: neither, or a file that is broken.
    """
    if is_file(folder / CONFIG_FILE):
        return FILES.config(HeadsConfig, folder)
    if _published_file(folder) is None:
        wrong = f"it holds neither {CONFIG_FILE} nor {' or '.join(PUBLISHED)}"
        raise ConfigError(f"Medusa heads {str(folder)!r}", wrong, "name a folder that holds trained heads")
    return None


def load(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Heads:
    """Return trained heads, from a folder that `Heads.save` wrote or one as published.

    Raises:
        ConfigError: files or tensors that are missing, broken, misshaped or left over.
        CapabilityError: published heads of more than one block each.
    """
    config = read_config(folder)
    if config is None:
        return _load_published(folder, dtype, device)
    values = FILES.tensors(folder)
    return FILES.fill(Heads(config, dtype, "meta"), values, folder / WEIGHTS_FILE, device).requires_grad_(False)


def _published_file(folder: Path) -> Path | None:
    return next((folder / name for name in PUBLISHED if is_file(folder / name)), None)


def _load_published(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Heads:
    """Return heads in the form of the Medusa repository: ``0.0.linear.weight``, ``0.1.weight`` and so on."""
    file = _published_file(folder)
    assert file is not None, "it was found before"
    parts: dict[tuple[int, int, str], Tensor] = {}
    for name, value in _tensors(file).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(
                str(file), f"a tensor called {shown(name)}", "use heads as the Medusa repository saves them"
            )
        parts[int(match[1]), int(match[2]), f"{match[3] or ''}{match[4]}"] = value
    count = 1 + max((head for head, _, _ in parts), default=-1)
    if any(place > 1 for _, place, _ in parts):
        wrong = "its heads have several blocks each"
        raise CapabilityError(str(file), wrong, "use heads of one block (medusa_num_layers=1)")
    names = {"weight": (0, "linear.weight"), "bias": (0, "linear.bias"), "own": (1, "weight")}
    expected = {(head, *rest) for head in range(count) for rest in names.values()}
    if lost := sorted(expected ^ {*parts}):
        head, place, name = lost[0]
        raise ConfigError(str(file), f"{head}.{place}.{name} is missing, or has no place", "download it again")
    try:
        stacked = {to: torch.stack([parts[head, *rest] for head in range(count)]) for to, rest in names.items()}
    except (RuntimeError, TypeError) as error:
        raise ConfigError(str(file), f"its heads differ in shape ({error})", "download it again") from error
    vocab, width = stacked["own"].shape[-2:] if stacked["own"].ndim == 3 else (0, 0)
    config = HeadsConfig(heads=count, d_model=width, vocab_size=vocab, own=True, target=_base_model(folder))
    return FILES.fill(Heads(config, dtype, "meta"), stacked, file, device).requires_grad_(False)


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with opened(file, "download it again"):
            return load_file(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)  # tensors, and no code
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ConfigError(str(file), f"not tensors alone ({str(error)[:100]})", "download it again") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConfigError(str(file), "not a dictionary of tensors", "download it again")
    return {str(name): value for name, value in loaded.items()}


def _base_model(folder: Path) -> str:
    """Return the model that published heads name; empty where they name none."""
    file = folder / "config.json"
    values = read_json(file, "download it again") if is_file(file) else {}
    name = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    return name if isinstance(name, str) else ""
