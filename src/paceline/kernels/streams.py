"""Streams of a compiled pass: what `Stack.decide_streams` is given and gives back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from ..papers.streaming.model import StreamSet
from . import abi
from .calls import Room, numbers
from .linear import NativeAdapters


class StreamCarrier(NamedTuple):
    """A sequence whose next draft is read from streams, for `Stack.decide_streams`."""

    span: int  # index of its `RowSpan`
    root: int  # its root's row
    streams: int  # streams wanted of the last accepted node, the first ones
    most: int  # accepted nodes behind which a draft is of use
    ends: Collection[int]  # tokens that end its answer: no draft is wanted behind them
    riders: Sequence[int]  # nodes whose streams go with the main rows, ascending


class StreamRun(NamedTuple):
    """The streams of a pass, for `Stack.decide_streams`."""

    streams: StreamSet
    carriers: Sequence[StreamCarrier]  # in the order of their spans
    k: int  # tokens wanted of each stream
    scratch: slice  # slots for K and V of streams: of all riders, and of a row's for every carrier
    noisy: bool = False  # whether a sequence that samples has its drafts drawn with the noise of its own choices

    @property
    def rows(self) -> int:
        """Stream rows of the pass itself."""
        return sum(c.streams * len(c.riders) for c in self.carriers)

    def begin(self, made: abi.CStreamSet, held: list[Any]) -> tuple[abi.CStreamPass, Callable[[], list[Any]]]:
        """As compiled code reads it, and what reads the `StreamTokens` of each carrier (or None) after the call; what
        must stay alive meanwhile is appended to ``held``."""
        table, rooms = (abi.CCarrier * len(self.carriers))(), list[Room]()
        for row, (span, root, streams, most, ends, riders) in zip(table, self.carriers, strict=True):
            row.segment, row.root, row.streams, row.most = span, root, streams, most
            row.ends, row.num_ends = numbers([*ends], held), len(ends)
            row.riders, row.num_riders = numbers(riders, held), len(riders)
            rooms.append(Room(row, made.gamma * self.k, tokens="q", log_q="f"))
        held.append(table)
        whole = abi.CStreamPass(
            set=ctypes.addressof(made),
            carriers=ctypes.addressof(table),
            count=len(table),
            k=self.k,
            scratch=self.scratch.start,
            room=self.scratch.stop - self.scratch.start,
            noisy=self.noisy,
        )
        return whole, lambda: [self._read(row, room) for row, room in zip(table, rooms, strict=True)]

    def _read(self, row: abi.CCarrier, room: Room) -> StreamTokens | None:
        if not row.found:
            return None
        tokens, log_q = (
            [part[i : i + self.k] for i in range(0, len(part), self.k)] for part in room.read(row.found * self.k)
        )
        return StreamTokens(tokens, log_q, bool(row.rode))


class StreamTokens(NamedTuple):
    """What the streams of one sequence's last accepted node say."""

    tokens: list[list[int]]  # [streams][k], likeliest first
    log_q: list[list[float]]
    rode: bool  # whether the streams ran with the main rows; else they ran afterwards


def native_streams(streams: StreamSet, adapters: NativeAdapters | None, dtype: torch.dtype) -> abi.CStreamSet:
    """The parameters of one lossless `StreamSet`, with its ``adapters``, as compiled layers with states of ``dtype``
    read them."""
    config = streams.config
    assert streams.embeddings is not None, "a set of adapters alone has no streams"
    embeddings = streams.embeddings.detach().to("cpu", dtype).contiguous()
    made = abi.CStreamSet(gamma=config.gamma, insertion=config.insertion, embeddings=embeddings.data_ptr())
    made.held = embeddings, adapters
    if adapters is not None:
        made.adapter, made.rank = ctypes.addressof(adapters.table), adapters.rank
    return made
