"""Hugging Face ``config.json`` -> `DecoderConfig`.

A family is one function from a config dictionary to a `DecoderConfig`; the network itself knows no
family by name. Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and
``rope_parameters`` (transformers 5). A file may have both; what is said twice must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..attention.rope import RopeConfig, yarn_attention_factor
from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown

Json = dict[str, Any]

MAX_INTEGER = 2**31 - 1  # of any size: products of several still fit a float
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 2**16
NUMBERS = (1e-30, 1e30)  # of any factor: float32 holds it, and its inverse


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """All that the network must know about a checkpoint."""

    family: str  # Hugging Face's model_type
    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # positions 0 .. max_position - 1 are right
    max_position_note: str = ""  # why it is less than the checkpoint's own figure, where it is
    windows: tuple[int | None, ...]  # [layers] a row at t sees keys at positions > t - window; None: all
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    activation: Literal["silu", "relu", "gelu"] = "silu"
    gated: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head
    tied: bool = False  # the output head is the embedding table
    rope: RopeConfig | None = None
    learned_positions: int = 0  # rows of the position table; 0: none
    position_offset: int = 0  # position p is row p + offset of that table
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None  # "bfloat16", "float32", ...
    first_norm: bool = True  # whether the first layer's attention has a norm before it; EAGLE's has none
    stretch: int = 1  # each layer is followed by so many less one that add zero; see `decoder.Decoder`

    @property
    def depth(self) -> int:
        """Layers that a pass goes through."""
        return self.num_layers * self.stretch

    def part(self, start: int, stop: int, words: bool) -> DecoderConfig:
        """The layers start .. stop - 1 alone.

        Args:
            start, stop: the range.
            words: whether embedding, final norm and head are there; else states go in and come out.
        """
        kept = replace(self, num_layers=stop - start, windows=self.windows[start:stop])
        return kept if words else replace(kept, vocab_size=1, tied=True, learned_positions=0)


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every fused linear of one layer, by name; see `layers.Layer`."""
    c = config
    return {
        "qkv": (c.d_model, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
        "out": (c.num_heads * c.head_dim, c.d_model),
        "up": (c.d_model, c.d_ff * (2 if c.gated else 1)),
        "down": (c.d_ff, c.d_model),
    }


def linear_biases(config: DecoderConfig) -> dict[str, bool]:
    """Whether each of `linear_shapes` has a bias."""
    c = config
    return {"qkv": c.qkv_bias, "out": c.out_bias, "up": c.mlp_bias, "down": c.mlp_bias}


def decoder_config(config: Json) -> DecoderConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: an architecture or a value that is not supported, a field that is missing.
        CapabilityError: a known family with an option that the decoder does not have.
    """
    if not isinstance(config, dict):
        raise ConfigError("config.json", f"it holds a {type(config).__name__}, not an object", "restore the file")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        remote = " (the checkpoint brings its own code, which is never run)" if "auto_map" in config else ""
        raise ConfigError(f"model_type {shown(kind)}", f"not a supported architecture{remote}", _supported())
    _refuse_other_heads(config)
    if config.get("quantization_config"):
        method = _Fields(config).mapping("quantization_config").get("quant_method", "unknown")
        raise CapabilityError(
            f"a checkpoint quantised with {shown(method)}",
            "only plain weights are read",
            "use the original, or dtype='int8'",
        )
    return FAMILIES[kind](_Fields(config))


def _supported() -> str:
    return f"use one of: {', '.join(sorted(FAMILIES))} (Vicuna and Llama 2 and 3 are all 'llama')"


def _refuse_other_heads(config: Json) -> None:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise _bad("architectures", names, "it must be a list of names")
    if names and not any(n.endswith(("ForCausalLM", "Model")) for n in names):
        raise ConfigError(f"architecture {names[0]!r}", "not a language model", "use a ...ForCausalLM checkpoint")


class _Fields:
    """Typed access to a config dictionary; every complaint names the field and its value."""

    def __init__(self, values: Json) -> None:
        self.values = values

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        return _integer(name, self._get(name, default), minimum, maximum)

    def layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def number(self, name: str, default: float | None = None) -> float:
        return _number(name, self._get(name, default))

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, "it must be true or false", default)

    def optional_integer(self, name: str, default: int | None, maximum: int = MAX_INTEGER) -> int | None:
        """An absent field takes the default; an explicit null stays null."""
        return None if self.values.get(name, default) is None else self.integer(name, default, maximum=maximum)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "it must be text", None)

    def mapping(self, name: str) -> Json:
        return self._typed(name, dict, "it must be an object", {})

    def _typed(self, name: str, kind: type, rule: str, default: Any) -> Any:
        value = self._get(name, default) if default is not None else self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise _bad(name, value, rule)
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise ConfigError(f"config.json of a {self.values['model_type']!r} model", f"{name!r} is missing", _RESTORE)
        return default if value is None else value


_RESTORE = "restore the file from where the checkpoint came"


def _bad(name: str, value: object, rule: str, file: str = "config.json") -> ConfigError:
    return ConfigError(f"{file}: {name} = {shown(value)}", rule, _RESTORE)


def _contradiction(name: str, values: Iterable[object]) -> ConfigError:
    said = " and ".join(map(shown, values))
    return ConfigError(f"config.json: {name}", f"it is said more than once, as {said}", "remove what is wrong")


def _integer(name: str, value: object, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise _bad(name, value, f"it must be an integer of at least {minimum}")
    if value > maximum:
        raise _bad(name, value, f"it must be an integer of at most {maximum}")
    return value


def _number(name: str, value: object) -> float:
    low, high = NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(name, value, f"it must be a positive number, {low:g} to {high:g}")
    return float(value)


# --- families -------------------------------------------------------------------------------------------------


def _llama(f: _Fields) -> DecoderConfig:
    bias = f.flag("attention_bias", False)
    return _rotary_family(f, qkv_bias=bias, out_bias=bias, mlp_bias=f.flag("mlp_bias", False))


def _mistral(f: _Fields) -> DecoderConfig:
    window = f.optional_integer("sliding_window", 4096)
    return _rotary_family(f, windows=(window,) * f.layers())


def _qwen2(f: _Fields) -> DecoderConfig:
    return _rotary_family(f, qkv_bias=True, windows=_layered_windows(f))


def _qwen3(f: _Fields) -> DecoderConfig:
    bias = f.flag("attention_bias", False)
    return _rotary_family(
        f,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=_layered_windows(f),
        head_dim=f.integer("head_dim", 128, maximum=MAX_HEAD_DIM),
    )


def _phi3(f: _Fields) -> DecoderConfig:
    window = f.optional_integer("sliding_window", None)
    return _rotary_family(f, windows=(window,) * f.layers())


def _opt(f: _Fields) -> DecoderConfig:
    d_model, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    _refuse_opt_variants(f, d_model)
    positions, bias = f.integer("max_position_embeddings"), f.flag("enable_bias", True)
    return DecoderConfig(
        **_common(f, d_model, heads, tied=True),
        d_ff=f.integer("ffn_dim"),
        num_kv_heads=heads,
        head_dim=_head_dim(d_model, heads),
        max_position=positions,
        windows=(None,) * f.layers(),
        norm="layer",
        norm_eps=1e-5,
        activation=_activation(f, "activation_function", "relu"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        learned_positions=positions + 2,
        position_offset=2,
    )


FAMILIES: dict[str, Callable[[_Fields], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _rotary_family(
    f: _Fields, *, windows: tuple[int | None, ...] | None = None, head_dim: int | None = None, **options: bool
) -> DecoderConfig:
    """What Llama, Mistral, Qwen and Phi-3 share: RMS norm, rotary positions, a gated MLP."""
    d_model, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise _bad("num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}")
    head_dim = head_dim or f.optional_integer("head_dim", None, MAX_HEAD_DIM) or _head_dim(d_model, heads)
    rope, limit, note = _rope(f, head_dim)
    layers = f.layers()
    return DecoderConfig(
        **_common(f, d_model, heads, tied=False),
        d_ff=f.integer("intermediate_size"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=limit,
        max_position_note=note,
        # A window as wide as the context hides nothing.
        windows=tuple(None if w is None or w >= limit else w for w in windows or (None,) * layers),
        norm_eps=f.number("rms_norm_eps"),
        activation=_activation(f, "hidden_act", "silu"),
        rope=rope,
        **options,  # type: ignore[arg-type]  # all of them are the boolean fields
    )


def _common(f: _Fields, d_model: int, heads: int, *, tied: bool) -> Json:
    return {
        "family": f.values["model_type"],
        "vocab_size": f.integer("vocab_size"),
        "d_model": d_model,
        "num_heads": heads,
        "num_layers": f.layers(),
        "tied": f.flag("tie_word_embeddings", tied),
        "bos_id": next(iter(token_ids("bos_token_id", f.values.get("bos_token_id"))), None),
        "eos_ids": token_ids("eos_token_id", f.values.get("eos_token_id")),
        "checkpoint_dtype": _stored_dtype(f),
    }


def _stored_dtype(f: _Fields) -> str | None:
    """Transformers 5 calls it ``dtype``, transformers 4 ``torch_dtype``; of both, the newer name counts there, too."""
    named = f.text("dtype") or f.text("torch_dtype")
    return None if named is None else named.removeprefix("torch.")


def token_ids(name: str, value: object, file: str = "config.json") -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple; those below 0 stand for none.

    Args:
        name: of the field.
        value: what it holds.
        file: where it stands, for messages.

    Raises:
        ConfigError: something else, or an id that no vocabulary could have.
    """
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_INTEGER for i in ids):
        raise _bad(name, value, "it must be a token id or a list of them", file)
    return tuple(i for i in ids if i >= 0)


