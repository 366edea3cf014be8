"""Passes and drafts as compiled code reads and writes them: lists of numbers, and what must stay alive meanwhile."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native

if TYPE_CHECKING:
    from .adapters import AdapterRange
    from .rope import Rotation

_FLOAT, _NUMBER = Struct("=f4x"), Struct("=q")  # a float, and the number that has its bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a continuation starts and when it ends; see `Stack.roll`."""

    pending: Sequence[int]  # tokens whose K and V are still to be computed, one or more
    position: int  # of the first of them
    steps: int  # tokens wanted behind them, one or more
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + steps - 2
    floor: float  # it ends once its cumulative log-probability is below this
    rules: bytes | None = None  # `SequenceSampler.rules`: draw with the sequence's noise; None: the likeliest tokens
    view: NativeView | None = None  # what each row sees of the text; None: all. With one pending token
    scratch: int = 0  # first of the slots for the view's sinks


class NativeView:
    """A sparse view of texts: ``struct SparseView`` in the source.

    Args:
        sinks, window: see `SinkWindow`.
        rotation: by every gap that may come.
    """

    def __init__(self, sinks: int, window: int, rotation: Rotation) -> None:
        cos, sin = self._held = rotation.halves
        if cos.dtype != torch.float32:
            raise ValueError(f"angles in {cos.dtype}, where float32 is read")
        self.struct = native.SparseView(sinks, window, cos.data_ptr(), sin.data_ptr(), len(cos))
        self.address = ctypes.addressof(self.struct)


class RowSpan(NamedTuple):
    """Rows of one sequence in an `Asked` pass; they are the last of its keys."""

    start: int
    stop: int
    prefix: int  # keys in front of its rows
    keys: slice | Tensor  # slots of all its keys, the rows' own last
    parents: Sequence[int] | None  # of the drafted nodes, which are the last rows; the root is 0. None: a chain


class Asked(NamedTuple):
    """A pass from token ids on, for `Stack.decide` and `Stack.decide_streams`: ``struct Asked`` in the source."""

    tokens: Sequence[int]  # [rows]
    positions: Sequence[int]  # [rows]
    slots: slice | Sequence[int]  # [rows] where K and V of each row go
    spans: Sequence[RowSpan]  # where each sequence's rows lie, in order
    wanted: Sequence[int]  # rows after which a token is chosen, ascending
    adapters: Sequence[AdapterRange] = ()  # ranges of rows with adapters
    rules: bytes | None = None  # `SequenceSampler.rules` of every span in a row; None: all take the likeliest
    logits: Tensor | None = None  # [wanted and riders, vocab] float32, to be filled; goes with ``rules``

    def numbers(self, held: list[Any]) -> list[int]:
        """As compiled code reads it; what must stay alive meanwhile is appended to ``held``."""
        slots = self.slots
        first = slots.start if isinstance(slots, slice) else -1
        numbers = [len(self.tokens), len(self.spans), len(self.wanted), first]
        parents: list[int] = []
        for start, stop, prefix, keys, above in self.spans:
            numbers += (start, stop, prefix)
            numbers += (keys.start, 0) if isinstance(keys, slice) else (-1, hold(keys, (prefix + stop - start,), held))
            numbers.append(-1 if above is None else len(above))
            parents += above or ()
        numbers += self.tokens
        numbers += self.positions
        if not isinstance(slots, slice):
            numbers += slots
        numbers += self.wanted
        numbers += parents
        return numbers

    def drawing(self, vocab: int, riders: int = 0) -> tuple[bytes | None, int | None]:
        """Rules and the address of logits, as a pass is given them; neither where all choices are the likeliest.

        Raises:
            ValueError: rules or logits of another size.
        """
        rules, logits = self.rules, self.logits
        if rules is None or logits is None:
            return None, None
        if len(rules) != native.RULES_BYTES * len(self.spans):
            raise ValueError(f"rules of {len(rules)} bytes for {len(self.spans)} sequences")
        if not logits.is_contiguous():
            raise ValueError("logits that do not lie in one piece")
        return rules, hold(logits, (len(self.wanted) + riders, vocab), [], torch.float32)


