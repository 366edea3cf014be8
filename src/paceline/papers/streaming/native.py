"""The compiled call that verifies a draft and reads the streams of the last accepted nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...kernels import abi
from ...kernels.calls import NativeTaps, Room, TokenPass, numbers
from ...kernels.layers import Stack
from ...model.base import KVCache
from .model import StreamSet


class StreamCarrier(NamedTuple):
    """A sequence whose next draft is read from streams, for `decide_streams`."""

    span: int  # index of its `RowSpan`
    root: int  # its root's row
    streams: int  # streams wanted of the last accepted node, the first ones
    most: int  # accepted nodes after which a draft is of use
    ends: Collection[int]  # tokens that end its answer: no draft is wanted after them
    riders: Sequence[int]  # nodes whose streams go with the main rows, ascending


class StreamRun(NamedTuple):
    """The streams of a pass, for `decide_streams`."""

    streams: StreamSet
    carriers: Sequence[StreamCarrier]  # in the order of their spans
    k: int  # tokens wanted of each stream
    scratch: slice  # slots for K and V of streams: of all riders, and of a row's for every carrier
    noisy: bool = False  # whether a sequence that samples has its drafts drawn with the noise of its own choices

    @property
    def rows(self) -> int:
        """Stream rows of the pass itself."""
        return sum(c.streams * len(c.riders) for c in self.carriers)


class StreamTokens(NamedTuple):
    """Describe what the streams of one sequence's last accepted node predict."""

    tokens: list[list[int]]  # [streams][k], likeliest first
    log_q: list[list[float]]
    rode: bool  # whether the streams ran with the main rows; else they ran afterwards


_SETS: WeakKeyDictionary[Stack, WeakKeyDictionary[StreamSet, abi.CStreamSet]] = WeakKeyDictionary()


def decide_streams(
    stack: Stack, whole: TokenPass, streams: StreamRun, cache: KVCache, taps: NativeTaps | None = None
) -> tuple[list[int], list[StreamTokens | None], float]:
    """Run `Stack.decide`, and read the streams of every carrier's last accepted node in the same call.

    Streams that are not rows of the pass go through their layers after it. The pass's wanted rows hold the root of
    every carrier and all rows after it; streams are read by its rules, too, and its logits have room for those of
    ``streams.rows``.

    Returns:
        The token after each of the wanted rows, as by `Stack.decide`; for each carrier the ``streams.k`` best tokens of
        its streams, None where no draft after its last accepted node is of use, or where that node is not known here;
        ms that streams took after the pass.

    Raises:
        ConfigError, ValueError: as `Stack.run`.
    """
    held, model, k = list[Any](), _native(stack, streams.streams), streams.k
    table, rooms = (abi.CCarrier * len(streams.carriers))(), list[Room]()
    for row, (span, root, count, most, ends, riders) in zip(table, streams.carriers, strict=True):
        row.segment, row.root, row.streams, row.most = span, root, count, most
        row.ends, row.num_ends = numbers([*ends], held), len(ends)
        row.riders, row.num_riders = numbers(riders, held), len(riders)
        rooms.append(Room(row, model.gamma * k, tokens="q", log_q="f"))
    struct = abi.CStreamPass(
        set=ctypes.addressof(model),
        carriers=ctypes.addressof(table),
        count=len(table),
        k=k,
        scratch=streams.scratch.start,
        room=streams.scratch.stop - streams.scratch.start,
        noisy=streams.noisy,
    )
    words = whole.packed(stack.shape[0], held, streams.rows)
    both = words.buffer_info()[0], ctypes.byref(struct)
    stack.choose(stack.library.pl_choose_streams, whole, cache, max(whole.positions) + model.gamma, *both, taps=taps)
    answers = list[StreamTokens | None]()
    for row, room in zip(table, rooms, strict=True):
        tokens, log_q = ([part[i : i + k] for i in range(0, len(part), k)] for part in room.read(row.found * k))
        answers.append(StreamTokens(tokens, log_q, bool(row.rode)) if row.found else None)
    return words[-len(whole.choice_rows) :].tolist(), answers, struct.late_us / 1e3


def _native(stack: Stack, streams: StreamSet) -> abi.CStreamSet:
    """Return the parameters of a lossless set as compiled layers read them, made once."""
    structs = _SETS.setdefault(stack, WeakKeyDictionary())
    if streams not in structs:
        assert streams.embeddings is not None, "a set of adapters alone has no streams"
        adapters = None if streams.adapters is None else stack.adapters(streams.adapters)
        embeddings = streams.embeddings.detach().to("cpu", stack.dtype).contiguous()
        config = streams.config
        struct = abi.CStreamSet(gamma=config.gamma, insertion=config.insertion, embeddings=embeddings.data_ptr())
        struct.held = embeddings, adapters
        if adapters is not None:
            struct.adapter, struct.rank = ctypes.addressof(adapters.table), adapters.rank
        structs[streams] = struct
    return structs[streams]
