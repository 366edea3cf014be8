"""Rotary position embedding: inverse frequencies of every scaling rule, and the table of cos and sin.

Su et al. 2021 (RoFormer). Query and key of a head are rotated in pairs (i, i + dim/2), as Hugging Face
checkpoints expect: ``x * cos + swap_halves(x) * (-sin, sin)``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn"]

# Rows of the table are computed this many at a time, so that their bits do not depend on when it grew.
_TABLE_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Which rotation a family uses."""

    dim: int  # rotated dimensions of a head, the first ones; the others pass
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # context extension
    original_max_position: int = 0  # positions before the extension (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin
    divisors: tuple[float, ...] = ()  # [dim/2] a divisor for every frequency (LongRoPE's short factors)


def inverse_frequencies(rope: RopeConfig, dtype: torch.dtype) -> Tensor:
    """Return [dim/2] radians a position, computed in ``dtype`` (float32 is what checkpoints were trained with)."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(dtype) / rope.dim
    wavelengths = rope.theta**exponent  # over 2 pi
    if rope.divisors:
        return 1.0 / (torch.tensor(rope.divisors, dtype=dtype) * wavelengths)
    if rope.kind == "linear":
        return (1.0 / wavelengths) / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    return 1.0 / wavelengths


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Slow frequencies are stretched by ``factor``, fast ones stay, those between are blended (Llama 3.1)."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    turns = rope.original_max_position / wavelength  # over the original context
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > rope.original_max_position / low, inverse / rope.factor, blended)
    return torch.where(wavelength < rope.original_max_position / high, inverse, scaled)


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Return blend of extrapolation and interpolation over a ramp of dimensions (Peng et al. 2023, section 3.2)."""

    def dimension(turns: float) -> float:  # at which a frequency makes so many turns over the original context
        return rope.dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=wavelengths.dtype) - low) / width).clamp(0, 1)
    return ramp / (rope.factor * wavelengths) + (1 - ramp) / wavelengths


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return what cos and sin are multiplied by (Peng et al. 2023, eq. 15.

    The two mscales are DeepSeek's refinement).
    """

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin of positions 0, 1, ..: what a `RopeTable` holds at one moment. Never changed once it is there."""

    cos: Tensor  # [positions, 1, dim]
    sin: Tensor  # [positions, 1, dim], first half negated

    def __len__(self) -> int:
        return len(self.cos)

    @cached_property  # threads that ask at once may each make it, the same numbers: all hold a whole pair
    def halves(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, dim/2], unsigned, contiguous, which rotate both halves of a head."""
        half = self.cos.shape[-1] // 2
        return self.cos[:, 0, half:].contiguous(), self.sin[:, 0, half:].contiguous()


class RopeTable:
    """cos and signed sin by position: two look-ups a forward pass. Threads may share it.

    A table, and not cos() of each pass's positions, since a vectorised cos may round a lane and a tail differently, and
    bits must not depend on how many rows a pass has. ``max_position`` positions are the model's context.

    A fixed one holds the context from the start, and `rows` never makes it grow: positions beyond the context are
    announced by `expect`. So is every one but on the CPU (None), where asking for a pass's largest position would stall
    the queue.
    """

    def __init__(
        self,
        rope: RopeConfig,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool | None = None,
    ) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._inverse = inverse_frequencies(rope, self._wide)
        self._fixed = device.type != "cpu" if fixed is None else fixed
        self._growing = threading.Lock()
        empty = torch.empty(0, 1, rope.dim, dtype=dtype, device=device)
        self.now = Rotation(empty, empty)  # replaced as a whole: a reader takes one of them and keeps to it
        if self._fixed:
            self.reach(max_position - 1)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin [rows, 1, dim] of ``positions`` [rows].

        Raises:
            IndexError: a fixed table on the CPU that does not hold one of them (on other devices the look-up fails
                as the device does).
        """
        now = self.now if self._fixed or not positions.numel() else self.reach(int(positions.max()))
        return now.cos[positions], now.sin[positions]

    def expect(self, position: int) -> None:
        """Say that positions up to ``position`` will come: a fixed table grows now, any other when they do."""
        if self._fixed:
            self.reach(position)

    def reach(self, position: int) -> Rotation:
        """Return the table, grown until it holds ``position``."""
        if position >= len(self.now):
            with self._growing:
                self._grow(position + 1)
        return self.now

    def _grow(self, positions: int) -> None:
        blocks = range(len(self.now), positions, _TABLE_BLOCK)
        if blocks:  # else another thread was faster
            cos, sin = zip(*(self._block(start) for start in blocks), strict=True)
            self.now = Rotation(torch.cat((self.now.cos, *cos)), torch.cat((self.now.sin, *sin)))

    def _block(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _TABLE_BLOCK).to(self._wide)
        angles = positions[:, None, None] * self._inverse  # [block, 1, dim/2]
        cos, sin = angles.cos() * self._rope.attention_factor, angles.sin() * self._rope.attention_factor
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return both[0].to(self._device, self._dtype), both[1].to(self._device, self._dtype)


class RopeTables:
    """The tables of a network's layers, one for each of their rotations [layers] that differs; None: that layer rotates
    nothing."""

    def __init__(
        self,
        rotations: Sequence[RopeConfig | None],
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool | None = None,
    ) -> None:
        kinds = [rope for rope in dict.fromkeys(rotations) if rope is not None]
        self._tables = [RopeTable(rope, max_position, dtype, device, fixed) for rope in kinds]
        self.of_layer = [-1 if rope is None else kinds.index(rope) for rope in rotations]  # table; -1: none
        self._joined: tuple[list[Rotation], tuple[Tensor, Tensor]] = [], (torch.empty(0), torch.empty(0))

    def rows(self, positions: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return `RopeTable.rows` of each table, and None for layers without one: the last, number -1."""
        return [*(table.rows(positions) for table in self._tables), None]

    def expect(self, position: int) -> None:
        """Call `RopeTable.expect` of each."""
        for table in self._tables:
            table.expect(position)

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
    """Return heads [.., heads, head_dim] with their first dimensions turned, as many as ``cos`` and signed ``sin``
    have.
    """
    dim = cos.shape[-1]
    part = x[..., :dim]
    turned = (part * cos + part.roll(dim // 2, -1) * sin).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)


def _stacked(parts: Sequence[Tensor], length: int) -> Tensor:
    """Return [parts, length, ..] of each part's first entries; a view where there is one part."""
    return parts[0][None] if len(parts) == 1 else torch.stack([part[:length] for part in parts])
