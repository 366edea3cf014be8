"""The embedded models: found by name, complete, and described truly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from paceline import zoo
from paceline.core.errors import ConfigError
from paceline.drafters import registry
from paceline.rounds import ROUNDS


@pytest.fixture(autouse=True)
def no_chosen_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ZOO", raising=False)


MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md")
SET_FILES = ("streams.json", "README.md")
HEAD_MB = {
    "exits.safetensors": 2,
    "lyanna.safetensors": 6,
    "medusa.safetensors": 2,
    "model.safetensors": 8,
    "spire.safetensors": 1,
}  # at most; model.safetensors is EAGLE's, and the layers of SPIRe's draft
PARAMETERS_NO_NUMBER = '{"role": "target", "description": "x", "parameters": "many"}'
DRAFTER_NO_TEXT = '{"role": "target", "description": "x", "parameters": 1, "drafter": 7}'


def make_model(folder: Path, card: str) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / zoo.CARD).write_text(card, encoding="utf-8")


def test_target_and_draft_are_there_and_belong_together() -> None:
    names = {entry.name: entry for entry in zoo.available()}
    assert names["paceline-small"].role == "target"
    assert names["paceline-small-draft"].role == "draft"
    assert names["paceline-small"].draft == "paceline-small-draft"
    assert zoo.default_drafter("paceline-small") == "hybrid:paceline-small-draft,dtype=int8"
    assert zoo.default_drafter("paceline-small-draft") is None
    assert zoo.find("paceline-small") == names["paceline-small"].path


@pytest.mark.parametrize("entry", zoo.available(), ids=lambda entry: entry.name)
def test_every_model_is_complete_and_its_card_is_true(entry: zoo.ZooEntry) -> None:
    trained_set = entry.role in zoo.TRAINED_SETS
    head = entry.role == "head"
    for name in ("README.md",) if head else SET_FILES if trained_set else MODEL_FILES:
        assert (entry.path / name).is_file(), name
    files = [entry.path / ("streams.safetensors" if trained_set else "model.safetensors")]
    if head:
        files = [*entry.path.glob("*.safetensors")]
        assert files
        assert all(file.stat().st_size <= HEAD_MB[file.name] * 1e6 for file in files)
    shapes = []
    for file in files:
        with safe_open(file, "pt") as weights:
            shapes += [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118  (no plain iteration)
    assert sum(math.prod(shape) for shape in shapes) == entry.parameters
    assert entry.bytes == sum(file.stat().st_size for file in files)
    for name in (entry.draft, entry.target):
        assert name is None or zoo.find(name) is not None
    readers = {*registry.names(), *ROUNDS}
    assert (entry.read_by in readers) if entry.role in ("draft", "head", "streams") else entry.read_by is None


def test_target_and_draft_share_one_tokenizer() -> None:
    target, draft = zoo.find("paceline-small"), zoo.find("paceline-small-draft")
    assert target is not None and draft is not None
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["", "nothing-like-it", "../zoo/paceline-small", "/", "paceline-small/"])
def test_what_is_no_name_is_not_found(name: str) -> None:
    assert zoo.find(name) is None
    assert zoo.default_drafter(name) is None


def test_a_head_names_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    card = '{"role": "head", "description": "x", "parameters": 1%s}'
    make_model(tmp_path / "some-lyanna", card % ', "target": "paceline-small"')
    assert {entry.name: entry for entry in zoo.available()}["some-lyanna"].role == "head"
    make_model(tmp_path / "other-lyanna", card % "")
    with pytest.raises(ConfigError, match="names its target"):
        zoo.available()


def test_a_chosen_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"role": "target", "description": "another", "parameters": 7}
    make_model(tmp_path / "paceline-small", json.dumps(card))
    make_model(tmp_path / "mine", json.dumps(card))
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    assert zoo.find("paceline-small") == tmp_path / "paceline-small"
    assert {"mine", "paceline-small-draft"} <= {entry.name for entry in zoo.available()}
    assert next(entry.bytes for entry in zoo.available() if entry.name == "mine") == 5


def test_a_chosen_folder_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone"):
        zoo.available()


@pytest.mark.parametrize(
    "card", ["{", "{}", '{"role": "target", "description": "x", "parameters": "many"}', "[]", DRAFTER_NO_TEXT]
)
def test_a_broken_card_is_an_error(card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "broken", card)
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    with pytest.raises(ConfigError, match="zoo card"):
        zoo.find("broken")
