"""Which drafter a model has where none is named: one rule for all commands, the server and Python's ``auto``."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.api.config import LLMConfig
from paceline.api.llm import drafters_of
from paceline.runtime.engine_worker import SERVED
from paceline.weights import zoo

MODEL, DRAFT = "paceline-small", "paceline-small-draft"
STATES = "hybrid:suffix+medusa:paceline-small-medusa"  # it cannot draft ahead
REPEATS = "def add(a, b):\n    return a + b\n\n\n" * 4
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def drafters(beside: Sequence[str] = (), **options: Any) -> Any:
    config = LLMConfig(**{"model": MODEL, "drafter": "auto", **options})
    return drafters_of(config, config.resolve(), beside)


@pytest.mark.parametrize("model", [MODEL, str(zoo.find(MODEL))])
def test_the_zoo_chooses_by_name_and_by_folder(model: str) -> None:
    wanted = ["hybrid:paceline-small-draft,dtype=int8", "suffix"]
    assert drafters(model=model) == wanted


@pytest.mark.parametrize(("dtype", "wanted"), [("auto", "ngram"), ("bfloat16", "ngram"), ("q4_0", "prediction")])
def test_a_card_names_a_drafter_for_a_type_of_weights(
    dtype: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a folder are what its files hold, in bf16 here, where no other type is asked for."""
    shutil.copytree(zoo.find(DRAFT) or tmp_path, tmp_path / "own")
    card = {"role": "target", "description": "", "parameters": 1, "drafter": "prediction"}
    (tmp_path / "own" / "zoo.json").write_text(json.dumps({**card, "drafter_in": {"bfloat16": "ngram"}}), "utf-8")
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    assert drafters(model="own", dtype=dtype) == [wanted, "suffix"]


def test_a_model_that_the_zoo_does_not_know_has_look_ups(tmp_path: Path) -> None:
    own = Path(shutil.copytree(zoo.find(DRAFT) or tmp_path, tmp_path / "own"))
    llm = LLM(str(own), drafter="auto", budget=4, threads=1)
    stats = llm.generate(REPEATS, GREEDY)[0].stats
    assert llm.config.drafter == "suffix" and stats.off_reason is None
    assert stats.accepted > 0 and stats.passes == 16 - stats.accepted


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [(None, "grammar+prediction+suffix"), ("none", "grammar+prediction"), ("ngram", "grammar+prediction+ngram")],
)
def test_a_server_s_own_drafters_stand_beside_the_one_that_is_chosen(
    chosen: str | None, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "default_drafter", lambda *asked: chosen)
    assert drafters(SERVED)[0] == f"hybrid:{parts}"
    assert drafters(SERVED, drafter="ngram") == ["ngram"]


@pytest.mark.parametrize("round_", ["mirror", "pipeline"])
def test_the_round_chooses_among_those_that_it_can_run_and_says_so(
    round_: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zoo, "default_drafter", lambda *asked: STATES)
    with caplog.at_level(logging.WARNING):
        llm = LLM(MODEL, drafter="auto", round=round_, threads=1)
    assert llm.config.drafter == "suffix" and llm.engine.round.name == round_
    assert f"{STATES!r}, the default of this model, cannot be used here: hybrid cannot draft below" in caplog.text
    assert "The drafter 'suffix' is used instead." in caplog.text
    stats = llm.generate(REPEATS, GREEDY)[0].stats
    assert stats.accepted > 0 and stats.off_reason is None
