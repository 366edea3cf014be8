"""Low-rank adapters next to a decoder's linear layers: y += scale * up(down(x)).

Source: Hu et al. 2021 (LoRA).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import ConfigError
from .families import linear_shapes as linear_shapes
from .linear import LinearOp, RowBlocks, make_linear, nan_parameter

LINEARS = ("qkv", "out", "up", "down")
Shapes = Mapping[str, tuple[int, int]]
"""linear -> (inputs, outputs); see `linear_shapes`."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Describe which linear layers have an adapter, and how wide it is."""

    rank: int = 8
    alpha: float = 8.0  # the adapter's output is scaled by alpha / rank
    layers: tuple[int, ...]  # absolute, ascending
    linears: tuple[str, ...] = LINEARS

    def __post_init__(self) -> None:
        self._require("rank", isinstance(self.rank, int) and self.rank >= 1, "must be 1 or more")
        self._require("alpha", 0 < self.alpha < float("inf"), "must be above 0")
        ascending = all(isinstance(x, int) for x in self.layers) and list(self.layers) == sorted({*self.layers})
        self._require("layers", ascending and min(self.layers, default=0) >= 0, "must be ascending layer indices")
        once = bool(self.linears) and len({*self.linears}) == len(self.linears)
        valid = once and set(self.linears) <= {*LINEARS}
        self._require("linears", valid, f"must be some of {', '.join(LINEARS)}, each once")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"adapter {name}={getattr(self, name)!r}", f"{name} {rule}", f"choose another {name}")

    @property
    def scale(self) -> float:
        """Return what up(down(x)) is multiplied by."""
        return self.alpha / self.rank


class LowRank(nn.Module):
    """The adapters of one set: a pair (down [rank, in], up [out, rank]) for each layer and linear named.

    ``shapes`` are as of `linear_shapes`.

    The parameters hold NaN until they are loaded or made by `start`. They can be trained as they are; `prepare` turns
    them into the kernels that inference uses.

    Raises:
        ConfigError: a linear without a shape.
    """

    def __init__(
        self,
        config: AdapterConfig,
        shapes: Shapes,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        missing = [name for name in config.linears if name not in shapes]
        if missing:
            raise ConfigError(f"adapters of {', '.join(missing)}", "no shape is given for them", "see linear_shapes")
        self.config = config
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for layer in config.layers:
            for linear in config.linears:
                inputs, outputs = shapes[linear]
                self.down[_key(layer, linear)] = nan_parameter((config.rank, inputs), dtype, device, True)
                self.up[_key(layer, linear)] = nan_parameter((outputs, config.rank), dtype, device, True)
        self._ops: dict[tuple[int, str], tuple[LinearOp, LinearOp]] = {}

    @property
    def scale(self) -> float:
        """Return what up(down(x)) is multiplied by."""
        return self.config.scale

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> LowRank:
        """Start values: down ~ N(0, 1 / in), up = 0, so that every delta begins as 0."""
        for down in self.down.values():
            fill_normal(down, down.shape[1] ** -0.5, generator)
        for up in self.up.values():
            up.zero_()
        return self

    def pairs(self) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yield (layer, linear, down [rank, in], up [out, rank]) of every pair."""
        for layer in self.config.layers:
            for linear in self.config.linears:
                yield layer, linear, self.down[_key(layer, linear)], self.up[_key(layer, linear)]

    def pair(self, layer: int, linear: str) -> tuple[Tensor, Tensor] | None:
        """Return down [rank, in] and up [out, rank]; None where this linear has no adapter."""
        key = _key(layer, linear)
        return (self.down[key], self.up[key]) if key in self.down else None

    def prepare(self, exact: bool = False) -> LowRank:
        """Make `delta` use inference kernels from now on; later changes of parameters have no effect.

        Args:
            exact: a row's bits must not depend on the number of rows.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        for layer, linear, down, up in self.pairs():
            if down.isnan().any() or up.isnan().any():
                raise not_loaded(f"the adapter of layer {layer}, {linear}")
            self._ops[layer, linear] = _op(down.data, exact), _op(up.data, exact)
        return self

    def delta(self, layer: int, linear: str, x: Tensor) -> Tensor | None:
        """Return what the adapter adds to the linear's output: scale * up(down(x)).

        Args:
            layer: absolute index.
            linear: one of `LINEARS`.
            x: [..., in], the input of that linear; [rows, in] once prepared.

        Returns:
            [..., out]; None where this linear has no adapter.

        Source: Hu et al. 2021, eq. 3.
        """
        ops = self._ops.get((layer, linear))
        if ops is not None:
            down, up = ops
            return up(down(x)).mul_(self.scale)
        pair = self.pair(layer, linear)
        return None if pair is None else F.linear(F.linear(x, pair[0]) * self.scale, pair[1])

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters under their names in a file: ``{layer}.{linear}.down`` and ``.up``."""
        pairs = ((f"{layer}.{linear}", down, up) for layer, linear, down, up in self.pairs())
        return {f"{name}.{end}": part for name, *pair in pairs for end, part in zip(("down", "up"), pair, strict=True)}


@dataclass(frozen=True, slots=True)
class AdapterRange:
    """Rows start .. stop - 1 of a packed pass go through ``adapter`` besides the base's linear layers."""

    start: int
    stop: int
    adapter: LowRank


def joined(parts: Iterable[tuple[int, int, LowRank | None]]) -> tuple[AdapterRange, ...]:
    """Return (start, stop, adapter), ascending, as disjoint ranges.

    Neighbours with the same adapters are one, and those without rows or adapters are left out.
    """
    ranges: list[AdapterRange] = []
    for start, stop, adapter in parts:
        if adapter is None or start == stop:
            continue
        if ranges and ranges[-1].stop == start and ranges[-1].adapter is adapter:
            start = ranges.pop().start
        ranges.append(AdapterRange(start, stop, adapter))
    return tuple(ranges)


def not_loaded(what: str) -> ConfigError:
    """Return the error for parameters that still hold NaN."""
    return ConfigError(what, "holds NaN: not loaded, or broken in the file", "restore the file, or train it again")


def fill_normal(parameter: Tensor, deviation: float, generator: torch.Generator | None) -> None:
    """Draw N(0, deviation^2) in float32 on the CPU, so that a seed means the same everywhere."""
    parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(deviation))


def _op(weight: Tensor, exact: bool) -> LinearOp:
    """Return a product as inference wants it.

    It is so narrow, on either side, that the probe of `make_linear` cannot be trusted to see whether its bits depend on
    the number of rows.
    """
    return RowBlocks(make_linear(weight, None)) if exact else make_linear(weight, None)


def _key(layer: int, linear: str) -> str:
    return f"{layer}_{linear}"  # a dot is not allowed in a parameter's name
