"""Scores and losses as a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import answers
import pytest
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kits.stream_sets import MODEL, save_set

pytestmark = pytest.mark.timeout(120)


def run(*given: Any) -> int:
    return answers.study.run([*map(str, given), "--model", MODEL, "--threads", "1"])


def test_the_base_and_every_application_are_scored_with_the_streams_that_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder = tmp_path / "words.txt", save_set(tmp_path / "set", mode="shared", gamma=2)
    text.write_text("Some words to be read.", encoding="utf-8")
    small = ("--prompts", 2, "--max-new-tokens", 4, "--dtype", "float32")
    given = ("--tasks", "sql,gsm8k", "--loss", text, "--application", f"mine={folder}", *small)
    assert run(*given, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("exact_match", "accuracy", "words", "mine", "base"))
    found = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert [(task["application"], task["task"]) for task in found["tasks"]] == [
        (application, task) for application in (None, "mine") for task in ("sql", "gsm8k")
    ]
    assert found["options"]["drafter"] == "streams" and found["machine"]["processor"]
    base, mine = found["losses"]
    assert base["domain"] == "words" and 0 < base["loss"] != mine["loss"] > 0
    assert "float32" in (tmp_path / "out" / "scores.md").read_text()
