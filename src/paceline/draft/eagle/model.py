"""An EAGLE head and its files, in the layout that EAGLE publishes and vLLM reads.

A folder with ``config.json``, of a Llama model of one layer, and ``model.safetensors``: ``fc.weight`` [d, 2d] of
[token, state], and ``layers.0.*`` without a norm before the attention. The embedding is the target's; a file that holds
one must hold that one. What Paceline knows next to it (the target's name and mark) stands in the config under
``paceline``.

Source: EAGLE (Li et al. 2024), section 4.1, and its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.errors import CapabilityError, ConfigError
from ...core.options import check, shown
from ...weights.trained_files import TrainedConfig, TrainedFiles
from ..states.head import StateHead
from .eagle3 import Eagle3Model
from .speculators import flat, is_speculators

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
OWN = "paceline"  # the entry of the config with our facts
EMBEDDING = "embed_tokens.weight"
_RESTORE = (
    "restore the file, or train the head again; if there is a .bin file, convert it once: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), ...)"
)
FILES = TrainedFiles("an EAGLE head", CONFIG_FILE, WEIGHTS_FILE, _RESTORE, None)


@dataclass(frozen=True, kw_only=True)
class EagleFacts(TrainedConfig):
    """Facts of a head of ours; a published one has none."""

    what: ClassVar[str] = "eagle"

    steps: int = 0  # that it was trained for; 0: not known

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")


class EagleModel(nn.Module):
    """One layer fed with states and tokens. NaN until loaded or made by `fresh`.

    Args:
        layer: its ``config.json``.
        facts: of it.
        bias: of the fusing map; some published heads have one.
        dtype, device: of the parameters.
    """

    reads_tokens = feeds_tokens = True
    info: Any = None  # no bias of tokens for their children's logits

    def __init__(
        self,
        layer: Mapping[str, Any],
        facts: EagleFacts,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.layer_config, self.facts = dict(layer), facts
        self.embedding: Tensor | None = None  # the target's, as the file has it; None: it holds none
        named = {**layer, "architectures": None}  # published heads have names of their own there
        self.head = StateHead(named, input_norm=False, bias=bias, dtype=dtype, device=device)

    @staticmethod
    def fresh(
        layer: Mapping[str, Any], facts: EagleFacts, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> EagleModel:
        """Return one to be trained, in float32."""
        model = EagleModel(layer, facts, device=device)
        model.head.start(generator)
        return model.requires_grad_(True)

    # -- files

    def resume(self, folder: Path) -> None:
        """Take the parameters of another head, to train them on.

        Raises:
            ConfigError: it is of another shape, or cannot be read.
        """
        model = EagleModel.load(folder)
        FILES.copy(self.head.tensors(), model.head.tensors(), folder / WEIGHTS_FILE)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE`; the folder is made where it is missing.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        name = str(dtype).removeprefix("torch.")
        facts = {**self.layer_config, "dtype": name, "torch_dtype": name, OWN: asdict(self.facts)}
        FILES.write(self.head.tensors(), facts, Path(folder), dtype)

    @staticmethod
    def load(
        folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> EagleModel:
        """Read a head: one of ours, or a published one of EAGLE-1 or 2.

        Raises:
            ConfigError: files or tensors that are missing, broken, misshaped or left over.
            CapabilityError: a head of another kind.
        """
        place = Path(folder)
        config, facts = read_head(place)
        values = read_values(place)
        if is_third(values):
            wrong = "it is an EAGLE-3 head, which is drafted with as it is, and neither trained on nor written"
            raise CapabilityError(f"eagle head {str(place)!r}", wrong, "use a head of EAGLE or EAGLE-2")
        embedding = values.pop(EMBEDDING, None)
        model = EagleModel(config, facts, bias="fc.bias" in values, dtype=dtype, device=device)
        FILES.copy(model.head.tensors(), values, place / WEIGHTS_FILE)
        model.embedding = embedding
        return model


def load_head(folder: str | Path) -> EagleModel | Eagle3Model:
    """Return a head of any of the three published layouts, or one of ours; as `EagleModel.load`."""
    place = Path(folder)
    values = read_values(place)
    return Eagle3Model(read_head(place)[0], values, place) if is_third(values) else EagleModel.load(place)


def read_values(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a head."""
    return {n.removeprefix("model."): v for n, v in FILES.tensors(place).items()}


def read_head(place: Path) -> tuple[dict[str, Any], EagleFacts]:
    """Return the layer's config of a head, and its own facts.

    Raises:
        ConfigError: no such folder, or a file that is missing or broken.
        CapabilityError: one of the library speculators, of a kind that is not computed here.
    """
    file, values = place / CONFIG_FILE, FILES.entries(place)
    facts = values.pop(OWN, {})
    if not isinstance(facts, dict):
        raise ConfigError(str(file), f"its {OWN!r} is {shown(facts)}", "restore the file")
    if is_speculators(values):
        values = flat(values, place)
    return {"model_type": "llama", **values}, FILES.build_config(EagleFacts, facts, file)


def is_third(values: Mapping[str, Tensor]) -> bool:
    """Return whether these are the tensors of an EAGLE-3 head.

    It has an output head of its own, and a norm for states.
    """
    return any(name.startswith(("midlayer.", "d2t", "t2d")) or name.endswith("hidden_norm.weight") for name in values)
