"""Tensor parallel: ranks, processes that each hold a part of every weight and compute a part of every product.

    embedding    rows by vocabulary; a row that a rank lacks is zero there, and ranks sum what they have
    qkv, up      outputs are divided: heads of queries, keys and values, and the MLP's inside, are a rank's own
    out, down    inputs are divided, and what comes of them is summed: two sums a layer
    head         outputs are divided: each rank gives the best of its tokens, or its logits, where a rule reads all

With weights by outputs alone (``by_outputs``) no sum crosses ranks: `out` and `down` read what all ranks have,
gathered, and each rank computes some of their outputs, with the same bits at any number of ranks: four gathers a layer.
Weights of 8 and 4 bits are so divided, too: their scales are those of whole rows.

Rank 0 is in the engine's process. What it embeds, runs and reads, the others do as well: it sends them the rows of a
pass in one message (`Run`), and they meet in its sums.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; plans use transformers' words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError, RankLost
from ..weights.names import Piece
from .adapters import AdapterRange, LowRank
from .attention.base import Segment
from .base import KVCache
from .families import FAMILIES, DecoderConfig, linear_shapes
from .fields import Slots, Values
from .joins import Collectives
from .linear import Quant

COLWISE, ROWWISE, BY_VOCABULARY = "colwise", "rowwise", "embedding_rowwise"
PLAN = {"embedding": BY_VOCABULARY, "qkv": COLWISE, "out": ROWWISE, "up": COLWISE, "down": ROWWISE, "head": COLWISE}
LANES = 16  # outputs that compiled layers compute together
Span = tuple[int, int]  # the first, and one past the last


@dataclass(frozen=True)
class Share:
    """Describe what one rank has of a network.

    Args:
        config: of the network.
        rank, count: which of how many ranks.
        by_outputs: whether all weights are divided by their outputs; see the module.

    Raises:
        ConfigError: ranks that do not divide heads or widths.
        CapabilityError: a family without a plan, or weights in blocks, which are not cut.
    """

    config: DecoderConfig
    rank: int
    count: int
    by_outputs: bool = False

    def __post_init__(self) -> None:
        c, subject = self.config, f"tensor_parallel={self.count}"
        if c.family not in FAMILIES:
            raise CapabilityError(subject, f"there is no plan for {c.family}", f"use one of: {', '.join(FAMILIES)}")
        if c.checkpoint_dtype == "stored":
            wrong = "its weights are stored in blocks, which are not cut at ranks"
            raise CapabilityError(subject, wrong, "use the original checkpoint, with dtype='int8' or 'bfloat16'")
        widths = {"heads": c.num_heads, "d_ff": c.d_ff} | ({"width": c.d_model} if self.by_outputs else {})
        for name, width in widths.items():
            unit = LANES if self.by_outputs and name != "heads" else 1
            if width % (self.count * unit):
                wrong = f"{self.count} ranks do not divide {name}: {width}" + (
                    f" in pieces of {unit}" if unit > 1 else ""
                )
                raise ConfigError(subject, wrong, "give a number that divides it, such as 1 or 2")
        if max(c.num_kv_heads, self.count) % min(c.num_kv_heads, self.count):
            wrong = f"{self.count} ranks cannot share {c.num_kv_heads} heads of K and V evenly"
            raise ConfigError(subject, wrong, "give a number that divides them, or a multiple of them")
        if -(-c.vocab_size // self.count) * (self.count - 1) >= c.vocab_size:
            raise ConfigError(subject, f"the vocabulary has {c.vocab_size} tokens", "give fewer ranks")

    @property
    def plan(self) -> Mapping[str, str]:
        """Return how each weight is divided."""
        return {**PLAN, "out": COLWISE, "down": COLWISE} if self.by_outputs else PLAN

    @cached_property
    def vocabulary(self) -> Span:
        """Its tokens."""
        size = -(-self.config.vocab_size // self.count)
        return self.rank * size, min(self.config.vocab_size, (self.rank + 1) * size)

    @property
    def local(self) -> DecoderConfig:
        """The network that its layers are."""
        c, first, last = self.config, *self.vocabulary
        return replace(
            c,
            num_heads=c.num_heads // self.count,
            num_kv_heads=max(1, c.num_kv_heads // self.count),
            d_ff=c.d_ff // self.count,
            vocab_size=last - first,
            gathered=self.count if self.by_outputs else 1,
        )

    def _even(self, width: int) -> Span:
        return self.rank * width // self.count, (self.rank + 1) * width // self.count

    def outputs(self, weight: str) -> list[Span]:
        """Rows of a whole weight that are its own, one range after the other."""
        c, hd = self.config, self.config.head_dim
        if weight in ("embedding", "head"):
            return [self.vocabulary]
        if self.plan[weight] == ROWWISE:
            return [(0, c.d_model)]
        if weight == "up":
            first, last = self._even(c.d_ff)
            return [(first, last), (c.d_ff + first, c.d_ff + last)]
        if weight != "qkv":
            return [self._even(c.d_model)]
        kv = self.rank * c.num_kv_heads // self.count * hd
        width = max(1, c.num_kv_heads // self.count) * hd
        heads, queries, all_kv = self._even(c.num_heads), c.num_heads * hd, c.num_kv_heads * hd
        return [(heads[0] * hd, heads[1] * hd), *((at + kv, at + kv + width) for at in (queries, queries + all_kv))]

    def inputs(self, weight: str) -> slice:
        """Columns of a whole weight that are its own."""
        if self.plan.get(weight) != ROWWISE:
            return slice(None)
        width, unit = linear_shapes(self.config)[weight][0], self.config.head_dim if weight == "out" else 1
        first, last = self._even(width // unit)
        return slice(first * unit, last * unit)

    def cut(self, piece: Piece) -> list[Piece]:
        """Return the part of a checkpoint's tensor that this rank reads."""
        weight, bias = weight_of(piece.into)
        if weight not in self.plan:
            return [piece]
        if bias and self.plan[weight] == ROWWISE:  # a bias is added once: by one rank of those that sum
            return [piece] if self.rank == 0 else []
        begin, rows = piece.at, piece.shape[0]
        spans = self.outputs(weight)
        pieces = []
        for (first, last), at in zip(spans, accumulate((b - a for a, b in spans), initial=0), strict=False):
            low, high = max(first, begin), min(last, begin + rows)
            if low < high:
                take = slice(low - begin, high - begin), *(() if bias else (self.inputs(weight),))
                pieces.append(replace(piece, at=at + low - first, rows=high - low, take=take))
        return pieces

    def absent(self, name: str) -> bool:
        """Return whether a parameter is another rank's alone, and zero here."""
        weight, bias = weight_of(name)
        return bias and self.rank > 0 and self.plan.get(weight) == ROWWISE

    def adapters(self, whole: LowRank) -> LowRank:
        """Its part of adapters: of what the parts of a weight read and give."""
        part = LowRank(whole.config, linear_shapes(self.local), dtype=next(whole.parameters()).dtype)
        for (_, linear, down, up), (_, _, all_down, all_up) in zip(part.pairs(), whole.pairs(), strict=True):
            up.data.copy_(torch.cat([all_up.data[first:last] for first, last in self.outputs(linear)]))
            down.data.copy_(all_down.data[:, self.inputs(linear)])
        return part


