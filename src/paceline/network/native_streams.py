"""Streams of a compiled pass: what `Stack.decide_streams` is given and gives back."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..native import abi
from .native_calls import numbers

if TYPE_CHECKING:
    from .native import Stack
    from .stream_rows import StreamLimit
    from .streams import StreamSet


class CarrierRows(NamedTuple):
    """A sequence whose next draft is read from streams, for `Stack.decide_streams`."""

    span: int  # index of its `RowSpan`
    root: int  # its root's row
    streams: int  # that are wanted of its last accepted node, the first ones
    most: int  # accepted nodes behind which a draft is of use
    ends: Collection[int]  # tokens that end its answer: no draft is wanted behind them
    riders: Sequence[int]  # nodes whose streams go with the main rows, ascending


class StreamRun(NamedTuple):
    """The streams of a pass, for `Stack.decide_streams`."""

    streams: StreamSet
    carriers: Sequence[CarrierRows]  # in the order of their spans
    k: int  # tokens wanted of each stream
    scratch: slice  # slots for K and V of streams: of all riders, and of a row's for every carrier
    noisy: bool = False  # whether a sequence that samples has its drafts drawn with the noise of its own choices
    most: int | None = None  # keys of its main row that a stream attends to; then every node is a rider. None: all

    @property
    def rows(self) -> int:
        """Stream rows of the pass itself."""
        return sum(c.streams * len(c.riders) for c in self.carriers)

    def begin(self, made: NativeStreams, held: list[Any]) -> StreamCall:
        """As compiled code reads it; what must stay alive meanwhile is appended to ``held``."""
        table = (abi.CCarrier * len(self.carriers))()
        for row, (span, root, streams, most, ends, riders) in zip(table, self.carriers, strict=True):
            row.segment, row.root, row.streams, row.most = span, root, streams, most
            row.ends, row.num_ends = numbers([*ends], held), len(ends)
            row.riders, row.num_riders = numbers(riders, held), len(riders)
        scratch = self.scratch
        whole = abi.CStreamPass(
            set=ctypes.addressof(made.struct),
            carriers=ctypes.addressof(table),
            count=len(table),
            k=self.k,
            scratch=scratch.start,
            room=scratch.stop - scratch.start,
            noisy=self.noisy,
            most=self.most or 0,
        )
        return StreamCall(whole, table, made.gamma, self.k)


class StreamTokens(NamedTuple):
    """What the streams of one sequence's last accepted node say."""

    tokens: list[list[int]]  # [streams][k], likeliest first
    log_q: list[list[float]]
    rode: bool  # with the main rows; else they ran afterwards


class StreamCall:
    """A `StreamRun` in compiled code, and room for what its streams say."""

    def __init__(self, struct: abi.CStreamPass, carriers: Any, gamma: int, k: int) -> None:
        self.struct, self._carriers, self._k = struct, carriers, k
        self._rooms = [(array("q", bytes(8 * gamma * k)), array("f", bytes(4 * gamma * k))) for _ in carriers]
        for row, (tokens, log_q) in zip(carriers, self._rooms, strict=True):
            row.tokens, row.log_q = tokens.buffer_info()[0], log_q.buffer_info()[0]

    def read(self) -> list[StreamTokens | None]:
        """Of each carrier, after the call."""
        found: list[StreamTokens | None] = []
        for row, (tokens, log_q) in zip(self._carriers, self._rooms, strict=True):
            starts = range(0, row.found * self._k, self._k)
            ids = [tokens[i : i + self._k].tolist() for i in starts]
            logs = [log_q[i : i + self._k].tolist() for i in starts]
            found.append(StreamTokens(ids, logs, bool(row.rode)) if row.found else None)
        return found


class NativeStreams:
    """The parameters of one lossless `StreamSet`, as the compiled layers read them.

    Raises:
        ConfigError: adapters that are not for this model; see `NativeAdapters`.
        ValueError: streams that begin as more than state and embedding.
    """

    def __init__(self, streams: StreamSet, stack: Stack) -> None:
        config = streams.config
        if streams.start_map is not None or streams.embeddings is None:
            raise ValueError("streams that begin through a map, or without embeddings, in one compiled call")
        self.gamma = config.gamma
        self._embeddings = streams.embeddings.detach().to("cpu", stack.dtype).contiguous()
        self.struct = abi.CStreamSet(
            gamma=config.gamma, insertion=config.insertion * stack.stretch, embeddings=self._embeddings.data_ptr()
        )
        if streams.adapters is not None:
            self._adapters = stack.adapters(streams.adapters)
            self.struct.adapter, self.struct.rank = ctypes.addressof(self._adapters.table), self._adapters.rank


def limits_of(parts: Sequence[StreamLimit]) -> Any:
    """Limits of attention as the compiled layers read them, a main row each: an array of `abi.CLimit`."""
    table = []
    for part in parts:
        rows = part.rows.tolist()
        gamma = (part.streams.stop - part.streams.start) // len(rows)
        for i, row in enumerate(rows):
            start = part.streams.start + i * gamma
            table.append(abi.CLimit(row=row, start=start, stop=start + gamma, keys=len(part.keys), most=part.most))
    return (abi.CLimit * len(table))(*table)
