"""Prompts: the mix and a user's own, those to learn from apart from those to judge on; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.adapt.prompts import JUDGED_OF_MIX, LEAST, MIX, collect
from paceline.bench.workloads import load
from paceline.core.errors import ConfigError
from paceline.weights.source import load_tokenizer


def test_the_mix_has_every_kind_and_judges_on_the_benchs_own_choice(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    asked = collect(None, tokenizer, 120, 40, seed=3)
    assert [q.name for q in asked] == list(MIX.values())
    for question in asked:
        assert len(question.judged) == JUDGED_OF_MIX and len(question.learned) == 32
        assert all(0 < len(ids) <= 80 for ids in (*question.learned, *question.judged))
        chosen = {p.id for p in load(question.workload, limit=JUDGED_OF_MIX, seed=3).prompts}
        assert len(chosen) == JUDGED_OF_MIX


def test_a_users_prompts_are_split(target: Path, prompts: Path) -> None:
    asked = collect(prompts, load_tokenizer(target), 120, 40, seed=0)
    (question,) = asked
    assert (len(question.learned), len(question.judged)) == (20, 5)
    assert not {*question.learned} & {*question.judged}


def test_too_few_prompts_are_refused(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(LEAST - 1)), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"it has {LEAST - 1} prompts"):
        collect(file, load_tokenizer(target), 120, 40, seed=0)
