"""Models as the planner sees them: sizes alone, from ``models.toml`` or any Hugging Face ``config.json``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown, suggest

MISTRAL_WINDOW = 4096  # of a Mistral config that does not say
MOST = 2**31 - 1  # of any size in a config


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture in the place of a layer's MLP."""

    count: int
    per_token: int
    d_ff: int  # of one expert
    shared_d_ff: int = 0  # of the one that every token goes through
    layers: int  # that have a mixture; the others have the dense MLP

    def touched(self, rows: int) -> float:
        """Experts of a layer whose weights a pass over ``rows`` tokens reads: the expected size of the union.

        Every token chooses ``per_token`` of them, all choices as likely and independent of each other. Tokens of one
        text choose more alike than that, so this is the upper side.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
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
    gated: bool = True  # an MLP of three matrices, else of two
    window: int | None = None  # keys that a sliding layer sees
    sliding_layers: int = 0
    experts: Experts | None = None
    source: str = ""
    hub: str = ""  # its name on the hub, where it has one

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries and output, keys and values."""
        return 2 * self.d_model * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def head_parameters(self) -> int:
        """Of the LM head (whether it is tied to the embedding or not: a pass reads all of it once)."""
        return self.d_model * self.vocab_size

    @property
    def body_parameters(self) -> float:
        """All that must be held, without embedding and head."""
        return self._body(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> float:
        """Those of the body that one token is multiplied with."""
        return self._body(self.experts.per_token if self.experts else 0)

    def read_parameters(self, rows: int) -> float:
        """Those of the body that a pass over ``rows`` tokens reads."""
        return self._body(self.experts.touched(rows) if self.experts else 0)

    def kv_values(self, keys: float) -> float:
        """Numbers of K and V that one sequence with ``keys`` tokens holds, in all layers."""
        return 2 * self.num_kv_heads * self.head_dim * self.key_layers(keys)

    def key_layers(self, keys: float) -> float:
        """Keys that one row sees, summed over layers: sliding layers see no more than their window."""
        slid = keys if self.window is None else min(keys, self.window)
        return (self.num_layers - self.sliding_layers) * keys + self.sliding_layers * slid

    def _body(self, experts: float) -> float:
        mixed = self.experts.layers if self.experts else 0
        dense = self.num_layers * self.attention_parameters + (self.num_layers - mixed) * self._mlp(self.d_ff)
        if self.experts is None:
            return dense
        router = self.d_model * self.experts.count
        one = experts * self._mlp(self.experts.d_ff) + self._mlp(self.experts.shared_d_ff)
        return dense + mixed * (one + router)

    def _mlp(self, d_ff: int) -> int:
        return (3 if self.gated else 2) * self.d_model * d_ff

    def last_layers(self, count: int) -> ModelShape:
        """A draft of that many of its layers, such as SPIRe's (SPIRe, section 3.2).

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

    def halved(self) -> ModelShape:
        """A dense draft of half the layers and half the width: an eighth of the body, a quarter of the K/V.

        It is the vanilla draft of SPIRe, section 4 (4 layers of width 512 for 8 of 1,024). Of a mixture, the width that
        one token goes through is halved.
        """
        active = self.d_ff
        if self.experts:
            active = self.experts.per_token * self.experts.d_ff + self.experts.shared_d_ff
        return replace(
            self,
            name=f"{self.name}, halved",
            d_model=max(1, self.d_model // 2),
            d_ff=max(1, active // 2),
            num_layers=max(1, self.num_layers // 2),
            num_heads=max(1, self.num_heads // 2),
            num_kv_heads=max(1, self.num_kv_heads // 2),
            sliding_layers=self.sliding_layers // 2,
            experts=None,
        )

    def stretched(self, times: int) -> ModelShape:
        """The same with so many layers for each (`core.model_spec`)."""
        experts = replace(self.experts, layers=self.experts.layers * times) if self.experts else None
        layers, sliding = self.num_layers * times, self.sliding_layers * times
        name = f"{self.name}, stretched {times}x" if times > 1 else self.name
        return replace(self, name=name, num_layers=layers, sliding_layers=sliding, experts=experts)


def names() -> list[str]:
    """Models that have a name."""
    return list(_table())


def named(name: str) -> ModelShape | None:
    """The model of that name or alias, or None."""
    for own, values in _table().items():
        if name in (own, *values.get("aliases", ())):
            return shape_of(values, own)
    return None


def unknown(name: str, more: list[str]) -> ConfigError:
    """The refusal of a name that is none of ours and none of ``more``."""
    remedy = suggest(name, [*names(), *more], "model")
    return ConfigError(f"model {shown(name)}", "there is no such model, folder or config.json", remedy)


def read_shape(path: Path) -> ModelShape:
    """The model of a ``config.json``, or of the folder that holds one.

    Raises:
        ConfigError: a file that cannot be read, or without the fields that are needed: it names them.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), f"not a readable config ({error})", "name a Hugging Face config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(str(file), "it holds no object", "name a Hugging Face config.json")
    inner = values.get("text_config")
    given = {**values, **inner} if isinstance(inner, dict) else values
    return replace(shape_of(given, path.name if path.is_dir() else str(path)), source=str(file))


