"""Drafters of states in compiled calls: how rows are fused, what tokens say, and where drafts start."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from .native_calls import hold, keys_of, states_at
from .native_linear import require

if TYPE_CHECKING:
    from .base import KVCache
    from .native import Stack
    from .native_linear import NativeLinear


class NativeFuse:
    """How a row is made of a state and a token: ``struct Fuse`` in the source.

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
        known = native.Linear() if state is None else state.struct
        norm, eps = (None, 0.0) if target is None else target.norm_at
        self._struct = native.Fuse(both.struct, known, self._held[2].data_ptr(), int(summed), norm, eps)
        self.reference = ctypes.byref(self._struct)


class NativeTokenInfo:
    """What tokens say about their children: ``struct TokenInfo`` in the source.

    Args:
        factors: [V, r] of every token, in the dtype of states.
        table: [r -> V] that they are multiplied with, of the same dtype.
    """

    def __init__(self, factors: Tensor, table: NativeLinear) -> None:
        vocab, rank = table.shape
        self._held: list[Any] = [table]
        self._struct = native.TokenInfo(table.struct, hold(factors, (vocab, rank), self._held, table.dtype))
        self.reference = ctypes.byref(self._struct)


MANY = 1 << 30  # nodes: all that are made


class Sprout(NamedTuple):
    """One sequence's drafts: a new one, one of logits that the last one left over, or both; see `sample`."""

    pending: Sequence[int]  # tokens behind the states that have no K and V yet, the root last; none where steps is 0
    position: int  # of the row of the first of them
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + steps - 2
    steps: int  # of the new draft; 0: there is none
    root: int
    place: int  # position that the root's children will have in the text
    rules: bytes | None  # as of a `Chain`
    left: Tensor | None = None  # [levels, vocab] float32, contiguous; None: nothing is re-sampled
    states: Tensor | None = None  # [pending, d_model] in front of the pending tokens, as the target leaves them
    most: tuple[int, int] = (MANY, MANY)  # nodes wanted of the new tree, and of the other: the best


class Drawn(NamedTuple):
    """A tree, parents before children; node 0 is the root, node n is entry n - 1."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]  # cumulative log q


class Sprouts:
    """Sprouts as `pl_sample` lists them in the source. Keeps alive what their addresses mean.

    Args:
        sprouts, branches, noisy: as for `sample`.
        reads_tokens: see `NativeFuse`.
        stack: the drafter's layer.
    """

    def __init__(self, sprouts: Sequence[Sprout], branches: int, noisy: bool, reads_tokens: bool, stack: Stack) -> None:
        vocab, width = stack.shape
        pending = array("q", [token for sprout in sprouts for token in sprout.pending])
        rules = array("B", b"".join(sprout.rules or b"" for sprout in sprouts))
        self._held: list[Any] = [pending, rules]
        self._rooms: list[tuple[int, int]] = []
        self.last = 0
        at_pending, at_rules = pending.buffer_info()[0], rules.buffer_info()[0]
        numbers = [len(sprouts), branches, int(reads_tokens), int(noisy)]
        for tokens, position, keys, steps, root, place, own, left, states, most in sprouts:
            rows = position + len(tokens) + steps - 1 if steps else 0
            where = keys_of(keys, rows, self._held) if steps else (0, 0)
            rest = 0 if left is None else len(left)
            at_left = 0 if left is None else hold(left, (rest, vocab), self._held, torch.float32)
            given = states_at(states, len(tokens), width, stack.dtype, self._held) if steps else 0
            room = min(_most(branches, steps), most[0]), min(_most(branches, rest), most[1])
            numbers += (at_pending, len(tokens), position, *where, steps, root, place, at_rules if own else 0, room[0])
            numbers += (at_left, rest, room[1], given)
            at_pending, at_rules = at_pending + 8 * len(tokens), at_rules + len(own or b"")
            self._rooms.append(room)
            self.last = max(self.last, rows)
        sizes = [room for both in self._rooms for room in both if room]
        self._made = array("q", bytes(8 * sum(1 + 2 * size for size in sizes)))
        self._scores = array("d", bytes(8 * sum(sizes)))
        self._table = array("q", numbers)
        self.address = self._table.buffer_info()[0]
        self.results = self._made.buffer_info()[0], self._scores.buffer_info()[0]

    def read(self) -> list[tuple[Drawn | None, Drawn | None]]:
        """The trees of each, after the call."""
        places = [0, 0]
        return [(self._read(first, places), self._read(second, places)) for first, second in self._rooms]

    def _read(self, room: int, places: list[int]) -> Drawn | None:
        if not room:
            return None
        at, score = places
        count = self._made[at]
        tokens, parents = (self._made[i : i + count].tolist() for i in (at + 1, at + 1 + room))
        places[:] = at + 1 + 2 * room, score + room
        return Drawn(tokens, parents, self._scores[score : score + count].tolist())


def sample(
    stack: Stack,
    sprouts: Sequence[Sprout],
    branches: int,
    noisy: bool,
    fused: NativeFuse,
    info: NativeTokenInfo | None,
    cache: KVCache,
) -> tuple[Tensor, list[tuple[Drawn | None, Drawn | None]]]:
    """Lyanna's drafts: k passes, one product with the head, Algorithm 1; and Algorithm 2 on logits left over.

    Args:
        stack: the drafter's layer.
        sprouts: where each starts.
        branches: k of Algorithm 1.
        noisy: whether tokens are ranked with the noise of the target's own choices.
        fused, info: how rows are made, and what tokens say; None: nothing.
        cache: K and V; every pending token and every step but the last gets its own.

    Returns:
        [steps of all, vocab] raw logits; and for each its new tree and the one of the logits left over.

    Raises:
        ValueError: as `Stack.grow`; nothing was computed.
    """
    vocab, _ = stack.shape
    table = Sprouts(sprouts, branches, noisy, fused.reads_tokens, stack)
    library, run = native.library(), stack.reaching(cache, table.last)
    assert library is not None, "the stack has it, too"
    raw = torch.empty(sum(sprout.steps for sprout in sprouts), vocab)
    known = None if info is None else info.reference
    given = vocab, fused.reference, known, table.address, raw.data_ptr(), *table.results
    require(library.pl_sample(stack.reference, run, stack.embedding_at, *given))
    return raw, table.read()


def _most(branches: int, levels: int) -> int:
    """Nodes that Algorithm 1 makes at most."""
    return branches + branches * branches * (levels - 1) if levels else 0
