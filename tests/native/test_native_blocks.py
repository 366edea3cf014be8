"""Products of weights in blocks: beside float64, and the same bits at every width, by any threads and instructions."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.blocks import dequantise
from kits.native import needs_kernels
from torch import Tensor

from paceline import kernels
from paceline.kernels import abi
from paceline.kernels.linear import NativeLinear
from paceline.weights.blocks import BY_NAME, GROUPED, TYPES, BlockType, quantise

ALL = (*TYPES, *GROUPED.values())
EACH = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
OUTPUTS, INPUTS, ROWS = 83, 768, 64


def blocks_of(kind: BlockType, outputs: int = OUTPUTS, inputs: int = INPUTS) -> np.ndarray:
    """[outputs, bytes] of random blocks with scales of sensible sizes; of three outputs all codes are extreme."""
    generator = np.random.default_rng(kind.number)
    raw = generator.integers(0, 256, (outputs, inputs // kind.values, kind.bytes), dtype=np.uint8)
    for output, byte in enumerate((0x7F, 0x80, 0xFF)):
        raw[output] = byte
    halves = generator.uniform(-0.02, 0.02, (*raw.shape[:2], 2)).astype("<f2").view(np.uint8)
    if kind.name == "mxfp4":
        raw[..., 0] = generator.integers(0, 130, raw.shape[:2])
    elif kind.name == "q6_k":
        raw[..., -2:] = halves[..., :2]
    else:
        leading = 4 if kind.name in ("q4_1", "q5_1", "q4_k", "q5_k") else 2
        raw[..., :leading] = halves[..., :leading]
        if kind.name.endswith("_zeros"):
            raw[..., 2] &= 15
    return raw.reshape(outputs, -1)


def packed(kind: BlockType, raw: np.ndarray, inputs: int = INPUTS) -> tuple[Tensor, abi.CLinear]:
    library, number = kernels.library(), kernels.GGML + kind.number
    room = torch.empty(library.pl_packed_size(len(raw), inputs, number), dtype=torch.uint8)
    rows = torch.arange(len(raw)) * raw.strides[0] + raw.ctypes.data
    assert library.pl_pack_rows(rows.data_ptr(), len(raw), inputs, number, room.data_ptr(), 1) == 1
    return room, abi.CLinear(weight=room.data_ptr(), n=len(raw), k=inputs, kind=number)


def product(linear: abi.CLinear, x: Tensor, threads: int = 1) -> Tensor:
    x, y = x.contiguous(), torch.empty(len(x), linear.n)
    assert kernels.library().pl_linear(ctypes.byref(linear), x.data_ptr(), len(x), y.data_ptr(), threads) == 0
    return y


def rounded(x: Tensor) -> Tensor:
    """Rows as the products see them: bytes with one scale for 32 of them, in float64."""
    blocks = x.float().view(len(x), -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    by = torch.full_like(most, 127.0) / most  # 127 / tensor would take the inverse first
    return ((blocks * by).round().double() * (most / 127).double()).view(len(x), -1)


def rows(seed: int = 3, count: int = ROWS) -> Tensor:
    """[count, inputs] at random, but two that are as large as can be everywhere."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[0], x[1] = 1, -1
    return x


@needs_kernels
@EACH
def test_products_are_those_of_the_numbers(kind: BlockType) -> None:
    raw, x = blocks_of(kind), rounded(rows())
    room, linear = packed(kind, raw)
    weight = torch.from_numpy(dequantise(kind, raw)).double()
    size = (x.abs() @ weight.abs().T).clamp(min=1e-30)
    found = product(linear, rows()).double()
    assert (found - x @ weight.T).abs().div(size).max() < 1e-6
    weight[5, 40] += weight[5].abs().max() / 50  # so small an error would show
    assert (found - x @ weight.T).abs().div(size).max() > 1e-6
    assert room.numel() < 1.1 * raw.size + 16 * kind.row_bytes(INPUTS)  # outputs are padded to 16


