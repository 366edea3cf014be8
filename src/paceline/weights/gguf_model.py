"""A GGUF file as a checkpoint: its metadata in the form of ``config.json``, and its tensors under a checkpoint's names.

So one parser reads configurations (`families`) and one table maps tensors (`weights`). Where a file lacks a key, it
has llama.cpp's default for its architecture, since the file was written for that.

Source: the GGUF specification; llama.cpp's ``convert_hf_to_gguf.py`` (what is permuted, where 1 was added to norms).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..model.families import DecoderConfig, decoder_config
from .gguf import GGUF, PLAIN, GGUFTensor, read_gguf

STORED = "stored"  # as a dtype: the types that the file has its weights in
_PERMUTED = ("llama", "smollm3")  # whose rows of q and k the converter turned from halves into pairs

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OWN_NAMES = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

# What llama.cpp takes where a file lacks a key, for every architecture (its `load_hparams`); other keys must be there.
_DEFAULTS: dict[str, Any] = {
    "attention.causal": True,
    "attention.head_count_kv": lambda meta: meta.integer("attention.head_count"),
    "attention.key_length": lambda meta: meta.integer("embedding_length") // meta.integer("attention.head_count") or 1,
    "attention.sliding_window": 0,
    "attention.sliding_window_pattern": 6,  # Gemma 3's
    "attention.value_length": lambda meta: meta.integer("attention.key_length"),
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "pooling_type": 0,
    "rope.dimension_count": lambda meta: meta.integer("attention.key_length"),
    "rope.freq_base": 10_000.0,
    "rope.freq_base_swa": 10_000.0,  # Gemma 3's
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.factor": lambda meta: meta.get("rope.scale_linear"),  # of files that are older than it
    "rope.scaling.original_context_length": 0,
    "rope.scaling.type": "linear",
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


def tensors_of(model: GGUF) -> Iterator[GGUFTensor]:
    """Yield every tensor but rotation factors, by its checkpoint's name; one without such a name keeps its own."""
    arch = architecture(model)
    names = _LAYER | _OWN_NAMES.get(arch, {})
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"} if arch in _PERMUTED else {}
    for name, tensor in model.tensors.items():
        if name in _FACTORS:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None:
            stem, _, kind = name.partition(".")
            yield replace(tensor, source=f"{_TOP.get(stem, stem)}.{kind}")
        elif match[2] not in names:
            yield replace(tensor, source=name)
        else:
            count = _ArchMetadata(model).integer(f"attention.{heads[match[2]]}") if match[2] in heads else 0
            if count and tensor.shape[0] % (2 * count):
                tensor.file.refuse(f"tensor {shown(name)} has {tensor.shape[0]} rows for {count} heads")
            yield replace(tensor, source=f"layers.{match[1]}.{names[match[2]]}.{match[3]}", heads=count)


def architecture(model: GGUF) -> str:
    """Return ``general.architecture``.

    Raises:
        ConfigError: it is missing or unknown.
    """
    subject = f"GGUF file {model.path}"
    name = model.metadata.get("general.architecture")
    if isinstance(name, str) and name in _ARCHITECTURES:
        return name
    remedy = f"use one of: {', '.join(sorted(_ARCHITECTURES))}"
    wrong = "it names no architecture" if name is None else f"its architecture {shown(name)} is not known here"
    raise ConfigError(subject, wrong, remedy)


def config_of(model: GGUF) -> dict[str, Any]:
    """Return the model's configuration in the form of its family's ``config.json``.

    Raises:
        ConfigError: a key that is missing or cannot be.
        CapabilityError: an architecture or option that is not built.
    """
    arch, meta = architecture(model), _ArchMetadata(model)
    if meta.get("expert_count"):
        raise CapabilityError(meta.subject, "it is a mixture of experts, which is not supported", "use a dense model")
    if meta.get("pooling_type") or not meta.get("attention.causal"):
        raise CapabilityError(meta.subject, "it computes embeddings, not text", "use a model that writes")
    width, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length")
    if meta.integer("attention.value_length") != head_dim:
        raise CapabilityError(meta.subject, "its keys and values differ in width", "use another model")
    values: dict[str, Any] = {
        "vocab_size": _vocabulary(model),
        "hidden_size": width,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": model.token_id("bos"),
        "eos_token_id": _stop_ids(model),
        "dtype": _dtype(model),
    }
    if (turned := meta.integer("rope.dimension_count")) != head_dim:
        values["partial_rotary_factor"] = turned / head_dim
    values |= {"rope_scaling": rope} if (rope := _rope(model, meta)) else {}
    return values | _ARCHITECTURES[arch](meta)


class _ArchMetadata:
    """Metadata of one architecture, its types checked; every complaint names the key."""

    def __init__(self, model: GGUF) -> None:
        self.model, self.prefix = model, f"{architecture(model)}."
        self.subject = f"GGUF file {model.path}"

    def get(self, key: str) -> Any:
        """Return a key of the architecture, or its default; of an array all of whose entries agree, that entry."""
        value = self.model.metadata.get(self.prefix + key)
        if value is None:
            value = _DEFAULTS.get(key)
            value = value(self) if callable(value) else value
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        return value

    def integer(self, key: str, least: int = 1) -> int:
        """Return a count."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._bad(key, value, f"a whole number of at least {least}, the same in all layers")
        return value

    def number(self, key: str) -> float:
        """Return a positive number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self._bad(key, value, "a positive number")
        # 32 bits in the file: what people would write for it.
        return float(f"{value:.7g}")

    def _bad(self, key: str, value: Any, rule: str) -> None:
        wrong = "is missing" if value is None else f"is {shown(value)}; it must be {rule}"
        raise ConfigError(self.subject, f"{self.prefix}{key} {wrong}", "download the file again, or convert it again")


