"""Drafts with feedback memory in compiled calls: K and V of states, and chains whose rows see them in rings.

Source: SPIRe, section 3.3.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import native
from .native_calls import hold
from .native_linear import require

if TYPE_CHECKING:
    from ..kv.ring import RingCache
    from .native import Stack


class Recall(NamedTuple):
    """Where one sequence's chain starts; see `recall`."""

    root: int
    position: int  # of the root
    steps: int  # tokens wanted, one or more
    ring: int
    start: int  # beside the sinks K and V are there from this position on
    rules: bytes | None  # as of a `Chain`


def write_keys(
    stack: Stack,
    ring: RingCache,
    states: Sequence[Tensor],
    rows: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
) -> None:
    """K and V of states as the layers would compute them of their rows, and nothing else of these layers.

    Args:
        stack: the layers.
        ring: where they go.
        states: of each layer its own, [n, d_model].
        rows: [rows] which of them.
        positions, slots: [rows].

    Raises:
        ValueError: a cache or states of another shape, rows or slots that are not there; nothing was computed.
    """
    _, width = stack.shape
    if len(states) != len(ring.k) or not len(rows) == len(positions) == len(slots):
        counts = f"{len(rows)} rows, {len(positions)} positions and {len(slots)} slots"
        raise ValueError(f"states of {len(states)} layers for {len(ring.k)}, {counts}")
    held: list[Tensor] = []
    run, most = stack.reaching(ring, max(positions)), len(states[0])
    places, where, which = (array("q", numbers) for numbers in (positions, slots, rows))
    tables = array("q", [hold(own, (most, width), held, stack.dtype) for own in states])
    run.rows, run.positions, run.slots = len(rows), places.buffer_info()[0], where.buffer_info()[0]
    library = native.library()
    assert library is not None, "the stack has it, too"
    require(library.pl_keys(stack.reference, run, tables.buffer_info()[0], most, which.buffer_info()[0]))


def recall(
    stack: Stack, ring: RingCache, chains: Sequence[Recall], mix: Tensor | None, floor: float, limit: int
) -> list[list[tuple[int, float]]]:
    """Draft chains, a token a pass, all in each pass.

    Args:
        stack: the draft's layers.
        ring: K and V of what each chain's rows see.
        chains: where each starts.
        mix: [layers, layers + 1] float32, what a row's memory is made of; None: rows see the layers' own K and V.
        floor: a chain ends once its cumulative log-probability is below this.
        limit: tokens at and above this are never chosen.

    Returns:
        For each chain its tokens and their log-probabilities, of drawn ones among the scores with their noise.

    Raises:
        ValueError: a root that the embedding lacks, a ring or positions that are not there, more steps than a ring has
            room for; nothing was computed.
    """
    vocab, _ = stack.shape
    layers, held = len(ring.k), list[Tensor]()
    rules = array("B", b"".join(chain.rules or b"" for chain in chains))
    numbers, at = [len(chains), ring.view.sinks, ring.view.window, ring.span], rules.buffer_info()[0]
    for chain in chains:
        numbers += (*chain[:5], at if chain.rules else 0)
        at += len(chain.rules or b"")
    table, steps = array("q", numbers), sum(chain.steps for chain in chains)
    out, log_q = array("q", bytes(8 * (len(chains) + steps))), array("f", bytes(4 * steps))
    known = None if mix is None else hold(mix, (layers, layers + 1), held, torch.float32)
    run = stack.reaching(ring, max(chain.position + chain.steps for chain in chains))
    given = min(limit, vocab), table.buffer_info()[0], known, floor, out.buffer_info()[0], log_q.buffer_info()[0]
    library = native.library()
    assert library is not None, "the stack has it, too"
    require(library.pl_recall(stack.reference, run, stack.embedding_at, *given))
    return _read(chains, out, log_q)


def _read(chains: Sequence[Recall], out: array[int], log_q: array[float]) -> list[list[tuple[int, float]]]:
    found, at, score = [], 0, 0
    for chain in chains:
        made = out[at]
        found.append([*zip(out[at + 1 : at + 1 + made], log_q[score : score + made], strict=True)])
        at, score = at + 1 + chain.steps, score + chain.steps
    return found
