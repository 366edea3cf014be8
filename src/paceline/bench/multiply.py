"""How much of what a processor can multiply a pass over weights in blocks takes, where vectors of 512 bits do it.

Dot products of bytes, fused and plain multiplications share the same ports there: one of each counts as one, and what
the ports can do is measured with dot products that wait for nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from .. import native
from ..network.blocks import BY_NUMBER, GROUPED
from ..network.decoder import Decoder
from ..network.native_linear import LANES, NativeLinear

INPUTS, DOTS = 32, 8  # inputs whose products of a row and 16 outputs are so many dot products of bytes
# What these take beside them (`block_products.h`): for each row (sum and scale, least value, zero), and once.
_BESIDE = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4"), (2, 0)),
    **dict.fromkeys(("q4_1", "q5_1"), (3, 0)),
    **dict.fromkeys(("q4_k", "q5_k"), (3, 2)),
    "q6_k": (4, 2),
    "iq4_xs": (2, 1),
}
BESIDE = {kind.number: _BESIDE[kind.name] for kind in BY_NUMBER.values()}
BESIDE |= {kind.number: (3, 0) if zeros else (2, 0) for (_, zeros), kind in GROUPED.items()}
ROUNDS, REPEATS = 400_000, 7


def multiplications(decoder: Decoder, rows: int) -> int | None:
    """Vectors of 512 bits that a pass of so many rows multiplies; None: its weights are not all in blocks."""
    if decoder.stack is None:
        return None
    counted = [of_product(linear, rows) for linear in decoder.stack.weights.products]
    return sum(count for count in counted if count is not None) if None not in counted else None


def of_product(linear: NativeLinear, rows: int) -> int | None:
    """Likewise of one product; None: its weight is in no blocks."""
    kind, lines = linear.struct.kind, -(-linear.struct.n // LANES)
    if kind < native.MIXED:
        return None
    kinds = linear.packed[:, 1].tolist() if kind == native.MIXED else [kind] * lines
    panels = [8] * (rows // 8) + [width(rows % 8)] * (rows % 8 > 0)
    beside = (BESIDE[one - native.GGML] for one in kinds)
    return sum(sum(panels) * (DOTS + row) + len(panels) * once for row, once in beside) * linear.struct.k // INPUTS


def width(rows: int) -> int:
    """Rows that a product of so many, at most eight, computes (`panel_width` in `rows.h`)."""
    return rows if rows < 3 else rows + rows % 2


def peak(rows: int, threads: int) -> float | None:
    """Vectors of 512 bits that so many threads can multiply in a second; None: products of so many rows take other
    instructions here."""
    library = native.library()
    if library is None or not library.pl_dots(1, rows):
        return None
    with ThreadPoolExecutor(threads) as pool:
        found = []
        for _ in range(REPEATS):
            began = perf_counter()
            done = sum(pool.map(library.pl_dots, [ROUNDS] * threads, [rows] * threads))
            found.append(done / (perf_counter() - began))
    return max(found)  # what else ran meanwhile does not lower it
