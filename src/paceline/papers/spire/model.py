"""A trained SPIRe drafter: what it is, and its files.

A folder with a Hugging Face checkpoint of the draft's layers (``config.json``, ``model.safetensors``; embedding, final
norm and head are the target's), and with it ``spire.json``, which states what the draft is and for whom, and
``spire.safetensors``, the weights of its feedback memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...core.options import check
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "spire.json", "spire.safetensors"
MEMORY = "memory"
FILES = TrainedFiles("a spire draft", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the draft again", None)
OWN_WEIGHT = 2.0  # at the start, of the layer's own input in its memory; the others have 0


@dataclass(frozen=True, kw_only=True)
class SpireShape(TrainedConfig):
    """Describe what a trained draft is, and for which target. Names of sections are SPIRe's."""

    what: ClassVar[str] = "spire"
    retired = (("feedback", True), ("past", "layers"), ("shared", False), ("ends", "target"))

    layers: int = 0  # of the draft, n
    window: int = 64  # last tokens that a row sees (3.1)
    sinks: int = 1  # first tokens that it sees next to them
    depth: int = 4  # k, the passes that it was trained for

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        for name, low in (("layers", 1), ("window", 1), ("sinks", 0), ("depth", 1)):
            self.require(name, getattr(self, name) >= low, f"must be {low} or more")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return for each draft layer the target layer, 0-based, after which its memory of verified tokens is read.

        Draft layer i reads y^{N-n-1+i}, 1-based both (3.3 with N=8, n=2: y^6 and y^7): what the target's layer reads
        that it starts from.
        """
        return tuple(num_layers - self.layers - 1 + i for i in range(self.layers))

    def fresh_memory(self) -> Tensor:
        """Return w [n, n + 1] float32 before training: mostly what the layer itself reads."""
        return OWN_WEIGHT * torch.eye(self.layers, self.layers + 1)


def save_shape(shape: SpireShape, memory: Tensor, folder: Path) -> None:
    """Write what stands with the checkpoint; errors as of `TrainedFiles.write`."""
    FILES.write({MEMORY: memory}, asdict(shape), folder, torch.float32)


def read_shape(folder: Path) -> SpireShape:
    """Return what the draft in a folder is; errors as of `TrainedFiles.config`."""
    return FILES.config(SpireShape, folder)


def read_memory(shape: SpireShape, folder: Path) -> Tensor:
    """Return the weights of its memory, float32; errors as of `TrainedFiles.copy`."""
    memory = shape.fresh_memory()
    FILES.copy({MEMORY: memory}, FILES.tensors(folder), folder / WEIGHTS_FILE)
    return memory
