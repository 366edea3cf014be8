"""Linear layers of a loaded model: plain, packed (CPU), int8, and the row blocks that make them exact.

Every kind is a callable ``x [rows, in] -> [rows, out]`` with ``add`` for the residual stream. They are
plain objects, not modules: a decode step makes a handful of calls a layer, a microsecond each counts.

The fused post-operations of the packed kernel (add, swish, mul) are left out on purpose. Measured, they
cost more than the separate in-place operations (11.8 against 11.6 ms a pass, 12 layers, d=768), and
they change bits with the number of rows where the plain product does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import CapabilityError

Quant = Literal["int8", "q4_0", "q8_0", "stored"]  # how weights are stored next to bf16 activations; see `loader`
QUANTS = get_args(Quant)

PAD_ROWS = 8
WIDE_ROWS = 8192  # outputs whose weights are widened at a time
WIDTHS = (1, 2, 3, 4, 5, 8, 12, 17, 32)  # of passes that are compared; beyond the last they are split


class LinearOp(Protocol):
    """y = x W^T + b, by whatever kernel."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, in] -> [rows, out], freshly allocated."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [rows, out] residual + x W^T + b; ``residual`` itself is left as it is."""
        return self(x).add_(residual)

    def wide(self, x: Tensor) -> Tensor:
        """Return [rows, out] float32 or wider, not rounded to the weights' dtype in between."""
        ...


class Dense(nn.Module):
    """Weight and bias of a linear layer, NaN until loaded: a forgotten load cannot pass."""

    weight: nn.Parameter  # [out, in]
    bias: nn.Parameter | None  # [out]

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.weight = nan_parameter((outputs, inputs), dtype, weight_device or device)
        self.bias = nan_parameter((outputs,), dtype, device) if bias else None


def nan_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, trainable: bool = False
) -> nn.Parameter:
    """Return a parameter full of NaN."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype, device=device), requires_grad=trainable)


class PlainLinear(LinearOp):
    """`F.linear`; any dtype and device."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        return wide_product(x, self.weight, self.bias)


