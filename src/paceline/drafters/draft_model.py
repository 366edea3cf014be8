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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.errors import CapabilityError, ConfigError, PoolFullError
from ..core.inference import inference
from ..core.tree import TokenTree
from ..kv.pool import KVPool, SequenceCache
from ..network.base import ForwardState
from ..network.files import check_target, fingerprint
from ..network.native import Stack
from ..network.native_calls import ChainStart, TreeStart
from ..network.packing import RowPacker
from ..network.streams import StreamSet, read_config
from .base import Drafter, DrafterSpec, DraftRequest, SequenceView
from .growth import Grower, Growth, compiles, drawn_from, pack_frontier
from .model_sessions import ModelSessions
from .proposal import Proposal, to_tree
from .registry import DrafterConfig, DrafterContext, option
from .resampling import REFUSED
from .streaming_sessions import MAX_CARRIERS, StreamingSessions
from .vocabulary import check_vocabulary

if TYPE_CHECKING:
    from ..network.decoder import Decoder, TargetInfo

PREFILL_ROWS = 512  # rows of one draft pass over a long prompt
MAX_NODES = 256


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DrafterConfig):
    """A small language model with the target's tokenizer."""

    kind: ClassVar[str] = "draft_model"
    weights: ClassVar[str] = "model"
    refuses = REFUSED

    model: str = option("", help="folder, hub name or embedded model that drafts; none: the zoo's for the model")
    depth: int = option(5, help="levels of the draft", minimum=1, maximum=64)
    branching: str = option("", help="static tree: children a level, such as 1x1x3x1; sets the depth")
    topk: int = option(1, help="dynamic tree: children of an expanded node; 1: a chain", minimum=1, maximum=64)
    nodes: int = option(0, help="dynamic tree: nodes kept, best first; 0: topk x depth", minimum=0, maximum=MAX_NODES)
    beam: int = option(0, help="dynamic tree: nodes expanded a level; 0: topk", minimum=0, maximum=64)
    min_prob: float = option(
        0.0, help="stop below a path whose cumulative probability is under this", minimum=0.0, maximum=1.0
    )
    proposes: Literal["point", "coupled", "sampled"] = option(
        "coupled", help="point: likeliest tokens; coupled: with the target's noise; sampled: drawn from q (rejection)"
    )
    dtype: str = option("auto", help="auto (the target's), bfloat16, float32, float64, int8")
    streams: str = option(
        "",
        help="trained set of streams of the draft model itself: the same chains in fewer passes of it (Mirror-SD, 3.2)",
    )

    def validate(self) -> None:
        """Refuse shapes that contradict each other."""
        self.require("branching", not self.branching or self.topk == 1, "and topk are two kinds of tree: choose one")
        self.require("nodes", not self.nodes or self.topk > 1, "belongs to a dynamic tree: set topk above 1")
        self.require("beam", not self.beam or self.topk > 1, "belongs to a dynamic tree: set topk above 1")
        self.require(
            "proposes",
            not (self.proposes == "sampled" and self.topk > 1),
            "cannot go with a dynamic tree, which ranks drawn nodes away: use branching or a chain",
        )
        self.require(
            "min_prob",
            not (self.proposes == "sampled" and self.min_prob > 0),
            "cannot go with proposes=sampled: whether a node is drawn must not depend on the draw",
        )
        self.require("branching", self.num_nodes <= MAX_NODES, f"may have {MAX_NODES} nodes at most")
        rule = "draft chains: leave out branching, topk and proposes=sampled"
        self.require("streams", not self.streams or (self.is_chain and self.proposes != "sampled"), rule)

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
        """Whether no node has two children."""
        return self.topk == 1 and all(factor == 1 for factor in self.factors)

    def nodes_of(self, levels: int) -> int:
        """Drafted nodes of the first levels of a static tree or chain."""
        return sum(accumulate(self.factors[:levels], mul))

    @property
    def num_nodes(self) -> int:
        """Drafted nodes of a full tree."""
        return (self.nodes or self.topk * self.depth) if self.topk > 1 else self.nodes_of(len(self.factors))

    def build(self, context: DrafterContext) -> DraftModel:
        """Load the model beside the target."""
        if context.load_model is None:
            raise CapabilityError(
                f"drafter {self.kind}:{self.model}", "no model loader was given", "build it through LLM(...)"
            )
        loaded = context.load_model(self.model, self.dtype)
        return DraftModel(self, loaded, _own_streams(self, loaded, context) if self.streams else None)


