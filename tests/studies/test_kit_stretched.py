"""Checkpoints for other engines: a Llama whose head is stored on its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.stretched import write_untied

from paceline import LLM, CapabilityError, SamplingParams
from paceline.weights.zoo import find


def test_an_untied_checkpoint_says_the_same(tmp_path: Path) -> None:
    folder = find("paceline-small-draft")
    assert folder is not None
    write_untied(folder, tmp_path / "made")
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 70, 900], [*range(300, 340)])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for model in (folder, tmp_path / "made"):
        llm = LLM(str(model), drafter="none", dtype="q4_0", threads=1, max_model_len=128)
        answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
    assert not llm.decoder.config.tied
    assert answers[0] == answers[1]
    assert len({*answers[0][0], *answers[0][1]}) > 10


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    with pytest.raises(CapabilityError, match="only a Llama"):
        write_untied(tmp_path, tmp_path / "made")
