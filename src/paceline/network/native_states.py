"""Drafters of states in compiled calls: how rows are fused, what tokens say, and where drafts start."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..native import abi
from .native_calls import GrownTree, TreeRoom, hold, keys_of, numbers, rules_at, states_at
from .native_linear import require

if TYPE_CHECKING:
    from .base import KVCache
    from .native import Stack
    from .native_linear import NativeLinear


class NativeFuse:
    """How a row is made of a state and a token: ``struct Fuse`` of the kernels.

    Args:
        both: [2d -> d] of [token, state], or [d -> d] of their sum.
        state: [d -> d] of a state without a token; None: every row has one.
        constant: [1, d] what the latter adds.
        summed: whether token and state are added.
        reads_tokens: whether the rows of a text see the token behind them.
        target: whose states come, as its last layer leaves them, and go through its final norm. None: they have.
    """

    def __init__(
        self,
        both: NativeLinear,
        state: NativeLinear | None,
        constant: Tensor,
        summed: bool,
        reads_tokens: bool,
        target: Stack | None = None,
    ) -> None:
        self._held = both, state, constant.contiguous(), target
        self.reads_tokens = reads_tokens
        known = abi.CLinear() if state is None else state.struct
        norm, eps = (None, 0.0) if target is None else target.norm_at
        self._struct = abi.CFuse(
            both=both.struct, state=known, constant=self._held[2].data_ptr(), sum=int(summed), norm=norm, eps=eps
        )
        self.reference = ctypes.byref(self._struct)


class NativeTokenInfo:
    """What tokens say about their children: ``struct TokenInfo`` of the kernels.

    Args:
        factors: [V, r] of every token, in the dtype of states.
        table: [r -> outputs of the head] that they are multiplied with, of the same dtype.
    """

    def __init__(self, factors: Tensor, table: NativeLinear) -> None:
        shape = len(factors), table.shape[1]
        self._held: list[Any] = [table]
        self._struct = abi.CTokenInfo(table=table.struct, factors=hold(factors, shape, self._held, table.dtype))
        self.reference = ctypes.byref(self._struct)


MANY = 1 << 30  # nodes: all that are made


class SampleStart(NamedTuple):
    """One sequence's drafts: a new one, one of logits that the last one left over, or both; see `sample`."""

    pending: Sequence[int]  # tokens behind the states that have no K and V yet, the root last; none where steps is 0
    position: int  # of the row of the first of them
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + steps - 2
    steps: int  # of the new draft; 0: there is none
    root: int
    place: int  # position that the root's children will have in the text
    rules: bytes | None  # as of a `ChainStart`
    left: Tensor | None = None  # [levels, outputs of the head] float32, contiguous; None: nothing is re-sampled
    states: Tensor | None = None  # [pending, d_model] in front of the pending tokens, as the target leaves them
    most: tuple[int, int] = (MANY, MANY)  # nodes wanted of the new tree, and of the other: the best


def sample(
    stack: Stack,
    starts: Sequence[SampleStart],
    branches: int,
    noisy: bool,
    fused: NativeFuse,
    info: NativeTokenInfo | None,
    cache: KVCache,
) -> tuple[Tensor, list[tuple[GrownTree | None, GrownTree | None]]]:
    """Lyanna's drafts: k passes, one product with the head, Algorithm 1; and Algorithm 2 on logits left over.

    Args:
        stack: the drafter's layer.
        starts: where each starts.
        branches: k of Algorithm 1.
        noisy: whether tokens are ranked with the noise of the target's own choices.
        fused, info: how rows are made, and what tokens say; None: nothing.
        cache: K and V; every pending token and every step but the last gets its own.

    Returns:
        [steps of all, outputs of the head] raw logits; and for each its new tree and the one of the logits left over.

    Raises:
        ValueError: as `Stack.grow`; nothing was computed.
    """
    vocab, width = stack.shape
    held, table, last = list[Any](), (abi.CSampleStart * len(starts))(), 0
    rooms = []
    for row, s in zip(table, starts, strict=True):
        row.root, row.place, row.rules = s.root, s.place, rules_at(s.rules, held)
        row.fresh.levels, row.left.levels = s.steps, 0 if s.left is None else len(s.left)
        if s.steps:
            end = s.position + len(s.pending) + s.steps - 1
            row.pending, row.num_pending, row.position = numbers(s.pending, held), len(s.pending), s.position
            row.base, row.keys = keys_of(s.keys, end, held)
            row.states = states_at(s.states, len(s.pending), width, stack.dtype, held)
            last = max(last, end)
        if s.left is not None:
            row.left.logits = hold(s.left, (len(s.left), vocab), held, torch.float32)
        for tree, most in zip((row.fresh, row.left), s.most, strict=True):
            tree.most = min(_most(branches, tree.levels), most)
            rooms.append(TreeRoom(tree, tree.most))
    library, run = native.library(), stack.reaching(cache, last)
    assert library is not None, "the stack has it, too"
    raw = torch.empty(sum(s.steps for s in starts), vocab)
    known = None if info is None else info.reference
    given = table, len(starts), branches, int(fused.reads_tokens), int(noisy), raw.data_ptr()
    called = stack.reference, ctypes.byref(run), stack.embedding_at, vocab, fused.reference, known
    require(library.pl_sample(*called, *given))
    levels = (tree.levels for row in table for tree in (row.fresh, row.left))
    trees = [GrownTree(*room.read()) if own else None for room, own in zip(rooms, levels, strict=True)]
    return raw, [*zip(trees[::2], trees[1::2], strict=True)]


def _most(branches: int, levels: int) -> int:
    """Nodes that Algorithm 1 makes at most."""
    return branches + branches * branches * (levels - 1) if levels else 0
