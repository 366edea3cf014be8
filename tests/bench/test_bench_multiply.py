"""What passes over weights in blocks multiply, and what a processor can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits import gguf_files
from typer.testing import CliRunner

from paceline import native
from paceline.attention import make_backend
from paceline.bench.multiply import BESIDE, multiplications, of_product, peak, width
from paceline.cli import app
from paceline.network.blocks import BY_NUMBER, GROUPED
from paceline.network.decoder import Decoder
from paceline.network.loader import load_model
from paceline.network.native_linear import NativeLinear

VECTORS = native.library() is not None and native.library().pl_dots(1, 1) > 0


def _loaded(file: Path, dtype: str = "auto") -> Decoder:
    return load_model(file, attention=make_backend("sdpa", torch.bfloat16), dtype=dtype, native=True)


def test_every_type_is_counted() -> None:
    assert {*BESIDE} == {kind.number for kind in (*BY_NUMBER.values(), *GROUPED.values())}


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
@pytest.mark.parametrize(("name", "one", "eight"), [("q4_0", 10, 80), ("q4_1", 11, 88), ("q4_k", 13, 90)])
def test_multiplications_are_those_of_the_inner_loop(name: str, one: int, eight: int, tmp_path: Path) -> None:
    """For 32 inputs of 16 outputs."""
    decoder = _loaded(gguf_files.write(tmp_path / "m.gguf", name))
    assert decoder.stack is not None
    places = sum(-(-p.struct.n // 16) * p.struct.k // 32 for p in decoder.stack.weights.products)
    for rows, count in ((1, one), (8, eight), (9, eight + one), (16, 2 * eight)):
        assert multiplications(decoder, rows) == places * count
    assert multiplications(decoder, 3) == multiplications(decoder, 4)  # one is zeros
    assert multiplications(_loaded(tmp_path / "m.gguf", "bfloat16"), 1) is None


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_outputs_that_fill_no_line_take_a_whole_one() -> None:
    few, more = (NativeLinear(torch.randn(outputs, 64).bfloat16(), None, "q4_0") for outputs in (17, 32))
    assert of_product(few, 1) == of_product(more, 1) == 2 * 2 * 10


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_lines_of_a_mixture_count_by_their_types(tmp_path: Path) -> None:
    plain, mixed = (
        gguf_files.write(tmp_path / f"{i}.gguf", types) for i, types in enumerate(("q4_0", {"attn_v": "q6_k"}))
    )
    rows, width = gguf_files.SHAPES["attn_v"]
    more = [multiplications(_loaded(file), 1) for file in (plain, mixed)]
    assert None not in more and more[1] - more[0] == gguf_files.LAYERS * rows // 16 * width // 32 * (14 - 10)


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_the_peak_is_that_of_the_instructions_in_use() -> None:
    assert native.library().pl_dots(7, 1) == (84 if VECTORS else 0)
    assert [width(rows) for rows in range(1, 9)] == [1, 2, 4, 4, 6, 6, 8, 8]
    found = peak(1, 1)
    assert (found is not None) == VECTORS and (found is None or 1e7 < found < 1e11)
    assert native.library().isa != native.AMX or peak(8, 1) is None  # tiles do it there


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_bench_step_shows_the_share_where_it_is_known(tmp_path: Path) -> None:
    file, out = gguf_files.write(tmp_path / "m.gguf", "q4_0"), tmp_path / "step.json"
    for model, known in ((str(file), VECTORS), ("random:2x64x64x64", False)):
        sizes = ("--rows", "1", "--context", "8", "--repeats", "2", "--threads", "1", "--out", str(out))
        run: Any = CliRunner().invoke(app, ["bench", "step", "--model", model, *sizes], catch_exceptions=False)
        assert run.exit_code == 0 and ("multiplied:" in run.stdout) == known
        [row] = json.loads(out.read_text())["rows"]
        share = row["share_of_multiplications"]
        assert 0 < share < 1 if known else share is None
