"""Reads the next draft from the streams of the last accepted node.

Stream j predicts the token j places after the target's own next token, whatever that token is. So the k
likeliest tokens of stream 1 are children of the root, those of stream 2 are children of each of these, and
so on: a product tree of 1 + k + k^2 + .. nodes, of which the best by the sum of log q along their path are
proposed.

Source: Speculative Streaming, section 2.2; appendix G.1 (trees), appendix L (best path in batches).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ...core.errors import ConfigError
from ...core.sequence import Sequence
from ...core.tree import TokenTree
from ...draft.base import Drafter, DrafterSpec, DraftRequest, LevelScores, StepFeatures
from ...draft.fit import TrainedDrafterConfig
from ...draft.levels import cut, product_trees
from ...draft.registry import DrafterContext, option, proposes_option
from ...weights.files import check_target
from .compiled import stream_prices
from .model import MAX_STREAMS, STREAM_ROWS, StreamSet, check_exit, read_config

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo

MAX_NODES = 1024
SLACK = 2.0  # by which a score may be too low: the rule that sets the floor knows better, see `engine.chances`
USUAL_GAMMA = 4  # where it is not known who brings streams, and no gamma is given: decides the default tree alone


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(TrainedDrafterConfig):
    """Speculative streams: the target's own pass drafts, by a trained set or by a request's application."""

    kind: ClassVar[str] = "streams"
    of_applications: ClassVar[bool] = True

    path: str = option(
        "",
        help="trained set for lossless drafting; none: the applications' streams; without any, the zoo's for the model",
    )
    gamma: int | None = option(
        None, help="streams to draft with; default: as many as were trained", minimum=1, maximum=MAX_STREAMS
    )
    k: int = option(3, help="tokens taken from each stream: children of a node; 1: a chain", minimum=1, maximum=64)
    nodes: int | None = option(
        None, help="most nodes of a draft, before pruning; default: the full tree", minimum=1, maximum=MAX_NODES
    )
    prune_threshold: float | None = option(
        None, help="prune nodes whose early-exit probability given their parent is below this (0 to 1)"
    )
    prune_count: int | None = option(None, help="prune to so many nodes by early-exit probability", minimum=1)
    best_path_batch: int = option(
        8, help="from so many drafting sequences on, the best path alone, and no pruning (the paper: 2)", minimum=1
    )
    at: Literal["nodes", "frontier"] = option(
        "frontier",
        help="rows that carry streams: every kept node in the same pass, or the last accepted one, after verification "
        "unless it was likely enough to carry them in the pass",
    )
    proposes: Literal["point", "coupled"] = proposes_option()

    def validate(self) -> None:
        """Refuse options that contradict each other."""
        threshold = self.prune_threshold
        self.require("prune_threshold", threshold is None or 0 < threshold < 1, "must be above 0 and below 1")

    @property
    def prunes(self) -> bool:
        """Return whether trees are pruned in mid-pass."""
        return self.prune_threshold is not None or self.prune_count is not None

    def num_nodes(self, gamma: int) -> int:
        """Drafted nodes of a full draft: k + k^2 + .. + k^gamma, or the cap."""
        full = sum(self.k**g for g in range(1, gamma + 1))
        size = full if self.nodes is None else min(self.nodes, full)
        self.require("k", size <= MAX_NODES, f"makes a tree of {size} nodes over {gamma} streams: set nodes")
        return size

    def build(self, context: DrafterContext) -> StreamsDrafter:
        """Load the trained set, where one is named."""
        if not self.path:
            return StreamsDrafter(self, applied=context.rows_beside)
        folder = self.folder(context)
        self.check_weights(read_config(folder), context)
        return StreamsDrafter(self, StreamSet.load(folder, dtype=context.dtype, device=context.device or "cpu"))


class StreamsDrafter(Drafter):
    """Proposes trees from the streams of the last accepted node.

    Args:
        config: shape and kind of the drafts.
        streams: the general lossless set; None: only requests whose application has streams get drafts.
        applied: most streams of such an application; 0: not known. Decides the default tree alone.

    Raises:
        ConfigError: more streams than were trained, or a set in shared mode.
        CapabilityError: pruning with a set that cannot prune.
    """

    def __init__(self, config: StreamsConfig, streams: StreamSet | None = None, applied: int = 0) -> None:
        self.config = config
        self.streams = None if streams is None else _fitted(config, streams)
        trained_gamma = 0 if self.streams is None else self.streams.config.gamma
        self.gamma = trained_gamma or config.gamma or applied or USUAL_GAMMA
        self.spec = DrafterSpec(
            name=config.kind,
            proposes=config.proposes,
            default_budget=config.num_nodes(self.gamma),
            tree=config.k > 1,
            in_pass=True,
        )
        self._stream_scores: dict[int, LevelScores] = {}  # by sequence, of its last accepted node
        self._expected: dict[int, bool] = {}  # by sequence: whether it is called in the next step, where that is known

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the set's shape against the target's."""
        if self.streams is None:
            return
        config = self.streams.config
        check_target(f"streams trained for {config.target or 'another target'}", config, target.name, target)
        if self.streams.adapters is not None:
            self.streams.adapters.prepare()
        decoder = target.decoder
        if decoder and decoder.stack and decoder.ranks is None and self.config.at == "frontier":
            stream_prices(decoder, self.streams)  # now, not in the first request

    def stream_set(self, sequence: Sequence) -> StreamSet | None:
        """Return the general set, for every sequence without streams of its own; None: its rows carry none."""
        return self.streams if self._expected.get(sequence.key, True) else None

    def expect(self, requested: abc.Mapping[int, bool]) -> None:
        """Implement `Drafter`: rows carry streams where they are requested in the next step."""
        self._expected |= requested

    def idle_reason(self, view: Sequence) -> str | None:
        """Implement `Drafter`."""
        application = view.application
        if self.streams is None and (application is None or application.beside is None):
            who = "the base model" if application is None else f"application {application.name!r}"
            return f"drafter {self.spec.name!r} has only the streams of applications, and {who} has none"
        return None

    def scratch_slots(self, rows: int, sequences: int) -> int:
        """Implement `Drafter`."""
        gamma = 0 if self.streams is None else self.streams.config.gamma
        if self.config.at == "nodes":
            return gamma * rows
        # On the frontier one row a sequence has streams, in a pass of their own: it overwrites what the first one left.
        # A few likely ones may go with the first pass already.
        return max(gamma * min(sequences, rows), min(STREAM_ROWS, gamma * rows))

    def observe(self, step: StepFeatures) -> None:
        """Keep the streams' distributions, in place of the earlier ones."""
        for sequence, committed, scores in zip(step.sequences, step.committed, step.levels, strict=False):
            if scores is not None:
                self._stream_scores[sequence.key] = scores
            elif committed:
                self._stream_scores.pop(sequence.key, None)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Forget ended sequences."""
        for key in keys:
            self._stream_scores.pop(key, None)
            self._expected.pop(key, None)

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One tree a sequence; the root alone where its last node carried no streams."""
        config, rows = self.config, list[tuple[Sequence, LevelScores | None, int]]()
        for view, budget, max_depth in want.rows():
            nodes, scores = min(budget, config.nodes or budget), self._stream_scores.get(view.key)
            depth = min(max_depth, nodes, config.gamma or max_depth)
            rows.append((view, None if scores is None or depth <= 0 else cut(scores, 0, depth), nodes))
        batch = sum(scores is not None for _, scores, _ in rows) >= config.best_path_batch
        children = 1 if batch else config.k
        return product_trees(rows, children, config.proposes == "coupled", want.floor / SLACK)


def _fitted(config: StreamsConfig, streams: StreamSet) -> StreamSet:
    """Return the set with as many streams as are wanted."""
    trained = streams.config.gamma
    if streams.config.mode != "lossless":
        wrong = "the set was trained in shared mode: its adapters change the target's own answers"
        remedy = "load it as an application, and let requests name it: LLM(..., applications={'name': FOLDER})"
        raise ConfigError(config.label, wrong, remedy)
    if config.prunes:
        check_exit(f"pruning with the streams of {config.path or 'this set'}", streams)
    if config.gamma is None or config.gamma == trained:
        return streams
    config.require("gamma", config.gamma <= trained, f"is more than the {trained} streams that were trained")
    return streams.first(config.gamma)
