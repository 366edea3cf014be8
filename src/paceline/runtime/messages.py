"""Messages of stages and their coordinator.

    Clear      another epoch begins, with the address of frames that leave; is answered by `Ready`
    Verdicts   of the target, to all stages; has no answer
    Dropped    a stage lost its K/V, and comes back by itself
    Compute    a frame, from the coordinator to the first stage, from stage to stage, and back from the last but one

States go in and come out: embedding tokens and reading the last states are the coordinator's (`stage_workers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..model.stages import Frame, StageRows

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Rows:
    """`StageRows` without tokens, which a stage does not need, and with its tensors in the frame's."""

    request: int
    version: int
    nodes: list[int]
    positions: list[Count]
    first_key: int  # of keys in consecutive slots; below 0: they are among the frame's
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
    keys: Tensor  # [all that are not consecutive] int64 slots, one part's after the other
    visible: Tensor  # [all masks] bool, in the same order
    seconds: float = 0.0  # the most that a stage spent on it so far


@dataclass(frozen=True, slots=True)
class Clear:
    """Nothing in flight counts any more."""

    epoch: int
    out: str  # address of the next stage's frames (`wire.listening`)


@dataclass(frozen=True, slots=True)
class Ready:
    """Frames of an epoch may come."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A stage lost its K/V."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts of some requests, newest last."""

    survivors: list[tuple[int, int, list[int]]] = field(default_factory=list)  # request, version, nodes that are left
    closed: list[int] = field(default_factory=list)  # requests that ended
    ended: list[int] = field(default_factory=list)  # of which no frame is in flight any more


KINDS = Clear, Ready, Dropped, Verdicts


def message_of(frame: Frame, seconds: float = 0.0) -> Compute:
    """Return a frame whose tokens are embedded as a message; tensors are not copied before they are sent."""
    keys = [part.keys for part in frame.parts if not isinstance(part.keys, slice)]
    masks = [part.visible.reshape(-1) for part in frame.parts if part.visible is not None]
    return Compute(
        frame.epoch,
        [_rows(part) for part in frame.parts],
        [([*sources], [*targets]) for sources, targets in frame.moves],
        torch.empty(0) if frame.hidden is None else frame.hidden,
        torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64),
        torch.cat(masks) if masks else torch.empty(0, dtype=torch.bool),
        seconds,
    )


def _rows(part: StageRows) -> Rows:
    places = None if part.block_positions is None else [*part.block_positions]
    first = part.keys.start if isinstance(part.keys, slice) else -1
    masked = part.visible is not None
    return Rows(
        part.request, part.version, [*part.nodes], [*part.positions], first, part.num_keys, part.prefix, masked, places
    )


def frame_of(message: Compute, device: torch.device) -> Frame:
    """Return the frame of a message.

    Raises:
        ValueError: its parts do not fit together.
    """
    keys = _cut(message.keys, [rows.num_keys for rows in message.parts if rows.first_key < 0])
    blocks = [len(rows.nodes) * (rows.num_keys - rows.prefix) for rows in message.parts if rows.masked]
    masks = _cut(message.visible, blocks)
    parts = [_part(rows, keys, masks, device) for rows in message.parts]
    frame = Frame(message.epoch, parts, message.hidden.to(device) if parts else None, message.moves)
    if parts and frame.rows != len(message.hidden):
        raise ValueError("a frame with more states than rows, or fewer")
    return frame


def _cut(whole: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    if min(sizes, default=0) < 0 or sum(sizes) != len(whole):
        raise ValueError("a frame with more keys or masks than its rows need, or fewer")
    return iter(whole.split(sizes))


def _part(rows: Rows, keys: Iterator[Tensor], masks: Iterator[Tensor], device: torch.device) -> StageRows:
    count, block = len(rows.nodes), rows.num_keys - rows.prefix
    if not 0 < count <= block or len(rows.positions) != count or len(rows.block_positions or [0] * block) != block:
        raise ValueError(f"{count} rows with {len(rows.positions)} positions among {block} keys after a prefix")
    slots = slice(rows.first_key, rows.first_key + rows.num_keys) if rows.first_key >= 0 else next(keys).to(device)
    visible = next(masks).view(count, block) if rows.masked else None
    tokens: Sequence[int] = [0] * count
    places = rows.nodes, rows.positions, slots, rows.num_keys, rows.prefix, visible, rows.block_positions
    return StageRows(rows.request, rows.version, tokens, *places)