@dataclass(slots=True)
class NativeTaps:
    """States that `Stack.decide` is to copy out of a pass."""

    layers: tuple[int, ...]  # behind which, ascending
    rows: Sequence[int] | None  # of the pass; None: the first ones, as many as there is room for
    out: Tensor  # [layers, rows, d_model], or of one layer [rows, d_model], in the dtype of the states, to be filled
    ms: float = 0.0  # that copying took; set by the call

    def struct(self, stretch: int, width: int, dtype: torch.dtype, held: list[Any]) -> native.Taps:
        """As compiled code reads it; what must stay alive meanwhile is appended to ``held``."""
        out, shape, count = self.out, self.out.shape, len(self.layers)
        rows = shape[-2] if self.rows is None else len(self.rows)
        if shape != (count, rows, width) and not (count == 1 and shape == (rows, width)):
            raise ValueError(f"{list(shape)} as room for taps: {[count, rows, width]}")
        if out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"room for taps of {out.dtype}, or in pieces: {dtype} in one piece")
        after, which = _after(self.layers, stretch), None
        if self.rows is not None:
            named = array("q", self.rows)
            held.append(named)
            which = named.buffer_info()[0]
        return native.Taps(count, after.buffer_info()[0], rows, which, out.data_ptr())


@cache
def _after(layers: tuple[int, ...], stretch: int) -> array[int]:
    """How many layers have been run behind each of these."""
    return array("q", [(layer + 1) * stretch for layer in layers])


class Seed(NamedTuple):
    """Where a draft tree starts and how far it may grow; see `Stack.grow`."""

    pending: Sequence[int]  # tokens whose K and V are still to be computed, one or more; the last one is the root
    position: int  # of the first of them
    room: int  # nodes that may be expanded
    keys: slice | Tensor  # slots of positions 0 .. position + len(pending) + room - 1
    budget: int  # drafted nodes of a static tree
    max_depth: int  # levels
    most: int  # nodes that the tree may have before the best ones are taken
    rules: bytes | None  # as of a `Chain`
    shift: int = 0  # what a token's position in its text is beyond that of its row
    states: Tensor | None = None  # [pending, d_model] in front of the pending tokens, as the target leaves them


class Grown(NamedTuple):
    """A draft tree, parents before children; node 0 is the root, node n is entry n - 1."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]  # cumulative log-probability
    forwarded: int  # the first so many nodes have K and V
    passes: int


class Chains:
    """Chains as `struct Chain` in the source. Keeps alive what their addresses mean."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.last = max(chain.position + len(chain.pending) + chain.steps for chain in chains)
        self._chains = chains
        self._held: list[Any] = []
        pending = array("q", [token for chain in chains for token in chain.pending])
        rules = array("B", b"".join(chain.rules or b"" for chain in chains))
        steps = sum(chain.steps for chain in chains)
        self._tokens, self._log_q = array("q", bytes(8 * steps)), array("f", bytes(4 * steps))
        parts = (pending, self._tokens, self._log_q, rules)
        places = [part.buffer_info()[0] for part in parts]
        numbers: list[int] = []
        for chain in chains:
            numbers += self._numbers(chain, places)
            sizes = (8 * len(chain.pending), 8 * chain.steps, 4 * chain.steps, len(chain.rules or b""))
            places = [place + size for place, size in zip(places, sizes, strict=True)]
        self._table = array("q", numbers)
        self._held += (pending, rules)
        self.address = self._table.buffer_info()[0]

    def _numbers(self, chain: Chain, places: Sequence[int]) -> tuple[int, ...]:
        pending, tokens, log_q, rules = places
        count = len(chain.pending)
        keys = keys_of(chain.keys, chain.position + count + chain.steps - 1, self._held)
        (floor,) = _NUMBER.unpack(_FLOAT.pack(chain.floor))
        start = (pending, count, chain.position, chain.steps, *keys, floor)
        view = 0 if chain.view is None else chain.view.address
        return (*start, tokens, log_q, 0, rules if chain.rules else 0, view, chain.scratch)

    def read(self) -> list[list[tuple[int, float]]]:
        """Tokens and log-probabilities of each, after the call."""
        found, begin = [], 0
        made = self._table[native.CHAIN_MADE :: native.CHAIN_NUMBERS]
        for chain, count in zip(self._chains, made, strict=True):
            end = begin + count
            found.append([*zip(self._tokens[begin:end], self._log_q[begin:end], strict=True)])
            begin += chain.steps
        return found


