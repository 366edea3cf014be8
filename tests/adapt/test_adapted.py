"""A folder that names a drafter: read, found by the model, refused where it was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.api.config import LLMConfig
from paceline.api.llm import drafters_of
from paceline.core.errors import CapabilityError, ConfigError
from paceline.draft import adapted, registry
from paceline.runtime.engine_worker import SERVED
from paceline.weights.files import fingerprint


def made(folder: Path, target: Path, drafter: str = "suffix,depth=5", dtype: str = "auto") -> Path:
    weights = folder / adapted.WEIGHTS
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    settings = {"drafter": drafter, "target": "tiny", "fingerprint": fingerprint(target), "dtype": dtype}
    adapted.write(folder, settings)
    return folder


def chosen(model: str | Path, **options: Any) -> Any:
    config = LLMConfig(model=str(model), drafter="auto", **options)
    return drafters_of(config, config.resolve())[0]


def test_the_folder_is_a_drafter(tmp_path: Path, target: Path) -> None:
    folder = made(tmp_path / "one", target)
    assert registry.parse(str(folder)) == registry.parse("suffix,depth=5")
    assert str(tmp_path) in adapted.named(str(made(tmp_path / "two", target, "hybrid:suffix+eagle:{folder}")))
    with pytest.raises(ConfigError, match="there is no such drafter"):
        registry.parse(str(tmp_path))  # a folder without settings is none


def test_a_file_that_was_replaced_is_refused_by_name(tmp_path: Path, target: Path) -> None:
    folder = made(tmp_path / "one", target)
    (folder / adapted.WEIGHTS / "model.safetensors").write_bytes(b"another")
    with pytest.raises(CapabilityError, match=r"drafter/model.safetensors is not the file .* Run paceline adapt again"):
        registry.parse(str(folder))
    (folder / adapted.SETTINGS).write_text('{"format": 1, "drafter": 5}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        registry.parse(str(folder))


def test_a_path_that_no_drafter_can_hold_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match="its path holds ','"):
        registry.parse(str(made(tmp_path / "a,b", target)))


def test_auto_finds_it_by_the_models_weights(tmp_path: Path, target: Path) -> None:
    """For that model in that dtype alone, as long as it is there; Python's ``auto`` means the same."""
    assert chosen(target) == "suffix"
    folder = made(tmp_path / "one", target)
    adapted.remember(folder, fingerprint(target))
    assert chosen(target) == "suffix,depth=5" and chosen(target, dtype="float32") == "suffix"
    assert chosen("paceline-small") == "hybrid:paceline-small-draft,dtype=int8"
    llm = LLM(str(target), drafter="auto", threads=1)
    assert llm.config.drafter == "suffix,depth=5"
    (folder / adapted.SETTINGS).unlink()
    assert chosen(target) == "suffix"


def test_a_server_drafts_beside_what_was_left_also_where_that_is_nothing(tmp_path: Path, target: Path) -> None:
    for left, whole in (("none", "hybrid:grammar+prediction"), ("suffix", "hybrid:grammar+prediction+suffix")):
        adapted.remember(made(tmp_path / left, target, left), fingerprint(target))
        llm = LLM(str(target), drafter="auto", beside=SERVED, threads=1)
        assert llm.config.drafter == whole and llm.generate("red")
