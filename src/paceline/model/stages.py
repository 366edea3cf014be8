"""A target in stages: each runs a range of its layers, over K and V of its own.

    frame -> stage 0: embed, layers 0 .. a - 1 -> stage 1: layers a .. b - 1 -> .. -> the last layer's states

A frame has everything that a stage must know: where rows stand, which slots they write and which they see. K and V are
moved in the order of the frames: moves ride on the next frame, and each stage moves its own layers'
before it computes. So a frame that was sent before a move has written its rows, at every stage, before they are moved.

Verdicts overtake frames. They spare a stage rows that are of no use any more, and change nothing else.

Source: SpecPipe, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..kv.ledger import SlotStore
from ..kv.store import KVStore
from .applications import Application, adapter_ranges
from .attention.base import slot_indices
from .base import ForwardState, LayerCache, Taps
from .decoder import Decoder
from .fields import Slots, Values
from .packing import RowPacker

LOOK_S = 1e-4  # between two looks for a late level
TEXT = -1  # in place of a node: a token of the text


@dataclass(frozen=True, slots=True)
class StageRows:
    """One request's rows in a frame."""

    request: int  # unique among all that ever enter
    version: int  # verdicts of the request before its rows entered
    tokens: Sequence[int]
    nodes: Sequence[int]  # of each row; `TEXT`: a token of the text, which no verdict drops
    positions: Sequence[int]
    keys: Slots  # slots of all keys in logical order, those of the rows themselves last
    num_keys: int
    prefix: int  # leading keys that every row sees
    visible: Values | None = None  # [rows, num_keys - prefix] bool; None: a chain
    block_positions: Sequence[int] | None = None  # [num_keys - prefix]; None: prefix, prefix + 1, ..
    application: Application | None = None  # whose adapters the rows have

    @property
    def slots(self) -> slice | Tensor:
        """Return where the rows' own K and V go."""
        context = self.num_keys - len(self.nodes)
        return slice(self.keys.start + context, self.keys.stop) if isinstance(self.keys, slice) else self.keys[context:]

    def keep(self, rows: Sequence[int]) -> StageRows:
        """Return some of the rows, ascending, alone; the others are neither written nor seen from here on.

        Rows of a tree: those of a text stay, or go, together.
        """
        assert self.visible is not None and self.block_positions is not None, "a text's rows go together"
        context = self.num_keys - len(self.nodes)
        columns = [*range(context - self.prefix), *(context - self.prefix + row for row in rows)]
        keys = slot_indices(self.keys, self.visible.device)
        return replace(
            self,
            tokens=[self.tokens[row] for row in rows],
            nodes=[self.nodes[row] for row in rows],
            positions=[self.positions[row] for row in rows],
            keys=torch.cat([keys[: self.prefix], keys[self.prefix :][columns]]),
            num_keys=self.prefix + len(columns),
            visible=self.visible[[*rows]][:, columns],
            block_positions=[self.block_positions[column] for column in columns],
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """Describe what goes from stage to stage in one tick."""

    epoch: int
    parts: Sequence[StageRows]
    hidden: Values | None = None  # [rows, d_model, and as much for each of ``taps`` so far]; None: not embedded yet
    moves: Sequence[tuple[Sequence[int], Sequence[int]]] = ()  # source and target slots, to be copied before
    ended: Sequence[int] = ()  # requests of which no frame comes any more
    taps: Sequence[int] = ()  # layers, ascending, after which states of all rows are taken along

    @property
    def rows(self) -> int:
        """Return rows of all requests."""
        return sum(len(part.nodes) for part in self.parts)


@dataclass(eq=False)
class Stage:
    """A range of a target's layers with K and V of their own, in ``store``."""

    decoder: Decoder
    start: int
    stop: int
    store: KVStore
    first: int = 0  # of the target's layers, with which the decoder begins
    epoch: int = 0
    _told: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)  # the newest verdict of each request
    _closed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        first, behind = self.start, self.decoder.cache_shape[0] - self.stop
        # By the layers' own numbers: those of other layers are never touched.
        self._cache = LayerCache(*([*kv[:1] * first, *kv, *kv[:1] * behind] for kv in (self.store.k, self.store.v)))
        ranks = self.decoder.ranks
        line = None if ranks is None else ranks.line
        self._moved: SlotStore = self.store if line is None else line.followed(self.store, self._cache)

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """Apply a verdict: of the request's rows that entered before it, keep only these nodes.

        They may come late and in any order: a node that a later verdict left was left by the earlier ones, so the
        newest has all. One thread may deliver while another looks at rows: version and nodes are taken as one.
        """
        if version > self._told.get(request, (0, None))[0]:
            self._told[request] = version, alive

    def close(self, request: int) -> None:
        """End the request: drop all its rows."""
        self._told.pop(request, None)
        self._closed.add(request)

    def forget(self, epoch: int) -> None:
        """Begin a new epoch: frames of others are nothing, and no request is known."""
        self.epoch, self._told, self._closed = epoch, {}, set()

    def run(self, frame: Frame) -> Frame:
        """Return one frame through the stage's layers: what of it is still of use."""
        if frame.epoch != self.epoch:
            return Frame(frame.epoch, ())
        for sources, targets in frame.moves:
            self._moved.copy_slots(sources, targets)
        frame = self.pruned(frame)
        for request in frame.ended:  # no further frame comes of them
            self._told.pop(request, None)
            self._closed.discard(request)
        if not frame.rows:
            return replace(frame, hidden=None)
        layers = tuple(tap - self.first for tap in frame.taps if self.start <= tap - self.first < self.stop)
        state, taps = self._state(frame), Taps(layers)
        hidden = self.decoder.run_layers(state, self.start, self.stop, self._cache, taps if layers else None).hidden
        if frame.taps:
            before = () if frame.hidden is None else (frame.hidden[:, hidden.shape[1] :].to(hidden.device),)
            hidden = torch.cat([hidden, *before, *(taps.hidden[tap] for tap in layers)], dim=1)
        return replace(frame, hidden=hidden)

    def rows_left(self, request: int, version: int, nodes: Sequence[int]) -> Sequence[int]:
        """Return indices of the nodes that are left, of those that entered after so many verdicts; text always is."""
        newest, alive = self._told.get(request, (0, frozenset()))
        if request in self._closed:
            return ()
        if version >= newest:
            return range(len(nodes))
        return [row for row, node in enumerate(nodes) if node == TEXT or node in alive]

    def pruned(self, frame: Frame) -> Frame:
        """Drop the rows that the stage knows to be of no use."""
        parts: list[StageRows] = []
        rows_left: list[int] = []
        begin = 0
        for part in frame.parts:
            rows = self.rows_left(part.request, part.version, part.nodes)
            rows_left += [begin + row for row in rows]
            begin += len(part.nodes)
            if rows:
                parts.append(part if len(rows) == len(part.nodes) else part.keep(rows))
        if len(rows_left) == begin:
            return frame
        hidden = None if frame.hidden is None or not rows_left else frame.hidden[rows_left]
        return replace(frame, parts=parts, hidden=hidden)

    def _state(self, frame: Frame) -> ForwardState:
        """Return the stage's own plan for a frame's rows, over its own K and V."""
        packer = RowPacker(self.decoder, self.decoder.device)
        ranges = []
        device = self.decoder.device
        for part in frame.parts:
            first = packer.rows
            if not isinstance(part.keys, slice):
                part = replace(part, keys=part.keys.to(device))
            packer.add(
                part.tokens,
                part.positions,
                slots=part.slots,
                keys=part.keys,
                num_keys=part.num_keys,
                prefix=part.prefix,
                visible=part.visible,
                block_positions=part.block_positions,
            )
            ranges.append((first, packer.rows))
        batch = packer.batch()
        if frame.hidden is None:
            state = self.decoder.embed(batch)
        else:
            hidden = frame.hidden[:, : self.decoder.config.d_model] if frame.taps else frame.hidden
            state = ForwardState(hidden.contiguous().to(device), batch.positions, batch.slots, batch.attn)
        if any(part.application is not None for part in frame.parts):
            state.adapters = adapter_ranges([part.application for part in frame.parts], ranges)
        return state


