"""A Llama of random weights as a GGUF file, for speeds of sizes and types that nobody publishes small.

    python tools/random_gguf.py FILE.gguf --types q4_k_m --shape 16x2048x5632x32000

``--types`` is one type for all weights, or ``q4_k_m``: llama.cpp's mixture of Q4_K and Q6_K.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

HEAD = 64
SCALE = {"q4_k": 2e-4, "q5_k": 1e-4, "q6_k": 3e-5, "iq4_xs": 2e-5, "iq4_nl": 8e-4, "q8_0": 8e-4}
HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "mxfp4": (),
}  # where scales are


def blocks(kind: str, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes] with random codes and small scales."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    raw = rng.integers(0, 256, (rows * width // values, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = (rng.random(len(raw)) * SCALE.get(kind, 8e-3)).astype("<f2")
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "mxfp4":
        raw[:, 0] = rng.integers(118, 123, len(raw))
    return raw.reshape(rows, -1)


def more_bits(layer: int, layers: int) -> bool:
    """Whether the mixture gives this layer's values and down-projection six bits: the ends and every third."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def write(path: Path, types: str, layers: int, width: int, inner: int, vocabulary: int) -> None:
    """The file; its head is the embedding, keys and values have half the heads, or a third of an odd number."""
    rng, heads = np.random.default_rng(0), width // HEAD
    kv_heads = next(n for n in range(heads // 2, 0, -1) if heads % n == 0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, vocabulary))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    mixture = types == "q4_k_m"

    def add(name: str, rows: int, inputs: int, more: bool = False) -> None:
        kind = ("q6_k" if more else "q4_k") if mixture else types
        writer.add_tensor(name, blocks(kind, rows, inputs, rng), raw_dtype=gguf.GGMLQuantizationType[kind.upper()])

    add("token_embd.weight", vocabulary, width, more=True)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(width, np.float32))
        kv = kv_heads * HEAD
        for name, rows in (("attn_q", width), ("attn_k", kv), ("attn_v", kv), ("attn_output", width)):
            add(f"blk.{i}.{name}.weight", rows, width, more=name == "attn_v" and more_bits(i, layers))
        add(f"blk.{i}.ffn_gate.weight", inner, width)
        add(f"blk.{i}.ffn_up.weight", inner, width)
        add(f"blk.{i}.ffn_down.weight", width, inner, more=more_bits(i, layers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--types", default="q4_0")
    parser.add_argument("--shape", default="16x2048x5632x32000", help="LAYERSxWIDTHxFFxVOCABULARY")
    asked = parser.parse_args()
    layers, width, inner, vocabulary = map(int, asked.shape.split("x"))
    write(asked.file, asked.types, layers, width, inner, vocabulary)


if __name__ == "__main__":
    main()