class PackedLinear(LinearOp):
    """bf16 on the CPU with the weight in oneDNN's blocked layout: half the time of `F.linear` on few rows."""

    __slots__ = ("bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return y

    def wide(self, x: Tensor) -> Tensor:
        return wide_product(x, self.packed.to_dense(), self.bias)  # the kernel has no wide output


class Int8Linear(LinearOp):
    """int8 weights, one scale an output row (absmax, symmetric); activations stay in bf16.

    The weight is ``q * scale`` with ``scale = max|row| / 127`` and ``q = round(weight / scale)``. The
    product is rounded to bf16 once, after the scale.
    """

    __slots__ = ("bias", "scale", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scale = quantised(weight)  # [out, in], [out]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.scale)
        return y if self.bias is None else y.add_(self.bias)

    def wide(self, x: Tensor) -> Tensor:
        y = wide_product(x, self.weight, None).mul_(self.scale.float())
        return y if self.bias is None else y.add_(self.bias.float())


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [rows, out] x W^T + b in float32 or wider; of narrower weights a part is widened at a time."""
    if weight.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight, bias)
    rows = x.float()
    y = torch.cat([F.linear(rows, part.float()) for part in weight.split(WIDE_ROWS)], dim=1)
    return y if bias is None else y.add_(bias.float())


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [out, in] and its scale [out] bf16, as `Int8Linear` defines them."""
    wide = weight.float()
    # Where a row is all zero any scale will do. Rounded first: q must match the scale that is used.
    scale = (wide.abs().amax(dim=1) / 127).to(torch.bfloat16)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks(LinearOp):
    """Runs ``inner`` on blocks of ``limit`` rows or fewer, each padded with zeros to a multiple of ``step`` rows.

    There its bits do not depend on the number of rows. By default every product has one shape.
    """

    inner: LinearOp
    step: int = PAD_ROWS
    limit: int = PAD_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > self.limit:
            return torch.cat([self(part) for part in x.split(self.limit)])
        missing = -rows % self.step
        return self.inner(F.pad(x, (0, 0, 0, missing)))[:rows] if missing else self.inner(x)

    def wide(self, x: Tensor) -> Tensor:
        return self.inner.wide(x)


def make_linear(weight: Tensor, bias: Tensor | None, *, exact: bool = False, quant: Quant | None = None) -> LinearOp:
    """Return the fastest kind for a weight [out, in], stored by ``quant``.

    Args:
        exact: a row's output bits must not depend on the number of rows nor on its place among them.

    Raises:
        CapabilityError: a stored form for which the device or dtype has no kernel here.
    """
    if quant is not None and quant != "int8":
        raise CapabilityError(
            f"dtype={quant!r}", "weights in blocks run in compiled layers alone", "use dtype='int8' or 'bfloat16'"
        )
    if quant == "int8":
        _check_int8(weight)
        linear: LinearOp = Int8Linear(weight, bias)
    elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_pack():
        linear = PackedLinear(weight, bias)
    else:
        linear = PlainLinear(weight, bias)
    if not exact:
        return linear
    # The cheapest wrap that is enough, which is probed once for a shape and a number of threads.
    key = type(linear).__name__, tuple(weight.shape), weight.dtype, weight.device.type, torch.get_num_threads()
    if key not in _BLOCKS:
        _BLOCKS[key] = _probe(linear, weight)
    return RowBlocks(linear, *_BLOCKS[key])


_BLOCKS: dict[tuple[str, tuple[int, ...], torch.dtype, str, int], tuple[int, int]] = {}


def _probe(linear: LinearOp, weight: Tensor) -> tuple[int, int]:
    """Return ``step`` and ``limit`` of `RowBlocks`, by products of one row in every place of passes of `WIDTHS`."""
    # A GPU computes some rows in the time of one, and is slow where many rows are split.
    widths, most = (WIDTHS, PAD_ROWS) if weight.device.type == "cpu" else ((*WIDTHS, 64, 512), 64)
    x = cancelling_rows(weight, 1).expand(widths[-1], -1).contiguous()
    products = [linear(x[:width]) for width in widths]
    unlike = [len(y) for y in products if not torch.equal(y, products[-1][:1].expand_as(y))]
    steps = (step for step in (1, 2, 4, 8, 16, 32, 64) if step <= most and all(width % step for width in unlike))
    return next(((step, widths[-1]) for step in steps), (most, most))


def cancelling_rows(weight: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Return [rows, in] inputs whose product with many rows of ``weight`` nearly vanishes.

    Rounding to bf16 hides most differences in the order of summation: a few in ten thousand elements show
    them. Where the terms cancel, the rest is small next to them, and differences show in bulk.
    """
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    picked = torch.linspace(0, outputs - 1, max(1, min(64, outputs, inputs // 4))).long()
    basis, _ = torch.linalg.qr(weight[picked.to(weight.device)].T.float().cpu())  # [in, picked]
    return (x - (x @ basis) @ basis.T).to(weight.device, weight.dtype)


@cache
def can_pack() -> bool:
    """Return whether this build and this processor have the packed bf16 product."""
    ops = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(ops, n) for n in names)
        and bool(ops._is_mkldnn_bf16_supported())
    )


def _check_int8(weight: Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise CapabilityError("dtype='int8'", f"the weights are {weight.dtype}", "load them as bfloat16")
    if not _has_int8(weight.device.type):
        raise CapabilityError(
            "dtype='int8'",
            f"torch {torch.__version__} has no int8 weight product on {weight.device.type}",
            "use dtype='bfloat16', or device='cpu'",
        )


@cache
def _has_int8(device: str) -> bool:
    try:
        x = torch.ones(1, 32, dtype=torch.bfloat16, device=device)
        w = torch.ones(32, 32, dtype=torch.int8, device=device)
        return bool((torch._weight_int8pack_mm(x, w, x[0]) == 32).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