def even_cuts(layers: int, stages: int) -> list[int]:
    """Return the bounds of stages, from 0 to ``layers``: as even as can be, the first ones shorter.

    Raises:
        ConfigError: fewer layers than stages, or no stage.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"{stages} stages", f"the target has {layers} layers", f"give 1 to {layers} stages")
    size, longer = divmod(layers, stages)
    return [stage * size + max(0, stage + longer - stages) for stage in range(stages + 1)]


class StagesInTurn:
    """Stages of this process, one after the other."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages, self.count = stages, len(stages)
        self.layers = stages[-1].stop
        self._held: list[Frame | None] = [None] * self.count
        self._rest_s = 0.0  # that a late level may still be waited for

    def tick(self, entering: Frame | None) -> Frame | None:
        """Implement `model.stage_line.StageLine`."""
        began = time.perf_counter()
        self._held[0] = entering
        done = self.compute(self._held)
        self._held = [None, *done[:-1]]
        self._rest_s = time.perf_counter() - began
        return done[-1]

    def rest(self) -> bool:
        """Implement `model.stage_line.StageLine`; waits as long again as the tick took."""
        self._rest_s -= LOOK_S
        if self._rest_s <= 0:
            return False
        time.sleep(LOOK_S)
        return True

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """Return what each stage makes of what it holds."""
        pairs = zip(self.stages, held, strict=True)
        return [None if frame is None else stage.run(frame) for stage, frame in pairs]

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """Implement `model.stage_line.StageLine`."""
        for stage in self.stages:
            stage.tell(request, version, alive)

    def close(self, request: int) -> None:
        """Implement `model.stage_line.StageLine`."""
        for stage in self.stages:
            stage.close(request)

    def clear(self) -> int:
        """Implement `model.stage_line.StageLine`."""
        self._held = [None] * self.count
        epoch = self.stages[0].epoch + 1
        for stage in self.stages:
            stage.forget(epoch)
        return epoch
