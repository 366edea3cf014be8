"""Kept requests: so many, for the user alone, whole or left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.adapt.learning.store import ANSWER, PROMPT, RequestStore
from paceline.core.errors import ConfigError


def test_it_keeps_the_last_requests(tmp_path: Path) -> None:
    store = RequestStore(tmp_path / "requests", most=4)
    for i in range(1, 8):
        store.add([i, i + 1], [10 * i])
    for name in ("7.states", "7.states.part"):  # as an earlier version left them
        (store.folder / name).write_bytes(b"0")
    other = RequestStore(tmp_path / "requests", most=4)
    assert {file.suffix for file in store.folder.iterdir()} == {".npz"}
    assert other.numbers() == [4, 5, 6, 7] and other.numbers(after=5) == [6, 7]
    found = other.read([3, *other.numbers()])
    assert [(one.number, one.prompt, one.answer) for one in found] == [(i, [i, i + 1], [10 * i]) for i in (4, 5, 6, 7)]
    other.add([1], [2])  # another process continues after the last
    assert store.numbers() == [5, 6, 7, 8]
    (tmp_path / "requests" / "8.npz").write_bytes(b"PK" + b"\0" * 50)
    assert store.read([8]) == []


def test_long_requests_keep_the_end_of_their_prompt_and_the_beginning_of_their_answer(tmp_path: Path) -> None:
    store = RequestStore(tmp_path / "requests")
    store.add(list(range(5000)), list(range(900)))
    (one,) = store.read([1])
    assert one.prompt == list(range(5000 - PROMPT, 5000)) and one.answer == list(range(ANSWER))


def test_it_is_for_the_user_alone(tmp_path: Path) -> None:
    folder = RequestStore(tmp_path / "requests").folder
    assert os.stat(folder).st_mode & 0o777 == 0o700
    os.chmod(folder, 0o750)
    with pytest.raises(ConfigError, match="others may read requests in it. Chmod 700"):
        RequestStore(folder)
