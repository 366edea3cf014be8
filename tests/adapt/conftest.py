"""A tiny random model on disk, prompts for it, and a user's cache of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from toolkit import write_data, write_target

from paceline.draft import adapted


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt-models")
    return write_target(folder / "tiny-target", write_data(folder))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("adapt-prompts") / "boxes.jsonl"
    asked = [f"What colour is box {i} beside box {j}?" for i in range(5) for j in range(5)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def own_pointers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered in the real user's cache, and nothing found there. Compiled kernels stay where they are."""
    monkeypatch.setattr(adapted, "pointers", lambda: tmp_path / "pointers")