@needs_kernels
@EACH
def test_the_same_bits_at_every_width(kind: BlockType) -> None:
    room, linear = packed(kind, blocks_of(kind))
    x = rows()
    alone = torch.cat([product(linear, x[i : i + 1]) for i in range(ROWS)])
    for width in (*range(2, 18), 23, 31, 32, 33, 47, 48, 49, 63, 64):
        for first in {0, ROWS - width}:
            for threads in (1, 2):
                assert torch.equal(product(linear, x[first : first + width], threads), alone[first : first + width])
    assert room.numel()


@needs_kernels
@EACH
def test_what_is_no_number_stays_in_its_row(kind: BlockType) -> None:
    room, linear = packed(kind, blocks_of(kind))
    x = rows(count=12)
    clean = product(linear, x)
    for odd in (float("nan"), float("inf"), float("-inf")):
        x[4, 700] = odd
        found = product(linear, x)
        assert found[4].isnan().all() and torch.equal(found[:4], clean[:4]) and torch.equal(found[5:], clean[5:])
    x[4] = 0
    assert (product(linear, x)[4] == 0).all() and room.numel()


def digest() -> str:
    """Of the products of every type."""
    found = hashlib.sha256()
    for kind in ALL:
        room, linear = packed(kind, blocks_of(kind))
        found.update(product(linear, rows()).numpy().tobytes())
        assert room.numel()
    return found.hexdigest()


@needs_kernels
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=[pytest.mark.full] * (level in ("avx512", "avx512-vnni"))) for level in kernels.LEVELS],
)
def test_fewer_instructions_give_the_same_bits(level: str) -> None:
    """In a process of its own, whose kernels are built for a lower level of instructions; but the lowest without
    optimisations, of which none changes a bit, in a third of the time."""
    levels = list(kernels.LEVELS)
    if level not in levels[: kernels.library().isa]:
        pytest.skip(f"{level} is not below {kernels.describe()}, which runs here")
    try:
        kernels._flags_of(level)
    except RuntimeError as error:
        pytest.skip(str(error))
    environment = {**os.environ, kernels.SWITCH: level, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    quickly = (
        'from paceline import kernels as native; native.FLAGS = ("-O0", *native.FLAGS[1:]); '
        if level != levels[0]
        else ""
    )
    command = [sys.executable, "-c", f"{quickly}import {Path(__file__).stem} as test; print(test.digest())"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == digest()


@needs_kernels
@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
@pytest.mark.parametrize("inputs", [32, 50, 688])
def test_a_plain_weight_is_stored_in_blocks(name: str, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(37, inputs, generator=generator), torch.randn(37, generator=generator)
    x = torch.randn(5, inputs, generator=generator).bfloat16()
    linear = NativeLinear(weight.bfloat16(), bias.bfloat16(), name)  # type: ignore[arg-type]
    wide = torch.nn.functional.pad(weight.bfloat16().float(), (0, -inputs % 32))
    stored = torch.from_numpy(dequantise(BY_NAME[name], quantise(name, wide))).double()[:, :inputs]
    exact = x.double() @ stored.T + bias.bfloat16().double()
    torch.testing.assert_close(linear.wide(x).double(), exact, atol=0.03 * inputs**0.5, rtol=0)
    assert (linear.wide(x).double() - exact).abs().max() > 0  # rows are rounded
    far = {"q4_0": 0.25, "q8_0": 0.02}[name]
    assert (exact - x.double() @ weight.double().T - bias.double()).abs().max() < far * inputs**0.5


@needs_kernels
def test_zeros_lie_behind_a_padded_group_of_outputs() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(40, 64, generator=generator).bfloat16(), torch.randn(5, 64, generator=generator).bfloat16()
    alone, padded = (NativeLinear(weight, None, "q4_0", groups=groups).wide(x) for groups in ((0, 0), (0, 20)))
    groups = padded.view(5, 2, 32)
    assert torch.equal(groups[..., :20].reshape(5, 40), alone) and not groups[..., 20:].any()
