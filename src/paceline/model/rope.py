"""Rotary position embedding: the table of cos and sin.

Su et al. 2021 (RoFormer). Query and key of a head are rotated in pairs (i, i + dim/2), as Hugging Face
checkpoints expect: ``x * cos + swap_halves(x) * (-sin, sin)``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Rows of the table are computed this many at a time, so that their bits do not depend on when it grew.
_TABLE_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Describe which rotation a family uses."""

    dim: int  # rotated dimensions of a head, the first ones; the others pass
    theta: float = 10000.0
    scaled: tuple[float, ...] = ()  # [dim/2] radians a position, of a rotation that a rule scales
    attention_factor: float = 1.0  # multiplies cos and sin

    def frequencies(self, dtype: torch.dtype) -> Tensor:
        """Return [dim/2] radians a position, computed in ``dtype``; scaled ones are float32, as models learned them."""
        if self.scaled:
            return torch.tensor(self.scaled, dtype=torch.float32).to(dtype)
        return 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.int64).to(dtype) / self.dim)


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin of positions 0, 1, ..: what a `RopeTable` holds at one moment. Never changed once it is there."""

    cos: Tensor  # [positions, 1, dim]
    sin: Tensor  # [positions, 1, dim], first half negated

    def __len__(self) -> int:
        return len(self.cos)

    @cached_property  # threads that need it at once may each make it, the same numbers: all hold a whole pair
    def halves(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, dim/2], unsigned, contiguous, which rotate both halves of a head."""
        half = self.cos.shape[-1] // 2
        return self.cos[:, 0, half:].contiguous(), self.sin[:, 0, half:].contiguous()


class RopeTable:
    """cos and signed sin by position: two look-ups a forward pass. Threads may share it.

    A table, and not cos() of each pass's positions, since a vectorised cos may round a lane and a tail differently, and
    bits must not depend on how many rows a pass has.
    """

    def __init__(
        self,
        rope: RopeConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._inverse = rope.frequencies(self._wide)
        self._growing = threading.Lock()
        empty = torch.empty(0, 1, rope.dim, dtype=dtype, device=device)
        self.now = Rotation(empty, empty)  # replaced as a whole: a reader takes one of them and keeps to it

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin [rows, 1, dim] of ``positions`` [rows]."""
        now = self.reach(int(positions.max())) if positions.numel() else self.now
        return now.cos[positions], now.sin[positions]

    def reach(self, position: int) -> Rotation:
        """Return the table, grown until it holds ``position``."""
        if position >= len(self.now):
            with self._growing:
                if blocks := range(len(self.now), position + 1, _TABLE_BLOCK):  # else another thread was faster
                    cos, sin = zip(*(self._block(start) for start in blocks), strict=True)
                    self.now = Rotation(torch.cat((self.now.cos, *cos)), torch.cat((self.now.sin, *sin)))
        return self.now

    def _block(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _TABLE_BLOCK).to(self._wide)
        angles = positions[:, None, None] * self._inverse  # [block, 1, dim/2]
        cos, sin = angles.cos() * self._rope.attention_factor, angles.sin() * self._rope.attention_factor
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return both[0].to(self._device, self._dtype), both[1].to(self._device, self._dtype)


class RopeTables:
    """The tables of a network's layers, one for each of their rotations [layers] that differs.

    A layer of None rotates nothing.
    """

    def __init__(
        self,
        rotations: Sequence[RopeConfig | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kinds = [rope for rope in dict.fromkeys(rotations) if rope is not None]
        self._tables = [RopeTable(rope, dtype, device) for rope in kinds]
        self.of_layer = [-1 if rope is None else kinds.index(rope) for rope in rotations]  # table; -1: none
        self._joined: tuple[list[Rotation], tuple[Tensor, Tensor]] = [], (torch.empty(0), torch.empty(0))

    def rows(self, positions: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return `RopeTable.rows` of each table, and None for layers without one: the last, number -1."""
        return [*(table.rows(positions) for table in self._tables), None]

    def reach(self, position: int) -> tuple[Tensor, Tensor]:
        """Return `joined`, once every table holds ``position``."""
        for table in self._tables:
            table.reach(position)
        return self.joined()

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return `Rotation.halves` of all tables as they are, [tables, positions, dim/2].

        The same until one of them grows.
        """
        parts, (before, both) = [table.now for table in self._tables], self._joined
        if len(parts) != len(before) or any(a is not b for a, b in zip(parts, before, strict=True)):
            shortest = min(map(len, parts))  # another thread may be making one of them longer
            cos, sin = zip(*(part.halves for part in parts), strict=True)
            both = _stacked(cos, shortest), _stacked(sin, shortest)
            self._joined = parts, both
        return both


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [.., heads, head_dim] with as many dimensions turned as ``cos`` and signed ``sin`` have."""
    dim = cos.shape[-1]
    part = x[..., :dim]
    turned = (part * cos + part.roll(dim // 2, -1) * sin).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)


def _stacked(parts: Sequence[Tensor], length: int) -> Tensor:
    """Return [parts, length, ..] of each part's first entries; a view where there is one part."""
    return parts[0][None] if len(parts) == 1 else torch.stack([part[:length] for part in parts])
