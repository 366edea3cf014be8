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
class Experts:
    """The mixture in the place of a layer's MLP."""

    count: int
    per_token: int
    d_ff: int  # of one expert
    shared_d_ff: int = 0  # of the one that every token goes through
    layers: int  # that have a mixture; the others have the dense MLP

    def touched(self, rows: int) -> float:
        """Return how many experts of a layer a pass over ``rows`` tokens reads.

        It is the expected union of even, independent choices. Tokens of one text choose more alike than that, so it
        is an upper bound.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder. Parameters are matrices alone: norms and biases are below a thousandth of them."""

    name: str
    d_model: int
    d_ff: int = 0  # of a dense layer; 0: all of them are mixtures
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
    experts: Experts | None = None
    source: str = ""
    hub: str = ""  # its name on the hub, where it has one

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the LM head; tied to the embedding or not, a pass reads all of it once."""
        return self.d_model * self.vocab_size

    @property
    def body_parameters(self) -> float:
        """Return all parameters that must be held, without embedding and head."""
        return self._body(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> float:
        """Return the parameters of the body that one token is multiplied with."""
        return self._body(self.experts.per_token if self.experts else 0)

    def read_parameters(self, rows: int) -> float:
        """Return the parameters of the body that a pass over ``rows`` tokens reads."""
        return self._body(self.experts.touched(rows) if self.experts else 0)

    def kv_values(self, keys: float) -> float:
        """Return how many numbers of K and V one sequence with ``keys`` tokens holds, in all layers."""
        return 2 * self.num_kv_heads * self.head_dim * self.key_layers(keys)

    def key_layers(self, keys: float) -> float:
        """Return the keys that one row sees, summed over layers: sliding layers see no more than their window."""
        slid = keys if self.window is None else min(keys, self.window)
        return (self.num_layers - self.sliding_layers) * keys + self.sliding_layers * slid

    def _body(self, experts: float) -> float:
        mixed = self.experts.layers if self.experts else 0
        attention = 2 * self.d_model * self.head_dim * (self.num_heads + self.num_kv_heads)  # Q and output, K and V
        dense = self.num_layers * attention + (self.num_layers - mixed) * self._mlp(self.d_ff)
        if self.experts is None:
            return dense
        router = self.d_model * self.experts.count
        one = experts * self._mlp(self.experts.d_ff) + self._mlp(self.experts.shared_d_ff)
        return dense + mixed * (one + router)

    def _mlp(self, d_ff: int) -> int:
        return (3 if self.gated else 2) * self.d_model * d_ff

    def last_layers(self, count: int) -> ModelSizes:
        """Return a draft of that many of its layers, such as SPIRe's (SPIRe, section 3.2).

        Raises:
            ConfigError: more layers than there are, or none.
        """
        if not 1 <= count <= self.num_layers:
            asked = f"a draft of {count} layers of {self.name}"
            raise ConfigError(asked, f"the model has {self.num_layers}", f"use 1 to {self.num_layers}")
        mixed = min(self.experts.layers, count) if self.experts else 0
        return replace(
            self,
            name=f"{self.name}, last {count} layers",
            num_layers=count,
            sliding_layers=min(self.sliding_layers, count),
            experts=replace(self.experts, layers=mixed) if self.experts and mixed else None,
        )

    def halved(self) -> ModelSizes:
        """Return a dense draft of half the layers and width, an eighth of the body (vanilla draft of SPIRe, section 4).

        Of a mixture, the width that one token goes through is halved.
        """
        active = self.d_ff
        if self.experts:
            active = self.experts.per_token * self.experts.d_ff + self.experts.shared_d_ff
        halves: dict[str, Any] = {
            name: max(1, getattr(self, name) // 2) for name in ("d_model", "num_layers", "num_heads", "num_kv_heads")
        }
        halves |= {"d_ff": max(1, active // 2), "sliding_layers": self.sliding_layers // 2}
        return replace(self, name=f"{self.name}, halved", experts=None, **halves)


def names() -> list[str]:
    """Return the names of models that have one."""
    return list(read_table(TABLE))


def named(name: str) -> ModelSizes | None:
    """Return the model of that name or alias, or None."""
    for own, values in read_table(TABLE).items():
        if name in (own, *values.get("aliases", ())):
            sizes = {field: value for field, value in values.items() if field not in ("aliases", "experts", "source")}
            experts = Experts(**values["experts"]) if "experts" in values else None
            hub, source = values.get("hub"), values.get("source")
            said = ", ".join(filter(None, (hub and f"config.json of {hub}", source)))
            return ModelSizes(**sizes, name=own, experts=experts, source=said)
    return None


def read_shape(path: Path) -> ModelSizes:
    """Return the shape of a ``config.json``, of the folder that holds one, or of a GGUF file, as the engine reads it.

    Raises:
        ConfigError: a file that cannot be read, an architecture that the engine does not have.
    """
    if is_gguf(path):
        matrices = [tensor for tensor in read_gguf(path).tensors.values() if len(tensor.shape) > 1]
        stored = sum(tensor.nbytes for tensor in matrices) / sum(prod(tensor.shape) for tensor in matrices)
        return replace(shape_of(read_gguf_config(path), path.stem), source=str(path), weight_bytes=stored)
    file, name = (path / "config.json", path.name) if path.is_dir() else (path, str(path))
    config = decoder_config(read_json(file, "name a Hugging Face config.json"))
    return replace(shape_of(config, name), source=str(file))


def shape_of(config: DecoderConfig, name: str = "") -> ModelSizes:
    """Return the sizes of a decoder."""
    sliding = [window for window in config.windows if window is not None]
    names = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")
    sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
    sizes |= {"weight_bytes": 0.5} if config.quantised else {}
    return ModelSizes(name=name, window=min(sliding, default=None), sliding_layers=len(sliding), **sizes)
