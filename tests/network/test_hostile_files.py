"""Files of a model that are wrong in any way at all: a `ConfigError` that says so, before anything is allocated."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.hostile import CONFIG, NASTY, YARN, bounded, deep, start, write_checkpoint, write_config
from kits.tiny import tiny_streams
from safetensors.torch import load_file, save_file

from paceline import ConfigError
from paceline.api.assembly import models
from paceline.core.options import shown
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.config_fields import MAX_LAYERS
from paceline.model.decoder import Decoder
from paceline.model.families import FAMILIES, decoder_config
from paceline.papers.streaming.model import CONFIG_FILE, StreamSet
from paceline.weights import generation, loader
from paceline.weights.loader import load_model
from paceline.weights.names import weight_map
from paceline.weights.source import read_config, resolve

# Hypothesis wants fixtures that are made anew for every example; these are only read.
shared = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def refuse(folder: Path, words: str) -> ConfigError:
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(resolve(folder, "float32"), attention=ReferenceAttention())
    return caught.value


OLD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_both_spellings_are_read():
    alone = decoder_config({**CONFIG, "rope_parameters": YARN})
    for both in (
        {"rope_parameters": YARN, "rope_scaling": YARN},
        {"rope_parameters": YARN, "rope_scaling": OLD, "rope_theta": 500},
        {"rope_parameters": YARN, "rope_scaling": {**OLD, "rope_type": "yarn", "beta_fast": 32}},
        {"rope_parameters": YARN, "rope_scaling": OLD},  # theta is said once
        {"rope_scaling": {**OLD, "rope_theta": 500.0}},
        {"rope_parameters": YARN, "rope_scaling": {}, "original_max_position_embeddings": 16},
    ):
        assert decoder_config({**CONFIG, **both}) == alone
    assert alone != decoder_config(CONFIG)


@pytest.mark.parametrize("rope", [None, YARN, {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}])
def test_what_transformers_writes_is_read_with_its_copy_beside_it(tmp_path: Path, rope: dict[str, Any] | None):
    """A file of transformers 5, alone and with the fields that readers of version 4 look for."""
    given = {k: v for k, v in CONFIG.items() if k not in ("model_type", "dtype", "architectures")}
    transformers.LlamaConfig(**given, **({"rope_parameters": dict(rope)} if rope else {})).save_pretrained(tmp_path)
    alone, values = read_config(tmp_path), json.loads((tmp_path / "config.json").read_text())
    inside = values["rope_parameters"]
    write_config(tmp_path, {**values, "rope_scaling": inside, "rope_theta": inside["rope_theta"]})
    assert read_config(tmp_path) == alone


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shapes_in_the_weight_map_are_those_of_the_network(family: str):
    """Every parameter of every family, with all its options, is filled to the last element."""
    values = {**CONFIG, "model_type": family, "ffn_dim": 24, "attention_bias": True, "mlp_bias": True, "head_dim": 10}
    for tied in (True, False):
        config = decoder_config({**values, "tie_word_embeddings": tied})
        decoder = Decoder(config, ReferenceAttention(), dtype=torch.float32)
        parts: dict[str, int] = {}
        for piece in weight_map(config):
            parameter = decoder.get_parameter(piece.into)
            rows = parameter if piece.rows is None else parameter[piece.at : piece.at + piece.rows]
            assert rows.shape == piece.shape
            parts[piece.into] = parts.get(piece.into, 0) + piece.numel
        assert parts == {name: parameter.numel() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 10**9}, r"embed_tokens.*shape is \[50, 16\].*\[1000000000, 16\]"),
        ({"hidden_size": 10**9, "head_dim": 8}, r"shape is \[50, 16\].*\[50, 1000000000\]"),
        ({"num_attention_heads": 10**9, "head_dim": 8}, "must divide|shape is"),
        ({"num_hidden_layers": MAX_LAYERS}, r"misses tensors layers\..* and 89979 more"),
        (
            {"num_hidden_layers": 10**9},
            f"num_hidden_layers = 1000000000: it must be an integer of at most {MAX_LAYERS}",
        ),
    ],
)
def test_sizes_are_held_against_the_headers_before_anything_is_allocated(
    checkpoint: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the network was made")

    monkeypatch.setattr(loader, "Decoder", never)
    write_config(checkpoint, {**CONFIG, **changes})
    with bounded(monkeypatch):
        refuse(checkpoint, words)
        assert start(str(checkpoint)) is not None


def sparse_weights(folder: Path, config: dict[str, Any]) -> None:
    """A file of the right shapes and length whose data is a hole: it takes no room on the disk."""
    header, end = {}, 0
    for piece in weight_map(decoder_config(config)):
        size = 4 * piece.numel
        header[piece.source] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


@pytest.mark.parametrize(("dtype", "fits"), [("float32", False), ("bfloat16", True)])
def test_memory_is_held_against_what_is_free(checkpoint: Path, dtype: str, fits: bool, monkeypatch: pytest.MonkeyPatch):
    """One tensor more than all of them: they are converted one at a time."""
    count = sum(piece.numel for piece in weight_map(decoder_config(CONFIG)))
    needed = 3 * (count + 50 * 16)  # more than two bytes of each, less than four
    monkeypatch.setattr(loader, "free_bytes", lambda device: needed)
    if fits:
        load_model(resolve(checkpoint, dtype), attention=ReferenceAttention())
        return
    with pytest.raises(ConfigError, match=rf"as {dtype} on cpu: its {count:,} parameters take 0.0 GiB.*are free"):
        load_model(resolve(checkpoint, dtype), attention=ReferenceAttention())


def test_weights_larger_than_the_machine_are_refused_in_words(tmp_path: Path):
    wide = {**CONFIG, "vocab_size": 2**24, "hidden_size": 2**13, "head_dim": 8}
    write_config(tmp_path, wide)
    sparse_weights(tmp_path, wide)
    refuse(tmp_path, "parameters take .* while they are loaded, and .* GiB are free|than this process may map")


def test_an_allocator_that_gives_up_is_heard(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the system promised more than it has."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(loader, "Decoder", fail)
    refuse(checkpoint, "more than this machine has")
    monkeypatch.setattr(loader, "Decoder", lambda *_, **__: [][1])
    with pytest.raises(IndexError):  # a fault of ours is not dressed up as the user's
        load_model(resolve(checkpoint), attention=ReferenceAttention())


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrite a file's header and leave its data."""

    def rewrite(file: Path) -> None:
        raw = file.read_bytes()
        end = 8 + struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:end])
        header.pop("__metadata__", None)
        change(header)
        made = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(made)) + made + raw[end:])

    return rewrite


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_header(lambda h: h[NORM].update(shape=[10**9])), "not safetensors"),
        (_header(lambda h: h[NORM].update(data_offsets=[0, 64])), "not safetensors"),
        (_header(lambda h: h[NORM].update(dtype="I32")), "I32, a quantised weight"),
        (_header(lambda h: h[NORM].update(shape=[4, 4])), r"norm.weight.*shape is \[4, 4\].*\[16\]"),
        (_header(lambda h: h.update({"norm.weight": h[NORM]})), "not safetensors|there twice"),
        (lambda f: f.write_bytes(struct.pack("<Q", 2**63)), "not safetensors"),
        (lambda f: f.write_bytes(struct.pack("<Q", 2) + b"{}"), "misses tensors"),
        (lambda f: (f.unlink(), f.mkdir()), "neither model.safetensors nor"),
    ],
)
def test_headers_that_lie_are_refused(checkpoint: Path, damage: Callable[[Path], Any], words: str):
    damage(checkpoint / "model.safetensors")
    refuse(checkpoint, words)


