"""A stage in a process of its own: the messages, and who serves them.

    Compute    a frame; is answered by `Computed` where it has rows
    Clear      another epoch begins; has no answer

States go in and come out: who embeds tokens and reads the last states is the coordinator (`stage_workers`). It sends
every frame on, and prunes it first, so that no verdict reaches a stage too late.

Source: SpecPipe, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ..core.inference import inference
from ..network.stages import Frame, Stage, StageRows
from .handshake import Facts

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Rows:
    """`StageRows` without tokens, for which a stage has no use, and with its tensors in the frame's."""

    request: int
    version: int
    nodes: list[int]
    positions: list[Count]
    first_key: int  # of keys that lie in one piece; below 0: they are among the frame's
    num_keys: Count
    prefix: Count
    masked: bool  # whether the frame has a mask for them; else a chain
    block_positions: list[Count] | None


@dataclass(frozen=True, slots=True)
class Compute:
    """A frame to a stage."""

    epoch: int
    parts: list[Rows]
    moves: list[tuple[list[Count], list[Count]]]
    hidden: Tensor  # [rows, d_model]
    keys: Tensor  # [all that lie in no piece] int64 slots, one part's behind the other
    visible: Tensor  # [all masks] bool, likewise


@dataclass(frozen=True, slots=True)
class Computed:
    """The states of a frame's rows behind the stage's last layer."""

    epoch: int
    hidden: Tensor  # [rows, d_model]
    seconds: float  # that they took the stage


@dataclass(frozen=True, slots=True)
class Clear:
    """Nothing of what is in flight counts any more."""

    epoch: int


KINDS: dict[str, type[Any]] = {"compute": Compute, "computed": Computed, "clear": Clear}


def message_of(frame: Frame) -> Compute:
    """A frame whose tokens are embedded, as a message; tensors are not copied before they are sent."""
    keys = [part.keys for part in frame.parts if not isinstance(part.keys, slice)]
    masks = [part.visible.reshape(-1) for part in frame.parts if part.visible is not None]
    return Compute(
        frame.epoch,
        [_rows(part) for part in frame.parts],
        [([*sources], [*targets]) for sources, targets in frame.moves],
        torch.empty(0) if frame.hidden is None else frame.hidden,
        torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64),
        torch.cat(masks) if masks else torch.empty(0, dtype=torch.bool),
    )


def _rows(part: StageRows) -> Rows:
    places = None if part.block_positions is None else [*part.block_positions]
    first = part.keys.start if isinstance(part.keys, slice) else -1
    masked = part.visible is not None
    return Rows(
        part.request, part.version, [*part.nodes], [*part.positions], first, part.num_keys, part.prefix, masked, places
    )


def frame_of(message: Compute, device: torch.device) -> Frame:
    """The frame that a message says.

    Raises:
        ValueError: its parts do not fit together.
    """
    keys, masks = _Taken(message.keys), _Taken(message.visible)
    parts = [_part(rows, keys, masks, device) for rows in message.parts]
    frame = Frame(message.epoch, parts, message.hidden.to(device) if parts else None, message.moves)
    if keys.left or masks.left or (parts and frame.rows != len(message.hidden)):
        raise ValueError("a frame with more keys, masks or states than rows have")
    return frame


class _Taken:
    """A tensor from which parts are taken, one behind the other."""

    def __init__(self, whole: Tensor) -> None:
        self._whole, self._at = whole, 0

    @property
    def left(self) -> int:
        return len(self._whole) - self._at

    def take(self, count: int) -> Tensor:
        if count > self.left:
            raise ValueError("a frame with fewer keys or masks than its rows need")
        self._at += count
        return self._whole[self._at - count : self._at]


def _part(rows: Rows, keys: _Taken, masks: _Taken, device: torch.device) -> StageRows:
    own, block = len(rows.nodes), rows.num_keys - rows.prefix
    if not 0 < own <= block or len(rows.positions) != own or len(rows.block_positions or [0] * block) != block:
        raise ValueError(f"{own} rows with {len(rows.positions)} positions among {block} keys behind a prefix")
    one_piece = rows.first_key >= 0
    slots = slice(rows.first_key, rows.first_key + rows.num_keys) if one_piece else keys.take(rows.num_keys).to(device)
    visible = masks.take(own * block).view(own, block) if rows.masked else None
    tokens: Sequence[int] = [0] * own
    told = rows.nodes, rows.positions, slots, rows.num_keys, rows.prefix, visible, rows.block_positions
    return StageRows(rows.request, rows.version, tokens, *told)


class StageService:
    """A stage behind a line.

    Args:
        stage: of a decoder without words.
        facts: about its weights.
    """

    kinds = KINDS

    def __init__(self, stage: Stage, facts: Facts) -> None:
        self.stage, self.facts = stage, facts

    @inference
    def handle(self, message: Any) -> Iterable[Any]:
        """Do what a message says."""
        if isinstance(message, Clear):
            self.stage.forget(message.epoch)
            return ()
        began = time.monotonic()
        frame = self.stage.run(frame_of(message, self.stage.decoder.device))
        return () if frame.hidden is None else (Computed(frame.epoch, frame.hidden, time.monotonic() - began),)

    def work(self) -> None:
        """Nothing is left behind a frame."""
        return None
