"""Weights in blocks that have scales of their own: the types of GGUF files, numbers from them, and numbers to them.

Every type here is ``scale * code + least``: whole-number codes, a scale for 16 or 32 of them, and for some types a
least value. Several scales of 6 or 8 bits may share a factor for 256 codes. Results equal the ``gguf``
package's numbers bit for bit.

Source: ggml's ``ggml-common.h`` and ``ggml-quants.c`` (layouts); the OCP Microscaling specification (MXFP4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..core.errors import ConfigError

Raw = np.ndarray  # [blocks, bytes] uint8


# Blocks as numbers: codes [blocks, scales, codes of each], scale and least [blocks, scales, 1] float32. In float32 they
# are ``scale * codes + least``; without least it is zero.
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class BlockType:
    """One type of block."""

    name: str
    number: int  # its type in a GGUF file; those of `GROUPED` are in none
    values: int  # of a block
    bytes: int  # of a block
    unpack: Callable[[Raw], Unpacked] | None = None  # None: products with it are not compiled

    def row_bytes(self, k: int) -> int:
        """Return the bytes of ``k`` values, whole blocks of them."""
        return k // self.values * self.bytes


class StoredRows(NamedTuple):
    """Rows of a weight in blocks, where a file or a computation has them."""

    type: BlockType
    rows: np.ndarray  # [n, bytes of a row] uint8
    order: Tensor  # [n] int64 which of these rows comes first, second, ...
    source: str = "a weight"  # what they are, for errors
    release: Callable[[], None] = lambda: None  # frees memory that can be read again from the file
    inputs: Tensor | None = None  # [k] int32 which input comes first, second, ...; None: they are in order

    @property
    def addresses(self) -> Tensor:
        """Return [n] int64 where each row lies, in order."""
        return self.order * self.rows.strides[0] + self.rows.ctypes.data


# By the decoder's parameter: tensors that follow each other, whose ``stored()`` gives `StoredRows`.
StoredWeights = Mapping[str, Sequence[Any]]


def dequantise(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    """Return [n, k] float32 of rows of blocks [n, bytes] uint8."""
    assert kind.unpack is not None, f"{kind.name} is not unpacked here"
    codes, scale, least = kind.unpack(raw.reshape(-1, kind.bytes))
    values = scale * codes.astype(np.float32)
    if least is not None:
        values = values + least
    return values.reshape(len(raw), -1)


def quantise(name: str, weight: Tensor) -> np.ndarray:
    """Return rows of blocks [n, bytes] uint8 of a weight [n, k], as ggml rounds them; "q4_0" or "q8_0".

    Raises:
        ConfigError: k is not a multiple of a block.
    """
    kind, wide = BY_NAME[name], weight.detach().float().numpy()
    if wide.shape[1] % kind.values:
        wrong = f"a weight has {wide.shape[1]} inputs, and a block {kind.values}"
        raise ConfigError(f"dtype={name!r}", wrong, "use dtype='int8'")
    blocks = wide.reshape(-1, kind.values)
    return _QUANTISE[name](blocks).reshape(len(wide), -1)


def _quantise_q4_0(x: np.ndarray) -> np.ndarray:
    """Quantise so that the value farthest from zero becomes -8."""
    far = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    scale = far / -8
    codes = np.trunc(x * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    return np.concatenate((scale.astype("<f2").view(np.uint8), codes[:, :16] | codes[:, 16:] << 4), 1)


def _quantise_q8_0(x: np.ndarray) -> np.ndarray:
    """Quantise so that the value farthest from zero becomes 127 or -127; halves are rounded away from zero."""
    scale = np.abs(x).max(1, keepdims=True) / 127
    scaled = x * _inverse(scale)
    codes = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8)
    return np.concatenate((scale.astype("<f2").view(np.uint8), codes.view(np.uint8)), 1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


_QUANTISE = {"q4_0": _quantise_q4_0, "q8_0": _quantise_q8_0}


# -- layouts


def _halves(raw: Raw) -> np.ndarray:
    """Return [blocks, bytes / 2] float32 of halves."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Raw, stretch: int) -> np.ndarray:
    """Return [blocks, 2 * bytes] codes: of every ``stretch`` bytes first the lower halves, then the upper ones."""
    groups = raw.reshape(len(raw), -1, 1, stretch)
    return np.concatenate((groups & 15, groups >> 4), 2).reshape(len(raw), -1)


def _bits(raw: Raw, at: range, mask: int) -> np.ndarray:
    """Return [blocks, len(at), bytes] codes: of every byte the bits from each place of ``at`` on."""
    return raw[:, None] >> np.array(at, np.uint8)[:, None] & mask


def _simple(least: bool, fifth: bool) -> Callable[[Raw], Unpacked]:
    """Read Q4_0, Q4_1, Q5_0 and Q5_1: a scale, a least value, a fifth bit of each code, four bits of each."""

    def unpack(raw: Raw) -> Unpacked:
        begin = 4 if least else 2
        head = _halves(raw[:, :begin])[:, :, None]
        codes = _nibbles(raw[:, begin + 4 * fifth :], 16).astype(np.int8)
        if fifth:
            codes |= np.unpackbits(raw[:, begin : begin + 4], axis=1, bitorder="little").view(np.int8) << 4
        if not least:
            codes -= 16 if fifth else 8
        return codes[:, None], head[:, :1], head[:, 1:] if least else None

    return unpack


