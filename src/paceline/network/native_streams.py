"""Streams of a compiled pass: what `native.Stack.decide_streams` is given and gives back."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import native

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


class Riding(NamedTuple):
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

    def numbers(self) -> list[int]:
        """What compiled code reads behind the numbers of `Asked`."""
        scratch = self.scratch
        found = [
            len(self.carriers),
            self.k,
            scratch.start,
            scratch.stop - scratch.start,
            int(self.noisy),
            self.most or 0,
        ]
        for span, root, streams, most, ends, riders in self.carriers:
            found += (span, root, streams, most, len(ends), len(riders), *ends, *riders)
        return found


class Told(NamedTuple):
    """What the streams of one sequence's last accepted node say."""

    tokens: list[list[int]]  # [streams][k], likeliest first
    log_q: list[list[float]]
    rode: bool  # with the main rows; else they ran afterwards


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
        self.struct = native.StreamSet(config.gamma, config.insertion * stack.stretch, self._embeddings.data_ptr())
        if streams.adapters is not None:
            self._adapters = stack.adapters(streams.adapters)
            self.struct.adapter, self.struct.rank = ctypes.addressof(self._adapters.table), self._adapters.rank
        self.reference = ctypes.byref(self.struct)


def limits_of(parts: Sequence[StreamLimit]) -> Any:
    """Limits of attention as the compiled layers read them, a main row each: an array of `native.Limit`."""
    table = []
    for part in parts:
        rows = part.rows.tolist()
        gamma = (part.streams.stop - part.streams.start) // len(rows)
        for i, row in enumerate(rows):
            start = part.streams.start + i * gamma
            table.append(native.Limit(row, start, start + gamma, len(part.keys), part.most))
    return (native.Limit * len(table))(*table)


def told(out: list[int], log_q: list[float], carriers: int, block: int, k: int) -> list[Told | None]:
    """What `pl_choose_streams` wrote for each carrier."""
    found: list[Told | None] = []
    for i in range(carriers):
        at = i * (2 + block)
        streams, rode = out[at], out[at + 1]
        rows = range(0, streams * k, k)
        tokens, scores = out[at + 2 : at + 2 + block], log_q[i * block : (i + 1) * block]
        said = Told([tokens[j : j + k] for j in rows], [scores[j : j + k] for j in rows], bool(rode))
        found.append(said if streams else None)
    return found
