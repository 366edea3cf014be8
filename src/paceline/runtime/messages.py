"""What stages and their coordinator say to each other.

    Clear      another epoch begins; says by which ways frames go. Has no answer, and what follows waits until the stage
               has its ranks
    Compute    a frame: from the coordinator, answered by `Computed` where it has rows, or from stage to stage
    Verdicts   what the target said, where frames go from stage to stage; has no answer
    AskStage   what a stage is at; is answered by `StageState`
    StageState in place of a `Computed`, too: the stage lost its K/V, and comes back by itself

States go in and come out: who embeds tokens and reads the last states is the coordinator (`stage_workers`).
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
    seconds: float = 0.0  # the most that it took a stage so far


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
    into: str = ""  # the way on which frames come in, and that on which they leave (`ways`) ..
    out: str = ""  # .. both empty: by the coordinator


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What was said of some requests, newest last."""

    told: list[tuple[int, int, list[int]]] = field(default_factory=list)  # request, version, nodes that are left
    closed: list[int] = field(default_factory=list)  # requests that ended
    ended: list[int] = field(default_factory=list)  # of which no frame is under way any more


@dataclass(frozen=True, slots=True)
class AskStage:
    """What are you at?"""

    epoch: int


@dataclass(frozen=True, slots=True)
class StageState:
    """What a stage is at."""

    epoch: int
    rows: Count  # of its frame; 0: it has none
    busy_s: float  # at it
    dropped: str  # why it lost its K/V, and comes back by itself; empty: it has them


KINDS = Compute, Computed, Clear, Verdicts, AskStage, StageState


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
    own, block = len(rows.nodes), rows.num_keys - rows.prefix
    if not 0 < own <= block or len(rows.positions) != own or len(rows.block_positions or [0] * block) != block:
        raise ValueError(f"{own} rows with {len(rows.positions)} positions among {block} keys behind a prefix")
    one_piece = rows.first_key >= 0
    slots = slice(rows.first_key, rows.first_key + rows.num_keys) if one_piece else next(keys).to(device)
    visible = next(masks).view(own, block) if rows.masked else None
    tokens: Sequence[int] = [0] * own
    told = rows.nodes, rows.positions, slots, rows.num_keys, rows.prefix, visible, rows.block_positions
    return StageRows(rows.request, rows.version, tokens, *told)
