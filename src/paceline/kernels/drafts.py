"""Drafts in compiled calls: of networks, drafters of states, Medusa's heads, and with feedback memory.

Sources: Lyanna, algorithms 1 and 2 (`sample`); SPIRe, section 3.3 (`write_keys`, `recall`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..core.tree import TokenTree
from . import abi
from .calls import Room, keys_of, numbers, pointer_to, rules_at
from .linear import NativeLinear, require

if TYPE_CHECKING:
    from ..kv.ring import RingCache
    from ..model.base import KVCache
    from ..model.rope import Rotation
    from .layers import Stack


# -- chains and trees


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Describe where a continuation starts and when it ends; see `roll`."""

    pending: Sequence[int]  # tokens whose K and V are still to be computed, one or more
    position: int  # of the first of them
    steps: int  # tokens wanted after them, one or more
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + steps - 2
    floor: float  # it ends once its cumulative log-probability is below this
    rules: bytes | None = None  # `SequenceSampler.rules`: draw with the sequence's noise; None: the likeliest tokens
    view: abi.CSparseView | None = None  # what each row sees of the text; None: all. With one pending token
    scratch: int = 0  # first of the slots for the view's sinks


def sparse_view(sinks: int, window: int, rotation: Rotation) -> abi.CSparseView:
    """Return a view of texts as of `SinkWindow`, with the rotation by every gap that may come."""
    cos, sin = rotation.halves
    if cos.dtype != torch.float32:
        raise ValueError(f"angles in {cos.dtype}, where float32 is read")
    view = abi.CSparseView(sinks=sinks, window=window, cos=cos.data_ptr(), sin=sin.data_ptr(), num_gaps=len(cos))
    view.held = cos, sin
    return view


class TreeStart(NamedTuple):
    """Describe where a draft tree starts and how far it may grow; see `grow`."""

    pending: Sequence[int]  # tokens whose K and V are still to be computed, one or more; the last one is the root
    position: int  # of the first of them
    room: int  # nodes that may be expanded
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + room - 1
    budget: int  # drafted nodes of a static tree
    max_depth: int  # levels
    most: int  # nodes that the tree may have before the best ones are taken
    rules: bytes | None  # as of a `ChainStart`
    shift: int = 0  # what a token's position in its text is beyond that of its row
    states: Tensor | None = None  # [pending, d_model] in front of the pending tokens, as the target leaves them


_TREE = {"tokens": "q", "parents": "q", "scores": "d"}  # a `Room` for one


def roll(stack: Stack, chains: Sequence[ChainStart], cache: KVCache, limit: int) -> list[list[tuple[int, float]]]:
    """Catch up with every chain's pending tokens and continue it, a token a pass, all in each pass.

    Args:
        cache: K and V; every position of a chain but that of its last token gets its own.
        limit: tokens at and above this are never chosen.

    Returns:
        For each chain its tokens and their log-probabilities, of drawn ones among the scores with their noise.

    Raises:
        ValueError: pending tokens that the embedding lacks, keys that are too few or outside the cache, or a limit
            below 1; nothing was computed.
    """
    held, table, rooms, last = list[Any](), (abi.CChain * len(chains))(), [], 0
    for row, c in zip(table, chains, strict=True):
        last = max(last, _begin(row, c, c.steps - 1, held) + 1)
        row.steps, row.floor, row.rules, row.scratch = c.steps, c.floor, rules_at(c.rules, held), c.scratch
        row.view = None if c.view is None else ctypes.addressof(c.view)
        rooms.append(Room(row, c.steps, tokens="q", log_q="f"))
    run, limit = stack.reaching(cache, last), min(limit, stack.shape[0])
    require(stack.library.pl_roll(stack.reference, ctypes.byref(run), stack.embedding_at, limit, table, len(chains)))
    return _chains(table, rooms)


def _chains(table: Any, rooms: Sequence[Room]) -> list[list[tuple[int, float]]]:
    """Return the tokens that were made and their log-probabilities."""
    return [[*zip(*room.read(row.made), strict=True)] for row, room in zip(table, rooms, strict=True)]


