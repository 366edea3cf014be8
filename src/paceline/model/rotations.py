"""Which rotation a ``config.json`` describes: `RopeConfig` of every kind of layer.

Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
A file may have both; what is said twice must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..core.errors import CapabilityError, ConfigError
from .config_fields import RESTORE, Fields, Json, bad, check_integer, check_number, contradiction
from .rope import RopeConfig, yarn_attention_factor

Rope = tuple[RopeConfig, int, str]  # the rotation, positions it is right for, why these are fewer than is said

_SPELLINGS = ("rope_parameters", "rope_scaling")  # of transformers 5 and of transformers 4


def read_rope(f: Fields, head_dim: int, theta: float = 10000.0) -> Rope:
    """Return the rotation that the file describes, in either spelling or, alike, in both.

    ``theta`` where it names no base.
    """
    given = {name: f.mapping(name) for name in _SPELLINGS if f.mapping(name)}
    places = [f.values, *given.values()]
    share = _said("partial_rotary_factor", places, 1.0)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise bad("partial_rotary_factor", share, f"the rotated part of a head ({dim}) must be even")
    base = RopeConfig(dim=dim, theta=_said("rope_theta", places, theta))
    found = [_read_rope(f, values, base) for values in given.values()] or [_read_rope(f, {}, base)]
    if any(other != found[0] for other in found):
        raise ConfigError(
            f"config.json: {' and '.join(given)}",
            "they describe two different rotations",
            "remove the one that the model was not trained with",
        )
    return found[0]


def read_layered_ropes(f: Fields, head_dim: int, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """Return the rotations of layers that see all keys and of those that slide, which have a base of their own.

    Transformers 5 lists parameters by the kind of layer; before it ``rope_local_base_freq`` was the base of sliding
    layers, and all else was about the others.
    """
    listed = f.mapping("rope_parameters")
    if not listed.keys() <= {"full_attention", "sliding_attention"}:
        raise bad("rope_parameters", listed, "it must list full_attention and sliding_attention")
    by_kind = {kind: Fields(listed).mapping(kind) for kind in listed}
    own = {"rope_theta": f.values.get("rope_local_base_freq"), "rope_scaling": None}
    full = f.values | {"rope_parameters": by_kind.get("full_attention")}
    sliding = f.values | own | {"rope_parameters": by_kind.get("sliding_attention")}
    return read_rope(Fields(full), head_dim, theta), read_rope(Fields(sliding), head_dim, local_theta)


def _said(name: str, places: Iterable[Json], default: float) -> float:
    """Return a number that may stand next to the rope parameters and among them."""
    found = {check_number(name, place[name]) for place in places if place.get(name) is not None}
    if len(found) > 1:
        raise contradiction(name, sorted(found))
    return next(iter(found), default)


def _read_rope(f: Fields, values: Json, base: RopeConfig) -> Rope:
    """Return what one of the two spellings says."""
    if any(isinstance(v, dict) for v in values.values()):
        raise CapabilityError(
            "rope_parameters by layer type", "all layers of this family rotate alike", "use another checkpoint"
        )
    kind = _rope_kind(f, values)
    if kind not in _ROPES:
        raise CapabilityError(
            f"rope type {kind!r}", "no such rotation here", f"use one of: {', '.join(sorted(_ROPES))}"
        )
    return _ROPES[kind](f, values, base, f.integer("max_position_embeddings"))


def _rope_kind(f: Fields, values: Json) -> str:
    """Return the type's name; its field is called ``rope_type``, formerly ``type``, and many files have both."""
    named = {name: value for name in ("rope_type", "type") if (value := values.get(name)) is not None}
    for name, value in named.items():
        if not isinstance(value, str):
            raise bad(name, value, "it must be the name of a rotation")
        if f.values["model_type"] == "phi3" and value in ("su", "yarn"):
            named[name] = "longrope"  # older Phi-3 checkpoints call LongRoPE so
        if value == "mrope":
            named[name] = "default"  # rotation in sections for pictures: for text alone the plain one
    if len({*named.values()}) > 1:
        raise contradiction("rope_type (or type)", named.values())
    return next(iter(named.values()), "default")