def by_outputs(exact: bool, quant: Quant | None) -> bool:
    """Return whether ranks divide all weights by their outputs."""
    return exact or quant is not None


def weight_of(parameter: str) -> tuple[str, bool]:
    """Return the plan's name for a decoder's parameter, and whether it is a bias."""
    parts = parameter.split(".")
    return parts[2] if parts[0] == "layers" else parts[0], parts[-1] == "bias"


# -- passes

NOTHING, BEST, LOGITS, NORMED = range(4)  # output of rows; NORMED: logits of states after the final norm


_NONE = torch.empty(0, dtype=torch.int64)
Move = tuple[int, list[int], list[int]]  # of K and V: cache, slots from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pass, or a part of one, as rank 0 sends it to the others."""

    tokens: Values | None = None  # [rows] int64; None: rows begin as states
    hidden: Values = _NONE  # [rows, d_model]
    layers: Span | None = None  # None: none is run
    positions: Values = _NONE  # [rows] int64
    slots: Slots = _NONE  # where K and V of the rows go
    segments: Sequence[Segment] = ()
    read: int = NOTHING
    choice_rows: Sequence[int] = ()  # that are read; none: all
    # What rank 0's line adds.
    epoch: int = 0
    cache: int = -1  # which K and V, and slots in them
    pool_slots: int = 0
    adapters: list[tuple[int, int, int]] = field(default_factory=list)  # which, of rows from .. to
    moves: list[Move] = field(default_factory=list)  # before anything is computed
    dropped: list[int] = field(default_factory=list)  # caches that were freed: no later run names them

    @property
    def rows(self) -> int:
        """Return the number of rows of the pass."""
        return max(1, len(self.hidden if self.tokens is None else self.tokens))


