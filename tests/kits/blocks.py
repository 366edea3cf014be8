"""Numbers from weights in blocks, those of checkpoints quantised in groups included, of which GGUF knows nothing."""

from __future__ import annotations

import numpy as np

from paceline.weights import blocks
from paceline.weights.blocks import GROUPED, BlockType


def dequantise(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    """Return [n, k] float32 of rows of blocks [n, bytes]."""
    if kind not in GROUPED.values():
        return blocks.dequantise(kind, raw)
    zeros = kind.name.endswith("_zeros")
    rows = raw.reshape(-1, kind.bytes)
    scale = np.ascontiguousarray(rows[:, :2]).view("<f2").astype(np.float32)
    groups = rows[:, 2 + zeros :].reshape(len(rows), -1, 1, 16)
    codes = np.concatenate((groups & 15, groups >> 4), 2).reshape(len(rows), -1).view(np.int8)
    least = rows[:, 2:3].view(np.int8) if zeros else np.int8(8)
    values: np.ndarray = (scale * (codes - least)).reshape(len(raw), -1)
    return values
