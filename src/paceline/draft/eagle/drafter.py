"""EAGLE-2: a tree of tokens and states, grown where it is likely, of which the best nodes are verified.

A node's row is made of the state that its parent's row predicts and of its own token; the target's head reads the state
that comes out, and gives its children. The tree grows by the top-k children of the best nodes of each level, and of all
nodes the best by cumulative probability are proposed.

Sources: EAGLE (Li et al. 2024a), section 4.1; EAGLE-2 (Li et al. 2024b), section 4: expansion (4.1), re-ranking (4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ...core.errors import CapabilityError
from ...core.inference import inference
from ...core.tree import TokenTree
from ...kernels.drafts import TreeStart, grow
from ...model.hot import load_hot
from ...weights.source import read_config
from ..base import DrafterSpec, DraftRequest
from ..fit import TrainedDrafterConfig
from ..growth import Grower, Growth, compiles
from ..registry import DrafterContext, option, proposes_option
from ..states.network import LAST, HeadNetwork, Storage, storage_option, stored_as
from ..states.sessions import StateDrafter, StateSessions
from .eagle3 import Eagle3Model, Eagle3Network
from .model import EagleModel, load_head, read_head

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo

MAX_NODES = 256
USUAL_DEPTH = 5  # of a head that does not name its target


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TrainedDrafterConfig):
    """EAGLE-2: a head over the target's states, trees that grow where they are likely."""

    kind: ClassVar[str] = "eagle"

    path: str = option(
        "", help="head of EAGLE, EAGLE-2 or EAGLE-3: folder, hub name or embedded one; none: the zoo's for the model"
    )
    depth: int | None = option(
        None, help="levels of the tree; default: as many as it was trained for, or 5", minimum=1, maximum=64
    )
    topk: int = option(
        4, help="children of an expanded node, and nodes expanded a level; 1: a chain", minimum=1, maximum=64
    )
    nodes: int = option(12, help="nodes to verify, best first", minimum=1, maximum=MAX_NODES)
    proposes: Literal["point", "coupled"] = proposes_option()
    past: int = option(256, help="last tokens of a text that its K/V begins with", minimum=1)
    storage: Storage = storage_option()

    def build(self, context: DrafterContext) -> EagleDrafter:
        """Load the head.

        Raises:
            ConfigError: a folder that holds none.
            CapabilityError: it was trained for another target.
        """
        folder = self.folder(context)
        self.check_weights(read_head(folder)[1], context)
        layers = None if context.target_folder is None else read_config(context.target_folder).num_layers
        model = load_head(folder)
        hot = load_hot(folder, model.head.config.vocab_size) if isinstance(model, EagleModel) else None
        return EagleDrafter(self, model, layers, hot)


class EagleDrafter(StateDrafter):
    """Drafts with an EAGLE head.

    Args:
        config: shape of the drafts.
        model: the head.
        num_layers: of the target, of which an EAGLE-3 head reads three; None: not known.
        hot: [H] int64, the only tokens that it drafts; None: all that the head knows.

    Raises:
        CapabilityError: an EAGLE-3 head, and a target that is not known or lacks the layers that it reads.
    """

    def __init__(
        self,
        config: EagleConfig,
        model: EagleModel | Eagle3Model,
        num_layers: int | None = None,
        hot: Tensor | None = None,
    ) -> None:
        self.config, self.model, self._hot = config, model, hot
        steps = model.facts.steps if isinstance(model, EagleModel) else 0
        self.depth = config.depth or steps or USUAL_DEPTH
        taps: tuple[int, ...] = (LAST,)
        if isinstance(model, Eagle3Model):
            if num_layers is None:
                wrong = "it reads three of the target's layers, and the target is not known when it is built"
                raise CapabilityError(config.label, wrong, "build it for a target in a folder")
            taps = model.taps(num_layers)
        self.spec = DrafterSpec(
            name=config.kind,
            taps=tuple(sorted({*taps})),
            past=config.past,
            network=True,
            proposes=config.proposes,
            default_budget=config.nodes if config.topk > 1 else min(config.nodes, self.depth),
            tree=config.topk > 1,
            ahead=True,
            ahead_levels=self.depth,
        )
        self._grower = Grower((1,) * self.depth, config.topk, config.proposes)

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the target, and make the layer over its embedding and head."""
        model, self.target = self.model, target
        c, name = (model.head.config, model.facts.target) if isinstance(model, EagleModel) else (model.config, "")
        self.config.check_shape(c, name, target)
        rows, lent = model.embedding, target.handle
        if rows is not None and not torch.allclose(rows.float(), lent.table().float().cpu(), rtol=1e-2, atol=1e-3):
            wrong = f"its embedding is not the one of {target.name}, which it is to be fed with"
            raise CapabilityError(self.config.label, wrong, "use the target that it was trained for")
        model.embedding = None  # the target's serves both
        room = self.config.topk * max(1, self.depth - 1)
        network: HeadNetwork | Eagle3Network
        if isinstance(model, EagleModel):
            quant = stored_as(self.config.storage, target)
            network = HeadNetwork(model.head, target.handle, device, hot=self._hot, quant=quant)
        else:
            if self.config.storage not in ("auto", "plain"):
                what = f"{self.config.label} with storage={self.config.storage}"
                raise CapabilityError(what, "an EAGLE-3 head runs on plain weights alone", "leave out storage")
            network = Eagle3Network(model, model.taps(target.num_layers), target.handle, device)
        self.body = StateSessions(self, network, room, self.config.past, max_sequences, pool_tokens, device)

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return one tree a sequence, level by level, all sequences together."""
        growths = [Growth(*row) for row in want.rows()]
        able = [g for g in growths if min(g.budget, g.max_depth) > 0 and self.body.ready(g.sequence)]
        want.passes = self._grow(able, want.log_floor) if able else 0
        return [growth.tree.best(growth.budget) for growth in growths]

    # -- its parts

    def _grow(self, growths: Sequence[Growth], floor: float) -> int:
        """Grow all trees; returns the passes that it took."""
        for growth in growths:
            growth.max_depth, growth.budget = min(growth.max_depth, self.depth), min(growth.budget, self.config.nodes)
        if self.body.fuse is not None and compiles(growths, self.config.proposes):
            return self._grow_compiled(growths, floor)
        return self._grower.bounded(floor).grow(growths, self.body.logits_after)

    def _grow_compiled(self, growths: Sequence[Growth], floor: float) -> int:
        """Return the same in one compiled call."""
        body, stack, grower = self.body, self.body.stack, self._grower
        assert stack is not None and body.fuse is not None
        starts = [self._tree_start(growth) for growth in growths]
        shape = grower.factors, grower.topk, floor
        grown = grow(stack, starts, *shape, body.pool, stack.shape[0], body.fuse)
        body.settle([growth.sequence for growth in growths], [len(start.pending) for start in starts])
        for growth, (tree, _, _) in zip(growths, grown, strict=True):
            growth.tree = tree
        return max(passes for _, _, passes in grown)

    def _tree_start(self, growth: Growth) -> TreeStart:
        """Return where a tree starts, for compiled code."""
        levels, grower = growth.max_depth, self._grower
        room = grower.topk * (levels - 1)
        text, tokens, states = self.body.take(growth.sequence)
        first = text.cache.committed
        keys = text.cache.slots(0, first + len(tokens) + room)
        most, shift = growth.budget, text.start + 1
        return TreeStart(tokens, first, room, keys, growth.budget, levels, most, growth.rules, shift, states)