def _own_streams(config: DraftModelConfig, loaded: Any, context: DrafterContext) -> StreamSet:
    """The streams of the draft model."""
    folder = Path(config.streams) if context.find is None else Path(context.find(config.streams))
    asked = f"drafter={config.kind}:{config.model} with streams={config.streams}"
    shape = read_config(folder)
    if shape.mode != "lossless":
        raise ConfigError(asked, "the set was trained in shared mode, which changes what the model says", "use another")
    mark = fingerprint(loaded.folder) if shape.fingerprint and loaded.folder is not None else None
    decoder: Decoder = loaded.decoder
    check_target(asked, shape, loaded.name, decoder.info(loaded.name), mark)
    if shape.value_rotation is not None:
        raise CapabilityError(asked, "it rotates values, and these streams do not", "use a set with embeddings")
    found = StreamSet.load(folder, dtype=decoder.dtype, device=decoder.device)
    if found.adapters is not None:
        found.adapters.prepare()
    return found


@dataclass(slots=True)
class _State:
    """What the draft has computed of one sequence."""

    cache: SequenceCache
    base: int = 0  # committed length below which the drafted nodes hang
    draft: Proposal = field(default_factory=Proposal)  # the last one
    forwarded: int = 0  # the first so many of its nodes have K/V
    read: int = 0  # leading tokens of the text that the draft has an embedding for


@dataclass(slots=True)
class _Growth(Growth):
    """A tree while it grows, and the draft's state of its sequence."""

    state: _State = field(kw_only=True)

    @property
    def pending(self) -> int:
        """Tokens of the text without K/V."""
        return len(self.sequence.tokens) - self.state.cache.committed


