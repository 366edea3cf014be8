"""Messages come back as they were sent, and no bytes whatever are taken for one that was not."""

from __future__ import annotations

import math
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor

from paceline.runtime import frames
from paceline.runtime.frames import DTYPES, HEAD, Codec, FrameError


@dataclass(frozen=True, slots=True)
class Grow:
    """A message of every kind of field."""

    session: Annotated[int, Field(ge=0)]
    tokens: list[int]
    scores: dict[str, float]
    hidden: Tensor
    why: str | None
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Close:
    session: int


@dataclass(frozen=True, slots=True)
class Six:
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    e: Tensor
    f: Tensor


CODEC = Codec(Grow, Close, Six)


def bytes_of(message: object) -> bytearray:
    return bytearray(b"".join(CODEC.encode(message)))


def grow() -> Grow:
    hidden = torch.arange(12).reshape(3, 4).to(torch.bfloat16)
    return Grow(7, [1, 2**60, -3], {"p": 0.1, "q": -math.inf}, hidden, None, torch.tensor([True, False]))


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape_comes_back(name: str):
    dtype = getattr(torch, name)
    full = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    deep = torch.zeros([1] * frames.MOST_DIMENSIONS).to(dtype)
    sent = [full, full[1, 2, 3], full[:0], full.transpose(0, 2), full[:, ::2], deep]
    found = CODEC.decode(bytes_of(Six(*sent)))
    assert all(same(one, getattr(found, name)) for one, name in zip(sent, "abcdef", strict=True))


def test_a_frame_that_is_cut_short_or_too_long_is_refused():
    whole = bytes_of(grow())
    for size in range(len(whole)):
        with pytest.raises(FrameError):
            CODEC.decode(whole[:size])
    with pytest.raises(FrameError):
        CODEC.decode(whole + b"\0")


def test_a_torn_frame_is_refused():
    """A bit that changed in front of the tensors' bytes is seen; in these it changes a number and nothing else."""
    whole, draw = bytes_of(grow()), random.Random(0)
    head, refused = len(whole) - 2 * 64, 0
    for at in range(head):
        torn = bytearray(whole)
        torn[at] ^= 1 << draw.randrange(8)
        with pytest.raises(FrameError):
            CODEC.decode(torn)
        refused += 1
    assert refused == head > 100
    whole[head] ^= 1
    assert CODEC.decode(whole).tokens == grow().tokens


def sealed(name: str, fields: bytes, shapes: str = "", bodies: bytes = b"") -> bytearray:
    """A frame with a right checksum, whatever is in it."""
    what = f'["{name}",[{shapes}]]'.encode()
    head = HEAD.pack(0, frames.PROTOCOL, len(what), len(fields))[4:] + what + fields
    head += bytes(-(len(head) + 4) % 64)
    return bytearray(struct.pack("<I", zlib.crc32(head)) + head + bodies)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (sealed("Steal", b"{}"), "not expected here"),
        (sealed("Close", b"{}"), "session"),
        (sealed("Close", b'{"session": "7"}'), "session"),
        (sealed("Close", b'{"session": 7.5}'), "session"),
        (sealed("Close", b'{"session": 7, "more": 1}'), "more"),
        (sealed("Close", b"[" * 5000), "fields"),
        (sealed("Close", b"\xff\xfe"), "fields"),
        (sealed("Close", b'{"session": 7}', '["uint8",[]]', bytes(64)), "1 tensors"),
        (sealed('"', b"{}"), "a frame whose head cannot be"),
        (sealed("Six", b"{}", '["complex64",[]]'), "a frame whose 1.0.0 cannot be"),
        (sealed("Six", b"{}", f'["int8",{[1] * 9}]'), "a frame whose 1.0.1 cannot be"),
        (sealed("Six", b"{}", '["int8",[-1]]'), "a frame whose 1.0.1.0 cannot be"),
        (sealed("Six", b"{}", ",".join(['["int8",[0]]'] * 5 + ['["int8",[0,1099511627776,2]]'])), "shape"),
        (sealed("Six", b"{}", ",".join(['["int8",[0]]'] * 5 + ['["int8",[65]]']), bytes(64)), "of which it says"),
        (sealed("Six", b"{}", ",".join(['["int8",[0]]'] * 5 + ['["int8",[64]]']), bytes(128)), "of which it says"),
    ],
)
def test_what_no_message_says_is_refused(frame: bytearray, why: str):
    with pytest.raises(FrameError, match=why):
        CODEC.decode(frame)


def test_another_protocol_is_named(monkeypatch: pytest.MonkeyPatch):
    whole = bytes_of(Close(1))
    monkeypatch.setattr(frames, "PROTOCOL", 4)
    with pytest.raises(FrameError, match="protocol 3, this is protocol 4"):
        CODEC.decode(whole)


def test_noise_is_no_message():
    draw = random.Random(1)
    for _ in range(300):
        with pytest.raises(FrameError):
            CODEC.decode(bytearray(draw.randbytes(draw.randrange(200))))
