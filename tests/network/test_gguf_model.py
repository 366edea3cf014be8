"""GGUF files as checkpoints: the same network as a folder of their weights, in every type, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.gguf_files import NAMES, NUMBERS, VOCABULARY, WIDTH, as_folder, write
from kits.native import needs_kernels
from kits.tiny import full_logits

from paceline.core.errors import CapabilityError, ConfigError
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.weights.blocks import BY_NAME, TYPES, dequantise
from paceline.weights.gguf import read_gguf
from paceline.weights.loader import load_model
from paceline.weights.source import read_config, resolve, resolve_folder

TOKENS = [5, 17, 200, 33, 33, 319, 0, 8]
TEXT = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(0)).tolist()


def load(place: Path, dtype: str = "auto", native: bool = True, **options: Any) -> Decoder:
    source = resolve(place, dtype)
    return load_model(source, attention=make_backend(source.dtype, exact=False), native=native, **options)


def logits(decoder: Decoder, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    return full_logits(decoder, tokens)


def distance(decoder: Decoder, plain: Decoder) -> float:
    """Return the root mean square of how far logits over a text lie apart, in standard deviations. The largest distance
    of a few rows is chance: rows of a small network differ by a factor of three."""
    mine, theirs = (logits(each, TEXT) for each in (decoder, plain))
    return float((mine - theirs).square().mean().sqrt() / theirs.std())


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", *(kind.name for kind in TYPES)])
def test_a_file_is_the_checkpoint_of_its_numbers(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", kind, tied=kind != "q5_0")
    folder = as_folder(file, tmp_path / "folder")
    theirs = logits(load(folder, "float32", native=False))
    assert torch.equal(logits(load(file, "float32", native=False)), theirs)
    assert theirs.std() > 0.1


@needs_kernels
@pytest.mark.parametrize("kind", [kind.name for kind in TYPES])
def test_stored_blocks_compute_what_their_numbers_do(kind: str, tmp_path: Path) -> None:
    """Up to the rounding of activations; and the look-up of embeddings exactly."""
    file = write(tmp_path / "m.gguf", kind)
    decoder = load(file)
    assert decoder.quant == "stored" and decoder.dtype == torch.bfloat16
    assert distance(decoder, load(file, "float32", native=False)) < 0.025
    table = dequantise(BY_NAME[kind], read_gguf(file).tensors["token_embd.weight"].raw())
    every = torch.arange(VOCABULARY)
    assert torch.equal(decoder.embed_tokens(every), torch.from_numpy(table).bfloat16())
    assert not torch.equal(decoder.embed_tokens(every[:1]), torch.from_numpy(table[1:2]).bfloat16())
    with pytest.raises(IndexError, match="token id outside"):
        decoder.embed_tokens(every + 1)


@needs_kernels
def test_parts_of_one_product_may_be_of_several_types(tmp_path: Path) -> None:
    """As in Q4_K_M, where q, k and v of a layer differ."""
    types = {"attn_v": "q6_k", "attn_k": "q5_0", "ffn_up": "q4_k", "ffn_down": "q8_0", "token_embd": "q6_k"}
    file = write(tmp_path / "m.gguf", types)
    decoder = load(file)
    assert distance(decoder, load(file, "float32", native=False)) < 0.025
    for width in (1, 3, 8):  # the same bits at every width
        assert torch.equal(logits(decoder, TOKENS[:width]), logits(decoder)[:width])


@needs_kernels
def test_a_plain_dtype_is_that_of_the_same_checkpoint(tmp_path: Path, dtype: str = "int8") -> None:
    file = write(tmp_path / "m.gguf", "q5_1")
    folder = as_folder(file, tmp_path / "folder")
    assert torch.equal(logits(load(file, dtype)), logits(load(folder, dtype)))


@needs_kernels
def test_llama_3s_rope_factors_are_a_tensor(tmp_path: Path) -> None:
    """As the converter writes them: what each frequency is divided by."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    folder = as_folder(write(tmp_path / "plain.gguf", "f32"), tmp_path / "folder")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"rope_scaling": scaling}))
    lengths = 2 * np.pi * 10000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = ((64 / lengths - 1) / 3).clip(0, 1)
    factors = {"rope_freqs.weight": 1 / ((1 - smooth) / 8 + smooth)}
    file = write(tmp_path / "m.gguf", "f32", extra=factors)
    theirs = logits(load(folder, "float32", native=False))
    assert torch.allclose(logits(load(file, "float32", native=False)), theirs, rtol=0, atol=1e-4)
    plain = logits(load(tmp_path / "plain.gguf", "float32", native=False))
    assert not torch.allclose(plain, theirs, rtol=0, atol=1e-2)


LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scale_linear": 4.0}, LINEAR),  # of older files
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, LINEAR),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
        (OF_YARN, YARN),
        (
            OF_YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": [2.0]},
            YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
        ),
        (OF_YARN | {"rope.scaling.attn_factor": 1.5}, YARN | {"attention_factor": 1.5 * (0.1 * np.log(4.0) + 1)}),
        (OF_YARN | {"rope.scaling.original_context_length": 0}, YARN | {"original_max_position_embeddings": 512}),
        (
            {"rope.scaling.attn_factor": 1.5, "rope.scaling.factor": 4.0},
            {"rope_type": "longrope", "short_factor": [4.0] * 32, "attention_factor": 1.5},
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_scales_them(keys: dict[str, Any], scaling: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "f32", changed={f"llama.{key}": value for key, value in keys.items()})
    folder = as_folder(file, tmp_path / "folder")
    said = json.loads((folder / "config.json").read_text())
    plain = logits(load(folder, "float32", native=False))
    (folder / "config.json").write_text(json.dumps(said | {"rope_scaling": scaling}))
    theirs = logits(load(folder, "float32", native=False))
    assert torch.equal(logits(load(file, "float32", native=False)), theirs)
    assert torch.equal(plain, theirs) == (scaling is None)


@pytest.mark.parametrize(
    ("keys", "windows", "bases"),
    [
        ({"attention.sliding_window": 128}, (128,) * 5 + (None, 128), (10_000.0,) * 5 + (1e6, 10_000.0)),
        ({"attention.sliding_window": 128, "attention.sliding_window_pattern": [2]}, (128, None) * 3 + (128,), None),
        ({"attention.sliding_window": 128, "rope.freq_base_swa": 5e3}, None, (5e3,) * 5 + (1e6, 5e3)),
        ({}, (None,) * 7, (1e6,) * 7),
    ],
)
def test_windows_of_gemma_3_are_llama_cpps(keys: dict[str, Any], windows: Any, bases: Any, tmp_path: Path) -> None:
    shape = {key.removeprefix("llama."): value for key, value in NUMBERS.items() if key.startswith("llama.")}
    shape |= {"block_count": 7, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6} | keys
    changed = {"general.architecture": "gemma3"} | {f"gemma3.{key}": value for key, value in shape.items()}
    config = read_config(write(tmp_path / "m.gguf", changed=changed))
    assert config.windows == windows or windows is None
    assert bases is None or tuple(rope.theta for rope in config.ropes if rope is not None) == bases


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    assert resolve_folder(tmp_path) == resolve_folder(file) == file
    write(tmp_path / "n.gguf")
    with pytest.raises(ConfigError, match=r"^model folder .* it holds 2 models: m.gguf, n.gguf. Name"):
        resolve_folder(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        resolve_folder(tmp_path / "o.gguf")
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ConfigError, match="it is a file"):
        resolve_folder(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.block_count": 3}, "misses tensors layers.2"),
        ({"llama.block_count": 1}, "unexpected tensors blk.1.attn_norm.weight"),
        ({"llama.feed_forward_length": 500}, "is .512, 256., and its configuration needs .500, 256."),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "must be a positive number"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.pooling_type": 3}, "it computes embeddings"),
        ({"general.architecture": "nonesuch"}, "'nonesuch' is not known here"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id is 320, and there are 320 tokens"),
        ({"tokenizer.ggml.eot_token_id": "end"}, "eot_token_id' is 'end', and must be a whole number"),
        ({"tokenizer.ggml.token_type": ["one"] * 320}, "token_type' is a list, and must be a list of numbers"),
    ],
)
def test_metadata_that_cannot_be_are_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", changed=changed)
    with pytest.raises(ConfigError, match=words):
        load(file, "float32", native=False)


def test_ends_of_turns_stop(tmp_path: Path) -> None:
    """Those that keys name, and where none is named the first that llama.cpp would take."""
    tokens = [f"<{i}>" for i in range(318)] + ["<end_of_turn>", "<|im_end|>"]
    named = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 7}
    for number, (keys, ends) in enumerate(
        [
            ({}, (7, 319)),
            ({"tokenizer.ggml.eot_token_id": 9}, (7, 9)),
            ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 11}, (7, 11)),
            ({"tokenizer.ggml.eos_token_id": 2**32 - 1}, (319,)),
        ]
    ):
        file = write(tmp_path / f"{number}.gguf", changed=named | keys)
        assert read_config(file).eos_ids == ends


def test_tokens_and_embedding_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="300 tokens, and an embedding of 320"):
        read_config(write(tmp_path / "m.gguf", tokens=300))


@needs_kernels
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    place = read_gguf(file).tensors["blk.1.ffn_gate.weight"]
    data = bytearray(file.read_bytes())
    data[place.start + 18 * 7 : place.start + 18 * 7 + 2] = struct.pack("<e", value)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"blk.1.ffn_gate.weight"):
        load(file)


def test_other_types_load_with_a_plain_dtype(tmp_path: Path) -> None:
    """Q3_K, which has no product here: by the gguf package, and named where no plain dtype is asked for."""
    import gguf

    file = write(tmp_path / "m.gguf", {"attn_v": "f32"})
    place = read_gguf(file).tensors["blk.0.attn_v.weight"]
    raw = np.random.default_rng(0).integers(0, 256, (WIDTH // 2, 110), dtype=np.uint8)
    raw[:, 108:] = np.full((len(raw), 1), 1e-3, "<f2").view(np.uint8)
    data = bytearray(file.read_bytes())
    data[place.start : place.start + raw.size] = raw.tobytes()
    entry = data.index(b"blk.0.attn_v.weight") + len("blk.0.attn_v.weight") + 4 + 16
    data[entry : entry + 4] = struct.pack("<I", 11)
    file.write_bytes(data)
    whole = load(file, "float32", native=False)
    rows = whole.layers[0].qkv.weight[-WIDTH // 2 :]
    known = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q3_K)
    assert np.array_equal(rows.numpy(), known) and "v_proj" in NAMES["attn_v"]
    with pytest.raises(CapabilityError, match="q3_k"):
        load(file)
