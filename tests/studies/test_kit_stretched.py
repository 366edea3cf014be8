"""Checkpoints for other engines: a stretched model written as layers of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.stretched import write_stretched

from paceline import LLM, CapabilityError, SamplingParams
from paceline.zoo import find


@pytest.mark.parametrize("times", [1, 3])
def test_a_stretched_checkpoint_is_the_stretched_model(tmp_path: Path, times: int) -> None:
    folder = find("paceline-small-draft")
    assert folder is not None
    write_stretched(folder, times, tmp_path / "made")
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 70, 900], [*range(300, 340)])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    named = f"stretch:{folder},times={times}" if times > 1 else str(folder)
    answers = []
    for model in (named, str(tmp_path / "made")):
        llm = LLM(model, drafter="none", dtype="q4_0", threads=1, max_model_len=128)
        answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
        assert llm.decoder.config.depth == 2 * times
    assert answers[0] == answers[1]
    assert len({*answers[0][0], *answers[0][1]}) > 10


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    with pytest.raises(CapabilityError, match="only a Llama"):
        write_stretched(tmp_path, 2, tmp_path / "made")
