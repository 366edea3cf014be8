"""Who drafts in a case: the real drafters, and some that are up to no good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kits.adversaries import RULES, Adversary, Known, Rule, unreliable
from kits.medusa import medusa, taught_heads
from kits.spire import spire
from kits.state import eagle, lyanna
from worlds import World, draft, lossless_streams

from paceline.draft.draft_model import DraftModel, DraftModelConfig
from paceline.draft.hybrid import HybridConfig
from paceline.draft.magicdec import MagicDec, MagicDecConfig
from paceline.draft.ngram import NgramConfig
from paceline.draft.registry import DrafterContext
from paceline.draft.suffix import SuffixConfig
from paceline.papers.streaming.drafter import StreamsConfig, StreamsDrafter


@dataclass(frozen=True)
class Guest:
    """How to make one drafter, and which verifiers may follow it beside the default."""

    make: Callable[[World, Known], Any]
    verifiers: tuple[str, ...] = ()
    fails: bool = False
    streams: bool = False
    round: str = "auto"  # that it drafts in
    whole: bool = False  # wants a target whose layers see the whole text


def _model(noise: float = 0.03, verifiers: tuple[str, ...] = (), **options: Any) -> Guest:
    config = DraftModelConfig(model="tiny-draft", **options)
    return Guest(lambda world, known: DraftModel(config, draft(world, noise)), verifiers)


LOOKUP, MODEL = "suffix;depth=6;max_tokens=0", "draft_model:tiny-draft;depth=4"


def _hybrid(parts: str, noise: float = 0.03, **options: Any) -> Guest:
    config = HybridConfig(parts=parts, **options)
    return Guest(lambda world, known: config.build(_context(world, noise)))


def _context(world: World, noise: float) -> DrafterContext:
    return DrafterContext(
        load_model=lambda name, dtype: draft(world, noise), dtype=world.dtype, device=torch.device("cpu")
    )


def _streams(verifiers: tuple[str, ...] = (), layers: int = 1, **options: Any) -> Guest:
    config = StreamsConfig(**options)
    return Guest(lambda world, known: StreamsDrafter(config, lossless_streams(world, layers)), verifiers, streams=True)


def _states(make: Callable[..., Any], **options: Any) -> Guest:
    return Guest(lambda world, known: make(config=world.config, **options))


def _medusa(**options: Any) -> Guest:
    return Guest(lambda world, known: medusa(taught_heads(world.config), world.dtype, **options))


def _magicdec(verifiers: tuple[str, ...] = (), **options: Any) -> Guest:
    return Guest(lambda world, known: MagicDec(MagicDecConfig(**options)), verifiers, whole=True)


def _spire(verifiers: tuple[str, ...] = (), **options: Any) -> Guest:
    def make(world: World, known: Known) -> Any:
        return spire(config=world.config, dtype=world.dtype, compiled=world.compiled, **options)

    return Guest(make, verifiers, whole=True)


def _adversary(rule: Rule) -> Guest:
    return Guest(lambda world, known: Adversary(rule, known), fails=rule is unreliable)


GUESTS: dict[str, Guest] = {
    "none": Guest(lambda world, known: None),
    "ngram": Guest(lambda world, known: NgramConfig(depth=5)),
    "suffix": Guest(lambda world, known: SuffixConfig(depth=6)),
    "chain_coupled": _model(depth=4),
    "chain_point": _model(depth=4, proposes="point"),
    "chain_drawn": _model(depth=3, proposes="sampled", verifiers=("rejection", "block")),
    "static_coupled": _model(branching="3x2x1", noise=0.08),
    "static_drawn": _model(branching="2x2", proposes="sampled", verifiers=("rejection", "block")),
    "dynamic_coupled": _model(topk=3, depth=4, nodes=9, noise=0.08),
    "dynamic_point": _model(topk=4, depth=3, noise=0.08, proposes="point"),
    "dynamic_narrow": _model(topk=2, depth=6),
    "streams_tree": _streams(k=12, nodes=24, at="nodes"),
    "streams_frontier": _streams(k=12, nodes=24),
    "streams_point": _streams(k=12, nodes=24, proposes="point"),
    "streams_chain": _streams(k=1, at="nodes"),
    "streams_threshold": _streams(k=12, nodes=24, prune_threshold=0.003, at="nodes"),
    "streams_count": _streams(k=12, nodes=24, prune_count=9),
    "streams_best_path": _streams(k=12, nodes=24, best_path_batch=2),
    "lyanna": _states(lyanna, nodes=8, extra=12, past=8),
    "lyanna_point": _states(lyanna, nodes=12, proposes="point"),
    "eagle": _states(eagle, depth=3, nodes=16, past=8),
    "medusa": _medusa(),
    "medusa_point": _medusa(nodes=12, depth=2, proposes="point"),
    "magicdec": _magicdec(window=12, sinks=2),
    "magicdec_drawn": _magicdec(window=7, sinks=0, depth=3, proposes="sampled", verifiers=("rejection", "block")),
    "spire": _spire(),
    "spire_narrow": _spire(shape={"window": 3, "sinks": 0}, depth=6, proposes="point"),
    "spire_drawn": _spire(proposes="sampled", verifiers=("rejection", "block")),
    "hybrid": _hybrid(f"{LOOKUP}+{MODEL}"),
    "hybrid_trees": _hybrid(f"ngram+{LOOKUP}+{MODEL};topk=3;nodes=9", nodes=12, noise=0.08),
    **{rule.__name__: _adversary(rule) for rule in RULES},
    "mirror": replace(_model(depth=3), round="mirror,kappa=4,exit=1/2"),
    "mirror_plain": replace(_model(depth=2, proposes="point"), round="mirror,kappa=6,exit=1/2,rollout=beside"),
    "pipeline": replace(_model(depth=3, noise=0.06), round="pipeline,stages=3,width=4,children=3"),
    "pipeline_shared": replace(_model(depth=3), round="pipeline,stages=2,width=6,children=2,rows=5"),
    "pipeline_hybrid": replace(_hybrid(f"{LOOKUP}+{MODEL}"), round="pipeline,stages=2,width=3,children=2"),
}
