"""A draft of tracks: what is loaded computes what was trained; folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.kv.pool import KVPool
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.families import decoder_config
from paceline.model.packing import RowPacker
from paceline.papers.mirror.tracks import Tracks
from paceline.papers.mirror.tracks_training import TracksNetwork, TracksOptions
from paceline.train.data import TokenBatch
from paceline.weights import zoo
from paceline.weights.loader import load_model
from paceline.weights.source import resolve

IDS = [*range(7, 40, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "float64": {"attention": make_backend(torch.float64), "dtype": "float64"},
    "bfloat16": {"attention": make_backend(torch.bfloat16), "dtype": "bfloat16"},
    "compiled": {"attention": make_backend(torch.bfloat16), "dtype": "bfloat16", "native": True},
}
EACH = pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_kernels if k == "compiled" else ()) for k in KINDS])


def load(folder: Path, kind: str) -> Decoder:
    how = {**KINDS[kind]}
    return load_model(resolve(folder, how.pop("dtype")), network=Tracks, **how)


def draft(folder: Path, tracks: int = 2, vocab: int = 202, width: int = 32) -> TracksNetwork:
    """A random draft, and its folder."""
    shape = {"layers": 4, "d_model": width * tracks, "d_ff": 48 * tracks, "heads": 2 * tracks, "kv_heads": tracks}
    options = TracksOptions(tracks=tracks, **shape)
    config = options.config(vocab, 128, 0, 1, 2)
    network = TracksNetwork(decoder_config(config))
    network.init_weights(3)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8.0)
    network.save(folder, config, torch.bfloat16)
    return TracksNetwork.load(folder)


@torch.inference_mode()
def answer(decoder: Decoder) -> Tensor:
    """Logits of a prompt, in two passes."""
    pool, found = KVPool(*decoder.cache_shape, 64, decoder.dtype, decoder.device), []
    for first, last in ((0, 7), (7, 11)):
        packer, places = RowPacker(decoder, decoder.device), (slice(first, last), slice(0, last))
        packer.add(IDS[first:last], range(first, last), *places, num_keys=last, prefix=first)
        batch = packer.batch()
        state = decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, pool)
        found.append(decoder.read(state.hidden))
    return torch.cat(found)


@EACH
def test_what_is_loaded_computes_what_was_trained(kind: str, tmp_path: Path) -> None:
    network = draft(tmp_path, 4)
    tokens = torch.tensor([IDS])
    places, zeros = torch.arange(len(IDS))[None], torch.zeros_like(tokens)
    batch = TokenBatch(tokens, tokens, torch.ones(1, len(IDS)), places, zeros, zeros, places)
    with torch.no_grad():
        expected = network(batch)[0] @ network.head_weight.t()
    found = answer(load(tmp_path, kind))
    near = 1e-5 if kind == "float64" else 0.05
    assert expected.std() > 0.5 and (found - expected).abs().max() < near * expected.abs().max()


def with_tokenizer(folder: Path) -> Path:
    target = zoo.find("paceline-small")
    assert target is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    return folder


def test_an_engine_drafts_with_tracks(tmp_path: Path) -> None:
    """What is said is the target's; under `mirror` drafting goes through sessions."""
    draft(tmp_path, vocab=8192)
    named = f"draft_model:{with_tokenizer(tmp_path)},depth=3"
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    target = LLM("paceline-small", drafter=None, threads=1)
    [wanted] = target.generate(["Once upon a time"], params)
    for drafter, round_ in ((named, "serial"), (named, "mirror,kappa=2")):
        llm = LLM("paceline-small", drafter=drafter, round=round_, budget=3, threads=1, share=target)
        [output] = llm.generate(["Once upon a time"], params)
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        engine_round: Any = llm.engine.round
        assert engine_round.failure is None


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), encoding="utf-8")

    return edit


def without(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = load_file(folder / "model.safetensors")
        del values[name]
        save_file(values, folder / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edited(num_tracks=3), "num_tracks = 3: there must be two or more, which divide hidden_size"),
        (edited(num_tracks=1), "num_tracks = 1: there must be two or more"),
        (edited(num_tracks=None), "'num_tracks' is missing"),
        (edited(merge="sum"), "merge = 'sum': it must be gather"),
        (edited(num_hidden_layers=3), "num_hidden_layers = 3: it must be divided by 2 segments"),
        (edited(tie_word_embeddings=False), "one table"),
        (edited(vocab_size=200), r"configuration needs \[200, 64\]"),
        (without("model.tracks.1.layers.0.mlp.up_proj.weight"), "misses tensor tracks.1.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_folder_that_is_wrong_is_refused(edit: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    draft(tmp_path)
    edit(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "DRAFT"}, "it is a draft of tracks, which no target is"),
    ],
)
def test_what_tracks_cannot_do_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    draft(tmp_path, vocab=8192)
    with_tokenizer(tmp_path)
    given = {name: value.replace("DRAFT", str(tmp_path)) for name, value in options.items()}
    with pytest.raises(ConfigError) as refused:
        LLM(given.pop("model", "paceline-small"), **given)
    assert words in str(refused.value)
