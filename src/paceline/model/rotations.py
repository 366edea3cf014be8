"""Which rotation a ``config.json`` describes: `RopeConfig` of every kind of layer.

Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
In a file with both the former counts, as for transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from .config_fields import RESTORE, Fields, Json, bad, check_integer, check_number
from .rope import RopeConfig

Rope = tuple[RopeConfig, int, str]  # the rotation, positions it is right for, why these are fewer than the file states

# By type, parameters that must be given. Dynamic NTK turns every frequency once a sequence outgrows the context, keys
# already cached included. Up to there it is the plain rotation; beyond, a key would depend on tokens after it, which no
# cache can hold.
_NEEDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "dynamic", "longrope", "yarn"), ()),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ORIGINAL = "original_max_position_embeddings"  # next to the rope parameters or among them
_NUMBERS = (*_NEEDED["llama3"], "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def read_rope(f: Fields, head_dim: int, theta: float = 10000.0) -> Rope:
    """Return the rotation that the file describes; ``theta`` where it names no base."""
    parameters = f.mapping("rope_parameters")
    values = f.mapping("rope_scaling") or parameters
    theta, share = (
        check_number(
            name,
            next((x for x in (values.get(name), parameters.get(name), f.values.get(name)) if x is not None), default),
        )
        for name, default in (("rope_theta", theta), ("partial_rotary_factor", 1.0))
    )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise bad("partial_rotary_factor", share, f"the rotated part of a head ({dim}) must be even")
    base = RopeConfig(dim=dim, theta=theta)
    if any(isinstance(v, dict) for v in values.values()):
        raise CapabilityError(
            "rope_parameters by layer type", "all layers of this family rotate alike", "use another checkpoint"
        )
    phi3, context = f.values["model_type"] == "phi3", f.integer("max_position_embeddings")
    kind = values.get("rope_type") or values.get("type") or "default"
    if phi3 and kind in ("su", "yarn"):
        kind = "longrope"  # older Phi-3 checkpoints call it so
    if kind == "mrope":
        kind = "default"  # in sections for pictures: for text alone the plain rotation
    if kind not in [*_NEEDED]:
        wrong, kinds = "no such rotation here", ", ".join(sorted(_NEEDED))
        raise CapabilityError(f"rope type {shown(kind)}", wrong, f"use one of: {kinds}")
    if kind in ("default", "dynamic"):
        return base, context, "" if kind == "default" else "dynamic NTK changes the keys of earlier tokens beyond it"
    original = f.optional_integer(_ORIGINAL, None) or (4096 if phi3 and _ORIGINAL not in f.values else context)
    if values.get(_ORIGINAL) is not None:
        original = check_integer(_ORIGINAL, values[_ORIGINAL])
    parameters = {name: check_number(name, values[name]) for name in _NUMBERS if values.get(name)}
    if lost := next((name for name in _NEEDED[kind] if name not in parameters), None):
        raise ConfigError("config.json: rope parameters", f"{lost!r} is missing", RESTORE)
    factors = values.get("short_factor")
    if kind == "longrope" and (not isinstance(factors, list) or len(factors) != base.dim // 2):
        raise bad("short_factor", factors, f"it must list {base.dim // 2} numbers")
    parameters = {"factor": context / original, "long_factor": ()} | parameters
    parameters |= {"truncate": Fields(values).flag("truncate", True), _ORIGINAL: original}
    parameters["short_factor"] = [check_number("short_factor", factor) for factor in factors or ()]
    rope = scaled(kind, parameters, base)
    limit = min(context, original) if kind == "longrope" else context
    return rope, limit, "LongRoPE changes the keys of earlier tokens beyond it" if limit < context else ""


def read_layered_ropes(f: Fields, head_dim: int, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """Return the rotations of layers that see all keys and of those that slide, which have a base of their own.

    Transformers 5 lists parameters by the kind of layer; before it ``rope_local_base_freq`` was the base of sliding
    layers, and all else was about the others.
    """
    listed = f.mapping("rope_parameters")
    if not listed.keys() <= {"full_attention", "sliding_attention"}:
        raise bad("rope_parameters", listed, "it must list full_attention and sliding_attention")
    by_kind = {kind: Fields(listed).mapping(kind) for kind in listed}
    local = {"rope_theta": f.values.get("rope_local_base_freq"), "rope_scaling": None}
    full = f.values | {"rope_parameters": by_kind.get("full_attention")}
    sliding = f.values | local | {"rope_parameters": by_kind.get("sliding_attention")}
    return read_rope(Fields(full), head_dim, theta), read_rope(Fields(sliding), head_dim, local_theta)


def scaled(kind: str, parameters: Json, base: RopeConfig) -> RopeConfig:
    """Return the rotation that transformers computes, of short texts where LongRoPE has two.

    Which of those two rotates a key depends on the length of the whole sequence, so a sequence that grows past the
    original context needs all its keys computed again: longer contexts are refused by ``max_position``.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # here: most models need none of it

    shape: Json = {"head_dim": base.dim, "hidden_size": base.dim, "num_attention_heads": 1}
    shape |= {"rope_parameters": {"rope_theta": base.theta, **parameters}}
    config: Any = SimpleNamespace(**shape, standardize_rope_params=lambda: None)
    try:
        frequencies, attention = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    except ArithmeticError as error:
        raise bad("rope parameters", parameters, f"{kind} computes no rotation with them ({error})") from error
    if not all(0 < value < math.inf for value in (*frequencies.tolist(), attention)):
        raise bad("rope parameters", parameters, f"{kind} computes a rotation with zeros or infinities with them")
    return replace(base, scaled=tuple(frequencies.tolist()), attention_factor=attention)