def _head_dim(d_model: int, heads: int) -> int:
    if d_model % heads:
        raise _bad("hidden_size", d_model, f"it must be a multiple of num_attention_heads = {heads}")
    return _integer("hidden_size / num_attention_heads", d_model // heads, maximum=MAX_HEAD_DIM)


def _activation(f: _Fields, name: str, default: str) -> Literal["silu", "relu", "gelu"]:
    value = f._get(name, default)
    if value in ("silu", "swish"):
        return "silu"
    if value == "relu":
        return "relu"
    if value == "gelu":
        return "gelu"
    raise CapabilityError(f"{name} = {shown(value)}", "the decoder has silu, relu and gelu", "use another checkpoint")


def _refuse_opt_variants(f: _Fields, d_model: int) -> None:
    wanted = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": d_model,
    }
    for name, value in wanted.items():
        given = f.values.get(name)
        if given is not None and given != value:
            raise CapabilityError(
                f"OPT with {name} = {shown(given)}",
                f"the decoder has {value!r} only",
                "use another size (350m differs)",
            )


def _layered_windows(f: _Fields) -> tuple[int | None, ...]:
    """Qwen's rule: which layers slide is listed, or it is those from ``max_window_layers`` on."""
    layers = f.layers()
    window = f.optional_integer("sliding_window", 4096) if f.flag("use_sliding_window", False) else None
    kinds = f.values.get("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", 28, minimum=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _bad("layer_types", kinds, f"it must list all {layers} layers")
    unknown = [k for k in kinds if k not in ("full_attention", "sliding_attention")]
    if unknown:
        raise CapabilityError(
            f"layer type {shown(unknown[0])}", "layers attend fully or slide", "use another checkpoint"
        )
    return tuple(window if k == "sliding_attention" else None for k in kinds)


# --- rotary parameters ----------------------------------------------------------------------------------------


Rope = tuple[RopeConfig, int, str]  # the rotation, positions it is right for, why these are fewer than is said

_SPELLINGS = ("rope_parameters", "rope_scaling")  # of transformers 5 and of transformers 4


def _rope(f: _Fields, head_dim: int) -> Rope:
    """The rotation that the file describes, in either spelling or, alike, in both."""
    given = {name: f.mapping(name) for name in _SPELLINGS if f.mapping(name)}
    places = [f.values, *given.values()]
    share = _said("partial_rotary_factor", places, 1.0)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise _bad("partial_rotary_factor", share, f"the rotated part of a head ({dim}) must be even")
    base = RopeConfig(dim=dim, theta=_said("rope_theta", places, 10000.0))
    found = [_read_rope(f, values, base) for values in given.values()] or [_read_rope(f, {}, base)]
    if any(other != found[0] for other in found):
        raise ConfigError(
            f"config.json: {' and '.join(given)}",
            "they describe two different rotations",
            "remove the one that the model was not trained with",
        )
    return found[0]


def _said(name: str, places: Iterable[Json], default: float) -> float:
    """A number that may stand beside the rope parameters and among them."""
    found = {_number(name, place[name]) for place in places if place.get(name) is not None}
    if len(found) > 1:
        raise _contradiction(name, sorted(found))
    return next(iter(found), default)


def _read_rope(f: _Fields, values: Json, base: RopeConfig) -> Rope:
    """What one of the two spellings says."""
    if any(isinstance(v, dict) for v in values.values()):
        raise CapabilityError(
            "rope_parameters by layer type", "one rotation serves all layers", "use another checkpoint"
        )
    kind = _rope_kind(f, values)
    if kind not in _ROPES:
        raise CapabilityError(
            f"rope type {kind!r}", "no such rotation here", f"use one of: {', '.join(sorted(_ROPES))}"
        )
    return _ROPES[kind](f, values, base, f.integer("max_position_embeddings"))


def _rope_kind(f: _Fields, values: Json) -> str:
    """The type's name; its field is called ``rope_type``, formerly ``type``, and many files have both."""
    named = {name: value for name in ("rope_type", "type") if (value := values.get(name)) is not None}
    for name, value in named.items():
        if not isinstance(value, str):
            raise _bad(name, value, "it must be the name of a rotation")
        if f.values["model_type"] == "phi3" and value in ("su", "yarn"):
            named[name] = "longrope"  # older Phi-3 checkpoints call LongRoPE so
        if value == "mrope":
            named[name] = "default"  # rotation in sections for pictures: for text alone the plain one
    if len({*named.values()}) > 1:
        raise _contradiction("rope_type (or type)", named.values())
    return next(iter(named.values()), "default")


def _value(values: Json, name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if value is None:
        raise ConfigError("config.json: rope parameters", f"{name!r} is missing", _RESTORE)
    return _number(name, value)


def _original(f: _Fields, values: Json, context: int) -> int:
    """Positions before the extension; the field stands beside the rope parameters or among them."""
    name = "original_max_position_embeddings"
    beside = f.optional_integer(name, None)
    among = None if values.get(name) is None else _integer(name, values[name])
    if None not in (beside, among) and beside != among:
        raise _contradiction(name, (beside, among))
    default = 4096 if f.values["model_type"] == "phi3" and name not in f.values else context
    return beside or among or default


def _default_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    return base, context, ""


def _linear_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    return replace(base, kind="linear", factor=_value(values, "factor")), context, ""


def _dynamic_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    """Dynamic NTK turns every frequency once a sequence outgrows the context, keys already cached included.

    Up to there it is the plain rotation; beyond, a key would depend on tokens after it, which no cache can hold.
    """
    return base, context, "dynamic NTK changes the keys of earlier tokens beyond it"


def _llama3_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    options: Json = {name: _value(values, name) for name in ("low_freq_factor", "high_freq_factor", "factor")}
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    if high <= low:
        raise _bad("high_freq_factor", high, f"it must be above low_freq_factor = {low}")
    return replace(base, kind="llama3", original_max_position=_original(f, values, context), **options), context, ""


def _yarn_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    original, given = _original(f, values, context), {k: v for k, v in values.items() if v}
    if base.theta <= 1:
        raise _bad("rope_theta", base.theta, "yarn divides by its logarithm: it must be above 1")
    fast, slow = _value(given, "beta_fast", 32.0), _value(given, "beta_slow", 1.0)
    if fast < slow:
        raise _bad("beta_fast", fast, f"it must be beta_slow = {slow} or more")
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
        truncate=_Fields(values).flag("truncate", True),
        attention_factor=_value({k: v for k, v in values.items() if v is not None}, "attention_factor", computed),
    )
    return rope, context, ""


def _long_rope(f: _Fields, values: Json, base: RopeConfig, context: int) -> Rope:
    """LongRoPE (Ding et al. 2024) has two sets of factors: short and long sequences.

    Which of the two rotates a key depends on the length of the whole sequence, so a sequence that grows
    past the original context needs all its keys computed anew. Served is what the short factors are
    right for; longer contexts are refused by ``max_position``.
    """
    original = _original(f, values, context)
    if original == 1:
        raise _bad("original_max_position_embeddings", 1, "longrope divides by its logarithm: it must be above 1")
    factors = values.get("short_factor")
    if not isinstance(factors, list) or len(factors) != base.dim // 2:
        raise _bad("short_factor", factors, f"it must list {base.dim // 2} numbers")
    factor = _value({k: v for k, v in values.items() if v is not None}, "factor", context / original)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = replace(
        base,
        divisors=tuple(_number("short_factor", x) for x in factors),
        attention_factor=_value({k: v for k, v in values.items() if v is not None}, "attention_factor", computed),
    )
    limit = min(context, original)
    note = "LongRoPE changes the keys of earlier tokens beyond it" if limit < context else ""
    return rope, limit, note


_ROPES: dict[str, Callable[[_Fields, Json, RopeConfig, int], Rope]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _long_rope,
}
