"""A trained Lyanna drafter: its parameters and its files.

A folder with ``lyanna.json`` and ``lyanna.safetensors``. Token-info is shipped as its two factors, never as the table
that they make, and collapsed at load (section 5.1).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.options import check
from ...draft.states.head import StateHead
from ...weights.trained_files import TrainedConfig, TrainedFiles, continued
from .token_info import TokenInfo

CONFIG_FILE, WEIGHTS_FILE = "lyanna.json", "lyanna.safetensors"
FILES = TrainedFiles("a lyanna drafter", CONFIG_FILE, WEIGHTS_FILE, "restore it, or train the drafter again")


@dataclass(frozen=True, kw_only=True)
class LyannaShape(TrainedConfig):
    """Describe what a trained drafter is, and for which target."""

    what: ClassVar[str] = "lyanna"
    retired = (("fusion", "concat"), ("hot", 0), ("hot_columns", False))

    layer: dict[str, Any] = field(default_factory=dict)  # config.json of the layer; see `states.head.layer_json`
    steps: int = 3  # that it was trained for
    first_token: bool = True  # whether the first step sees the root's token (Table 1's ablation: no)
    rank: int = 64  # of token-info; 0: there is none
    tokenizer: str = ""  # `tokenizer_mark` of the target's; empty: not recorded

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        for name, low in (("steps", 1), ("rank", 0)):
            self.require(name, getattr(self, name) >= low, f"must be {low} or more")


class LyannaModel(nn.Module):
    """The layer, and token-info where there is any. NaN until loaded or made by `fresh`.

    Args:
        shape: of it.
        dtype, device: of the parameters.
    """

    feeds_tokens = False  # a step makes its state of the one before alone (section 4.1)

    def __init__(
        self,
        shape: LyannaShape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape, self.reads_tokens = shape, shape.first_token
        self.head = StateHead(shape.layer, blank=True, dtype=dtype, device=device)
        c = self.head.config
        self.info = TokenInfo(c.d_model, shape.rank, c.vocab_size, dtype, device) if shape.rank else None

    @staticmethod
    def fresh(shape: LyannaShape, generator: torch.Generator, device: torch.device | str = "cpu") -> LyannaModel:
        """Return one to be trained, in float32."""
        model = LyannaModel(shape, device=device)
        model.head.start(generator)
        if model.info is not None:
            model.info.start(generator)
        return model.requires_grad_(True)

    # -- files

    def resume(self, folder: Path) -> None:
        """Take the parameters of a trained drafter, to train them on.

        Its target may have been an earlier state of this one.

        Raises:
            ConfigError: it is of another shape, or cannot be read.
        """
        continued(read_shape(folder), self.shape, folder, ("steps", "tokenizer"))
        FILES.copy(self.tensors(), FILES.tensors(folder), folder / WEIGHTS_FILE)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters under their names in the file."""
        tensors = self.head.tensors()
        return tensors if self.info is None else {**tensors, **self.info.tensors()}

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        FILES.write(self.tensors(), asdict(self.shape), Path(folder), dtype)

    @staticmethod
    def load(
        folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> LyannaModel:
        """Read a trained drafter.

        Args:
            folder: what `save` wrote.
            dtype: of the parameters.

        Raises:
            ConfigError: files or tensors that are missing, broken, misshaped or left over.
        """
        place = Path(folder)
        shape, values = read_shape(place), FILES.tensors(place)
        model = LyannaModel(shape, dtype=dtype, device=device)
        FILES.copy(model.tensors(), values, place / WEIGHTS_FILE)
        return model


def read_shape(folder: str | Path) -> LyannaShape:
    """Return the configuration of a trained drafter; errors as of `TrainedFiles.config`."""
    return FILES.config(LyannaShape, Path(folder))