def grow(
    stack: Stack,
    starts: Sequence[TreeStart],
    factors: Sequence[int],
    topk: int,
    floor: float,
    cache: KVCache,
    limit: int,
    fused: NativeFuse | None = None,
) -> list[tuple[TokenTree, int, int]]:
    """Catch up with every start's pending tokens and grow its draft tree, a level a pass, all in each pass.

    Args:
        factors: children a level of static trees, and how many levels there may be.
        topk: of dynamic trees the children of a node, and the nodes that are expanded a level; 1: static ones.
        floor: nodes with a score below it are not expanded.
        cache: K and V; every expanded node gets its own.
        limit: tokens at and above this are never chosen.
        fused: how rows are made of the starts' states and of tokens; None: they are the tokens' embeddings.

    Returns:
        The trees as `DraftModel` grows them level by level, nodes in its order, with ``fused`` the best nodes of each,
        as many as the budget states; and of each how many nodes, the first ones, have K and V, and its passes.

    Raises:
        ValueError: as `roll`; nothing was computed.
    """
    held, table, rooms, last = list[Any](), (abi.CTreeStart * len(starts))(), [], 0
    for row, s in zip(table, starts, strict=True):
        last = max(last, _begin(row, s, s.room, held) + 1)
        row.room, row.shift, row.rules = s.room, s.shift, rules_at(s.rules, held)
        row.budget, row.max_depth, row.most = s.budget, s.max_depth, s.most
        if fused is not None:
            row.states = _states_at(s, stack, held)
        rooms.append(Room(row, s.most, **_TREE))
    rules = abi.CTreeRules(topk=topk, levels=len(factors), factors=numbers(factors, held), floor=floor)
    run, limit = stack.reaching(cache, last), min(limit, stack.shape[0])
    arguments = limit, table, len(starts), ctypes.byref(rules), None if fused is None else fused.reference
    require(stack.library.pl_grow(stack.reference, ctypes.byref(run), stack.embedding_at, *arguments))
    rows = zip(rooms, table, strict=True)
    return [(TokenTree(*room.read(row.nodes)), row.forwarded, row.passes) for room, row in rows]


def _begin(row: Any, start: ChainStart | TreeStart | SampleStart, behind: int, held: list[Any]) -> int:
    """Set what chains, trees and samples have in common.

    Returns:
        The position after the last key, ``behind`` after the pending tokens.
    """
    end = start.position + len(start.pending) + behind
    row.pending, row.num_pending, row.position = numbers(start.pending, held), len(start.pending), start.position
    row.base, row.keys = keys_of(start.keys, end, held)
    return end


def _states_at(start: TreeStart | SampleStart, stack: Stack, held: list[Any]) -> int:
    """Return the address of the states in front of the pending tokens."""
    rows = len(start.pending)
    if start.states is None:
        raise ValueError(f"no states in front of {rows} pending tokens")
    return pointer_to(start.states, (rows, stack.shape[1]), held, stack.dtype)


# -- drafters of states


class NativeFuse:
    """Describe how a row is made of a state and a token: ``struct Fuse`` of the kernels.

    Args:
        both: [2d -> d] of [token, state].
        state: [d -> d] of a state without a token; None: every row has one.
        constant: [1, d] what the latter adds.
        reads_tokens: whether the rows of a text see the token after them.
        target: whose states come, as its last layer leaves them, and go through its final norm. None: they have.
    """

    def __init__(
        self,
        both: NativeLinear,
        state: NativeLinear | None,
        constant: Tensor,
        reads_tokens: bool,
        target: Stack | None = None,
    ) -> None:
        self._held = both, state, constant.contiguous(), target
        self.reads_tokens = reads_tokens
        first = abi.CLinear() if state is None else state.struct
        norm, eps = (None, 0.0) if target is None else target.norm_at
        self._struct = abi.CFuse(both=both.struct, state=first, constant=self._held[2].data_ptr(), norm=norm, eps=eps)
        self.reference = ctypes.byref(self._struct)


def token_info(factors: Tensor, table: NativeLinear) -> abi.CTokenInfo:
    """Return what tokens imply for their children.

    Args:
        factors: [V, r] of every token, in the dtype of states.
        table: [r -> outputs of the head] that they are multiplied with, of the same dtype.
    """
    held: list[Any] = [table]
    info = abi.CTokenInfo(
        table=table.struct, factors=pointer_to(factors, (len(factors), table.shape[1]), held, table.dtype)
    )
    info.held = held
    return info


MANY = 1 << 30  # nodes that Algorithm 1 makes


