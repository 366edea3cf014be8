"""Passes as compiled code reads and writes them, and what must stay alive meanwhile."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from . import abi

if TYPE_CHECKING:
    from ..model.adapters import AdapterRange


class RowSpan(NamedTuple):
    """Rows of one sequence in a `TokenPass`; they are the last of its keys."""

    start: int
    stop: int
    prefix: int  # keys in front of its rows
    keys: slice | Tensor  # slots of all its keys, the rows' own last
    parents: Sequence[int] | None  # of the drafted nodes, which are the last rows; the root is 0. None: a chain


class TokenPass(NamedTuple):
    """A pass from token ids on, for `Stack.decide`."""

    tokens: Sequence[int]  # [rows]
    positions: Sequence[int]  # [rows]
    slots: slice | Sequence[int]  # [rows] where K and V of each row go
    spans: Sequence[RowSpan]  # where each sequence's rows lie, in order
    choice_rows: Sequence[int]  # rows after which a token is chosen, ascending
    adapters: Sequence[AdapterRange] = ()  # ranges of rows with adapters
    rules: bytes | None = None  # `SequenceSampler.rules` of every span in a row; None: all take the likeliest
    logits: Tensor | None = None  # [wanted and riders, vocab] float32, to be filled; goes with ``rules``
    masks: Tensor | None = None  # [wanted, (vocab + 31) // 32] int32: bits of tokens that may follow; with ``rules``

    def packed(self, vocab: int, held: list[Any], riders: int = 0) -> array[int]:
        """Pack it as compiled code reads it: an `abi.CTokenPass`, its spans and its numbers.

        Last is room for the choices.

        One array, because a pass of a small model takes about a millisecond, and ctypes would take 3% of it to set the
        same fields one by one. What else must stay alive is appended to ``held``.

        Raises:
            ValueError: rules or logits of another size.
        """
        numbers, rows, spans = [*self.tokens, *self.positions, *self.choice_rows], len(self.tokens), list[int]()
        begin = len(_PASS) + len(_SPAN) * len(self.spans)  # of the numbers; places are counted in fields
        addresses = [*_OWN]  # places of the fields that point into the array
        slots, slot_base = 0, 0
        if isinstance(self.slots, slice):
            slot_base = self.slots.start
        else:
            slots = begin + len(numbers)
            addresses.append(_SLOTS)
            numbers += self.slots
        for start, stop, prefix, keys, parents in self.spans:
            base, at = keys_of(keys, prefix + stop - start, held)
            drafted, nodes = -1, 0
            if parents is not None:
                drafted, nodes = len(parents), begin + len(numbers)
                addresses.append(len(_PASS) + len(spans) + _PARENTS)
                numbers += parents
            spans += (start, stop, prefix, base, at or 0, drafted, nodes)  # in the order of _SPAN
        drawing = self._drawing(vocab, held, riders)
        head = (  # in the order of _PASS
            *(rows, begin, begin + rows, slots, slot_base),
            *(len(_PASS), len(self.spans), begin + 2 * rows, len(self.choice_rows)),
            *(*drawing, begin + len(numbers)),
        )
        words = array("q", [*head, *spans, *numbers, *self.choice_rows])
        here = words.buffer_info()[0]
        for place in addresses:
            words[place] = here + 8 * words[place]
        return words

    def _drawing(self, vocab: int, held: list[Any], riders: int) -> tuple[int, int, int]:
        """Addresses of the rules, the logits and the masks; 0 where all take the likeliest token, or any."""
        rules, logits, masks = self.rules, self.logits, 0
        if rules is None or logits is None:
            return 0, 0, 0
        if len(rules) != kernels.RULES_BYTES * len(self.spans):
            raise ValueError(f"rules of {len(rules)} bytes for {len(self.spans)} sequences")
        if not logits.is_contiguous():
            raise ValueError("logits that do not lie in one piece")
        shape = len(self.choice_rows) + riders, vocab
        if self.masks is not None:
            masks = pointer_to(self.masks, (len(self.choice_rows), (vocab + 31) // 32), held, torch.int32)
        return rules_at(rules, held) or 0, pointer_to(logits, shape, held, torch.float32), masks


# Names of the fields, in the order in which `TokenPass.packed` lists them, each of 8 bytes (see its test).
_PASS, _SPAN = ([name for name, _ in struct._fields_] for struct in (abi.CTokenPass, abi.CSpan))
_OWN = [_PASS.index(name) for name in ("tokens", "positions", "spans", "wanted", "chosen")]
_SLOTS, _PARENTS = _PASS.index("slots"), _SPAN.index("parents")


@dataclass(slots=True)
class NativeTaps:
    """States that `Stack.decide` is to copy out of a pass."""

    layers: tuple[int, ...]  # layers after which states are copied, ascending
    rows: Sequence[int] | None  # rows of the pass to copy; None: the first ones, as many as there is room for
    out: Tensor  # [layers, rows, d_model], or of one layer [rows, d_model], in the dtype of the states, to be filled
    ms: float = 0.0  # ms that copying took; set by the call

    def struct(self, width: int, dtype: torch.dtype, held: list[Any]) -> abi.CTaps:
        """Pack it as compiled code reads it; what must stay alive meanwhile is appended to ``held``."""
        out, shape, count = self.out, self.out.shape, len(self.layers)
        rows = shape[-2] if self.rows is None else len(self.rows)
        if shape != (count, rows, width) and not (count == 1 and shape == (rows, width)):
            raise ValueError(f"{list(shape)} as room for taps: {[count, rows, width]}")
        if out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"room for taps of {out.dtype}, or in pieces: {dtype} in one piece")
        after, which = _after(self.layers), None
        if self.rows is not None:
            which = numbers(self.rows, held)
        return abi.CTaps(layers=count, after=after.buffer_info()[0], rows=rows, which=which, out=out.data_ptr())


@cache
def _after(layers: tuple[int, ...]) -> array[int]:
    """Return how many layers a pass has run after each of these layers."""
    return array("q", [layer + 1 for layer in layers])


class Room:
    """Room for lists that compiled code makes, of a given number of entries.

    Args:
        struct: receives the addresses of the lists.
        most: entries of each list.
        fields: of the struct, each with the letter of `array` for its entries.
    """

    def __init__(self, struct: Any, most: int, **fields: str) -> None:
        self._parts = [array(letter, bytes(array(letter).itemsize * most)) for letter in fields.values()]
        for name, part in zip(fields, self._parts, strict=True):
            setattr(struct, name, part.buffer_info()[0])

    def read(self, count: int) -> Any:  # list[list[int] | list[float]]
        """Return the first so many entries of each field."""
        return [part[:count].tolist() for part in self._parts]


def numbers(values: Sequence[int], held: list[Any]) -> int:
    """Return the address of these numbers as int64, which are kept in ``held``."""
    held.append(array("q", values))
    return int(held[-1].buffer_info()[0])


def rules_at(rules: bytes | None, held: list[Any]) -> int | None:
    """Return the address of a sampler's rules, which are kept in ``held``."""
    if not rules:
        return None
    held.append(array("q", rules))
    return int(held[-1].buffer_info()[0])


def keys_of(keys: slice | Tensor, count: int, held: list[Any]) -> tuple[int, int | None]:
    """(first slot, None) of keys in a row, (-1, address of ``count`` slots) of others."""
    return (keys.start, None) if isinstance(keys, slice) else (-1, pointer_to(keys[:count], (count,), held))


def pointer_to(tensor: Tensor, shape: Sequence[int], held: list[Any], dtype: torch.dtype = torch.int64) -> int:
    """Return the address of what compiled code reads as ``shape`` of ``dtype``; the tensor is kept in ``held``."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where {dtype} {list(shape)} is read")
    held.append(tensor.contiguous())
    return held[-1].data_ptr()


# Torch moves 32,768 numbers and more by threads, which then spin for milliseconds on a core that the compiled layers
# need: these find it taken, and continue with one thread for up to 0.4 seconds. So rows of a step are moved by these
# two.


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
    """Return the kernels, where they are in use and can move rows of a tensor."""
    return kernels.in_use() if x.device.type == "cpu" and x.is_contiguous() else None
