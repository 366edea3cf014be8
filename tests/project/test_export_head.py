"""Heads that go to another engine's layout and come back are the same; what it cannot express is refused."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import VOCAB
from safetensors.torch import load_file, save_file

from paceline.core.errors import CapabilityError, ConfigError
from paceline.draft.eagle.eagle3 import AUX, INNER, Eagle3Model
from paceline.draft.eagle.model import EagleFacts, EagleModel, load_head
from paceline.draft.eagle.speculators import LAYER
from paceline.weights import zoo

TOOL = Path(__file__).parents[2] / "tools" / "export_head.py"
NAMES = runpy.run_path(str(TOOL))
export = NAMES["export"]
WIDTH, HEADS, FF = 32, 4, 48
SMALL = torch.tensor([i for i in range(VOCAB) if i % 5 != 2])  # the draft's tokens
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": FF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "num_hidden_layers": 1,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def eagle2(folder: Path, bias: float | None = None) -> Path:
    """A random head of ours."""
    facts = EagleFacts(steps=3, target="tiny", fingerprint="ab" * 32)
    made = EagleModel(CONFIG, facts, bias=bias is not None)
    made.head.start(torch.Generator().manual_seed(1))
    if bias is not None:
        made.head.fc.bias.data.fill_(bias)
    made.save(folder)
    return folder


def eagle3(folder: Path, tokens: torch.Tensor | None = SMALL, **changes: Any) -> Path:
    """A random head in the published layout."""
    draw, kv = torch.Generator().manual_seed(2), WIDTH // 2
    count = VOCAB if tokens is None else len(tokens)
    shapes = {
        "midlayer.self_attn.q_proj": (WIDTH, 2 * WIDTH),
        "midlayer.self_attn.k_proj": (kv, 2 * WIDTH),
        "midlayer.self_attn.v_proj": (kv, 2 * WIDTH),
        "midlayer.self_attn.o_proj": (WIDTH, WIDTH),
        "midlayer.mlp.gate_proj": (FF, WIDTH),
        "midlayer.mlp.up_proj": (FF, WIDTH),
        "midlayer.mlp.down_proj": (WIDTH, FF),
        "midlayer.input_layernorm": (WIDTH,),
        "midlayer.hidden_norm": (WIDTH,),
        "midlayer.post_attention_layernorm": (WIDTH,),
        "fc": (WIDTH, 3 * WIDTH),
        "norm": (WIDTH,),
        "lm_head": (count, WIDTH),
    }
    values = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    if tokens is not None:
        values["d2t"] = tokens - torch.arange(count)
        values["t2d"] = torch.isin(torch.arange(VOCAB), tokens)
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    config = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], AUX: [2, 6, 9], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def same(a: Any, b: Any) -> None:
    """Two heads that draft alike."""
    assert type(a) is type(b)
    if isinstance(a, Eagle3Model):
        assert a.config == b.config and a.aux == b.aux and torch.equal(a.tokens, b.tokens)
        pairs = [(a.tensors, b.tensors)]
    else:
        assert a.facts == b.facts and a.head.config == b.head.config
        pairs = [(a.head.tensors(), b.head.tensors())]
    for ours, theirs in pairs:
        assert all(torch.equal(theirs.get(name, torch.zeros(1)), value) for name, value in ours.items())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_head_of_eagle_2_comes_back_as_it_went(engine: Any, tmp_path: Path) -> None:
    head = eagle2(tmp_path / "head")
    said = export(engine, head, tmp_path / "out")
    same(load_head(head), load_head(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = {*load_file(tmp_path / "out" / "model.safetensors")}
    assert str(tmp_path / "out") in said
    if engine == "vllm":
        assert config["architectures"] == ["LlamaForCausalLM"] and '"method": "eagle"' in said
        assert names == {*load_file(head / "model.safetensors")}
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle"] and "fc.bias" in names and "EAGLE " in said


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize("tokens", [SMALL, None, torch.arange(VOCAB).flip(0)], ids=["few", "all", "turned"])
def test_a_head_of_eagle_3_comes_back_as_it_went(engine: Any, tokens: torch.Tensor | None, tmp_path: Path) -> None:
    head = eagle3(tmp_path / "head", tokens)
    export(engine, head, tmp_path / "out", verifier="org/target", tokens=5)
    same(load_head(head), load_head(tmp_path / "out"))
    export("vllm", tmp_path / "out", tmp_path / "back")
    same(load_head(head), load_head(tmp_path / "back"))


def test_the_config_of_speculators_says_what_its_readers_ask(tmp_path: Path) -> None:
    export("speculators", eagle3(tmp_path / "head"), tmp_path / "out", verifier="org/target", tokens=5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    spec = config["speculators_config"]
    assert config["speculators_model_type"] == spec["algorithm"] == "eagle3"
    assert spec["verifier"] == {"name_or_path": "org/target", "architectures": []}
    assert [m["proposal_type"] for m in spec["proposal_methods"]] == [spec["default_proposal_method"]]
    assert spec["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["draft_vocab_size"] == len(SMALL) and config[AUX] == [2, 6, 9]
    assert config[LAYER]["vocab_size"] == VOCAB and config["norm_before_residual"] is False
    assert not [n for n in load_file(tmp_path / "out" / "model.safetensors") if n.startswith("midlayer")]


def test_a_published_config_that_leaves_out_defaults_is_read(tmp_path: Path) -> None:
    """The library writes what differs from transformers' defaults alone."""
    head = eagle3(tmp_path / "head")
    export("speculators", head, tmp_path / "out", verifier="org/target")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    assert config[LAYER].pop("rms_norm_eps") == 1e-6 and config[LAYER].pop("hidden_act") == "silu"
    file.write_text(json.dumps(config))
    same(load_head(head), load_head(tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"fc_norm": True}, "norms each tapped state"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({LAYER: {"model_type": "qwen3"}}, "qwen3"),
        ({LAYER: None}, "no object"),
    ],
)
def test_heads_of_speculators_that_are_not_computed_here_are_refused(changes: Any, words: str, tmp_path: Path) -> None:
    export("speculators", eagle3(tmp_path / "head"), tmp_path / "out", verifier="org/target")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match=words):
        load_head(tmp_path / "out")


