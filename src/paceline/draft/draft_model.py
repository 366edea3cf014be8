"""A small language model as the drafter of a large one (Leviathan et al. 2023; Chen et al. 2023).

Three shapes of draft:

    chain     one child a level                                            depth=5
    static    branching factors a level (SpecInfer, Miao et al. 2024)      branching=1x1x3x1
    dynamic   top-k children of the best nodes, the best w nodes kept      topk=4, nodes=16
              by cumulative probability (EAGLE-2's rule, Li et al. 2024)

Three ways to pick a child at temperature > 0: ``point`` the likeliest tokens; ``coupled`` the tokens that
the target's own noise favours under q, so that both often choose the same; ``sampled`` independent draws
from q, for rejection sampling.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ..core.errors import CapabilityError, ConfigError
from ..core.inference import inference
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kernels.drafts import ChainStart, TreeStart, grow, roll
from ..kernels.layers import Stack
from ..kv.pool import KVPool
from ..model.hot import load_hot
from .base import Drafter, DrafterSpec, DraftRequest
from .fit import check_vocabulary
from .growth import Grower, Growth, compiles
from .model_sessions import ModelSessions
from .registry import DrafterConfig, DrafterContext, option

if TYPE_CHECKING:
    from ..model.decoder import Decoder, TargetInfo

MAX_NODES = 256


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DrafterConfig):
    """A small language model with the target's tokenizer."""

    kind: ClassVar[str] = "draft_model"
    weights: ClassVar[str] = "model"

    model: str = option("", help="folder, hub name or embedded model that drafts; none: the zoo's for the model")
    depth: int = option(5, help="levels of the draft", minimum=1, maximum=64)
    branching: str = option("", help="static tree: children a level, such as 1x1x3x1; sets the depth")
    topk: int = option(
        1, help="dynamic tree: children of a node, and nodes expanded a level; 1: a chain", minimum=1, maximum=64
    )
    nodes: int = option(0, help="dynamic tree: nodes kept, best first; 0: topk x depth", minimum=0, maximum=MAX_NODES)
    proposes: Literal["point", "coupled", "sampled"] = option(
        "coupled", help="point: likeliest tokens; coupled: with the target's noise; sampled: drawn from q (rejection)"
    )
    dtype: str = option("auto", help="auto (the target's), bfloat16, float32, float64, int8")

    def validate(self) -> None:
        """Refuse shapes that contradict each other."""
        self.require("branching", not self.branching or self.topk == 1, "and topk are two kinds of tree: choose one")
        self.require("nodes", not self.nodes or self.topk > 1, "belongs to a dynamic tree: set topk above 1")
        self.require(
            "proposes",
            not (self.proposes == "sampled" and self.topk > 1),
            "cannot go with a dynamic tree, which ranks drawn nodes away: use branching or a chain",
        )
        self.require("branching", self.num_nodes <= MAX_NODES, f"may have {MAX_NODES} nodes at most")

    @property
    def factors(self) -> tuple[int, ...]:
        """Children a level of a static tree or chain."""
        if not self.branching:
            return (1,) * self.depth
        parts = self.branching.strip("<>").replace(",", "x").split("x")
        if not all(p.strip().isascii() and p.strip().isdigit() and int(p) > 0 for p in parts):
            raise ConfigError(f"branching={self.branching!r}", "factors are whole numbers above 0", "write 1x1x3x1")
        return tuple(int(p) for p in parts)

    @property
    def is_chain(self) -> bool:
        """Return whether no node has two children."""
        return self.topk == 1 and all(factor == 1 for factor in self.factors)

    def nodes_of(self, levels: int) -> int:
        """Drafted nodes of the first levels of a static tree or chain."""
        return sum(accumulate(self.factors[:levels], mul))

    @property
    def num_nodes(self) -> int:
        """Drafted nodes of a full tree."""
        return (self.nodes or self.topk * self.depth) if self.topk > 1 else self.nodes_of(len(self.factors))

    def build(self, context: DrafterContext) -> DraftModel:
        """Load the model next to the target."""
        if context.load_model is None:
            raise CapabilityError(
                f"drafter {self.kind}:{self.model}", "no model loader was given", "build it through LLM(...)"
            )
        loaded = context.load_model(self.model, self.dtype)
        loaded.decoder.cut(load_hot(loaded.folder, loaded.decoder.config.vocab_size))
        return DraftModel(self, loaded)


