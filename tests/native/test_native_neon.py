"""Kernels for aarch64, from Debian's cross compiler, run by qemu: right products, and the same bits at every level.

qemu says nothing of speed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.blocks import dequantise
from kits.native import needs_kernels
from test_native_blocks import ALL, INPUTS, OUTPUTS, ROWS, blocks_of, packed, product, rounded, rows
from torch import Tensor

from paceline import kernels

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
MISSING = [name for name in (COMPILER, EMULATOR[0]) if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed")
FLAGS = ("-Og", *kernels.FLAGS[1:])  # half the time of -O1
DRIVER = Path(__file__).parent / "drive_kernels.cpp"
NETWORKS = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.01, "q4_0": 0.01}  # by their weights: how far x86 may be
NETWORK = (40, 72)  # rows and width
LEVELS = [pytest.param(one, marks=[pytest.mark.full] * one.endswith(("dotprod", "i8mm"))) for one in kernels.ARM]


def weights() -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Each kind of weights: its number, as a file has them, x, and the same weights in float64."""
    generator = torch.Generator().manual_seed(4)
    plain = torch.randn(OUTPUTS, INPUTS, generator=generator)
    small = torch.randint(-127, 128, (OUTPUTS, INPUTS), generator=generator, dtype=torch.int8)
    x = rows()
    x[5, 700] = torch.nan
    found = [
        (kernels.FLOAT32, plain, x.float(), plain.double()),
        (kernels.BF16, plain.bfloat16(), x, plain.bfloat16().double()),
        (kernels.INT8, small, x, small.double()),
    ]
    for kind in ALL:
        raw = blocks_of(kind)
        found.append(
            (kernels.GGML + kind.number, torch.from_numpy(raw), x, torch.from_numpy(dequantise(kind, raw)).double())
        )
    return found


def run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver for both processors, and what it reads."""
    folder = tmp_path_factory.mktemp("driver")
    for compiler in ("c++", COMPILER):
        run(compiler, *FLAGS, DRIVER, "-o", folder / compiler, "-ldl")
    with open(folder / "in", "wb") as file:
        for number, weight, x, _ in weights():
            raw = weight.view(torch.uint8).numpy()
            file.write(np.array([number, OUTPUTS, INPUTS, ROWS, raw.shape[1]], np.int64).tobytes())
            file.write(raw.tobytes() + x.contiguous().view(torch.uint8).numpy().tobytes())
    return folder


def driven(folder: Path, compiler: str, library: Path, emulator: Sequence[str] = ()) -> tuple[int, Tensor, Tensor]:
    """The level, [kinds, rows, outputs] products, and [networks, rows, width] what networks make of their rows."""
    run(*emulator, folder / compiler, library, folder / "in", folder / "out")
    out = (folder / "out").read_bytes()
    numbers = torch.frombuffer(bytearray(out[8:]), dtype=torch.float32)
    of_networks = len(NETWORKS) * NETWORK[0] * NETWORK[1]
    products, networks = numbers[:-of_networks], numbers[-of_networks:]
    return int.from_bytes(out[:8], "little"), products.view(-1, ROWS, OUTPUTS), networks.view(-1, *NETWORK)


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_for_aarch64(level: str, folder: Path) -> None:
    library, flags = folder / f"{level}.so", kernels.ARM[level][0].split()
    run(COMPILER, *FLAGS, *flags, "-shared", kernels.SOURCE, "-o", library)
    number, products, networks = driven(folder, COMPILER, library, EMULATOR)
    assert list(kernels.ARM)[number] == level
    for (kind, _, x, weight), found in zip(weights(), products, strict=True):
        in_bytes = kind >= kernels.GGML or (kind == kernels.INT8 and level != "baseline")
        exact = rounded(x) if in_bytes else x.double()
        size = (exact.abs() @ weight.abs().T).clamp(min=1e-30)
        far = (found.double() - exact @ weight.T).abs() / size
        assert far[5].isnan().all() and far[[*range(5), *range(6, ROWS)]].max() < 1e-6, f"weights of kind {kind}"
    for kind, found in zip(ALL, products[-len(ALL) :], strict=True):
        room, linear = packed(kind, blocks_of(kind))
        same = found == product(linear, rows())
        assert same.all(-1).sum() == ROWS - 1 and room.numel(), f"{kind.name}: other bits than {kernels.describe()}"
    here = driven(folder, "c++", kernels.library().path)[2]
    for (name, far), found, other in zip(NETWORKS.items(), networks, here, strict=True):
        assert found[-1].isnan().all() and other[-1].isnan().all()
        assert (found - other)[:-1].pow(2).mean().sqrt() < far * other[:-1].std(), name