def _q8_0(raw: Raw) -> Unpacked:
    return raw[:, None, 2:].view(np.int8), _halves(raw[:, :2])[:, :, None], None


def six_bits(raw: Raw) -> tuple[np.ndarray, np.ndarray]:
    """Return [blocks, 8] scales and least values of 6 bits each, from the 12 bytes of Q4_K and Q5_K."""
    first, second, both = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scale = np.concatenate((first & 63, both & 15 | first >> 2 & 48), 1)
    least = np.concatenate((second & 63, both >> 4 | second >> 2 & 48), 1)
    return scale, least


def _k(fifth: bool) -> Callable[[Raw], Unpacked]:
    """Read Q4_K and Q5_K: two factors, eight scales and least values, a fifth bit of each code, four bits of each."""

    def unpack(raw: Raw) -> Unpacked:
        factors = _halves(raw[:, :4])
        scale, least = six_bits(raw[:, 4:16])
        codes = _nibbles(raw[:, 48 if fifth else 16 :], 32).reshape(len(raw), 8, 32)
        if fifth:
            codes = codes | _bits(raw[:, 16:48], range(8), 1) << 4
        by, less = factors[:, :1] * scale.astype(np.float32), factors[:, 1:] * least.astype(np.float32)
        return codes, by[:, :, None], -less[:, :, None]

    return unpack


def _q6_k(raw: Raw) -> Unpacked:
    scales, factor = raw[:, 192:208].view(np.int8), _halves(raw[:, 208:])
    upper = np.concatenate([_bits(part, range(0, 8, 2), 3) for part in np.split(raw[:, 128:192], 2, axis=1)], 1)
    codes = (_nibbles(raw[:, :128], 64) | upper.reshape(len(raw), 256) << 4).view(np.int8) - np.int8(32)
    return codes.reshape(len(raw), 16, 16), (factor * scales.astype(np.float32))[:, :, None], None


# What a code of four bits stands for.
NL_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
FP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)  # twice the number


def _iq4_nl(raw: Raw) -> Unpacked:
    return NL_VALUES[_nibbles(raw[:, 2:], 16)][:, None], _halves(raw[:, :2])[:, :, None], None


def _iq4_xs(raw: Raw) -> Unpacked:
    upper = np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2).astype(np.uint16) & 3  # [blocks, 8]
    scales = (_nibbles(raw[:, 4:8, None], 1).reshape(len(raw), 8) | upper.astype(np.uint8) << 4).view(np.int8) - 32
    codes = NL_VALUES[_nibbles(raw[:, 8:], 16)].reshape(len(raw), 8, 32)
    return codes, (_halves(raw[:, :2]) * scales.astype(np.float32))[:, :, None], None


def _mxfp4(raw: Raw) -> Unpacked:
    exponent = raw[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, exponent - np.uint32(1) << np.uint32(23))
    return FP4_VALUES[_nibbles(raw[:, 1:], 16)][:, None], bits.astype(np.uint32).view(np.float32)[:, :, None], None


def _grouped(zeros: bool) -> Callable[[Raw], Unpacked]:
    """Read a scale, a zero in a byte, four bits of each code, 32 after 32 as in Q4_0."""

    def unpack(raw: Raw) -> Unpacked:
        codes = _nibbles(raw[:, 2 + zeros :], 16).view(np.int8) - (raw[:, 2:3].view(np.int8) if zeros else np.int8(8))
        return codes[:, None], _halves(raw[:, :2])[:, :, None], None

    return unpack


TYPES = (
    BlockType("q4_0", 2, 32, 18, _simple(least=False, fifth=False)),
    BlockType("q4_1", 3, 32, 20, _simple(least=True, fifth=False)),
    BlockType("q5_0", 6, 32, 22, _simple(least=False, fifth=True)),
    BlockType("q5_1", 7, 32, 24, _simple(least=True, fifth=True)),
    BlockType("q8_0", 8, 32, 34, _q8_0),
    BlockType("q4_k", 12, 256, 144, _k(fifth=False)),
    BlockType("q5_k", 13, 256, 176, _k(fifth=True)),
    BlockType("q6_k", 14, 256, 210, _q6_k),
    BlockType("iq4_nl", 20, 32, 18, _iq4_nl),
    BlockType("iq4_xs", 23, 256, 136, _iq4_xs),
    BlockType("mxfp4", 39, 32, 17, _mxfp4),
)
# Of checkpoints quantised in groups: a scale and the codes of 32, 64 or 128 inputs; with a zero of its own, or 8.
GROUPED = {
    (values, zeros): BlockType(
        f"int4_g{values}{'_zeros' * zeros}",
        128 + values // 16 + zeros,
        values,
        2 + zeros + values // 2,
        _grouped(zeros),
    )
    for values, zeros in ((64, False), (128, False), (32, True), (64, True), (128, True))
}
BY_NAME = {kind.name: kind for kind in TYPES}
BY_NUMBER = {kind.number: kind for kind in TYPES}
