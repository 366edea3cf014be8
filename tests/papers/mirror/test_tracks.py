"""A draft of tracks: what is loaded computes what was trained, in one process and in one a track; folders; joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from paceline.model.families import decoder_config
from paceline.model.joins import RankMemory
from paceline.model.packing import RowPacker
from paceline.model.parallel import LOGITS, Ranks
from paceline.papers.mirror.tracks import Tracks, load_tracks, track_share
from paceline.papers.mirror.tracks_training import TracksNetwork, TracksOptions
from paceline.weights import zoo
from paceline.weights.source import read_config, resolve

IDS = [*range(7, 40, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "float64": {"attention": make_backend(torch.float64), "dtype": "float64"},
    "bfloat16": {"attention": make_backend(torch.bfloat16), "dtype": "bfloat16"},
    "compiled": {"attention": make_backend(torch.bfloat16), "dtype": "bfloat16", "native": True},
}
EACH = pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_kernels if k == "compiled" else ()) for k in KINDS])


def load(folder: Path, kind: str, ranks: Ranks | None = None) -> Tracks:
    how = {**KINDS[kind]}
    return load_tracks(resolve(folder, how.pop("dtype")), ranks=ranks, **how)


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
def answer(decoder: Tracks) -> Tensor:
    """Logits of a prompt, in two passes."""
    pool, found = KVPool(*decoder.cache_shape, 64, decoder.dtype, decoder.device), []
    for first, last in ((0, 7), (7, 11)):
        packer, places = RowPacker(decoder, decoder.device), (slice(first, last), slice(0, last))
        packer.add(IDS[first:last], range(first, last), *places, num_keys=last, prefix=first)
        batch = packer.batch()
        with decoder.whole_run(batch, pool, LOGITS, range(last - first)):
            state = decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, pool)
            found.append(decoder.read(state.hidden))
    return torch.cat(found)


@EACH
def test_a_process_a_track_gives_the_bits_of_one_at_two_joins_and_a_choice(kind: str, tmp_path: Path) -> None:
    tracks, vocab, rows = 4, 202, len(IDS)
    draft(tmp_path, tracks)
    whole, memory = answer(load(tmp_path, kind)), RankMemory(tracks)
    ranks = []
    for rank in range(tracks):
        joins = memory.joins()
        joins.struct.rank = joins.rank = rank
        ranks.append(Ranks(track_share(read_config(tmp_path), rank), joins))
    with ThreadPoolExecutor(tracks) as threads:
        decoders = [load(tmp_path, kind, own) for own in ranks]
        found = [*threads.map(answer, decoders)]
    memory.close()
    assert whole.std() > 0.5 and all(torch.equal(own, whole) for own in found)
    state, logits = decoders[0].dtype.itemsize, (8 if kind == "float64" else 4) * -(-vocab // tracks)
    for own in ranks:
        assert own.joins.struct.collectives == 2 * (2 + 1)  # of two passes; tensor parallel has 2 a layer, 2 more
        assert own.joins.struct.bytes == rows * (2 * 32 * state + logits)
    held = sum(p.numel() for d in decoders for p in d.parameters())
    assert held < 1.1 * sum(p.numel() for p in load(tmp_path, kind).parameters())


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
