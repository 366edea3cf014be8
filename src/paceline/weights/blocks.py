"""Weights in blocks that have scales of their own: the types of GGUF files, numbers from them, and numbers to them.

Every type here is ``scale * code + least``: whole-number codes, a scale for 16 or 32 of them, and for some types a
least value. Several scales of 6 or 8 bits may share a factor for 256 codes. The ``gguf`` package has the numbers.

Source: ggml's ``ggml-common.h`` and ``ggml-quants.c`` (layouts); the OCP Microscaling specification (MXFP4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..core.errors import ConfigError


@dataclass(frozen=True)
class BlockType:
    """One type of block."""

    name: str
    number: int  # its type in a GGUF file; those of `GROUPED` are in none
    values: int  # of a block
    bytes: int  # of a block

    @property
    def compiled(self) -> bool:
        """Return whether there are products with it."""
        return self.number in BY_NUMBER or self.number > GROUPED_FROM

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
    """Return [n, k] float32 of rows of blocks [n, bytes] uint8, of a type of GGUF files.

    Raises:
        NotImplementedError: the ``gguf`` package does not unpack it.
    """
    import gguf  # here: it takes a third of a second

    values: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.number))
    return values


def quantise(name: str, weight: Tensor) -> np.ndarray:
    """Return rows of blocks [n, bytes] uint8 of a weight [n, k], as ggml rounds them; "q4_0" or "q8_0".

    Raises:
        ConfigError: k is not a multiple of a block.
    """
    import gguf

    kind, wide = BY_NAME[name], weight.detach().float().numpy()
    if wide.shape[1] % kind.values:
        wrong = f"a weight has {wide.shape[1]} inputs, and a block {kind.values}"
        raise ConfigError(f"dtype={name!r}", wrong, "use dtype='int8'")
    rows: np.ndarray = gguf.quants.quantize(wide, gguf.GGMLQuantizationType(kind.number))
    return rows


# Types of GGUF files that products are compiled with: name, number, values and bytes of a block.
TYPES = (
    BlockType("q4_0", 2, 32, 18),
    BlockType("q4_1", 3, 32, 20),
    BlockType("q5_0", 6, 32, 22),
    BlockType("q5_1", 7, 32, 24),
    BlockType("q8_0", 8, 32, 34),
    BlockType("q4_k", 12, 256, 144),
    BlockType("q5_k", 13, 256, 176),
    BlockType("q6_k", 14, 256, 210),
    BlockType("iq4_nl", 20, 32, 18),
    BlockType("iq4_xs", 23, 256, 136),
    BlockType("mxfp4", 39, 32, 17),
)
# Of checkpoints quantised in groups: a scale and the codes of 32, 64 or 128 inputs; with a zero of its own, or 8.
GROUPED_FROM = 128
GROUPED = {
    (values, zeros): BlockType(
        f"int4_g{values}{'_zeros' * zeros}", GROUPED_FROM + values // 16 + zeros, values, 2 + zeros + values // 2
    )
    for values, zeros in ((64, False), (128, False), (32, True), (64, True), (128, True))
}
BY_NAME = {kind.name: kind for kind in TYPES}
BY_NUMBER = {kind.number: kind for kind in TYPES}
