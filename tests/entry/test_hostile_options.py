"""Options of `LLM` that are wrong in any way at all: a `ConfigError` that says so, before weights are read."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kits.hostile import NASTY, bounded, deep, start, write_checkpoint

import paceline.api.assembly.models
from paceline import LLM, ConfigError
from paceline.api.config import MAX_THREADS, LLMConfig, parse_bytes
from paceline.draft.ngram import NgramConfig
from paceline.draft.registry import parse
from paceline.engine.budget import parse_budget

shared = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OBJECTS = [
    object(),
    b"x",
    {1, 2},
    1 + 2j,
    LLM,
    NgramConfig,
    NgramConfig(),
    Path("x"),
    torch.float32,
    torch.device("cpu"),
]
nasty = st.sampled_from([*NASTY, deep(), *OBJECTS, "cuda:99", "cuda:-1", "cpu:1", "CPU", "meta", "1:8,4:4", {1: 8}])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("options") / "model"))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be read."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(paceline.api.assembly.models, "load_model", never)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_memory": 1e9}, "kv_memory=1000000000.0: kv_memory takes text or integer or none"),
        ({"kv_memory": 10**400}, "kv_memory=about 2"),
        ({"kv_memory": "1000000GiB"}, "GiB are free"),
        ({"threads": 10**9}, f"threads=1000000000: threads must be {MAX_THREADS} or less"),
        ({"max_model_len": 65}, "has 64 positions"),
        ({"max_sequences": 10**9}, "max_sequences must be 65536 or less"),
        ({"budget": 10**5000}, "must be between"),
        ({"dtype": "float12"}, "no such dtype"),
        ({"device": "meta"}, "'cpu' and 'cuda'"),
        ({"kernels": "fast"}, "there are no such kernels. Use one of: auto, native, torch"),
        ({"round": "mirror!"}, "there is no such round. Use one of: auto"),
        ({"applications": ["x"]}, "folders by name"),
        ({"applications": {"sql": "a\0b"}}, "application 'sql'.*not a model's name"),
        ({"applications": {"base": "."}}, "'base' cannot name an application"),
        ({"drafter": "ngram,depth=0"}, "depth must be 1 or more"),
        ({"drafter": "x" * 5000}, "4,096 characters"),
    ],
)
def test_options_are_refused_before_weights_are_read(
    checkpoint: str, unread: None, options: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words):
        LLM(checkpoint, **{"offline": True, **options})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "model=None: model takes text"),
        ("a\0b", "without a NUL"),
        ("x" * 4000, "the path cannot be read"),
        ("\ud800", "neither a folder nor a hub name"),
        (Path("nowhere/at/all"), "there is no such folder"),
    ],
)
def test_models_that_cannot_be_are_refused(model: Any, words: str):
    error = start(model)
    assert error is not None
    with pytest.raises(ConfigError, match=words):
        raise error


NAMES = [f.name for f in fields(LLMConfig) if f.name != "model"]


@settings(shared, max_examples=300)
@given(options=st.dictionaries(st.sampled_from(NAMES), nasty, min_size=1, max_size=3))
@example(options={"max_model_len": 2**63})
def test_no_options_get_through(checkpoint: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    """Nothing but a `ConfigError` leaves the constructor, and nothing large is allocated on the way."""
    threads = torch.get_num_threads()
    try:
        with bounded(monkeypatch):
            start(checkpoint, **options)
    finally:
        torch.set_num_threads(threads)


@settings(shared, max_examples=60)
@given(model=nasty | st.text(max_size=30))
def test_no_model_gets_through(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    start(model)


WORDS = ["ngram", "suffix", "none", "draft_model", "hybrid", "streams", ":", ",", "=", "<", ">", " ", "\n"]
OPTION_NAMES = [
    *("max_ngram", "min_ngram", "depth", "max_tokens", "model", "topk", "nodes"),
    *("proposes", "dtype", "lookup", "memory", "pass_cost", "answers", "accept", "seed", "path", "k", "at"),
    *("best_path_batch", "prune_threshold", "prune_count", "gamma", "branching"),
    "extra",
]
VALUES = ["0", "1", "-1", "2", "1e999", "nan", "-inf", "9" * 400, "9" * 5000, "true", "none", "<1,2>", "x", "\0", "²"]
pieces = st.lists(st.sampled_from([*WORDS, *OPTION_NAMES, *VALUES]) | st.text(max_size=3), max_size=8).map("".join)
pairs = st.lists(st.tuples(st.sampled_from(OPTION_NAMES), st.sampled_from(VALUES)), min_size=1, max_size=3)
formed = st.builds(
    lambda name, given: ",".join([name, *(f"{key}={value}" for key, value in given)]), st.sampled_from(WORDS[:7]), pairs
)


@settings(shared, max_examples=250)
@given(spec=pieces | formed)
def test_no_drafter_gets_through(checkpoint: str, monkeypatch: pytest.MonkeyPatch, spec: str):
    with bounded(monkeypatch):
        start(checkpoint, drafter=spec)


@pytest.mark.parametrize("text", ["1,5 GiB", "4,000,000,000", "16GB/2", "2 GiB please", "1.", "\u0664GB", "GB", ""])
def test_a_size_is_read_to_its_end(text: str):
    assert parse_bytes(" 1.5 GiB ") == 3 * 2**29 and parse_bytes("2g") == 2 * 10**9 and parse_bytes(7) == 7
    with pytest.raises(ConfigError, match="not a size. Write bytes, or a number with MiB or GiB"):
        parse_bytes(text)


@settings(shared, max_examples=200)
@given(value=nasty | st.text(max_size=20) | st.dictionaries(nasty.filter(lambda v: v.__hash__), nasty, max_size=3))
def test_no_budget_and_no_size_gets_through(value: Any):
    for read in (parse_budget, parse_bytes, parse):
        try:
            read(value)
        except ConfigError as error:
            assert len(str(error)) < 3000