class DraftModel(Drafter):
    """Drafts with a decoder of its own and its own K/V pool.

    Args:
        config: shape and kind of the drafts.
        loaded: the draft's decoder, tokenizer and name.
        streams: of the draft itself; None: it drafts a token a pass.
    """

    trusted = True

    def __init__(self, config: DraftModelConfig, loaded: Any, streams: StreamSet | None = None) -> None:
        self.config, self.streams = config, streams
        self.decoder: Decoder = loaded.decoder
        self.tokenizer = loaded.tokenizer
        self.name: str = loaded.name
        self.spec = DrafterSpec(
            name="draft_model",
            network=True,
            cached=True,
            proposes=config.proposes,
            default_budget=config.num_nodes,
            ahead=config.proposes != "sampled",
            observes=False,
            tree=not config.is_chain,
        )
        self._states: dict[int, _State] = {}
        self._pool: KVPool | None = None
        self._vocab, self._eos_ids = 0, tuple[int, ...]()
        self._size = 0, 0, self.decoder.device  # sequences, tokens of the target's pool, device
        self._grower = Grower(config.factors, config.topk, config.beam or config.topk, config.proposes)

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the tokenizers against each other and allocate the draft's K/V."""
        check_vocabulary(target, self.tokenizer, self.decoder.config.vocab_size, self.name)
        self._vocab, self._eos_ids = target.vocab_size, target.eos_ids
        self._size = max_sequences, pool_tokens, device
        if self.streams is None:
            self._pool = self._make_pool(self.config.num_nodes)
        else:
            self._begin()

    def _make_pool(self, rows: int) -> KVPool:
        """A pool for texts as long as the target's, and so many drafted rows of each sequence."""
        sequences, tokens, device = self._size
        gamma = 0 if self.streams is None else self.streams.config.gamma
        room = rows * (1 + gamma) + 32  # guesses that were wrong stay until the next cut
        scratch = gamma * min(sequences * rows, MAX_CARRIERS)
        shape = self.decoder.cache_shape
        return KVPool(*shape, tokens + sequences * room, self.decoder.dtype, device, scratch_slots=scratch)

    def sessions(self, rows: int) -> ModelSessions:
        """See `Drafter`: over K/V of their own."""
        assert self._vocab and self.config.proposes != "sampled", "bind comes first; see `DrafterSpec.ahead`"
        self._pool = self.own_sessions = None
        given = self._of_sessions(rows)
        return ModelSessions(*given) if self.streams is None else StreamingSessions(self.streams, *given)

    def _of_sessions(self, rows: int) -> tuple[Any, ...]:
        """The arguments of `ModelSessions`."""
        floor = math.log(self.config.min_prob) if self.config.min_prob else -math.inf
        return self.decoder, self._make_pool(rows), self._vocab, self._eos_ids, self.config.proposes, floor

    def release(self, keys: Sequence[int]) -> None:
        """Free the K/V of ended or preempted sequences (their blocks remain in the prefix cache)."""
        super().release(keys)
        for key in keys:
            state = self._states.pop(key, None)
            if state is not None:
                state.cache.release()
        if self._pool is not None and not self._states and not self._pool.idle:
            self._pool.reset()  # a draft or a release ended in its middle

    def forget(self) -> None:
        """Forget the K/V of ended sequences."""
        super().forget()
        if self._pool is not None:
            self._pool.forget()

    def propose(self, want: DraftRequest) -> TokenTree:
        """One tree a sequence, level by level, all sequences together."""
        if self.streams is not None:  # several tokens a pass
            depths = [self._depth(sequence, max_depth) for sequence, _, max_depth in want.rows()]
            return super().propose(replace(want, max_depths=depths))
        growths = self._grow(want)
        tree = to_tree(want.roots(), [self._proposal(g) for g in growths], trusted=True)
        if self.config.proposes == "sampled":
            tree.q = drawn_from(growths, self._vocab)
        return tree

    @inference
    def _grow(self, want: DraftRequest) -> list[_Growth]:
        least = max(self.config.min_prob, 0.0 if self.config.proposes == "sampled" else min(want.floor, 1.0))
        self._grower = replace(self._grower, floor=math.log(least) if least > 0 else -math.inf)
        growths = [self._start(*row) for row in want.rows()]
        able = [g for g in growths if g.budget > 0]
        stack = self.decoder.stack
        if able and stack is not None and compiles(able, self.config.proposes):
            if self.config.is_chain:
                self._roll(able, stack)
            else:
                self._sprout(able, stack)
        elif able:
            logits: Tensor | None = self._catch_up(able)
            level = 0
            while logits is not None:
                self._grower.expand(able, logits, level)
                level += 1
                logits = self._forward_frontier(able)
        for growth in able:
            growth.state.draft, growth.state.forwarded = growth.draft, growth.forwarded
        return growths

    def _roll(self, growths: Sequence[_Growth], stack: Stack) -> None:
        """What `_catch_up`, `_expand` and `_forward_frontier` do level by level, for chains."""
        assert self._pool is not None
        chains = []
        for growth in growths:
            self._shorten(growth)
            cache, tokens = growth.state.cache, growth.sequence.tokens
            steps = min(growth.max_depth, growth.budget)
            keys = cache.slots(0, len(tokens) + steps - 1)
            chains.append(
                ChainStart(tokens[cache.committed :], cache.committed, steps, keys, self._grower.floor, growth.rules)
            )
        found = stack.roll(chains, self._pool, self._vocab)
        self._settled(growths, [len(chain.pending) for chain in chains])
        for growth, drafted in zip(growths, found, strict=True):
            for node, (token, log_q) in enumerate(drafted):
                growth.add(node, token, log_q)
            growth.state.base = growth.state.cache.committed
            growth.forwarded = len(drafted) - 1

    def _sprout(self, growths: Sequence[_Growth], stack: Stack) -> None:
        """The same for trees."""
        assert self._pool is not None
        config, seeds = self.config, []
        beam = config.beam or config.topk
        for growth in growths:
            self._shorten(growth)
            cache, tokens, levels = growth.state.cache, growth.sequence.tokens, growth.max_depth
            most = config.topk * (1 + beam * (levels - 1)) if config.topk > 1 else config.nodes_of(levels)
            room, first = self._room(growth), cache.committed
            keys = cache.slots(0, len(tokens) + room)
            seeds.append(TreeStart(tokens[first:], first, room, keys, growth.budget, levels, most, growth.rules))
        grown = stack.grow(seeds, config.factors, config.topk, beam, self._grower.floor, self._pool, self._vocab)
        self._settled(growths, [len(seed.pending) for seed in seeds])
        for growth, tree in zip(growths, grown, strict=True):
            growth.draft = Proposal(tree.tokens, tree.parents, tree.scores)
            growth.state.base = growth.state.cache.committed
            growth.forwarded = tree.forwarded

    def _shorten(self, growth: _Growth) -> None:
        """Leave at most `PREFILL_ROWS` pending tokens."""
        while growth.pending > PREFILL_ROWS:
            self._forward_pending([growth])

    def _proposal(self, growth: _Growth) -> Proposal:
        """The drafted nodes; of a dynamic tree the best ones (a node's score is never above its parent's)."""
        return growth.draft.best(growth.budget) if self.config.topk > 1 else growth.draft

    # -- catching up with the committed tokens

    def _start(self, sequence: SequenceView, budget: int, max_depth: int) -> _Growth:
        assert self._pool is not None, "bind comes before propose"
        state = self._states.get(sequence.key)
        if state is None:
            state = self._states[sequence.key] = _State(self._open(sequence))
        growth = _Growth(sequence, 0, self._depth(sequence, max_depth), state=state)  # the target goes on alone
        if not self._reads(state, sequence.tokens):
            state.cache.release()  # of no use any more: the text will keep that token
            return growth
        self._settle(state, sequence.tokens)
        if budget > 0 and growth.max_depth > 0 and self._reserve(growth):
            growth.budget = budget
        return growth

    def _reads(self, state: _State, tokens: Sequence[int]) -> bool:
        """Whether the draft has an embedding for all of a text, which only grows: each token is looked at once.

        Heads of one family often differ in how far they are padded. A target whose head is the wider one may be
        given, and may say, ids that the draft lacks.
        """
        known = self.decoder.config.vocab_size
        if known >= self._vocab:
            return True
        while state.read < len(tokens) and tokens[state.read] < known:
            state.read += 1
        return state.read == len(tokens)

    def _depth(self, sequence: SequenceView, max_depth: int) -> int:
        """Levels that can be drafted; 0 or less where the sequence fills the draft's context."""
        return min(max_depth, len(self.config.factors), self.decoder.config.max_position - len(sequence.tokens))

    def _reserve(self, growth: _Growth) -> bool:
        """Room for the pending tokens and for every node that may be expanded; False if the pool is full."""
        try:
            growth.state.cache.reserve(growth.pending + self._room(growth))
        except PoolFullError:
            return False
        return True

    def _open(self, sequence: SequenceView) -> SequenceCache:
        assert self._pool is not None
        expected = None if sequence.max_len is None else sequence.max_len + self.config.num_nodes
        return self._pool.open(sequence.tokens, expected=expected)

    def _room(self, growth: _Growth) -> int:
        """Rows that a tree may take in the speculative region: nodes above its last level, which is not expanded."""
        levels = growth.max_depth - 1
        if self.config.topk > 1:
            return (self.config.beam or self.config.topk) * levels
        return self.config.nodes_of(levels)

    def _settle(self, state: _State, tokens: Sequence[int]) -> None:
        """Keep the K/V of drafted nodes that became part of the answer.

        Never that of the last token, even if it is there: the next draft needs the logits after it.
        """
        assert self._pool is not None
        nodes = zip(state.draft.parents, state.draft.tokens, range(1, state.forwarded + 1), strict=False)
        children = {(parent, token): node for parent, token, node in nodes}
        kept: list[int] = []
        node = 0
        for token in tokens[state.base : -1]:
            node = children.get((node, token), 0)
            if node == 0:
                break
            kept.append(node - 1)
        if state.cache.reserved:
            self._pool.commit([(state.cache, kept)])
            state.cache.publish(tokens)
        state.forwarded = 0

    def _catch_up(self, growths: Sequence[_Growth]) -> Tensor:
        """Compute the K/V of all committed tokens. Returns the logits [B, V] after them."""
        for growth in growths:
            self._shorten(growth)
        logits = self._logits(*self._forward_pending(growths))
        for growth in growths:
            growth.state.base = growth.state.cache.committed
        return logits

    def _forward_pending(self, growths: Sequence[_Growth]) -> tuple[ForwardState, list[int]]:
        """One pass over the first `PREFILL_ROWS` pending tokens of each; it, and the last row of each."""
        packer = RowPacker(self.decoder, self.decoder.device)
        last: list[int] = []
        counts: list[int] = []
        for growth in growths:
            cache = growth.state.cache
            first = cache.committed
            rows = min(growth.pending, PREFILL_ROWS)
            stop = first + rows
            packer.add(
                growth.sequence.tokens[first:stop],
                range(first, stop),
                [-1] * rows,
                slots=cache.slots(first, stop),
                keys=cache.slots(0, stop),
                num_keys=stop,
                prefix=first,
            )
            last.append(packer.rows - 1)
            counts.append(rows)
        state = self._run(packer)
        self._settled(growths, counts)
        return state, last

    def _settled(self, growths: Sequence[_Growth], counts: Sequence[int]) -> None:
        """The first so many reserved rows of each are part of the text; what is left stays reserved."""
        assert self._pool is not None
        caches = [growth.state.cache for growth in growths]
        room = [cache.reserved for cache in caches]
        self._pool.commit([(cache, range(count)) for cache, count in zip(caches, counts, strict=True)])
        for growth, cache, reserved, count in zip(growths, caches, room, counts, strict=True):
            cache.publish(growth.sequence.tokens)
            cache.reserve(reserved - count)

    def _run(self, packer: RowPacker) -> ForwardState:
        """One pass over all layers."""
        assert self._pool is not None
        state = self.decoder.embed(packer.batch())
        return self.decoder.run_layers(state, 0, self.decoder.num_layers, self._pool)

    def _logits(self, state: ForwardState, rows: list[int]) -> Tensor:
        """[len(rows), V] logits over the target's vocabulary.

        Heads of one family often differ in how far they are padded: rows beyond the target's are cut, missing
        ones are impossible.
        """
        whole = len(rows) == state.hidden.shape[0]
        chosen = None if whole else torch.tensor(rows, device=state.hidden.device)
        logits = self.decoder.logits(state, chosen)[:, : self._vocab]
        missing = self._vocab - logits.shape[-1]
        return pad(logits, (0, missing), value=-math.inf) if missing else logits

    # -- growing

    def _forward_frontier(self, growths: Sequence[_Growth]) -> Tensor | None:
        """K/V and logits of all frontier nodes; None where nothing is left to expand."""
        packer = RowPacker(self.decoder, self.decoder.device)
        for growth in growths:
            if growth.frontier:
                pack_frontier(packer, growth, growth.state.cache)
        return self._logits(self._run(packer), [*range(packer.rows)]) if packer.rows else None
