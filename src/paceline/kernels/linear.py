"""Packed weights and their products, and what all calls of compiled code have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..core.errors import CapabilityError, ConfigError, RankLost
from ..model.adapters import LINEARS, LowRank, not_loaded
from ..model.linear import LinearOp, Quant, quantised
from ..model.padding import widened
from ..weights.blocks import BY_NAME, BY_NUMBER, StoredRows, quantise
from . import abi
from .memory import Arena

KINDS = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BF16, torch.int8: kernels.INT8}  # of weights
LANES = 16  # outputs that lie side by side in a packed weight
PACKED_BYTES = 32 << 20  # of weights in blocks that are packed before their file's memory is let go
# `Refusal` in the source. Compiled code has done nothing then.
BAD_POSITION, LOST = 1, 7
_REFUSALS = {
    BAD_POSITION: "a position that is negative or beyond the rotation table",
    2: "a token id without a row in the embedding",
    3: "a slot outside the cache",
    4: "segments that do not cover the rows in order, or have fewer keys than rows",
    5: "adapters for rows that are out of order or not there",
    6: "a count, limit or range of layers that cannot be, or a row that is not there",
}


class NativeLinear(LinearOp):
    """A packed weight and its product, on its own; in a pass the layers use the same weight directly.

    Args:
        weight, bias: [out, in] and [out].
        groups: inputs, and outputs, that are padded together; see `groups_of`.
        parts: the weight's rows as a file has them in blocks; ``weight`` then gives its shape and dtype alone.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quant: Quant | None = None,
        groups: tuple[int, int] = (0, 0),
        arena: Arena | None = None,
        parts: Sequence[StoredRows] | None = None,
    ) -> None:
        self.dtype, self.shape, self._groups = weight.dtype, weight.shape, groups
        self._arena, self._held = arena or Arena(), list[Tensor]()
        bias = None if bias is None else self.widened_outputs(bias)
        self.scale: Tensor | None = None
        self.order: Tensor | None = None  # of its inputs
        if parts is not None:
            n, k = len(self.widened_outputs(torch.cat([part.order for part in parts]))), weight.shape[1]
            kind, address = self._pack_parts(parts, k)
        else:
            weight = self.widened_inputs(self.widened_outputs(weight))
            n, k = weight.shape
            kind, weight = self._stored(weight, quant)
            address = self._pack(weight, n, k, kind)
        self.scale = None if self.scale is None else self.scale.float()
        self.bias = None if bias is None else bias.float()
        self.struct = abi.CLinear(
            weight=address,
            scale=_address(self.scale),
            bias=_address(self.bias),
            order=_address(self.order),
            n=n,
            k=k,
            kind=kind,
        )

    def _stored(self, weight: Tensor, quant: Quant | None) -> tuple[int, Tensor]:
        """Return the kind of a weight, and its values or blocks."""
        if quant is None or quant == "stored":  # a file's plain tensor among those in blocks
            short = weight.dtype == torch.bfloat16 and weight.shape[1] <= kernels.SHORT_INPUTS
            return kernels.BF16_SHORT if short else KINDS[weight.dtype], weight
        if quant == "int8":
            weight, self.scale = quantised(weight)
            return kernels.INT8, weight
        block = BY_NAME[quant]
        whole = F.pad(weight, (0, -weight.shape[1] % block.values))
        return kernels.GGML + block.number, torch.from_numpy(quantise(quant, whole))

    def _pack(self, weight: Tensor, n: int, k: int, kind: int) -> int:
        """Return where the packed weight lies; one in blocks is given as its bytes."""
        if kind >= kernels.GGML:
            whole = StoredRows(BY_NUMBER[kind - kernels.GGML], weight.numpy(), torch.arange(n))
            return self._pack_rows([whole], whole.addresses, k)
        weight, library = weight.contiguous(), _library()
        self.packed = self._arena.empty(library.pl_packed_size(n, k, kind), weight.dtype)
        library.pl_pack(weight.data_ptr(), n, k, kind, self.packed.data_ptr())
        self._held.append(self.packed)
        return self.packed.data_ptr()

    def _pack_rows(self, parts: Sequence[StoredRows], rows: Tensor, k: int) -> int:
        """Return where the packed rows of parts of one type lie; ``rows`` are their addresses."""
        library, kind = _library(), kernels.GGML + parts[0].type.number
        line = library.pl_packed_size(LANES, k, kind)
        self.packed = self._arena.empty(library.pl_packed_size(len(rows), k, kind), torch.uint8)
        step = max(PACKED_BYTES // line, 1) * LANES
        for first in range(0, len(rows), step):
            some, place = rows[first : first + step], self.packed.data_ptr() + first // LANES * line
            if not library.pl_pack_rows(some.data_ptr(), len(some), k, kind, place, torch.get_num_threads()):
                remedy = "download the file again, or convert the model again"
                raise ConfigError(_sources(parts), "a scale is not a finite number", remedy)
            for part in parts:
                part.release()
        self._held.append(self.packed)
        return self.packed.data_ptr()

    def _pack_parts(self, parts: Sequence[StoredRows], k: int) -> tuple[int, int]:
        """Return the kind, and where the weight lies: packed, or a table of the lines of its parts."""
        self.order = parts[0].inputs
        if len({None if part.inputs is None else part.inputs.numpy().tobytes() for part in parts}) > 1:
            wrong = "their inputs are in different orders (act order)"
            raise CapabilityError(_sources(parts), wrong, "load it with dtype='bfloat16' or 'int8'")
        places = [self.widened_outputs(part.addresses) for part in parts]  # 0, a row of zeros, between them
        if len({part.type.number for part in parts}) == 1:
            return kernels.GGML + parts[0].type.number, self._pack_rows(parts, torch.cat(places), k)
        lines = []
        for part, rows in zip(parts, places, strict=True):
            kind, start = kernels.GGML + part.type.number, self._pack_rows([part], rows, k)
            step = _library().pl_packed_size(LANES, k, kind)
            lines += [(start + i * step, kind) for i in range(len(rows) // LANES)]
        self.packed = torch.tensor(lines, dtype=torch.int64)
        return kernels.MIXED, self.packed.data_ptr()

    @property
    def nbytes(self) -> int:
        """Return bytes of the packed weight."""
        return sum(part.nbytes for part in self._held)

    def widened_inputs(self, weight: Tensor) -> Tensor:
        """Return [.., in] as the packed weight has them."""
        return widened(weight, -1, self._groups[0])

    def widened_outputs(self, weight: Tensor) -> Tensor:
        """Return [out, ..] as the packed weight has them."""
        return widened(weight, 0, self._groups[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, in] -> [rows, out], both padded."""
        return self.wide(x).to(self.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """Return [rows, in] -> [rows, out] float32, both padded."""
        library = _library()
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.struct.k:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} into a product of {self.struct.k} {self.dtype} inputs")
        rows = x.contiguous()
        y = torch.empty(rows.shape[0], self.struct.n)
        arguments = ctypes.byref(self.struct), rows.data_ptr(), len(rows), y.data_ptr(), torch.get_num_threads()
        require(library.pl_linear(*arguments))
        return y


class NativeAdapters:
    """The pairs of one `LowRank`, packed for a stack's products.

    Weights are of the model's dtype, bf16 next to int8. The factor alpha / rank is folded into ``up`` before it
    is rounded, and so is the inverse of an int8 output's scale: the delta then adds to the integer product.

    Args:
        adapter: what to pack; parameters that change later are not seen.
        bases: the base's products of all layers, in the order of `LINEARS`.

    Raises:
        ConfigError: a pair of another shape or layer than the base has, or one that holds NaN.
    """

    def __init__(self, adapter: LowRank, bases: Sequence[NativeLinear]) -> None:
        self.rank = adapter.config.rank
        layers = len(bases) // len(LINEARS)
        self.table = (abi.CLowRank * (layers * len(LINEARS)))()
        self._arena = Arena()
        self._held: list[NativeLinear] = []
        for layer, linear, down, up in adapter.pairs():
            what = f"the adapter of layer {layer}, {linear}"
            if layer >= layers:
                raise ConfigError(what, f"the model has {layers} layers", "use its own adapters")
            at = layer * len(LINEARS) + LINEARS.index(linear)
            base, entry = bases[at], self.table[at]
            n, k = base.shape
            if down.shape != (self.rank, k) or up.shape != (n, self.rank):
                shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
                expected = f"({self.rank}, {k}) and ({n}, {self.rank})"
                raise ConfigError(what, f"down and up are {shapes}, not {expected}", "use adapters made for this model")
            if down.isnan().any() or up.isnan().any():
                raise not_loaded(what)
            wide = base.widened_outputs(up.detach().float() * adapter.scale)  # [out, rank]
            if base.scale is not None:
                wide = wide / base.scale[:, None]
            for name, weight in (("down", base.widened_inputs(down.detach())), ("up", wide)):
                packed = NativeLinear(weight.to("cpu", base.dtype), None, arena=self._arena)
                self._held.append(packed)
                setattr(entry, name, packed.struct)


def top(logits: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the k likeliest tokens of each row of logits [rows, V], best first, and their log-probabilities.

    Raises:
        ValueError: k below 1.
    """
    rows, width = logits.shape
    k = min(k, width)
    library = kernels.library() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if library is None:
        best = logits.log_softmax(dim=1).topk(k, dim=1)
        return best.indices.tolist(), best.values.tolist()
    logits = logits.contiguous()
    tokens, log_q = (ctypes.c_int64 * (rows * k))(), (ctypes.c_float * (rows * k))()
    require(library.pl_top(logits.data_ptr(), rows, width, k, tokens, log_q))
    starts = range(0, rows * k, k)
    return [tokens[i : i + k] for i in starts], [log_q[i : i + k] for i in starts]


def require(refused: int) -> None:
    """Raise what compiled code refused.

    Raises:
        ValueError: the fault.
    """
    if refused == LOST:
        raise RankLost("another rank is gone")
    if refused:
        words = _REFUSALS.get(refused, f"what they refuse as number {refused}, for which _REFUSALS has no words")
        raise ValueError(f"the compiled layers were given {words}")


def _sources(parts: Sequence[StoredRows]) -> str:
    return " and ".join(part.source for part in parts)


def _library() -> Any:
    """Return the kernels, without which there are no packed weights."""
    library = kernels.library()
    assert library is not None
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