@dataclass(eq=False)
class Ranks:
    """One of several ranks, at work.

    Args:
        share: what it has.
        joins: what it gives the others, and takes of them.
        line: of rank 0, to the others (`runtime.rank_workers.RankWorkers`).
    """

    share: Share
    joins: Collectives
    line: Any = None
    _inside: bool = False
    _adapters: WeakKeyDictionary[LowRank, LowRank] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.joins.struct.by_outputs = self.share.by_outputs

    @contextmanager
    def together(
        self, run: Callable[[], Run], cache: KVCache | None = None, adapters: Sequence[AdapterRange] = ()
    ) -> Iterator[None]:
        """Have all ranks do something at once, inside of a run that was sent already or of this one."""
        if self.line is None or self._inside:
            yield
            return
        self.line.send(run(), cache, adapters)
        self._inside = True
        try:
            yield
            self.line.done()
        except RankLost:
            raise self.line.lost() from None
        finally:
            self._inside = False

    def adapters(self, ranges: Sequence[AdapterRange], exact: bool | None) -> tuple[AdapterRange, ...]:
        """Its parts of adapters; ``exact``: as of `LowRank.prepare`, None: they are for compiled layers."""
        return tuple(replace(r, adapter=self._part(r.adapter, exact)) for r in ranges)

    def _part(self, whole: LowRank, exact: bool | None) -> LowRank:
        if whole not in self._adapters:
            part = self.share.adapters(whole)
            self._adapters[whole] = part if exact is None else part.prepare(exact)
        return self._adapters[whole]

    def embedded(self, tokens: Tensor, table: Tensor) -> Tensor:
        """[rows, d_model] of ``tokens`` [rows], of which this rank's ``table`` has some."""
        first, last = self.share.vocabulary
        here = (tokens >= first) & (tokens < last)
        rows = torch.nn.functional.embedding((tokens - first).clamp(0, last - first - 1), table)
        wide = rows if rows.dtype == torch.float64 else rows.float()
        return self.joins.sum(wide.masked_fill_(~here[:, None], 0)).to(table.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        """Return what `out` and `down` read of ``x`` [rows, own width], which is their own inputs."""
        return self.joins.gather(x) if self.share.by_outputs else x

    def outputs(self, y: Tensor) -> Tensor:
        """[rows, d_model] of what they gave here, float32 or wider."""
        return self.joins.gather(y) if self.share.by_outputs else self.joins.sum(y)

    def logits(self, part: Tensor) -> Tensor:
        """[rows, V] of all ranks' [rows, own tokens]."""
        widest = -(-self.share.config.vocab_size // self.share.count)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]), value=-torch.inf)
        return self.joins.gather(padded)[:, : self.share.config.vocab_size]

    def best(self, part: Tensor, ids: Tensor) -> Tensor:
        """[rows] int64 the first of the best tokens, of the best of this rank's, ``ids`` [rows] among ``part``."""
        score = part.gather(1, ids[:, None]).double()
        pairs = torch.cat((score, (ids[:, None] + self.share.vocabulary[0]).double()), 1)  # [rows, 2]
        each = self.joins.gather(pairs).view(len(ids), -1, 2)
        return each[torch.arange(len(ids)), each[..., 0].argmax(1), 1].long()
