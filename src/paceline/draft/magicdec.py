"""The target drafts for itself: with all its layers, over a few first and the last tokens of the text alone.

A draft pass then reads the weights and a constant part of the K/V, where a pass of the target reads all of it. That
pays where K/V is most of what a pass reads: large batches, long contexts.

The drafter holds nothing. It reads the target's own K/V, and writes that of drafted tokens to the slots that are
reserved for their verification, which writes them again. Positions are those within the view, see `PoolView`.

Sources: MagicDec (Chen et al. 2024, arXiv 2408.11049); SPIRe, sections 3.1 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.inference import inference
from ..core.tree import TokenTree
from ..kernels.drafts import ChainStart, roll, sparse_view
from ..kernels.layers import Stack
from ..kv.pool import KVPool, SequenceCache
from ..kv.views import PoolView, SinkWindow
from ..model.applications import adapter_ranges
from ..model.packing import RowPacker
from .base import Drafter, DrafterSpec, DraftRequest
from .fit import check_rotary
from .growth import Grower, Growth, compiles
from .registry import DrafterConfig, DrafterContext, option, proposes_option

if TYPE_CHECKING:
    from ..model.decoder import Decoder, TargetInfo


@dataclass(frozen=True, kw_only=True)
class MagicDecConfig(DrafterConfig):
    """The target itself, seeing the first and the last tokens of the text alone."""

    kind: ClassVar[str] = "magicdec"

    window: int = option(64, help="last tokens that a drafting pass sees, its own among them", minimum=1)
    sinks: int = option(1, help="first tokens that it sees in addition", minimum=0)
    depth: int = option(4, help="tokens of a draft", minimum=1, maximum=64)
    proposes: Literal["point", "coupled", "sampled"] = proposes_option(sampled=True)

    def build(self, context: DrafterContext) -> MagicDec:
        """Return the drafter; it gets the target in `bind`."""
        return MagicDec(self)


class MagicDec(Drafter):
    """Drafts chains with the target over a sparse view of its own K/V.

    Args:
        config: the view, and how long drafts are.
    """

    trusted = True
    decoder: Decoder  # the target; `bind` sets it, and what drafting passes see
    view: PoolView

    def __init__(self, config: MagicDecConfig) -> None:
        self.config = config
        self.shape = SinkWindow(config.sinks, config.window)
        self.spec = DrafterSpec(
            name=config.kind,
            network=True,
            proposes=config.proposes,
            default_budget=config.depth,
            observes=False,
            scratch=config.sinks,
        )
        self._grower = Grower((1,) * config.depth, proposes=config.proposes)

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check that the target can draft for itself.

        Raises:
            CapabilityError: layers with sliding windows or rotations of their own.
            ConfigError: a view that leaves nothing out.
        """
        shape = target.decoder.config
        subject = f"drafter={self.config.kind},window={self.config.window},sinks={self.config.sinks}"
        check_rotary(subject, shape, target.name, "use draft_model or ngram for this target")
        if self.shape.keys >= target.max_position:
            wrong = f"{target.name} has {target.max_position} positions, and the view leaves none of them out"
            raise ConfigError(subject, wrong, f"give window and sinks below {target.max_position} together")
        self.decoder = target.decoder
        self.view = PoolView(self.shape, shape.rope, target.dtype, device)

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return one chain a sequence, a token a pass, all sequences together."""
        growths = [Growth(*row) for row in want.rows()]
        for growth, cache in zip(growths, want.caches, strict=True):
            growth.cache = cache
            # A drafted token's K/V lies where verification will put it.
            growth.max_depth = min(growth.max_depth, growth.budget, self.config.depth, cache.reserved)
        able = [growth for growth in growths if growth.max_depth > 0]
        grower = self._grower.bounded(want.log_floor)
        stack = self.decoder.stack
        adapted = any(growth.sequence.application is not None for growth in able)
        if able and stack is not None and not adapted and compiles(able, self.config.proposes):
            self._grow_compiled(able, stack, grower.floor)
        elif able:
            grower.grow(able, self._forward)
        return [growth.tree for growth in growths]

    # -- its parts

    def _grow_compiled(self, growths: Sequence[Growth], stack: Stack, floor: float) -> None:
        """Do what `Grower.grow` does, in one compiled call."""
        chains = []
        ends = [len(growth.sequence.tokens) + growth.max_depth - 1 for growth in growths]
        view = sparse_view(self.shape.sinks, self.shape.window, self.view.reach(max(ends) - 1))
        for index, (growth, end) in enumerate(zip(growths, ends, strict=True)):
            tokens, cache = growth.sequence.tokens, growth.cache
            assert cache is not None
            scratch = self.view.scratch(cache.pool, index).start
            start = tokens[-1:], len(tokens) - 1, growth.max_depth, cache.slots(0, end)
            chains.append(ChainStart(*start, floor, growth.rules, view, scratch))
        pool, vocab = _pool(growths[0].cache), self.decoder.config.vocab_size
        for growth, drafted in zip(growths, roll(stack, chains, pool, vocab), strict=True):
            growth.follow(drafted)

    def _forward(self, growths: Sequence[Growth]) -> Tensor:
        """Return [growths, V] logits after the last node of each."""
        packer, rows = RowPacker(self.decoder, self.decoder.device), []
        for growth in growths:
            assert growth.cache is not None
            rows.append((growth.cache, len(growth.sequence.tokens) - 1 + growth.frontier[0]))
        pool = _pool(rows[0][0])
        self.view.turn(pool, rows)
        for index, (growth, (cache, position)) in enumerate(zip(growths, rows, strict=True)):
            (node,) = growth.frontier  # of a chain it is the depth, too
            token = growth.token(node)
            keys = self.view.keys(cache, position, index)
            count = min(position + 1, self.shape.keys)
            packer.add([token], [position], cache.slots(position, position + 1), keys, count, count - 1)
        state = self.decoder.embed(packer.batch())
        if any(growth.sequence.application is not None for growth in growths):
            ranges = [(row, row + 1) for row in range(len(growths))]
            state.adapters = adapter_ranges([growth.sequence.application for growth in growths], ranges)
        return self.decoder.logits(self.decoder.run_layers(state, 0, self.decoder.num_layers, pool))


def _pool(cache: SequenceCache | None) -> KVPool:
    """Return the target's K/V, which a drafter that runs its layers finds in its own process."""
    assert cache is not None and isinstance(cache.pool, KVPool)
    return cache.pool