class DraftModel(Drafter):
    """Drafts with a decoder of its own and its own K/V pool.

    Args:
        config: shape and kind of the drafts.
        loaded: the draft's decoder, tokenizer and name.
    """

    trusted = True
    model: ModelSessions  # texts and K/V of the sequences that it proposes for

    def __init__(self, config: DraftModelConfig, loaded: Any) -> None:
        self.config = config
        self.decoder: Decoder = loaded.decoder
        self.tokenizer = loaded.tokenizer
        self.name: str = loaded.name
        self.spec = DrafterSpec(
            name="draft_model",
            network=True,
            cached=True,
            proposes=config.proposes,
            default_budget=config.num_nodes,
            context=self.decoder.config.max_position,
            ahead=config.proposes != "sampled",
            ahead_levels=len(config.factors),
            observes=False,
            tree=not config.is_chain,
        )
        self._vocab, self._eos_ids = 0, tuple[int, ...]()
        self._size = 0, 0, self.decoder.device  # sequences, tokens of the target's pool, device
        self._grower = Grower(config.factors, config.topk, config.proposes)

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the tokenizers against each other and allocate the draft's K/V."""
        check_vocabulary(target, self.tokenizer, self.decoder.config.vocab_size, self.name)
        self._vocab, self._eos_ids = target.vocab_size, target.eos_ids
        self._size = max_sequences, pool_tokens, device
        self.own_sessions = self.model = self._make(self.config.num_nodes)
        self._lengths = {}

    def sessions(self, rows: int) -> ModelSessions:
        """Implement `Drafter`: over K/V of their own."""
        assert self._vocab and self.spec.ahead, "bind comes first; see `DrafterSpec.ahead`"
        self.own_sessions = None
        vars(self).pop("model", None)  # with its K/V
        return self._make(rows)

    def _make(self, rows: int) -> ModelSessions:
        """Return sessions with room for texts and so many drafted rows of each sequence."""
        sequences, tokens, device = self._size
        pool = KVPool(*self.decoder.cache_shape, tokens + sequences * (rows + 32), self.decoder.dtype, device)
        if self.decoder.ranks is not None and self.decoder.ranks.line is not None:
            self.decoder.ranks.line.follow(pool)
        return ModelSessions(self.decoder, pool, self._vocab, self._eos_ids, self.config.proposes == "coupled")

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One tree a sequence, level by level, all sequences together."""
        self._grower = self._grower.bounded(want.log_floor)
        growths = [self._start(*row) for row in want.rows()]
        able = [g for g in growths if g.budget > 0]
        stack = self.decoder.stack
        if able and stack is not None and compiles(able, self.config.proposes):
            (self._roll if self.config.is_chain else self._sprout)(able, stack)
        else:
            self._grower.grow(able, self.model.logits_after)
        # Of a dynamic tree the best nodes: a node's score is never above its parent's.
        return [g.tree.best(g.budget) if self.config.topk > 1 else g.tree for g in growths]

    def _roll(self, growths: abc.Sequence[Growth], stack: Stack) -> None:
        """Grow chains in one compiled call."""
        chains = []
        for growth in growths:
            cache, tokens = self.model.follow(growth.sequence).cache, growth.sequence.tokens
            steps = min(growth.max_depth, growth.budget)
            keys = cache.slots(0, len(tokens) + steps - 1)
            chains.append(
                ChainStart(tokens[cache.committed :], cache.committed, steps, keys, self._grower.floor, growth.rules)
            )
        for growth, drafted in zip(growths, roll(stack, chains, self.model.pool, self._vocab), strict=True):
            growth.follow(drafted)
            self.model.computed(growth.sequence, growth.tree, len(drafted) - 1)

    def _sprout(self, growths: abc.Sequence[Growth], stack: Stack) -> None:
        """Grow trees in one compiled call."""
        config, seeds = self.config, []
        for growth in growths:
            cache, tokens = self.model.follow(growth.sequence).cache, growth.sequence.tokens
            levels = growth.max_depth
            most = config.topk * (1 + config.topk * (levels - 1)) if config.topk > 1 else config.nodes_of(levels)
            room, first = self._room(levels), cache.committed
            keys = cache.slots(0, len(tokens) + room)
            seeds.append(TreeStart(tokens[first:], first, room, keys, growth.budget, levels, most, growth.rules))
        pool, floor = self.model.pool, self._grower.floor
        grown = grow(stack, seeds, config.factors, config.topk, floor, pool, self._vocab)
        for growth, (tree, forwarded, _) in zip(growths, grown, strict=True):
            growth.tree = tree
            self.model.computed(growth.sequence, tree, forwarded)

    def _start(self, view: Sequence, budget: int, max_depth: int) -> Growth:
        """Return a tree that is still empty; its budget is 0 where the target continues alone."""
        session = self.model.follow(view)
        depth = min(max_depth, len(self.config.factors), self.decoder.config.max_position - len(view.tokens))
        growth = Growth(view, 0, depth)
        if not self.model.reads(session):
            session.cache.release()  # of no use any more: the text will keep that token
            return growth
        drafts = min(budget, growth.max_depth, session.pending) > 0
        if drafts and self.model.make_room(session, self._room(growth.max_depth)):
            growth.budget = budget
        return growth

    def _room(self, depth: int) -> int:
        """Rows of a tree of so many levels: nodes above its last one, which is not expanded."""
        if self.config.topk > 1:
            return self.config.topk * (depth - 1)
        return self.config.nodes_of(depth - 1)
