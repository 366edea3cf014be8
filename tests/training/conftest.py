"""Data and a target on disk, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toolkit import write_data, write_target

from paceline.train import trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies"))  # the dense reference of streams is theirs


@pytest.fixture(autouse=True)
def every_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "tiny-target", data)