def _value(values: Json, name: str, default: float | None = None) -> float:
    value = values.get(name)
    if value is None and default is None:
        raise ConfigError("config.json: rope parameters", f"{name!r} is missing", RESTORE)
    return check_number(name, default if value is None else value)


def _original(f: Fields, values: Json, context: int) -> int:
    """Return positions before the extension; the field stands next to the rope parameters or among them."""
    name = "original_max_position_embeddings"
    beside = f.optional_integer(name, None)
    among = None if values.get(name) is None else check_integer(name, values[name])
    if None not in (beside, among) and beside != among:
        raise contradiction(name, (beside, among))
    default = 4096 if f.values["model_type"] == "phi3" and name not in f.values else context
    return beside or among or default


_DYNAMIC = "dynamic NTK changes the keys of earlier tokens beyond it"


def _linear(values: Json, base: RopeConfig) -> RopeConfig:
    return replace(base, kind="linear", factor=_value(values, "factor"))


def _llama3_rope(f: Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    options: Json = {name: _value(values, name) for name in ("low_freq_factor", "high_freq_factor", "factor")}
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    if high <= low:
        raise bad("high_freq_factor", high, f"it must be above low_freq_factor = {low}")
    return replace(base, kind="llama3", original_max_position=_original(f, values, context), **options), context, ""


def _yarn_rope(f: Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    original, given = _original(f, values, context), {k: v for k, v in values.items() if v}
    if base.theta <= 1:
        raise bad("rope_theta", base.theta, "yarn divides by its logarithm: it must be above 1")
    fast, slow = _value(given, "beta_fast", 32.0), _value(given, "beta_slow", 1.0)
    if fast < slow:
        raise bad("beta_fast", fast, f"it must be beta_slow = {slow} or more")
    factor = _value(values, "factor", context / original)
    weights = [_value(given, name) if name in given else None for name in ("mscale", "mscale_all_dim")]
    computed = yarn_attention_factor(factor, *weights)
    rope = replace(
        base,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=Fields(values).flag("truncate", True),
        attention_factor=_value(values, "attention_factor", computed),
    )
    return rope, context, ""


def _long_rope(f: Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    """LongRoPE (Ding et al. 2024) has two sets of factors: short and long sequences.

    Which of the two rotates a key depends on the length of the whole sequence, so a sequence that grows
    past the original context needs all its keys computed again. Served is what the short factors are
    right for; longer contexts are refused by ``max_position``.
    """
    original = _original(f, values, context)
    if original == 1:
        raise bad("original_max_position_embeddings", 1, "longrope divides by its logarithm: it must be above 1")
    factors = values.get("short_factor")
    if not isinstance(factors, list) or len(factors) != base.dim // 2:
        raise bad("short_factor", factors, f"it must list {base.dim // 2} numbers")
    factor = _value(values, "factor", context / original)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = replace(
        base,
        divisors=tuple(check_number("short_factor", x) for x in factors),
        attention_factor=_value(values, "attention_factor", computed),
    )
    limit = min(context, original)
    note = "LongRoPE changes the keys of earlier tokens beyond it" if limit < context else ""
    return rope, limit, note


_ROPES: dict[str, Callable[[Fields, Json, RopeConfig, int], Rope]] = {
    "default": lambda f, values, base, context: (base, context, ""),
    "linear": lambda f, values, base, context: (_linear(values, base), context, ""),
    # Dynamic NTK turns every frequency once a sequence outgrows the context, keys already cached included. Up to there
    # it is the plain rotation; beyond, a key would depend on tokens after it, which no cache can hold.
    "dynamic": lambda f, values, base, context: (base, context, _DYNAMIC),
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _long_rope,
}