class SampleStart(NamedTuple):
    """One sequence's drafts: a new one, and one of logits that the last one left over; see `sample`."""

    pending: Sequence[int]  # tokens after the states that have no K and V yet, the root last
    position: int  # of the row of the first of them
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + steps - 2
    steps: int  # of the new draft, one or more
    root: int
    place: int  # position that the root's children will have in the text
    rules: bytes | None  # as of a `ChainStart`
    states: Tensor  # [pending, d_model] in front of the pending tokens, as the target leaves them
    leftover: Tensor | None = None  # [levels, outputs of the head] float32, contiguous; None: nothing is re-sampled
    most: tuple[int, int] = (MANY, MANY)  # nodes wanted of the new tree, and of the other: the best


def sample(
    stack: Stack,
    starts: Sequence[SampleStart],
    branches: int,
    noisy: bool,
    fused: NativeFuse,
    info: abi.CTokenInfo | None,
    cache: KVCache,
) -> tuple[Tensor, list[tuple[TokenTree, TokenTree | None]]]:
    """Return Lyanna's drafts: k passes, one product with the head, Algorithm 1; and Algorithm 2 on logits left over.

    Args:
        branches: k of Algorithm 1.
        noisy: whether tokens are ranked with the noise of the target's own choices.
        fused, info: how rows are made, and the bias of tokens; None: none.
        cache: K and V; every pending token and every step but the last gets its own.

    Returns:
        [steps of all, outputs of the head] raw logits; and for each its new tree and the one of the logits left over.

    Raises:
        ValueError: as `grow`; nothing was computed.
    """
    vocab, _ = stack.shape
    held, table, rooms, last = list[Any](), (abi.CSampleStart * len(starts))(), [], 0
    for row, s in zip(table, starts, strict=True):
        row.root, row.place, row.rules = s.root, s.place, rules_at(s.rules, held)
        row.fresh.levels, row.left.levels = s.steps, 0 if s.leftover is None else len(s.leftover)
        last = max(last, _begin(row, s, s.steps - 1, held))
        row.states = _states_at(s, stack, held)
        if s.leftover is not None:
            row.left.logits = pointer_to(s.leftover, (len(s.leftover), vocab), held, torch.float32)
        for tree, most in zip((row.fresh, row.left), s.most, strict=True):
            tree.most = min(_most(branches, tree.levels), most)
            rooms.append(Room(tree, tree.most, **_TREE))
    run = stack.reaching(cache, last)
    raw = torch.empty(sum(s.steps for s in starts), vocab)
    info_reference = None if info is None else ctypes.byref(info)
    arguments = table, len(starts), branches, int(fused.reads_tokens), int(noisy), raw.data_ptr()
    called = stack.reference, ctypes.byref(run), stack.embedding_at, vocab, fused.reference, info_reference
    require(stack.library.pl_sample(*called, *arguments))
    trees = []
    for fresh, again, row in zip(rooms[::2], rooms[1::2], table, strict=True):
        second = TokenTree(*again.read(row.left.nodes)) if row.left.levels else None
        trees.append((TokenTree(*fresh.read(row.fresh.nodes)), second))
    return raw, trees


def _most(branches: int, levels: int) -> int:
    """Return nodes that Algorithm 1 makes at most."""
    return branches + branches * branches * (levels - 1) if levels else 0


# -- heads on the last state (Medusa)


