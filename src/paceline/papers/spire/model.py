"""A trained SPIRe drafter: what it is, and its files.

A folder with a Hugging Face checkpoint of the draft's layers and ends (``config.json``, ``model.safetensors``; of the
layers alone where the ends are the target's), and next to it ``spire.json``, which says what the draft is and for whom,
and ``spire.safetensors``, the weights of its feedback memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...core.options import check
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "spire.json", "spire.safetensors"
MEMORY = "memory"
FILES = TrainedFiles("a spire draft", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the draft again", None)
Past = Literal["layers", "embedding", "last"]
Ends = Literal["own", "target"]
OWN_WEIGHT = 2.0  # at the start, of the layer's own input in its memory; the others have 0


@dataclass(frozen=True, kw_only=True)
class SpireShape(TrainedConfig):
    """What a trained draft is, and for which target. Names of sections are SPIRe's."""

    what: ClassVar[str] = "spire"

    layers: int = 0  # of the draft, n
    window: int = 64  # last tokens that a row sees (3.1)
    sinks: int = 1  # first tokens that it sees next to them
    depth: int = 4  # k, the passes that it was trained for
    feedback: bool = True  # rows see memory of earlier tokens (3.3); else the layers' own inputs, their own among them
    past: Past = "layers"  # what stands for the memory of verified tokens: the target's activations layer by layer; the
    # draft's embeddings, or the target's last activation for all layers (3.3's worse variants)
    shared: bool = False  # one memory for all layers (Fan et al. 2021), not one each
    ends: Ends = "own"  # embedding, final norm and head: in the checkpoint; or the target's, which it then lacks

    def __post_init__(self) -> None:
        check(self, f"{self.what} with ")
        for name, low in (("layers", 1), ("window", 1), ("sinks", 0), ("depth", 1)):
            self.require(name, getattr(self, name) >= low, f"must be {low} or more")
        self.require("shared", self.feedback or not self.shared, "is of no meaning without feedback memory")
        whole = self.past != "layers" or not self.shared
        self.require("shared", whole, "needs a past that is one vector a token (past = embedding or last)")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Of each draft layer the target layer, 0-based, after which its memory of verified tokens is read; none: it
        is read from tokens.

        Draft layer i reads y^{N-n-1+i}, 1-based both (3.3 with N=8, n=2: y^6 and y^7): what the target's layer reads
        that it starts from.
        """
        if self.past == "embedding":
            return ()
        if self.past == "last":
            return (num_layers - 1,) * self.layers
        return tuple(num_layers - self.layers - 1 + i for i in range(self.layers))

    def fresh_memory(self) -> Tensor | None:
        """Return [n, n + 1] (or [1, n + 1]) float32 w before training: mostly what the layer itself reads.

        None: no memory.
        """
        if not self.feedback:
            return None
        rows = 1 if self.shared else self.layers
        made = torch.zeros(rows, self.layers + 1)
        for row in range(rows):
            made[row, row] = OWN_WEIGHT
        return made


def save_shape(shape: SpireShape, memory: Tensor | None, folder: Path) -> None:
    """Write what stands next to the checkpoint; errors as of `TrainedFiles.write`."""
    FILES.write({} if memory is None else {MEMORY: memory}, asdict(shape), folder, torch.float32)


def read_shape(folder: Path) -> SpireShape:
    """Return what the draft in a folder is; errors as of `TrainedFiles.config`."""
    return FILES.config(SpireShape, folder)


def read_memory(shape: SpireShape, folder: Path) -> Tensor | None:
    """Return the weights of its memory, float32; None: it has none. Errors as of `TrainedFiles.copy`."""
    made = shape.fresh_memory()
    FILES.copy({} if made is None else {MEMORY: made}, FILES.tensors(folder), folder / WEIGHTS_FILE)
    return made
