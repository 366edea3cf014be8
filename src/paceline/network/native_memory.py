"""Drafts with feedback memory in compiled calls: K and V of states, and chains whose rows see them in rings.

Source: SPIRe, section 3.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..native import abi
from .native_calls import ChainRoom, hold, numbers, rules_at
from .native_linear import require

if TYPE_CHECKING:
    from ..kv.ring import RingCache
    from .native import Stack


class RingChain(NamedTuple):
    """Where one sequence's chain starts; see `recall`."""

    root: int
    position: int  # of the root
    steps: int  # tokens wanted, one or more
    ring: int
    start: int  # beside the sinks K and V are there from this position on
    rules: bytes | None  # as of a `ChainStart`


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
    held: list[Any] = []
    run, most = stack.reaching(ring, max(positions)), len(states[0])
    run.rows, run.positions, run.slots = len(rows), numbers(positions, held), numbers(slots, held)
    tables = numbers([hold(own, (most, width), held, stack.dtype) for own in states], held)
    library = native.library()
    assert library is not None, "the stack has it, too"
    require(library.pl_keys(stack.reference, ctypes.byref(run), tables, most, numbers(rows, held)))


def recall(
    stack: Stack, ring: RingCache, chains: Sequence[RingChain], mix: Tensor | None, floor: float, limit: int
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
    layers, held = len(ring.k), list[Any]()
    table = (abi.CRingChain * len(chains))()
    rooms = []
    for row, chain in zip(table, chains, strict=True):
        row.root, row.position, row.steps, row.ring, row.start = chain[:5]
        row.rules = rules_at(chain.rules, held)
        rooms.append(ChainRoom(row, chain.steps))
    shape = abi.CRingShape(sinks=ring.view.sinks, window=ring.view.window, span=ring.span)
    known = None if mix is None else hold(mix, (layers, layers + 1), held, torch.float32)
    run = stack.reaching(ring, max(chain.position + chain.steps for chain in chains))
    given = min(limit, vocab), ctypes.byref(shape), table, len(chains), known, floor
    library = native.library()
    assert library is not None, "the stack has it, too"
    require(library.pl_recall(stack.reference, ctypes.byref(run), stack.embedding_at, *given))
    return [room.read() for room in rooms]
