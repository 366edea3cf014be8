"""Models as the planner sees them: sizes alone, from ``models.toml`` or a ``config.json`` that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.tables import read_table
from ..model.families import DecoderConfig, decoder_config
from ..weights.files import read_json
from ..weights.gguf import is_gguf, read_gguf
from ..weights.gguf_model import read_gguf_config

TABLE = "plan/models.toml"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder. Parameters are matrices alone: norms and biases are below a thousandth of them."""

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    weight_bytes: float = 2.0  # of a weight, as the model's files store it
    gated: bool = True  # an MLP of three matrices, else of two
    window: int | None = None  # keys that a sliding layer sees
    sliding_layers: int = 0
    hub: str = ""  # its name on the hub, where it has one

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the LM head; tied to the embedding or not, a pass reads all of it once."""
        return self.d_model * self.vocab_size

    @property
    def body_parameters(self) -> int:
        """Return all parameters without embedding and head."""
        attention = 2 * self.d_model * self.head_dim * (self.num_heads + self.num_kv_heads)  # Q and output, K and V
        return self.num_layers * (attention + (3 if self.gated else 2) * self.d_model * self.d_ff)

    def kv_values(self, keys: float) -> float:
        """Return how many numbers of K and V one sequence with ``keys`` tokens holds, in all layers."""
        return 2 * self.num_kv_heads * self.head_dim * self.key_layers(keys)

    def key_layers(self, keys: float) -> float:
        """Return the keys that one row sees, summed over layers: sliding layers see no more than their window."""
        slid = keys if self.window is None else min(keys, self.window)
        return (self.num_layers - self.sliding_layers) * keys + self.sliding_layers * slid

    def last_layers(self, count: int) -> ModelSizes:
        """Return a draft of that many of its layers, such as SPIRe's (SPIRe, section 3.2).

        Raises:
            ConfigError: more layers than there are, or none.
        """
        if not 1 <= count <= self.num_layers:
            subject = f"a draft of {count} layers of {self.name}"
            raise ConfigError(subject, f"the model has {self.num_layers}", f"use 1 to {self.num_layers}")
        return replace(
            self,
            name=f"{self.name}, last {count} layers",
            num_layers=count,
            sliding_layers=min(self.sliding_layers, count),
        )

    def halved(self) -> ModelSizes:
        """Return a draft of half the layers and width, an eighth of the body (vanilla draft of SPIRe, section 4)."""
        names = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads")
        halves: dict[str, Any] = {name: max(1, getattr(self, name) // 2) for name in names}
        return replace(self, name=f"{self.name}, halved", sliding_layers=self.sliding_layers // 2, **halves)


def names() -> list[str]:
    """Return the names of models that have one."""
    return list(read_table(TABLE))


def named(name: str) -> ModelSizes | None:
    """Return the model of that name or alias, or None."""
    for key, values in read_table(TABLE).items():
        if name in (key, *values.get("aliases", ())):
            sizes = {field: value for field, value in values.items() if field not in ("aliases", "source")}
            return ModelSizes(**sizes, name=key)
    return None


def read_shape(path: Path) -> ModelSizes:
    """Return the shape of a ``config.json``, of the folder that holds one, or of a GGUF file, as the engine reads it.

    Raises:
        ConfigError: a file that cannot be read, an architecture that the engine does not have.
    """
    if is_gguf(path):
        matrices = [tensor for tensor in read_gguf(path).tensors.values() if len(tensor.shape) > 1]
        stored = sum(tensor.nbytes for tensor in matrices) / sum(prod(tensor.shape) for tensor in matrices)
        return replace(shape_of(read_gguf_config(path), path.stem), weight_bytes=stored)
    file, name = (path / "config.json", path.name) if path.is_dir() else (path, str(path))
    return shape_of(decoder_config(read_json(file, "name a Hugging Face config.json")), name)


def shape_of(config: DecoderConfig, name: str = "") -> ModelSizes:
    """Return the sizes of a decoder."""
    sliding = [window for window in config.windows if window is not None]
    names = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")
    sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
    sizes |= {"weight_bytes": 0.5} if config.quantised else {}
    return ModelSizes(name=name, window=min(sliding, default=None), sliding_layers=len(sliding), **sizes)