@pytest.mark.parametrize("named", [{AUX: [2, 6, 9]}, {AUX: None, INNER: {AUX: [1, 5, 8]}}], ids=["vllm", "sglang"])
def test_sglang_names_outputs_of_layers_and_vllm_inputs(named: dict[str, Any], tmp_path: Path) -> None:
    head = eagle3(tmp_path / "head", **named)
    model = load_head(head)
    assert isinstance(model, Eagle3Model) and model.taps(9) == (1, 5, 8)
    with pytest.raises(CapabilityError, match="inputs of layers 2, 6, 9, and the target has 8"):
        model.taps(8)
    export("sglang", head, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[AUX] == [2, 6, 9] and config[INNER] == {AUX: [1, 5, 8], "use_aux_hidden_state": True}


def test_what_an_engine_cannot_express_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    biased, plain, third = eagle2(tmp_path / "biased", 0.5), eagle2(tmp_path / "plain"), eagle3(tmp_path / "third")
    hot = eagle2(tmp_path / "hot")
    (hot / "hot.json").write_text('{"tokens": [1, 2, 3]}')
    cases: list[tuple[Any, Path, str]] = [
        ("vllm", biased, "bias"),
        ("vllm", hot, "hot tokens"),
        ("sglang", hot, "hot tokens"),
        ("speculators", plain, "EAGLE-3 heads alone"),
        ("speculators", third, "--verifier"),
        ("vllm", zoo.find("paceline-small-lyanna"), "Lyanna"),
        ("vllm", zoo.find("paceline-small-medusa"), "Medusa"),
        ("sglang", zoo.find("paceline-small-streams"), "streams"),
        ("vllm", zoo.find("paceline-small-spire"), "SPIRe"),
        ("vllm", tmp_path / "nowhere", "there is no such folder"),
        ("tensorrt", plain, "vllm, sglang, speculators"),
    ]
    for engine, head, words in cases:
        with pytest.raises(ConfigError, match=words):
            export(engine, head, out)
        assert not out.exists()
    export("vllm", eagle2(tmp_path / "zero", 0.0), out)  # a bias of zeros is none
    with pytest.raises(ConfigError, match="there already"):
        export("vllm", plain, out)
    with pytest.raises(CapabilityError, match="EAGLE-3 head"):
        EagleModel.load(third)


def test_the_command_writes_the_zoos_head_and_says_how_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(TOOL), "vllm", "paceline-small-eagle", str(tmp_path / "out"), "--tokens", "4"]
    monkeypatch.setattr(sys, "argv", command)
    NAMES["main"]()
    assert '"num_speculative_tokens": 4' in capsys.readouterr().out
    same(load_head(zoo.find("paceline-small-eagle")), load_head(tmp_path / "out"))