def shard(folder: Path, parts: dict[str, dict[str, torch.Tensor]]) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {t: name for name, tensors in parts.items() for t in tensors}}
    write_config(folder, index, "model.safetensors.index.json")


def test_a_tensor_in_two_shards_is_refused(checkpoint: Path):
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    first, second = ({n: tensors[n] for n in part} for part in (names[:9], names[9:]))
    shard(checkpoint, {"a.safetensors": first, "b.safetensors": second})
    load_model(resolve(checkpoint), attention=ReferenceAttention())
    shard(checkpoint, {"a.safetensors": first, "b.safetensors": second | {names[0]: tensors[names[0]] * 2}})
    refuse(checkpoint, "it is there twice, in a.safetensors and in b.safetensors")


def test_a_tensor_with_and_without_the_prefix_is_refused(checkpoint: Path):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"norm.weight": tensors[NORM] * 2}, file)
    refuse(checkpoint, "tensor norm.weight .*it is there twice")


@pytest.mark.parametrize("name", ["", "..", "a\0b", "/etc/passwd", "../a.safetensors"])
def test_shards_that_cannot_be_files_are_refused(checkpoint: Path, name: str):
    write_config(checkpoint, {"weight_map": {"a": name}}, "model.safetensors.index.json")
    refuse(checkpoint, "shard")


