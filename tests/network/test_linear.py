"""Linear kinds: each computes x W^T + b, and the exact ones give a row the same bits at every width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.linear import Int8Linear, LinearOp, cancelling_rows, make_linear

WIDTHS = range(1, 65)
SHAPES = [(64, 64), (200, 48), (768, 256), (256, 768)]  # out, in


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def rows_of(inputs: int, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(7)).to(dtype)


def sensitive_rows(weight: Tensor, rows: int) -> Tensor:
    """Half of them random, half of them with terms that cancel, where any other order of summation shows."""
    random = rows_of(weight.shape[1], rows, weight.dtype)
    return torch.where(torch.arange(rows)[:, None] % 2 == 0, random, cancelling_rows(weight, rows, seed=9))


def assert_width_invariant(linear: LinearOp, x: Tensor, residual: Tensor) -> None:
    alone = torch.cat([linear(row) for row in x.split(1)])
    added = torch.cat([linear.add(a, b) for a, b in zip(x.split(1), residual.split(1), strict=True)])
    for width in WIDTHS:
        for first in {0, (len(x) - width) // 2, len(x) - width}:
            part = slice(first, first + width)
            assert torch.equal(linear(x[part]), alone[part]), f"{width} rows from {first}"
            assert torch.equal(linear.add(x[part], residual[part]), added[part]), f"add, {width} rows from {first}"


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        *((dtype, None) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        (torch.bfloat16, "int8"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_bits_are_the_same_at_every_width(shape: tuple[int, int], dtype: torch.dtype, quant):
    weight, bias = weights(*shape, dtype)
    linear = make_linear(weight, bias, exact=True, quant=quant)
    assert_width_invariant(linear, sensitive_rows(weight, 64), rows_of(shape[0], 64, dtype))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 8, 11])
def test_computes_the_product(rows: int, dtype: torch.dtype, bias: bool, exact: bool):
    weight, offset = weights(40, 48, dtype)
    x, residual = rows_of(48, rows, dtype), rows_of(40, rows, dtype)
    kept = residual.clone()
    linear = make_linear(weight, offset if bias else None, exact=exact)
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0)
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(linear(x).double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        linear.add(x, residual).double(), expected + residual.double(), atol=2 * tolerance, rtol=tolerance
    )
    assert linear(x).dtype == dtype
    assert torch.equal(residual, kept)  # the residual stream is tapped: it must not be written to


def test_int8_is_what_its_integers_say():
    weight, bias = weights(96, 64, torch.bfloat16)
    weight[3] = 0  # a row without a scale of its own
    linear = Int8Linear(weight, bias)
    assert linear.weight.dtype == torch.int8
    stored = linear.weight.double() * linear.scale.double()[:, None]
    # Half a step of the integer grid, and half a unit in the last place of a scale that was rounded to bf16.
    step = linear.scale.double()[:, None]
    assert ((stored - weight.double()).abs() <= 0.51 * step).all()
    x = rows_of(64, 5, torch.bfloat16)
    torch.testing.assert_close(linear(x).double(), x.double() @ stored.T + bias.double(), atol=3e-2, rtol=2e-2)


def test_cancelling_rows_show_what_random_rows_hide():
    """The inputs of the probe can fail: the same product summed from both ends differs in most of them."""
    weight, _ = weights(64, 768, torch.bfloat16)

    def shares(x: Tensor) -> float:
        forward = (x.float() @ weight.float().T).bfloat16()
        backward = (x.float().flip(1) @ weight.float().flip(1).T).bfloat16()
        return float((forward != backward).float().mean())

    hidden, shown = shares(rows_of(768, 64, torch.bfloat16)), shares(cancelling_rows(weight, 64))
    assert shown > 0.005
    assert shown > 10 * hidden
