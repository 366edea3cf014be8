"""Small GGUF files of any type, written by the ``gguf`` package, and the same weights as a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from paceline.weights.blocks import BY_NAME

WIDTH, HEADS, KV_HEADS, INNER, VOCABULARY, LAYERS = 256, 4, 2, 512, 320, 2
SHAPES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TEXTS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
NUMBERS = {
    "llama.block_count": LAYERS,
    "llama.context_length": 512,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "tokenizer.ggml.eos_token_id": 0,
}
HALVES: dict[str, tuple[int, ...]] = {  # bytes at which a block's scales of 16 bits begin, where not at 0 alone
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q6_k": (208,),
    "mxfp4": (),
}
CONFIG = {  # of a folder
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
}


def random_rows(name: str, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes] of blocks whose scales are small numbers, so that a network of them computes."""
    if name in ("f32", "f16", "bf16"):
        values = torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32) * width**-0.5)
        kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
        return values.to(kind).view(torch.uint8).numpy()
    kind = BY_NAME[name]
    raw = rng.integers(0, 256, (rows * width // kind.values, kind.bytes), dtype=np.uint8)
    shrink = {"q4_k": 2e-4, "q5_k": 1e-4, "q6_k": 3e-5, "iq4_xs": 2e-5, "iq4_nl": 8e-4, "q8_0": 8e-4}.get(name, 8e-3)
    for at in HALVES.get(name, (0,)):
        halves = (rng.random(len(raw)) * shrink).astype("<f2")
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if name in ("q4_1", "q5_1"):  # the least value: about minus half of the range
        scale = raw[:, :2].copy().view("<f2")
        raw[:, 2:4] = (scale * np.float16(-8 if name == "q4_1" else -16)).view(np.uint8)
    if name == "mxfp4":
        raw[:, 0] = rng.integers(118, 123, len(raw))
    return raw.reshape(rows, -1)


def write(
    path: Path,
    types: str | Mapping[str, str] = "q4_0",
    *,
    tied: bool = True,
    seed: int = 0,
    changed: Mapping[str, Any] | None = None,
    tokens: int | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A Llama of two layers with random weights.

    Args:
        path: of the file.
        types: of all products and the embedding, or by the tensor's stem (``attn_q``, ``token_embd``), the rest q4_0.
        tied: without an ``output.weight``.
        seed: of the weights.
        changed: metadata that replace others; None removes one.
        tokens: how many there are; None: as many as the embedding has rows.
        extra: tensors in float32 beside those.
    """
    changed = dict(changed or {})
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, changed.pop("general.architecture", "llama"))

    def type_of(stem: str) -> str:
        return types if isinstance(types, str) else types.get(stem, "q4_0")

    names = [f"<{i}>" for i in range(VOCABULARY if tokens is None else tokens)]
    metadata: dict[str, Any] = TEXTS | NUMBERS | {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {"llama.rope.freq_base": 10000.0, "tokenizer.ggml.tokens": names, "tokenizer.ggml.merges": [""][:0]}
    metadata |= {"tokenizer.ggml.token_type": [1] * len(names)} | changed
    for key, value in metadata.items():
        if value is None or value == []:
            continue
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ](key, value)

    def add(name: str, rows: int, width: int) -> None:
        kind = type_of(name.split(".")[-2])
        number = gguf.GGMLQuantizationType[kind.upper()]
        raw = random_rows(kind, rows, width, rng)
        if kind in ("f32", "f16"):
            writer.add_tensor(name, raw.view(np.float32 if kind == "f32" else np.float16))
        else:
            writer.add_tensor(name, raw, raw_dtype=number)

    for name, values in (extra or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    add("token_embd.weight", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", rng.random(WIDTH, dtype=np.float32) + 0.5)
    if not tied:
        add("output.weight", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", rng.random(WIDTH, dtype=np.float32) + 0.5)
        for stem, (rows, width) in SHAPES.items():
            add(f"blk.{layer}.{stem}.weight", rows, width)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what a writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_folder(path: Path, folder: Path) -> Path:
    """The file's weights in float32 as a checkpoint's folder, by the ``gguf`` package: rows of q and k in halves."""
    folder.mkdir(parents=True, exist_ok=True)
    reader, found = gguf.GGUFReader(path), {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = torch.from_numpy(np.array(values)).reshape(tuple(int(n) for n in reversed(tensor.shape)))
        stem, rest = tensor.name.removeprefix("blk.").rsplit(".", 1)[0], ".weight"
        layer, _, stem = stem.rpartition(".")
        if stem in ("attn_q", "attn_k"):
            heads = HEADS if stem == "attn_q" else KV_HEADS
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        inner = NAMES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        name = top[stem] if not layer else f"model.layers.{layer}.{inner[stem]}"
        found[name + rest] = values.contiguous()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | {"tie_word_embeddings": "lm_head.weight" not in found, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
