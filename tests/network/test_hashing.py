"""Hashes of large files: every byte counts, none is read twice, and what was kept is for the same file alone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.weights import hashing
from paceline.weights.hashing import content_hash

PIECE = 64


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small pieces and buffers, times as fine as can be, nothing known yet, and a cache folder of the test's own."""
    monkeypatch.setattr(hashing, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(hashing, "SETTLED_S", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "hashes"


def written(folder: Path, content: bytes, name: str = "weights") -> Path:
    file = folder / name
    file.write_bytes(content)
    return file


def reference(content: bytes) -> str:
    pieces = [content[i : i + PIECE] for i in range(0, max(1, len(content)), PIECE)]
    return hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()


class Reads:
    """Counts how often a file is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        whole = hashing._hash

        def counted(file: Path, size: int) -> str:
            self.count += 1
            return whole(file, size)

        monkeypatch.setattr(hashing, "_hash", counted)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_it_is_that_of_the_pieces_and_every_byte_counts(tmp_path: Path, size: int) -> None:
    content = bytes(i * 7 % 251 for i in range(size))
    file = written(tmp_path, content)
    assert content_hash(file) == reference(content)
    found = {content_hash(file)}
    for place in range(size):
        found.add(content_hash(written(tmp_path, content[:place] + b"\xff" + content[place + 1 :])))
    assert len(found) == size + 1


def test_a_file_is_read_once(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reads = written(tmp_path, b"x" * 100), Reads(monkeypatch)
    (tmp_path / "link").symlink_to(file)
    first = content_hash(file)
    assert [content_hash(file), content_hash(tmp_path / "link")] == [first] * 2
    assert content_hash(file) == first and reads.count == 1
    assert len(list(small.iterdir())) == 1
    assert content_hash(written(tmp_path, b"x" * 100, "another")) == first and reads.count == 2


def in_place(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.write(b"y")


def in_place_with_its_old_time(file: Path) -> None:
    before = file.stat()
    in_place(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another(file: Path) -> None:
    before = file.stat()
    fresh = written(file.parent, b"y" + b"x" * 99, "fresh")
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(file)


def longer(file: Path) -> None:
    file.write_bytes(b"y" + b"x" * 100)


@pytest.mark.parametrize("change", [in_place, in_place_with_its_old_time, by_another, longer])
def test_a_file_that_was_changed_is_read_again(tmp_path: Path, change: Callable[[Path], None]) -> None:
    file = written(tmp_path, b"x" * 100)
    before = content_hash(file)
    time.sleep(0.02)  # file systems tell times apart that are as far from each other as this
    change(file)
    assert content_hash(file) == reference(file.read_bytes()) != before


def test_what_was_just_written_is_not_kept_however_long_it_is_read(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SETTLED_S", 0.3)
    file, whole = written(tmp_path, b"x" * 100), hashing._hash

    def long(path: Path, size: int) -> str:
        time.sleep(0.5)
        return whole(path, size)

    monkeypatch.setattr(hashing, "_hash", long)
    content_hash(file)
    assert not small.exists()
    content_hash(file)
    assert len(list(small.iterdir())) == 1


@pytest.mark.parametrize("broken", [b"", b"\xff\xfe", b"not one", b"a" * 63, b"[" * 100_000])
def test_a_damaged_record_is_not_believed(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, broken: bytes
) -> None:
    file, reads = written(tmp_path, b"x" * 100), Reads(monkeypatch)
    first = content_hash(file)
    (kept,) = small.iterdir()
    record = kept.read_bytes()
    kept.write_bytes(broken)
    assert content_hash(file) == first and reads.count == 2
    assert kept.read_bytes() == record, "it is written again"