def shape_of(values: Mapping[str, Any], name: str) -> ModelShape:
    """Sizes from the fields of a Hugging Face config.

    Args:
        values: the config.
        name: of the model, for messages.

    Raises:
        ConfigError: fields that are missing (all of them are named), or sizes that cannot be.
        CapabilityError: a model whose past is no K/V cache of whole heads.
    """
    read = _Reader(values, name)
    read.refuse_others()
    width, heads = read.size("hidden_size", "n_embd"), read.size("num_attention_heads", "n_head")
    layers, vocabulary = read.size("num_hidden_layers", "n_layer"), read.size("vocab_size")
    context = read.size("max_position_embeddings", "n_positions")
    experts = read.experts(layers)
    inner = read.size("intermediate_size", "ffn_dim", "n_inner") if not experts or experts.layers < layers else 1
    read.refuse_missing()
    kv_heads = read.optional("num_key_value_heads") or heads
    head_dim = read.optional("head_dim") or width // heads
    if not head_dim or heads % kv_heads:
        wrong = f"{heads} heads of width {width} share {kv_heads} K/V heads"
        raise ConfigError(f"config of {name}", wrong, "restore the file from where the model came")
    window, hub = read.window(), str(values.get("hub", ""))
    return ModelShape(
        name=name,
        d_model=width,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position=context,
        gated=values.get("model_type") not in PLAIN_MLP,
        window=window,
        sliding_layers=read.sliding(layers) if window else 0,
        experts=experts,
        source=", ".join(filter(None, (hub and f"config.json of {hub}", str(values.get("source", ""))))),
        hub=hub,
    )


PLAIN_MLP = ("opt", "gpt2", "gpt_neox", "falcon", "bloom", "phi", "gpt_bigcode", "starcoder2")  # two matrices
QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # whose windows are off unless switched on


class _Reader:
    """Reads sizes, and remembers which were missing."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name
        self.kind = values.get("model_type")
        self.missing: list[str] = []

    def size(self, *spellings: str) -> int:
        """The first of the spellings that is there; 1 in the place of a field that is missing."""
        for spelling in spellings:
            if (found := self.optional(spelling)) is not None:
                return found
        self.missing.append(spellings[0])
        return 1

    def optional(self, field: str) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            wrong = f"{field} = {shown(value)} is no integer of 1 to {MOST:,}"
            raise ConfigError(f"config of {self.name}", wrong, "restore the file from where the model came")
        return value

    def or_zero(self, field: str) -> int:
        """A size that may be absent, null, false or 0."""
        return (self.optional(field) or 0) if self.values.get(field) else 0

    def refuse_missing(self) -> None:
        if self.missing:
            wrong = f"fields are missing: {', '.join(self.missing)}"
            raise ConfigError(f"config of {self.name}", wrong, "add them, or name another model")

    def refuse_others(self) -> None:
        kinds = self.values.get("layer_types")
        other = [kind for kind in kinds if kind not in ATTENTION] if isinstance(kinds, list) else []
        other += ["latent attention"] if self.values.get("kv_lora_rank") else []
        if other:
            asked, wrong = f"{self.name} with {shown(other[0])}", "its cache is not modelled"
            raise CapabilityError(asked, wrong, "name a model whose layers attend to keys and values")

    def experts(self, layers: int) -> Experts | None:
        count = next(filter(None, map(self.or_zero, EXPERT_COUNTS)), 0)
        if count < 2:
            return None
        chosen = self.size("num_experts_per_tok")
        if chosen > count:
            wrong = f"a token chooses {chosen} of {count} experts"
            raise ConfigError(f"config of {self.name}", wrong, "restore the file from where the model came")
        wide = self.or_zero("moe_intermediate_size") or self.size("intermediate_size")
        shared = self.or_zero("shared_expert_intermediate_size")
        dense = min(layers, self.or_zero("first_k_dense_replace"))
        return Experts(count=count, per_token=chosen, d_ff=wide, shared_d_ff=shared, layers=layers - dense)

    def window(self) -> int | None:
        """Keys of a sliding layer; None where no layer slides."""
        if self.kind in QWEN and not self.values.get("use_sliding_window"):
            return None
        if self.kind == "mistral" and "sliding_window" not in self.values:
            return MISTRAL_WINDOW
        return self.optional("sliding_window")

    def sliding(self, layers: int) -> int:
        """How many layers slide: those listed so, or Qwen's from ``max_window_layers`` on, or all."""
        kinds = self.values.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            return sum(kind == "sliding_attention" for kind in kinds)
        first = self.values.get("max_window_layers") if self.kind in QWEN else 0
        return max(0, layers - first) if isinstance(first, int) else layers


ATTENTION = ("full_attention", "sliding_attention")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((resources.files(__package__) / "models.toml").read_text(encoding="utf-8"))
