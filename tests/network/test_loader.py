"""Checkpoints: how they may be stored, and what is said about those that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import full_logits
from safetensors.torch import load_file, save_file

from paceline.core.errors import CapabilityError, ConfigError
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.decoder import Decoder
from paceline.model.families import decoder_config
from paceline.model.rope import RopeConfig
from paceline.weights import zoo
from paceline.weights.loader import load_model
from paceline.weights.source import resolve, resolve_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from checkpoints import build  # noqa: E402  (the builders live beside the parity tests)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def load(folder: Path, dtype: str = "float32", **options: Any) -> Decoder:
    return load_model(resolve(folder, dtype), attention=ReferenceAttention(), **options)


def outputs(decoder: Decoder) -> torch.Tensor:
    return full_logits(decoder, range(5, 14))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build("llama2", tmp_path, seed=4)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama2", "phi3"])
def test_sharded_weights_are_the_same_weights(family: str, tmp_path: Path):
    build(family, tmp_path / "one", seed=5)
    build(family, tmp_path / "many", seed=5, max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(outputs(load(tmp_path / "one")), outputs(load(tmp_path / "many")))


def test_tied_and_untied_heads(tmp_path: Path):
    build("llama3", tmp_path, seed=6)  # tied: no lm_head in the file
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    tied = outputs(load(tmp_path))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(outputs(load(tmp_path)), tied)  # a stored copy of the embedding changes nothing
    edit(tmp_path, tie_word_embeddings=False)
    assert torch.equal(outputs(load(tmp_path)), tied)
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding * 2}))
    torch.testing.assert_close(outputs(load(tmp_path)), tied * 2)
    edit(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="ties the head"):
        load(tmp_path)


def test_one_nan_in_the_checkpoint_is_found(checkpoint: Path):
    edit_weights(checkpoint, lambda t: t["model.layers.1.mlp.down_proj.weight"].view(-1)[77:78].fill_(torch.nan))
    with pytest.raises(ConfigError, match=r"layers\.1\.down\.weight hold NaN"):
        load(checkpoint)


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, lambda tensors: tensors.pop(name))


def _add(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.ones(2, 2)}))


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "truncated or not safetensors"),
        (_drop("model.layers.2.self_attn.v_proj.weight"), r"misses tensor layers\.2\.self_attn\.v_proj\.weight"),
        (_add, r"unexpected tensor model\.layers\.0\.mlp\.extra\.weight"),
        (_pickle_only, "pickle files.*save_pretrained"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "lla'), "not readable as JSON"),
        (lambda folder: edit(folder, num_hidden_layers=2), "unexpected tensors.*and 6 more"),
    ],
)
def test_damage_is_named(checkpoint: Path, damage: Callable[[Path], object], message: str):
    damage(checkpoint)
    with pytest.raises(ConfigError, match=message):
        load(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path):
    build("llama2", tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"shard {shard.name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2'.*not a supported.*llama.*qwen3"),
        ({"model_type": "mystery", "auto_map": {"AutoModel": "x.Y"}}, "brings its own code, which is never run"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps.*positive"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"hidden_act": "gelu_new"}, "gelu_new.*silu, relu and gelu"),
        ({"rope_scaling": {"type": "longest"}}, "rope type 'longest'.*llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a language model"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        decoder_config({k: v for k, v in {**LLAMA, **changes}.items() if v is not None})


def test_rotations_that_rewrite_old_keys_limit_the_context():
    dynamic = decoder_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert dynamic.max_position == 64
    assert "dynamic" in dynamic.max_position_note
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 32, "rope_scaling": scaling}
    assert decoder_config(phi).max_position == 32
    assert "LongRoPE" in decoder_config(phi).max_position_note
    with pytest.raises(ConfigError, match="short_factor"):
        decoder_config({**phi, "rope_scaling": {**scaling, "short_factor": [1.0] * 3}})


def test_windows_by_layer():
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 8}
    assert decoder_config(qwen).windows == (None, None)
    assert decoder_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert decoder_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (8, None)
    mistral = {**LLAMA, "model_type": "mistral"}
    assert decoder_config({**mistral, "sliding_window": 8}).windows == (8, 8)
    assert decoder_config({**mistral, "sliding_window": None}).windows == (None, None)
    with pytest.raises(CapabilityError, match="chunked"):
        decoder_config({**qwen, "layer_types": ["chunked_attention"] * 2})


GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "hidden_size": 25, "num_hidden_layers": 7, "sliding_window": 8}


def test_gemma_3_in_both_spellings():
    """Five layers that slide to one that does not, each kind with a rotation of its own."""
    made = decoder_config(GEMMA3)
    full, local = RopeConfig(dim=256, theta=1e6), RopeConfig(dim=256)
    assert made.windows == (8,) * 5 + (None, 8)
    assert made.ropes == (local,) * 5 + (full, local)
    assert (made.rope, made.head_dim, made.scale, made.embedding_scale) == (full, 256, 1 / 16, 5.0)
    assert made.tied and made.qk_norm and made.activation == "gelu_tanh" and made.norm_offset == 1
    assert made.part(4, 6, ends=False).rotations == (local, full)
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    }
    scaled = decoder_config(GEMMA3 | old | {"sliding_window_pattern": 3, "query_pre_attn_scalar": 100})
    assert scaled.ropes[1:3] == (
        replace(local, theta=500.0),
        replace(full, scaled=tuple((full.frequencies(torch.float32) / 8).tolist())),
    )
    assert scaled.scale == 0.1
    assert decoder_config(GEMMA3 | new | {"query_pre_attn_scalar": 100}) == scaled
    assert decoder_config(GEMMA3 | old | new | {"query_pre_attn_scalar": 100}) == scaled


def test_layers_that_rotate_nothing():
    smol = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 5}
    rope = RopeConfig(dim=8, theta=2e6)
    assert decoder_config(smol).rotations == (rope, rope, rope, None, rope)
    assert decoder_config({**smol, "no_rope_layers": [1, 0, 1, 1, 0, 1]}).ropes == (rope, None, rope, rope, None)
    assert decoder_config({**smol, "no_rope_layers": [1] * 5}).ropes == ()
    slides = decoder_config({**smol, "use_sliding_window": True, "sliding_window": 8})
    assert slides.windows == (None, None, None, 8, None) and slides.tied
    for wrong in ([1, 1], [2] * 5, "1"):
        with pytest.raises(ConfigError, match="no_rope_layers"):
            decoder_config({**smol, "no_rope_layers": wrong})


def test_folders_and_names(checkpoint: Path):
    assert resolve_folder(checkpoint) == checkpoint
    with pytest.raises(ConfigError, match="revision='main'.*local"):
        resolve_folder(checkpoint, revision="main")
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_folder("./nowhere")
    with pytest.raises(ConfigError, match="no such folder"):
        load(checkpoint / "nowhere")
    with pytest.raises(ConfigError, match="not in the local cache.*switched off"):
        resolve_folder("some-org/some-model", offline=True)
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        resolve_folder("not a name!")


def test_a_hub_out_of_reach_and_a_name_it_does_not_know(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked: list[dict[str, Any]] = []

    def fail(name: str, **options: Any) -> str:
        asked.append(options)
        raise failures.pop()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    failures = [RuntimeError("timed out"), LocalEntryNotFoundError("no network")]
    with pytest.raises(ConfigError, match="out of reach.*check the network|out of reach.*Check the network"):
        resolve_folder("some-org/some-model", revision="v2")
    with pytest.raises(ConfigError, match="the hub refuses it .timed out"):
        resolve_folder("some-org/some-model")
    assert asked[0]["revision"] == "v2"
    assert not asked[0]["local_files_only"]
    assert not any("py" in p or "bin" in p for p in asked[0]["allow_patterns"])  # no code, no pickles


STARTED = r"""
import sys
from paceline.weights.source import resolve
tokenizer = resolve(sys.argv[1]).tokenizer()
quick = "torch._dynamo" not in sys.modules
from transformers import AutoTokenizer
auto = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
assert "torch._dynamo" in sys.modules
asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|user|> caf\u00e9 \U0001f600"}]
for one in (tokenizer, auto):
    ids = one.encode("def f(x):\n  return <|eos|> \u00e9")
    print(quick, type(one).__name__, one, ids, one.decode(ids), one.apply_chat_template(asked, tokenize=False))
"""


def test_the_embedded_tokenizer_is_transformers_own_without_torch_s_compiler():
    folder = str(zoo.find("paceline-small"))
    done = subprocess.run([sys.executable, "-c", STARTED, folder], capture_output=True, text=True, check=True)
    ours, theirs = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert ours == theirs and ours.startswith("True TokenizersBackend ")