@settings(shared, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_no_damage_to_the_weights_gets_through(tmp_path_factory: pytest.TempPathFactory, seed: int):
    """Bytes changed, cut out and put in at random, most of them in the header."""
    folder = tmp_path_factory.getbasetemp() / "damaged-weights"
    if not folder.is_dir():
        write_checkpoint(folder)
        (folder / "model.safetensors").rename(folder / "whole")
    draw, raw = random.Random(seed), bytearray((folder / "whole").read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(8 + 1500) if draw.random() < 0.9 else draw.randrange(len(raw))
        raw[place : place + draw.choice([0, 1, 1, 1, 40])] = draw.randbytes(draw.choice([0, 1, 1, 8]))
    (folder / "model.safetensors").write_bytes(raw)
    try:
        load_model(resolve(folder), attention=ReferenceAttention())
    except ConfigError as error:
        assert len(str(error)) < 3000


RAW = {
    "deep": '{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "digits": '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}",
    "not text": b"\xff\xfe{}",
    "cut": '{"model_type": "llama"',
    "empty": "",
    "null": "null",
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_json_of_any_content_is_refused(checkpoint: Path, name: str, content: str | bytes):
    (checkpoint / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert start(str(checkpoint)) is not None


FIELDS = [
    *CONFIG,
    *("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "layer_types"),
    *("use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling", "rope_parameters", "torch_dtype"),
    *("partial_rotary_factor", "original_max_position_embeddings", "bos_token_id", "quantization_config", "auto_map"),
]
ROPE_FIELDS = [
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor", "truncate", "low_freq_factor", "high_freq_factor"),
    *("partial_rotary_factor", "short_factor", "long_factor"),
]
nasty = st.sampled_from([*NASTY, deep(), "llama", "yarn", "longrope", "llama3", "linear", "dynamic", "bfloat16"])
ropes = st.dictionaries(st.sampled_from(ROPE_FIELDS), nasty, max_size=3).map(lambda changes: YARN | changes)
kinds = st.sampled_from(["yarn", "longrope", "llama3", "linear", "dynamic", "su"])
typed_ropes = st.builds(lambda rope, kind: rope | {"rope_type": kind}, ropes, kinds)


@settings(shared, max_examples=250)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), nasty, max_size=3),
    rope=st.none() | ropes | typed_ropes,
    family=st.sampled_from(sorted(FAMILIES)),
    spelling=st.sampled_from(["rope_parameters", "rope_scaling"]),
)
def test_no_configuration_gets_through(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    rope: dict[str, Any] | None,
    family: str,
    spelling: str,
):
    """Nothing but a `ConfigError` leaves the constructor, and nothing large is allocated on the way."""
    values = {**CONFIG, "model_type": family} | ({} if rope is None else {spelling: rope}) | changes
    write_config(checkpoint, values)
    with bounded(monkeypatch):
        start(str(checkpoint))


@settings(shared, max_examples=60)
@given(
    changes=st.dictionaries(
        st.sampled_from(["eos_token_id", "bos_token_id", "do_sample", *generation.SAMPLED]), nasty, min_size=1
    )
)
def test_no_generation_config_gets_through(checkpoint: Path, changes: dict[str, Any]):
    write_config(checkpoint, changes, "generation_config.json")
    start(str(checkpoint))
    with suppress(ConfigError):
        generation.sampling(checkpoint, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": deep()}, r"model_type \[\[\[\[\[...\]\]\]\]\]"),
        ({"vocab_size": 10**400}, r"vocab_size = about 2\*\*1329"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = about .* positive number"),
        ({"eos_token_id": [[3]]}, "eos_token_id"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "yarn computes no rotation with them"),
        (
            {
                "rope_scaling": {
                    **YARN,
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "original_max_position_embeddings": 1,
                }
            },
            "longrope computes no rotation with them",
        ),
    ],
)
def test_wrong_types_and_values_are_named(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        decoder_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    "value", [*NASTY, deep(10_000), object(), {1, 2}, b"x" * 10**6, [0] * 10**6, {10**5000: "a" * 10**6}]
)
def test_every_value_can_be_shown(value: Any):
    text = shown(value)
    assert 0 < len(text) <= 120
    assert "\n" not in text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"])
@pytest.mark.parametrize(
    "content",
    [RAW["deep"], RAW["cut"], b"\0" * 100, '{"model": {"type": "BPE"}}'],
    ids=["deep", "cut", "zeros", "half"],
)
def test_tokenizers_that_are_garbage_are_refused_before_the_weights(
    checkpoint: Path, name: str, content: str | bytes, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    (checkpoint / name).write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.setattr(models, "load_model", never)
    error = start(str(checkpoint))
    assert error is not None and "tokenizer" in str(error)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    tiny_streams().save(tmp_path / "set")
    return tmp_path / "set"


STREAM_FIELDS = [
    *("format", "mode", "gamma", "msa_layers", "num_layers", "d_model", "vocab_size", "start_rank", "prune_rank"),
    *("value_rotation", "adapter", "target", "fingerprint", "exits"),
]
adapters = st.dictionaries(st.sampled_from(["rank", "alpha", "layers", "linears"]), nasty, max_size=2)


@settings(shared, max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(STREAM_FIELDS), nasty, max_size=2), adapter=adapters)
def test_no_configuration_of_a_set_gets_through(
    trained: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], adapter: dict[str, Any]
):
    values = json.loads((trained / CONFIG_FILE).read_text())
    whole = (trained / CONFIG_FILE).read_bytes()
    write_config(trained, values | {"adapter": values["adapter"] | adapter} | changes, CONFIG_FILE)
    try:
        with bounded(monkeypatch):
            StreamSet.load(trained)
    except ConfigError as error:
        assert len(str(error)) < 3000
    finally:
        (trained / CONFIG_FILE).write_bytes(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gamma": 10**9}, "gamma must be 1024 or less"),
        ({"gamma": 1000}, r"embeddings is \(3, 32\), wanted \(1000, 32\)"),
        ({"d_model": 10**9}, "d_model must be 1 to"),
        ({"start_rank": 32}, "unknown entry 'start_rank'"),
        ({"adapter": {"rank": 10**6, "alpha": 8.0, "layers": [2]}}, "adapters.2.down.down is|wanted .1000000,"),
    ],
)
def test_sets_are_held_against_their_files(
    trained: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
):
    values = json.loads((trained / CONFIG_FILE).read_text())
    write_config(trained, values | changes, CONFIG_FILE)
    with bounded(monkeypatch), pytest.raises(ConfigError, match=words):
        StreamSet.load(trained)
