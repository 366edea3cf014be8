"""A trained Lyanna drafter: its parameters and its files.

A folder with ``lyanna.json`` and ``lyanna.safetensors``. Token-info is shipped as its two factors, never as the table
that they make, and collapsed at load (section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.options import check
from ...draft.states.head import Fusion, StateHead
from ...model.families import decoder_config
from ...weights.trained_files import TrainedConfig, TrainedFiles, continued
from .token_info import TokenInfo

CONFIG_FILE, WEIGHTS_FILE = "lyanna.json", "lyanna.safetensors"
_RETRAIN = "restore it, or train the drafter again"
FILES = TrainedFiles("a lyanna drafter", CONFIG_FILE, WEIGHTS_FILE, _RETRAIN)


@dataclass(frozen=True, kw_only=True)
class LyannaShape(TrainedConfig):
    """What a trained drafter is, and for which target."""

    what: ClassVar[str] = "lyanna"

    layer: dict[str, Any] = field(default_factory=dict)  # config.json of the layer; see `states.head.layer_json`
    steps: int = 3  # that it was trained for
    fusion: Fusion = "concat"
    first_token: bool = True  # whether the first step sees the root's token (Table 1's ablation: no)
    rank: int = 64  # of token-info; 0: there is none
    hot: int = 0  # frequent tokens that alone have token-info; 0: all
    hot_columns: bool = False  # whether W2 was trained over the hot tokens alone, or over all and is cut after the norm
    tokenizer: str = ""  # `tokenizer_mark` of the target's; empty: not recorded

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        for name, low in (("steps", 1), ("rank", 0), ("hot", 0)):
            self.require(name, getattr(self, name) >= low, f"must be {low} or more")
        self.require("hot", self.rank > 0 or not self.hot, "is of no meaning without token-info (rank=0)")
        self.require("hot_columns", self.hot > 0 or not self.hot_columns, "needs hot tokens")


class LyannaModel(nn.Module):
    """The layer, and token-info where there is any. NaN until loaded or made by `fresh`.

    Args:
        shape: of it.
        hot: [shape.hot] int64 ids of the frequent tokens, ascending; None where there are none.
        dtype, device: of the parameters.
    """

    feeds_tokens = False  # a step makes its state of the one before alone (section 4.1)

    def __init__(
        self,
        shape: LyannaShape,
        hot: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape, self.reads_tokens = shape, shape.first_token
        self.head = StateHead(shape.layer, fusion=shape.fusion, blank=True, dtype=dtype, device=device)
        c = self.head.config
        columns = shape.hot if shape.hot_columns else c.vocab_size
        made = TokenInfo(c.d_model, shape.rank, columns, c.vocab_size, hot, dtype, device) if shape.rank else None
        self.info = made

    @staticmethod
    def fresh(
        shape: LyannaShape, hot: Tensor | None, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> LyannaModel:
        """One to be trained, in float32."""
        made = LyannaModel(shape, hot, device=device)
        made.head.start(generator)
        if made.info is not None:
            made.info.start(generator)
        return made.requires_grad_(True)

    # -- files

    def resume(self, folder: Path) -> None:
        """Take the parameters of a trained drafter, to train them on; its target may have been an earlier state of this
        one.

        Raises:
            ConfigError: it is of another shape, or cannot be read.
        """
        continued(read_shape(folder), self.shape, folder, ("steps", "tokenizer"))
        FILES.copy(self.tensors(), FILES.tensors(folder), folder / WEIGHTS_FILE)

    def cut(self, hot: Tensor) -> LyannaModel:
        """The same drafter with token-info for the tokens ``hot`` [H] alone: rows are normed whole, then cut."""
        made = LyannaModel(replace(self.shape, hot=len(hot)), hot)
        FILES.copy(made.tensors(), {**self.tensors(), "token_info.hot": hot}, Path("memory"))
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Parameters under their names in the file."""
        found = self.head.tensors()
        return found if self.info is None else {**found, **self.info.tensors()}

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        values = self.tensors()
        if "token_info.hot" in values:
            values["token_info.hot"] = values["token_info.hot"].int()
        FILES.write(values, asdict(self.shape), Path(folder), dtype)

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
        made = LyannaModel(shape, _hot(shape, values, place), dtype=dtype, device=device)
        FILES.copy(made.tensors(), values, place / WEIGHTS_FILE)
        return made


def _hot(shape: LyannaShape, values: Mapping[str, Tensor], place: Path) -> Tensor | None:
    """The hot tokens of a file, checked."""
    found = values.get("token_info.hot")
    if not shape.hot:
        return None  # one that is left over is refused with the other tensors
    if found is None:
        raise ConfigError(str(place / WEIGHTS_FILE), "token_info.hot is missing", _RETRAIN)
    vocab, ids = decoder_config(dict(shape.layer)).vocab_size, found.long()
    whole = found.ndim == 1 and len(ids) == shape.hot and not found.is_floating_point()
    if not whole or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        wrong = f"its hot tokens are no {shape.hot} ascending ids below {vocab}"
        raise ConfigError(f"lyanna drafter {str(place)!r}", wrong, _RETRAIN)
    return ids


def read_shape(folder: str | Path) -> LyannaShape:
    """The configuration of a trained drafter; errors as of `TrainedFiles.config`."""
    return FILES.config(LyannaShape, Path(folder))