# Ends of a turn, of which llama.cpp takes the first that there is where no key names it.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "<end_of_utterance>")


def _stop_ids(model: GGUF) -> list[int]:
    """Return the ids that end a text, a turn and a message."""
    ids = [model.token_id(role) for role in ("eos", "eot", "eom")]
    if ids[1] is None:
        tokens = model.metadata.get("tokenizer.ggml.tokens", ())
        ids[1] = next((tokens.index(end) for end in _TURN_ENDS if end in tokens), None)
    return list(dict.fromkeys(token for token in ids if token is not None))


def _vocabulary(model: GGUF) -> int:
    """Return the rows of the embedding, which must agree with the tokens."""
    table, tokens = model.tensors.get("token_embd.weight"), model.metadata.get("tokenizer.ggml.tokens")
    what = f"GGUF file {model.path}"
    if table is None:
        raise ConfigError(what, "it has no tensor token_embd.weight: it is not a whole language model", "name another")
    if tokens is not None and len(tokens) != table.shape[0]:
        wrong = f"it has {len(tokens):,} tokens, and an embedding of {table.shape[0]:,}"
        raise ConfigError(what, wrong, "convert the model again")
    return table.shape[0]


def _dtype(model: GGUF) -> str:
    """Return `STORED` where products' weights are in blocks, else their plain type.

    A type without products is refused later, where no plain dtype is requested.
    """
    kinds = {t.type.name for n, t in model.tensors.items() if n.startswith("blk.") and len(t.shape) == 2}
    plain = [name for name in ("f16", "bf16", "f32", "f64") if name in kinds]
    if kinds - PLAIN.keys() or not plain:
        return STORED
    return str(PLAIN[plain[0]]).removeprefix("torch.")


def _rope(model: GGUF, meta: _ArchMetadata) -> dict[str, Any]:
    """Return the fields of ``rope_scaling``; none for the plain rotation.

    As in llama.cpp a factor scales whatever the type, unless that is "none"; 0 means no factor.
    """
    kind, attention = meta.get("rope.scaling.type"), meta.number("rope.scaling.attn_factor")
    if kind not in ("none", "linear", "yarn", "longrope"):
        wrong = f"{meta.prefix}rope.scaling.type is {shown(kind)}, a rotation that is not known here"
        raise CapabilityError(meta.subject, wrong, "use another model")
    unscaled = kind == "none" or meta.get("rope.scaling.factor") == 0
    factor = 1.0 if unscaled else meta.number("rope.scaling.factor")
    context = meta.integer("context_length")
    original = meta.integer("rope.scaling.original_context_length", 0) or context
    # Divisors of each frequency: Llama 3's, or LongRoPE's for short texts.
    divisors = model.tensors.get("rope_freqs.weight") or model.tensors.get("rope_factors_short.weight")
    if kind == "yarn":
        if divisors is not None:
            wrong = f"it has both {shown(divisors.name)} and {meta.prefix}rope.scaling.type 'yarn', which is not built"
            raise CapabilityError(meta.subject, wrong, "use another model")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast"),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow"),
            "attention_factor": attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        }
    if divisors is None and attention == 1:
        return {"rope_type": "linear", "factor": factor} if factor != 1 else {}
    plain = [1.0] * (meta.integer("rope.dimension_count") // 2)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original if "rope_factors_long.weight" in model.tensors else context,
        "short_factor": [factor * x for x in (plain if divisors is None else divisors.values().float().tolist())],
        "attention_factor": attention,
    }


def _gemma3(meta: _ArchMetadata) -> dict[str, Any]:
    """Add what no file names: the scale of the largest model's scores; without windows all layers rotate alike."""
    window = meta.integer("attention.sliding_window", least=0) or None
    layers, width, heads = (meta.integer(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": meta.integer("attention.sliding_window_pattern") if window else 1,
        "rope_local_base_freq": meta.number("rope.freq_base_swa"),
        "query_pre_attn_scalar": width // heads if layers == 62 else meta.integer("attention.key_length"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


# The keys of each architecture in addition to those of all.
_ARCHITECTURES: dict[str, Callable[[_ArchMetadata], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "llama": lambda meta: {"model_type": "llama", "attention_bias": "blk.0.attn_q.bias" in meta.model.tensors},
    "phi3": lambda meta: {"model_type": "phi3", "sliding_window": meta.integer("attention.sliding_window", 0) or None},
    "qwen2": lambda meta: {"model_type": "qwen2"},
    "qwen3": lambda meta: {"model_type": "qwen3"},
    "smollm3": lambda meta: {"model_type": "smollm3", "no_rope_layer_interval": 4},
}


def read_gguf_config(path: Path) -> DecoderConfig:
    """Return the decoder's configuration of a GGUF file.

    Raises:
        ConfigError, CapabilityError: values that cannot be, or are not supported.
    """
    model = read_gguf(path)
    try:
        return replace(decoder_config(config_of(model)), norm_offset=0.0)  # the converter has added it
    except ConfigError as error:  # CapabilityError is one
        named = error.subject.replace("config.json", f"GGUF file {path}")
        raise type(error)(named, error.wrong, error.remedy) from error
