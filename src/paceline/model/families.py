"""Hugging Face ``config.json`` -> `DecoderConfig`.

A family is one function from a config dictionary to a `DecoderConfig`; the network itself knows no
family by name. Fields are read by `config_fields`, rotations by `rotations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..weights.quant_config import GroupQuant, read_group_quant
from .config_fields import Fields, Json, bad, check_integer, token_ids
from .rope import RopeConfig
from .rotations import Rope, read_layered_ropes, read_rope

MAX_HEAD_DIM = 2**16
SEGMENTS = 2  # of a draft of tracks
Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]


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
    norm_eps: float
    norm_offset: float = 0.0  # added to the gains of norms that a checkpoint holds
    wide_norms: bool = False  # these gains are float32 next to activations of 16 bits
    post_norms: bool = False  # RMS norms after attention and MLP, in front of the sums
    activation: Activation = "silu"  # an MLP is down(act(gate(x)) * up(x))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head
    query_scalar: float | None = None  # scores are q k / sqrt(query_scalar); None: head_dim
    tied: bool = False  # the output head is the embedding table
    embedding_scale: float = 1.0  # of embeddings in front of the first layer, in their dtype; of the head 1
    rope: RopeConfig  # rotation of layers that see all keys
    ropes: tuple[RopeConfig | None, ...] = ()  # [layers] where not all have `rope`; None: that layer rotates nothing
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None  # "bfloat16", "float32", ..., or "stored": in blocks
    quantised: GroupQuant | None = None  # how its linears are stored; None: as plain numbers
    first_norm: bool = True  # whether the first layer's attention has a norm before it; EAGLE's has none
    gathered: int = 1  # ranks whose heads and MLP's inside `out` and `down` read; each has so many times fewer outputs
    tracks: int = 1  # that the layers consist of; widths and heads are those of all tracks together; see `tracks`

    @property
    def scale(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def rotations(self) -> tuple[RopeConfig | None, ...]:
        """Return [layers] the rotation of each layer."""
        return self.ropes or (self.rope,) * self.num_layers

    def part(self, start: int, stop: int, ends: bool) -> DecoderConfig:
        """Return the layers start .. stop - 1 alone.

        Without ``ends`` states go in and come out, and embedding, final norm and head are not there.
        """
        part = replace(self, num_layers=stop - start, windows=self.windows[start:stop], ropes=self.ropes[start:stop])
        return part if ends else replace(part, vocab_size=1, tied=True)

    @property
    def track(self) -> DecoderConfig:
        """Return the layers of one of its tracks, without ends."""
        widths = {name: getattr(self, name) // self.tracks for name in _SHARED}
        return replace(self.part(0, self.num_layers, ends=False), family="llama", tracks=1, **widths)


_SHARED = ("d_model", "d_ff", "num_heads", "num_kv_heads")  # divided among tracks


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of every fused linear of one layer, by name; see `layers.Layer`."""
    c, ranks = config, config.gathered
    return {
        "qkv": (c.d_model, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
        "out": (ranks * c.num_heads * c.head_dim, c.d_model // ranks),
        "up": (c.d_model, 2 * c.d_ff),
        "down": (ranks * c.d_ff, c.d_model // ranks),
    }


def linear_biases(config: DecoderConfig) -> dict[str, bool]:
    """Return whether each of `linear_shapes` has a bias."""
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
    if not isinstance(kind, str) or kind not in _READ:
        remote = " (the checkpoint brings its own code, which is never run)" if "auto_map" in config else ""
        remedy = f"use one of: {', '.join(sorted(FAMILIES))} (Vicuna and Llama 2 and 3 are all 'llama')"
        raise ConfigError(f"model_type {shown(kind)}", f"not a supported architecture{remote}", remedy)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise bad("architectures", names, "it must be a list of names")
    if names and not any(n.endswith(("ForCausalLM", "Model")) for n in names):
        raise ConfigError(f"architecture {names[0]!r}", "not a language model", "use a ...ForCausalLM checkpoint")
    read = _READ[kind](Fields(config))
    if not config.get("quantization_config"):
        return read
    quantised = read_group_quant(Fields(config).mapping("quantization_config"))
    return replace(read, quantised=quantised, checkpoint_dtype="stored")


# --- families -------------------------------------------------------------------------------------------------


def _biased(f: Fields) -> dict[str, Any]:
    """Return whether the linears of attention have biases."""
    return dict.fromkeys(("qkv_bias", "out_bias"), f.flag("attention_bias", False))


def _tracks(f: Fields) -> DecoderConfig:
    """Return a draft of tracks, as a recipe of kind tracks trains one."""
    config = _rotary_family(f, tied=True)
    tracks, merge = f.integer("num_tracks"), f.text("merge") or ""
    uneven = [name for name in _SHARED if getattr(config, name) % tracks]
    if tracks < 2 or uneven:
        wrong = "there must be two or more, which divide hidden_size, intermediate_size and heads"
        raise bad("num_tracks", tracks, wrong)
    if config.num_layers % SEGMENTS:
        raise bad("num_hidden_layers", config.num_layers, f"it must be divided by {SEGMENTS} segments")
    if merge != "gather":
        raise bad("merge", merge, "it must be gather")
    if not config.tied:
        raise CapabilityError("tie_word_embeddings = false", "a draft of tracks has one table", "train it so")
    return replace(config, tracks=tracks)


def _one_window(usual: int | None, f: Fields) -> DecoderConfig:
    """Mistral and Phi-3: all layers see equally far, ``usual`` where the file has no entry."""
    return _rotary_family(f, windows=(f.optional_integer("sliding_window", usual),) * f.layers())


def _qwen3(f: Fields) -> DecoderConfig:
    head_dim = f.integer("head_dim", 128, maximum=MAX_HEAD_DIM)
    return _rotary_family(f, **_biased(f), qk_norm=True, windows=_layered_windows(f), head_dim=head_dim)


def _smollm3(f: Fields) -> DecoderConfig:
    layers = f.layers()
    interval = f.integer("no_rope_layer_interval", 4)
    rotated = f.values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(r not in (0, 1) for r in rotated):
        raise bad("no_rope_layers", rotated, f"it must list 0 or 1 for each of {layers} layers")
    kinds = ["full_attention" if r else "sliding_attention" for r in rotated[:layers]]
    options: dict[str, Any] = {"mlp_bias": f.flag("mlp_bias", False), "windows": _layered_windows(f, kinds)}
    config = _rotary_family(f, theta=2_000_000.0, tied=True, **_biased(f), **options)
    if all(rotated[:layers]):
        return config
    return replace(config, ropes=tuple(config.rope if r else None for r in rotated[:layers]))


def _gemma3(f: Fields) -> DecoderConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if f.values.get(name):
            raise CapabilityError(
                f"{name} = {shown(f.values[name])}", "the decoder has no such thing", "use another checkpoint"
            )
    layers, d_model = f.layers(), f.integer("hidden_size")
    head_dim = f.integer("head_dim", 256, maximum=MAX_HEAD_DIM)
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    kinds = _layer_kinds(f, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)])
    full, sliding = read_layered_ropes(f, head_dim, 1_000_000.0, 10_000.0)
    window = f.optional_integer("sliding_window", 4096)
    return _rotary_family(
        f,
        head_dim=head_dim,
        rope=full,
        tied=True,
        activation="hidden_activation",
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        ropes=tuple(sliding[0] if kind == "sliding_attention" else full[0] for kind in kinds),
        **_biased(f),
        norm_offset=1.0,
        wide_norms=True,
        post_norms=True,
        qk_norm=True,
        query_scalar=f.number("query_pre_attn_scalar", 256),
        embedding_scale=d_model**0.5,
    )


FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "gemma3_text": _gemma3,
    "llama": lambda f: _rotary_family(f, **_biased(f), mlp_bias=f.flag("mlp_bias", False)),
    "mistral": partial(_one_window, 4096),
    "phi3": partial(_one_window, None),
    "qwen2": lambda f: _rotary_family(f, qkv_bias=True, windows=_layered_windows(f)),
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
_READ = FAMILIES | {"paceline_tracks": _tracks}  # the last is not an architecture of others


def _rotary_family(
    f: Fields,
    *,
    windows: tuple[int | None, ...] | None = None,
    head_dim: int | None = None,
    rope: Rope | None = None,
    theta: float = 10000.0,
    tied: bool = False,
    activation: str = "hidden_act",
    **options: Any,
) -> DecoderConfig:
    """Read the fields that all families share; `None` is what the file holds, for windows none.

    ``theta`` and ``tied`` are its defaults, ``activation`` is the field that names the activation.
    """
    d_model, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise bad("num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}")
    head_dim = head_dim or f.optional_integer("head_dim", None, MAX_HEAD_DIM) or _head_dim(d_model, heads)
    rotation, limit, note = rope or read_rope(f, head_dim, theta)
    layers, named = f.layers(), f.text("dtype") or f.text("torch_dtype")  # of transformers 5, else of transformers 4
    return DecoderConfig(
        family=f.values["model_type"],
        vocab_size=f.integer("vocab_size"),
        d_model=d_model,
        d_ff=f.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=limit,
        max_position_note=note,
        # A window as wide as the context hides nothing.
        windows=tuple(None if w is None or w >= limit else w for w in windows or (None,) * layers),
        norm_eps=f.number("rms_norm_eps"),
        activation=_activation(f, activation, "silu" if activation == "hidden_act" else "gelu_pytorch_tanh"),
        rope=rotation,
        tied=f.flag("tie_word_embeddings", tied),
        bos_id=next(iter(token_ids("bos_token_id", f.values.get("bos_token_id"))), None),
        eos_ids=token_ids("eos_token_id", f.values.get("eos_token_id")),
        checkpoint_dtype=None if named is None else named.removeprefix("torch."),
        **options,
    )


def _head_dim(d_model: int, heads: int) -> int:
    if d_model % heads:
        raise bad("hidden_size", d_model, f"it must be a multiple of num_attention_heads = {heads}")
    return check_integer("hidden_size / num_attention_heads", d_model // heads, maximum=MAX_HEAD_DIM)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _activation(f: Fields, name: str, default: str) -> Activation:
    value = f.get(name, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        wrong = f"the decoder has silu, relu and gelu ({', '.join(_ACTIVATIONS)})"
        raise CapabilityError(f"{name} = {shown(value)}", wrong, "use another checkpoint")
    return _ACTIVATIONS[value]


def _layered_windows(f: Fields, usual: list[str] | None = None) -> tuple[int | None, ...]:
    """Return the layers that slide: listed, or as ``usual``.

    None is Qwen's rule: those from ``max_window_layers`` on.
    """
    window = f.optional_integer("sliding_window", 4096) if f.flag("use_sliding_window", False) else None
    if usual is None:
        first = f.integer("max_window_layers", 28, minimum=0)
        usual = ["full_attention" if i < first else "sliding_attention" for i in range(f.layers())]
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_kinds(f, usual))


def _layer_kinds(f: Fields, usual: list[str]) -> list[str]:
    """Return [layers] full_attention or sliding_attention."""
    kinds = f.values.get("layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list) or len(kinds) != len(usual):
        raise bad("layer_types", kinds, f"it must list all {len(usual)} layers")
    unknown = [k for k in kinds if k not in ("full_attention", "sliding_attention")]
    if unknown:
        raise CapabilityError(
            f"layer type {shown(unknown[0])}", "layers attend fully or slide", "use another checkpoint"
        )
    return kinds
