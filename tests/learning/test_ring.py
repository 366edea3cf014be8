"""The ring: bounded, for the user alone, whole or left out; no texts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.adapt.learning.ring import ANSWER, PROMPT, Ring, ServedRequest
from paceline.core.errors import ConfigError


def test_it_keeps_the_last_requests_and_no_more(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring.bin", slots=4)
    size = (tmp_path / "ring.bin").stat().st_size
    for i in range(1, 8):
        ring.add([i, i + 1], [10 * i])
    other = Ring(tmp_path / "ring.bin", slots=4)
    assert other.read() == [ServedRequest(i, [i, i + 1], [10 * i]) for i in (4, 5, 6, 7)]
    assert [one.number for one in other.read(after=5)] == [6, 7]
    assert (tmp_path / "ring.bin").stat().st_size == size
    other.add([1], [2])  # another process goes on behind the last
    assert ring.read()[-1] == ServedRequest(8, [1], [2])


def test_long_requests_keep_the_end_of_their_prompt_and_the_beginning_of_their_answer(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring.bin", slots=2)
    ring.add(list(range(5000)), list(range(900)))
    (one,) = ring.read()
    assert one.prompt == list(range(5000 - PROMPT, 5000)) and one.answer == list(range(ANSWER))


def test_a_slot_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring.bin", slots=4)
    ring.add([5, 6, 7], [8])
    ring.add([5, 6, 7], [9])
    data = bytearray((tmp_path / "ring.bin").read_bytes())
    place = data.index((9).to_bytes(4, "little"), 24)
    data[place] = 77
    (tmp_path / "ring.bin").write_bytes(data)
    assert [one.answer for one in Ring(tmp_path / "ring.bin", slots=4).read()] == [[8]]


def test_it_is_for_the_user_alone(tmp_path: Path) -> None:
    Ring(tmp_path / "ring.bin", slots=2)
    assert os.stat(tmp_path / "ring.bin").st_mode & 0o777 == 0o600
    os.chmod(tmp_path / "ring.bin", 0o640)
    with pytest.raises(ConfigError, match="others may read ring.bin. Chmod 600"):
        Ring(tmp_path / "ring.bin", slots=2)