class NativeHeads:
    """Heads over a target's compiled layers.

    Args:
        stack: of the target, whose final norm and, where the heads have none, output head are used.
        matrices: [heads * d_model, d_model] of the blocks, one below the other.
        bias: [heads, d_model] of them.
        own: [heads, vocab, d_model] output heads; None: the target's serves all.
        hot: [H] int64, the only tokens that the target's head is computed for; None: all.

    Raises:
        ValueError: shapes that are not the target's.
    """

    def __init__(
        self, stack: Stack, matrices: Tensor, bias: Tensor, ends: Tensor | None = None, hot: Tensor | None = None
    ) -> None:
        self.stack, self.count = stack, len(bias)
        vocab, width = stack.shape
        if matrices.shape != (self.count * width, width) or (ends is not None and ends.shape[1:] != (vocab, width)):
            raise ValueError(f"heads of other shapes than a target of width {width} with {vocab} tokens has")
        self.blocks = NativeLinear(matrices.to("cpu", stack.dtype), bias.flatten())
        self.own = [NativeLinear(part.to("cpu", stack.dtype), None) for part in ends] if ends is not None else []
        self._table = (abi.CLinear * len(self.own))(*[linear.struct for linear in self.own])
        own_at = ctypes.addressof(self._table) if self.own else None
        self._struct = abi.CHeads(count=self.count, blocks=self.blocks.struct, own=own_at)
        self._reference = ctypes.byref(self._struct)
        self._ends = stack.ends(hot)

    def best(
        self, states: Tensor, k: int, positions: Sequence[int], rules: bytes | None = None, noisy: bool = False
    ) -> list[tuple[list[list[int]], list[list[float]]]]:
        """Return the k best tokens of every head after every state, best first, and their log-probabilities.

        Args:
            states: [rows, d_model] before the final norm.
            positions: [rows] of the first head's tokens.
            rules: `SequenceSampler.rules` of every row in a row; None: by the logits alone.
            noisy: by logits with the noise of the sequence's own choices.

        Returns:
            For each row [heads][k] tokens and their log-probabilities by these rules.
        """
        states = self.stack.states(states)
        rows, size = len(states), len(states) * k
        places = array("q", positions)
        tokens, log_q = array("q", bytes(8 * size * self.count)), array("f", bytes(4 * size * self.count))
        if len(places) != rows or (rules is not None and len(rules) != kernels.RULES_BYTES * rows):
            raise ValueError(f"{len(places)} positions and {len(rules or b'')} bytes of rules for {rows} states")
        out = tokens.buffer_info()[0], log_q.buffer_info()[0], torch.get_num_threads()
        call = states.data_ptr(), rows, k, rules, places.buffer_info()[0], int(noisy)
        require(self.stack.library.pl_heads(ctypes.byref(self._ends), self._reference, *call, *out))
        starts = [[head * size + row * k for head in range(self.count)] for row in range(rows)]
        return [([tokens[i : i + k].tolist() for i in at], [log_q[i : i + k].tolist() for i in at]) for at in starts]


# -- feedback memory


class RingChain(NamedTuple):
    """Describe where one sequence's chain starts; see `recall`."""

    root: int
    position: int  # position of the root
    steps: int  # tokens wanted, one or more
    ring: int
    start: int  # next to the sinks K and V are there from this position on
    rules: bytes | None  # as of a `ChainStart`


def write_keys(
    stack: Stack,
    ring: RingCache,
    states: Sequence[Tensor],
    rows: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
) -> None:
    """Write K and V of states as the layers would compute them of their rows, and nothing else of these layers.

    Args:
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
    tables = numbers([pointer_to(state, (most, width), held, stack.dtype) for state in states], held)
    require(stack.library.pl_keys(stack.reference, ctypes.byref(run), tables, most, numbers(rows, held)))


def recall(
    stack: Stack, ring: RingCache, chains: Sequence[RingChain], mix: Tensor, floor: float, limit: int
) -> list[list[tuple[int, float]]]:
    """Draft chains, a token a pass, all in each pass.

    Args:
        ring: K and V of what each chain's rows see.
        mix: [layers, layers + 1] float32, what a row's memory is made of.
        floor: a chain ends once its cumulative log-probability is below this.
        limit: tokens at and above this are never chosen.

    Returns:
        For each chain its tokens and their log-probabilities, of drawn ones among the scores with their noise.

    Raises:
        ValueError: a root that the embedding lacks, a ring or positions that are not there, more steps than a ring has
            room for; nothing was computed.
    """
    layers, held, table, rooms = len(ring.k), list[Any](), (abi.CRingChain * len(chains))(), []
    for row, chain in zip(table, chains, strict=True):
        row.root, row.position, row.steps, row.ring, row.start = chain[:5]
        row.rules = rules_at(chain.rules, held)
        rooms.append(Room(row, chain.steps, tokens="q", log_q="f"))
    shape = abi.CRingShape(sinks=ring.view.sinks, window=ring.view.window, span=ring.span)
    mix_address = pointer_to(mix, (layers, layers + 1), held, torch.float32)
    run = stack.reaching(ring, max(chain.position + chain.steps for chain in chains))
    arguments = min(limit, stack.shape[0]), ctypes.byref(shape), table, len(chains), mix_address, floor
    require(stack.library.pl_recall(stack.reference, ctypes.byref(run), stack.embedding_at, *arguments))
    return _chains(table, rooms)