class Seeds:
    """Seeds as `pl_grow` lists them in the source. Keeps alive what their addresses mean.

    Args:
        seeds, factors, topk, beam: as for `Stack.grow`.
        fed: width and dtype of the states that rows are made of; None: they are made of tokens alone.
    """

    def __init__(
        self,
        seeds: Sequence[Seed],
        factors: Sequence[int],
        topk: int,
        beam: int,
        fed: tuple[int, torch.dtype] | None = None,
    ) -> None:
        self.last = max(seed.position + len(seed.pending) + seed.room for seed in seeds) + 1
        self._room = [seed.most for seed in seeds]
        pending = array("q", [token for seed in seeds for token in seed.pending])
        rules = array("B", b"".join(seed.rules or b"" for seed in seeds))
        self._held: list[Any] = [pending, rules]
        at_pending, at_rules = pending.buffer_info()[0], rules.buffer_info()[0]
        numbers = [len(seeds), topk, beam, len(factors), *factors]
        for tokens, position, room, keys, budget, max_depth, most, own, shift, states in seeds:
            places = keys_of(keys, position + len(tokens) + room, self._held)
            given = 0 if fed is None else states_at(states, len(tokens), *fed, self._held)
            numbers += (at_pending, len(tokens), position, room, *places)
            numbers += (budget, max_depth, at_rules if own else 0, shift, most, given)
            at_pending, at_rules = at_pending + 8 * len(tokens), at_rules + len(own or b"")
        total = sum(self._room)
        self._made, self._scores = array("q", bytes(8 * (3 * len(seeds) + 2 * total))), array("d", bytes(8 * total))
        self._table = array("q", numbers)
        self.address = self._table.buffer_info()[0]
        self.results = self._made.buffer_info()[0], self._scores.buffer_info()[0]

    def read(self) -> list[Grown]:
        """The trees, after the call."""
        found, at, score = [], 0, 0
        for most in self._room:
            count, forwarded, passes = self._made[at : at + 3]
            tokens, parents = at + 3, at + 3 + most
            nodes = self._made[tokens : tokens + count].tolist(), self._made[parents : parents + count].tolist()
            found.append(Grown(*nodes, self._scores[score : score + count].tolist(), forwarded, passes))
            at, score = parents + most, score + most
        return found


def keys_of(keys: slice | Tensor, count: int, held: list[Any]) -> tuple[int, int]:
    """(first slot, 0) of keys in a row, (-1, address of ``count`` slots) of others."""
    return (keys.start, 0) if isinstance(keys, slice) else (-1, hold(keys[:count], (count,), held))


def states_at(states: Tensor | None, rows: int, width: int, dtype: torch.dtype, held: list[Any]) -> int:
    """The address of the states [rows, width] in front of as many pending tokens."""
    if states is None:
        raise ValueError(f"no states in front of {rows} pending tokens")
    return hold(states, (rows, width), held, dtype)


def hold(tensor: Tensor, shape: Sequence[int], held: list[Any], dtype: torch.dtype = torch.int64) -> int:
    """The address of what compiled code reads as ``shape`` of ``dtype``; the tensor is kept in ``held``."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where {dtype} {list(shape)} is read")
    held.append(tensor.contiguous())
    return held[-1].data_ptr()


# Torch moves 32,768 numbers and more by threads, which then spin for milliseconds on a core that the compiled layers
# need: these find it taken, and go on with one thread for up to 0.4 seconds. So rows of a step are moved by these two.


def pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows] of ``x`` [n, width].

    Raises:
        IndexError: a row that is not there.
    """
    library = _moving(x)
    if library is None:
        return x[torch.tensor(rows, dtype=torch.int64, device=x.device)]
    which, out = array("q", rows), x.new_empty(len(rows), x.shape[1])
    shape = len(x), x.shape[1] * x.element_size()
    if library.pl_pick_rows(x.data_ptr(), *shape, which.buffer_info()[0], len(rows), out.data_ptr()):
        raise IndexError(f"rows {[*rows]} of {len(x)}")
    return out


def join(parts: Sequence[Tensor]) -> Tensor:
    """All rows of one or more ``parts`` [n, width] of one width and dtype; without a copy where there is one part."""
    if len(parts) == 1:
        return parts[0]
    if not all(_moving(part) for part in parts):
        return torch.cat([*parts])
    out = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    at = out.data_ptr()
    for part in parts:
        ctypes.memmove(at, part.data_ptr(), part.nbytes)
        at += part.nbytes
    return out


def _moving(x: Tensor) -> Any:
    """The kernels, where they are in use and can move rows of a tensor."""
    return native.in_use() if x.device.type == "cpu" and x.is_contiguous() else None
