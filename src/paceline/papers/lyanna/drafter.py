"""Lyanna: a chain of drafted states, a tree of tokens made of it, and a second tree where the first was wrong.

A draft is k passes of one layer, each from the state that the one before predicted, then one product of all k states
with the target's head, then Algorithm 1 on its logits. The logits are kept: once the target has chosen which token was
right, the levels after it are biased by that token and give new candidates (Algorithm 2), without a pass. They are
verified together with the next draft (verification fusion), or in its place.

Source: Lyanna, sections 4 to 6.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from ...core.errors import CapabilityError
from ...core.inference import inference
from ...core.sequence import Sequence
from ...core.tree import TokenTree
from ...draft.base import DrafterSpec, DraftRequest
from ...draft.fit import TrainedDrafterConfig, tokenizer_mark
from ...draft.growth import Grower, Growth
from ...draft.registry import DrafterContext, option, proposes_option
from ...draft.states.network import LAST, HeadNetwork, Storage, storage_option, stored_as
from ...draft.states.sessions import StateDrafter, StateSessions
from ...kernels.drafts import MANY, SampleStart, sample, token_info
from ...kernels.linear import NativeLinear
from ...model.hot import load_hot
from .model import LyannaModel, read_shape
from .trees import Bias, token_info_sampling

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo

MAX_NODES = 256
FRESH, AGAIN = 0, 1  # source marks: of nodes of a fresh draft, and of re-sampled ones


@dataclass(frozen=True, kw_only=True)
class LyannaConfig(TrainedDrafterConfig):
    """Lyanna: states are drafted first and tokens second, and a rejected token wastes no state."""

    kind: ClassVar[str] = "lyanna"

    depth: int | None = option(
        None, help="steps, levels of the tree; default: as many as it was trained for", minimum=1, maximum=16
    )
    width: int = option(4, help="children of a node, and nodes of a level that have some", minimum=1, maximum=64)
    nodes: int = option(12, help="nodes of a fresh draft to verify, best first", minimum=1, maximum=MAX_NODES)
    extra: int = option(
        4,
        help="re-sampled nodes at most, of what the last draft left over, on top of the fresh ones; 0: none",
        minimum=0,
        maximum=MAX_NODES,
    )
    proposes: Literal["point", "coupled"] = proposes_option()
    past: int = option(256, help="last tokens of a text that its K/V begins with", minimum=1)
    storage: Storage = storage_option()

    def build(self, context: DrafterContext) -> LyannaDrafter:
        """Load the trained drafter.

        Raises:
            ConfigError: a folder that holds none.
            CapabilityError: it was trained for another target.
        """
        folder = self.folder(context)
        self.check_weights(read_shape(folder), context)
        model = LyannaModel.load(folder)
        return LyannaDrafter(self, model, load_hot(folder, model.head.config.vocab_size))


class LyannaDrafter(StateDrafter):
    """Drafts with a trained `LyannaModel`.

    Args:
        config: shape of the drafts.
        model: the trained drafter.
        hot: [H] int64, the only tokens that it drafts; None: all.
    """

    def __init__(self, config: LyannaConfig, model: LyannaModel, hot: Tensor | None = None) -> None:
        self.config, self.model, self._hot = config, model, hot
        self.depth = config.depth or model.shape.steps
        self.spec = DrafterSpec(
            name=config.kind,
            taps=(LAST,),
            past=config.past,
            network=True,
            proposes=config.proposes,
            default_budget=config.nodes + config.extra,
            tree=config.width > 1 or config.extra > 0,
            sources=(config.kind, "re-sampled") if config.extra else (),
            ahead=True,
            ahead_levels=self.depth,
        )
        self._grower = Grower((1,) * self.depth, config.width, config.proposes)
        # By sequence: tokens of its text, the last of which was the root, and the levels of the draft below it.
        self._drafted: dict[int, tuple[int, Tensor]] = {}
        self._bias: Bias = lambda tokens: None
        self._info: Any = None  # the same for compiled code
        self.states_drafted = self.states_reused = 0  # so far: states, and how many gave logits a second time

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the target, and make the layer over its embedding and head."""
        shape, self.target = self.model.shape, target
        self.config.check_shape(self.model.head.config, shape.target, target)
        if shape.tokenizer and (tokenizer_mark(target.tokenizer) or shape.tokenizer) != shape.tokenizer:
            wrong = f"trained for {shape.target or 'another model'}: its tokenizer differs from {target.name}'s"
            remedy = f"use one that was trained for {target.name}, or train one"
            raise CapabilityError(self.config.label, wrong, remedy)
        reads, quant = self.model.reads_tokens, stored_as(self.config.storage, target)
        network = HeadNetwork(self.model.head, target.handle, device, reads, self._hot, quant)
        self.body = StateSessions(self, network, self.depth, self.config.past, max_sequences, pool_tokens, device)
        if self.model.info is None:
            return
        # Token-info collapsed: u of every token, and the table that it is multiplied with, [V, r] each. Both in the
        # dtype of states, as the other weights: factors are rounded, sums are wide.
        dtype, wide = target.handle.dtype, torch.float64 if target.handle.dtype == torch.float64 else torch.float32
        info = self.model.info.to(device, wide)
        with torch.no_grad():
            factors = info.factors(target.handle.table()).to(dtype)
            table = info.table().data.to(dtype).contiguous()
        wide_factors, wide_table = factors.to(wide), table.to(wide)
        self._bias = lambda tokens: wide_factors[[*tokens]] @ wide_table.t()
        if self.body.fuse is not None:
            self._info = token_info(factors, NativeLinear(table if self._hot is None else table[self._hot], None))

    def logits(self, states: Tensor, tokens: abc.Sequence[int]) -> Tensor:
        """Implement `StateDrafter`: with what the tokens imply for their children."""
        bias, logits = self._bias(tokens), super().logits(states, tokens)
        return logits if bias is None else logits + bias

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of ended or preempted sequences."""
        super().release(keys)
        for key in keys:
            self._drafted.pop(key, None)

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One tree a sequence; nodes that come from states of the draft before are marked."""
        drafts = [_SequenceDraft(*row) for row in want.rows()]
        for draft in drafts:
            self._plan(draft)
        able = [draft for draft in drafts if draft.steps]
        want.passes = max((draft.steps for draft in able), default=0)
        # One compiled call does all of it, where there is one that knows the rules of all sequences.
        if able and self.body.fuse is not None and all(d.view.sampler.plain or d.view.sampler.draws for d in drafts):
            self._grow_compiled(able)
        elif able:
            self._grow(able)
        return [self._merge(draft) for draft in drafts]

    # -- its parts

    def _grow(self, drafts: abc.Sequence[_SequenceDraft]) -> None:
        """Both trees of each sequence, part by part."""
        self._draft_states(drafts)
        growths = [growth for draft in drafts for growth in (draft.fresh, draft.again) if growth is not None]
        token_info_sampling(growths, self._grower, self._bias)

    def _grow_compiled(self, drafts: abc.Sequence[_SequenceDraft]) -> None:
        """Do what `_grow` does, in one compiled call."""
        body, stack = self.body, self.body.stack
        assert stack is not None and body.fuse is not None
        starts = [self._sample_start(draft) for draft in drafts]
        noisy = self.config.proposes == "coupled"
        raw, trees = sample(stack, starts, self.config.width, noisy, body.fuse, self._info, body.pool)
        body.settle([draft.view for draft in drafts], [len(start.pending) for start in starts])
        rows = raw.split([draft.steps for draft in drafts])
        for draft, logits, (tree, again) in zip(drafts, rows, trees, strict=True):
            self._keep(draft, logits).tree = tree
            if again is not None and draft.again is not None:
                draft.again.tree = again

    def _sample_start(self, draft: _SequenceDraft) -> SampleStart:
        """Return where its trees start, for compiled code."""
        tokens, sampler, steps = draft.view.tokens, draft.view.sampler, draft.steps
        rules = None if sampler.plain else sampler.rules
        rest = None if draft.again is None else draft.again.logits.contiguous()
        text, pending, states = self.body.take(draft.view)
        first = text.cache.committed
        keys = text.cache.slots(0, first + len(pending) + steps - 1)
        most = self.config.nodes, self._room(draft)
        return SampleStart(pending, first, keys, steps, tokens[-1], len(tokens), rules, states, rest, most)

    def _keep(self, draft: _SequenceDraft, logits: Tensor) -> Growth:
        """Keep a new draft's logits [steps, V] for the next time; return its tree, still empty."""
        draft.fresh = Growth(draft.view, MANY, len(logits), logits=logits)
        self.states_drafted += len(logits)
        if self.config.extra:
            self._drafted[draft.view.key] = len(draft.view.tokens), logits
        return draft.fresh

    def _plan(self, draft: _SequenceDraft) -> None:
        """Choose the trees of a sequence: the rest of the last draft, and so many steps of a new one."""
        length, logits = self._drafted.pop(draft.view.key, (0, None))  # used in the draft that comes next, or never
        most = min(draft.budget, draft.max_depth)
        if most <= 0 or not self.body.ready(draft.view):
            return
        draft.steps = min(self.depth, most)
        # Algorithm 2: with a tokens accepted the target's own one is at level a + 1, rejected there or not drafted at
        # all. The levels after it are left over; the first of them is of the place after the new root.
        accepted, room = len(draft.view.tokens) - length, min(self._room(draft), draft.max_depth)
        if logits is not None and 0 < accepted < len(logits) and room:
            rest = logits[accepted : accepted + room]
            draft.again = Growth(draft.view, MANY, len(rest), logits=rest)
            self.states_reused += len(rest)

    def _room(self, draft: _SequenceDraft) -> int:
        """Return how many re-sampled nodes a budget has room for: fresh ones come first."""
        return max(0, min(self.config.extra, draft.budget - self.config.nodes))

    def _draft_states(self, drafts: abc.Sequence[_SequenceDraft]) -> None:
        """k passes, and one product of all states with the head (section 4.2)."""
        body = self.body
        chains = [[state] for state in body.catch_up([draft.view for draft in drafts])]  # [d] each
        for step in range(1, max(draft.steps for draft in drafts)):
            alive = [i for i, draft in enumerate(drafts) if draft.steps > step]
            states = body.extend([drafts[i].view for i in alive], torch.stack([chains[i][-1] for i in alive]), step)
            for i, state in zip(alive, states, strict=True):
                chains[i].append(state)
        logits = body.network.logits(torch.stack([state for chain in chains for state in chain]))
        for draft, states_logits in zip(drafts, logits.split([*map(len, chains)]), strict=True):
            self._keep(draft, states_logits)

    def _merge(self, draft: _SequenceDraft) -> TokenTree:
        """Join both trees below one root, each within its share of the budget (verification fusion, section 6.2).

        A path that both have is a fresh node.
        """
        if draft.fresh is None:
            return TokenTree()
        tree = draft.fresh.tree.best(min(self.config.nodes, draft.budget))
        if draft.again is not None:
            tree = TokenTree(tree.tokens[:], tree.parents[:], tree.scores[:])
            tree.graft(draft.again.tree.best(self._room(draft)), AGAIN)
        return tree


@dataclass(slots=True)
class _SequenceDraft:
    """Describe what a sequence is given."""

    view: Sequence
    budget: int
    max_depth: int
    steps: int = 0  # of a new draft; 0: none
    fresh: Growth | None = None
    again: Growth | None = None  # of the states left over
