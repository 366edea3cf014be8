"""Blocks with scales of their own: their sizes, and how far rounded numbers are from a weight."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.weights.blocks import BY_NAME, TYPES, BlockType, dequantise, quantise


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_sizes_are_those_of_the_gguf_package(kind: BlockType) -> None:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name.upper()]]
    assert (kind.values, kind.bytes) == (values, size)
    assert kind.row_bytes(3 * values) == 3 * size


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 300.0])
def test_rounding_is_near(name: str, scale: float) -> None:
    weight = torch.randn(9, 160, generator=torch.Generator().manual_seed(1)) * scale
    weight[2, :64] = 0
    raw = quantise(name, weight)
    far = {"q4_0": 0.1, "q8_0": 0.005}[name] * float(weight.abs().max())
    assert np.abs(dequantise(BY_NAME[name], raw) - weight.numpy()).max() < far


def test_a_width_that_is_no_whole_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="33 inputs, and a block 32"):
        quantise("q4_0", torch.zeros(2, 33))
