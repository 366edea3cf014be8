"""A trained Lyanna drafter: its parameters and its files.

A folder with ``lyanna.json`` and ``lyanna.safetensors``. Token-info is shipped as its two factors, never as the table
that they make, and collapsed at load (section 5.1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.options import check, shown
from ...network.families import decoder_config
from ...network.files import is_file, read_json
from ..states.head import Fusion, StateHead, fill, known, misfit, read_tensors, stored
from .token_info import TokenInfo

CONFIG_FILE, WEIGHTS_FILE = "lyanna.json", "lyanna.safetensors"
FORMAT = 1
_RETRAIN = "restore it, or train the drafter again"


@dataclass(frozen=True, kw_only=True)
class LyannaShape:
    """What a trained drafter is, and for which target."""

    layer: dict[str, Any] = field(default_factory=dict)  # config.json of the layer; see `states.head.layer_json`
    steps: int = 3  # that it was trained for
    fusion: Fusion = "concat"
    first_token: bool = True  # whether the first step sees the root's token (Table 1's ablation: no)
    rank: int = 64  # of token-info; 0: there is none
    hot: int = 0  # frequent tokens that alone have token-info; 0: all
    hot_columns: bool = False  # whether W2 was trained over the hot tokens alone, or over all and is cut after the norm
    target: str = ""  # name of the target, for messages
    fingerprint: str = ""  # of the target's checkpoint; empty: not recorded
    tokenizer: str = ""  # `tokenizer_mark` of the target's; empty: not recorded

    def __post_init__(self) -> None:
        check(self, "lyanna with ")
        for name, low in (("steps", 1), ("rank", 0), ("hot", 0)):
            self._require(name, getattr(self, name) >= low, f"must be {low} or more")
        self._require("hot", self.rank > 0 or not self.hot, "is of no meaning without token-info (rank=0)")
        self._require("hot_columns", self.hot > 0 or not self.hot_columns, "needs hot tokens")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"lyanna with {name}={shown(getattr(self, name))}", f"{name} {rule}", f"correct {name}")


class LyannaModel(nn.Module):
    """The layer, and token-info where there is any. NaN until loaded or made by `fresh`.

    Args:
        shape: of it.
        hot: [shape.hot] int64 ids of the frequent tokens, ascending; None where there are none.
        dtype, device: of the parameters.
    """

    def __init__(
        self,
        shape: LyannaShape,
        hot: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape = shape
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

    # -- what the unrolled network asks (`states.unrolled.Unrollable`)

    @property
    def reads_tokens(self) -> bool:
        """Whether the first step sees the token that follows the state."""
        return self.shape.first_token

    def feed(self, states: Tensor, embedded: Tensor) -> Tensor:
        """The next step's input [R, d]: from the state alone, without a token (section 4.1)."""
        return self.head.fuse(states, None)

    def logit_factors(
        self, states: Tensor, embedded: Tensor, tokens: Tensor, head: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """l' = h W_head + RMSNorm(E'(t)) as one product (section 4.1).

        Args:
            states: [R, d] predicted.
            embedded, tokens: [R, n], [R] of the parents.
            head: [V, d] the target's.

        Returns:
            [R, d + r] and [V, d + r], and how many leading columns of the latter are the target's own.
        """
        if self.info is None:
            return states, head, head.shape[1]
        u = self.info.factors(embedded, tokens)
        return torch.cat((states, u.to(states.dtype)), 1), torch.cat((head, self.info.table()), 1), head.shape[1]

    # -- files

    @torch.no_grad()
    def resume(self, folder: Path) -> None:
        """Take the parameters of a trained drafter, to train them on; its target may have been an earlier state of this
        one.

        Raises:
            ConfigError: it is of another shape, or cannot be read.
        """
        found = read_shape(folder)
        for name in ("layer", "fusion", "first_token", "rank", "hot", "hot_columns"):
            theirs, ours = getattr(found, name), getattr(self.shape, name)
            if theirs != ours:
                wrong = f"its {name} is {shown(theirs)}, this run's {shown(ours)}"
                raise ConfigError(f"going on from {folder}", wrong, "train with its options, or without --init")
        fill(self.tensors(), read_tensors(folder / WEIGHTS_FILE), folder)

    def cut(self, hot: Tensor) -> LyannaModel:
        """The same drafter with token-info for the tokens ``hot`` [H] alone: rows are normed whole, then cut."""
        made = LyannaModel(replace(self.shape, hot=len(hot)), hot)
        fill({**made.tensors()}, {**self.tensors(), "token_info.hot": hot}, Path("memory"))
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
        place = Path(folder)
        values = stored(self.tensors(), dtype, place)
        if self.info is not None and self.info.hot is not None:
            values["token_info.hot"] = self.info.hot.to("cpu", torch.int32)
        place.mkdir(parents=True, exist_ok=True)
        save_file(values, place / WEIGHTS_FILE, metadata={"format": "pt"})
        facts = {"format": FORMAT, **asdict(self.shape)}
        (place / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    @torch.no_grad()
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
        shape, values = read_shape(place), read_tensors(place / WEIGHTS_FILE)
        hot = _hot(shape, values, place)
        made = LyannaModel(shape, hot, dtype=dtype, device=device)
        fill(made.tensors(), values, place)
        return made


def _hot(shape: LyannaShape, values: Mapping[str, Tensor], place: Path) -> Tensor | None:
    """The hot tokens of a file, checked."""
    found = values.get("token_info.hot")
    if not shape.hot:
        return None  # one that is left over is refused with the other tensors
    if found is None:
        raise misfit(place, "token_info.hot is missing")
    vocab, ids = decoder_config(dict(shape.layer)).vocab_size, found.long()
    whole = found.ndim == 1 and len(ids) == shape.hot and not found.is_floating_point()
    if not whole or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        wrong = f"its hot tokens are no {shape.hot} ascending ids below {vocab}"
        raise ConfigError(f"lyanna drafter {str(place)!r}", wrong, _RETRAIN)
    return ids


def read_shape(folder: str | Path) -> LyannaShape:
    """The configuration of a trained drafter.

    Raises:
        ConfigError: no such folder, or a file that is missing, broken or of another format.
    """
    place = Path(folder)
    file = place / CONFIG_FILE
    if not is_file(file):
        wrong = f"it holds no {CONFIG_FILE}" if place.is_dir() else "there is no such folder"
        raise ConfigError(f"lyanna drafter {str(place)!r}", wrong, "name a folder that holds a trained drafter")
    values = read_json(file, "restore the file", "not JSON")
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ConfigError(str(file), f"not written in format {FORMAT}", "train it again, or update Paceline")
    known(values, [f.name for f in fields(LyannaShape)], str(file))
    return LyannaShape(**values)
