"""Target, drafter, pool, budget and round as an engine."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ...core.errors import CapabilityError
from ...engine.base import ModelOrigin
from ...engine.engine import Engine, EngineLimits
from ...engine.grammar import Grammars
from ...engine.rounds import make_round, parse_round, round_of
from ...engine.scheduler import SchedulerConfig, parse_prompt_rows
from ...engine.tokens import texts_of
from ...model.applications import load_applications, locate
from ...weights import zoo
from ...weights.source import Source, resolve_folder
from ..config import LLMConfig
from .drafting import build_drafter, drafter_of, make_budget
from .memory import kv_layout, make_pool, model_length, pool_tokens
from .models import (
    LoadedModel,
    exact_layers,
    load_decoder,
    load_source,
    own_layers,
    share_of,
    start,
)

log = logging.getLogger(__name__)


def load_target(config: LLMConfig, source: Source) -> LoadedModel:
    """Load the target, and start its other ranks, where it has some.

    Everything that can be checked without the weights is checked before they are read.
    """
    if source.shape.tracks > 1:
        wrong = "it is a draft of tracks, which no target is"
        raise CapabilityError(f"model {config.model!r}", wrong, f"draft with it: drafter='draft_model:{config.model}'")
    drafter_of(config)
    pool_tokens(config, *kv_layout(config, source.shape, source.dtype), model_length(config, source.shape))
    locate(config.applications or {}, config.offline)
    layers = own_layers(config, source.shape)
    if config.tensor_parallel > 1:
        share_of(config, source, 0)
        tokenizer = source.tokenizer()
        ranks = start("rank_worker:start_ranks", config, source)
        decoder = load_decoder(config, source, exact_layers(config, source), ranks=ranks)  # as the others load theirs
        ranks.line.start()
        return LoadedModel(source, decoder, tokenizer)
    return load_source(config, source, exact_layers(config, source), layers)


def build_engine(config: LLMConfig, target: LoadedModel, hosts: Any = None) -> Engine:
    """Build drafter, pool, budget, round and engine over a loaded target, with workers on ``hosts``.

    Raises:
        ConfigError: a part that is not available, or parts that do not fit together.
    """
    source, decoder = target.source, target.decoder
    folders = locate(config.applications or {}, config.offline)
    applications = load_applications(folders, decoder, source.name, source.folder)
    beside = max([0, *(application.rows for application in applications.values())])
    drafter = build_drafter(config, target, beside)
    if drafter is not None:
        round_of(config.round, drafter.spec)  # before anything is allocated or started
    if decoder.ranks is not None and drafter is not None and drafter.spec.scratch:
        wrong = "it turns the target's keys, of which each rank has a part"
        subject = f"tensor_parallel={config.tensor_parallel} with drafter {drafter.spec.name!r}"
        raise CapabilityError(subject, wrong, "use another drafter")
    if drafter is not None and drafter.spec.scratch and config.kv_cache_dtype != "auto":
        wrong = "it reads the target's keys and values, and turns some, as the activations are"
        subject = f"kv_cache_dtype={config.kv_cache_dtype!r} with drafter {drafter.spec.name!r}"
        raise CapabilityError(subject, wrong, "leave it out, or use another drafter")
    max_model_len = model_length(config, decoder.config)
    rows, sequences = config.max_batch_rows, config.max_sequences
    prompt_rows = parse_prompt_rows(config.max_prompt_rows)
    scheduler = SchedulerConfig(max_sequences=sequences, max_batch_rows=rows, max_prompt_rows=prompt_rows)
    scratch = 0 if drafter is None else max(beside * rows, drafter.scratch_slots(rows, sequences))
    pool = make_pool(config, target, max_model_len, scratch)
    for name, context in [] if drafter is None else drafter.spec.limits(max_model_len):
        short = "drafter %r has %d positions, and the target %d: a text beyond the first %d tokens has no drafts of it"
        log.warning(short, name, context, max_model_len, context)
    round_config = parse_round(config.round)
    apart = round_config is not None and round_config.place is not None
    if drafter is not None and not apart:
        info = decoder.info(source.name, target.tokenizer)
        drafter.bind(info, config.max_sequences, pool.num_tokens, decoder.device)
    budget = make_budget(config, drafter, target)
    find, trained = partial(resolve_folder, offline=config.offline), partial(zoo.weights, model=config.model)
    origin = ModelOrigin(source.name, source.folder, find, trained)
    parts: dict[str, Any] = {"target": decoder, "pool": pool, "drafter": drafter, "verifier": config.verifier}
    parts |= {
        "origin": origin,
        "serve": partial(start, "draft_worker:start_drafter", hosts, config, source, pool.num_tokens),
    }
    if config.pipeline is not None:
        parts["start"] = partial(start, "stage_worker:start_stages", hosts, config, target, pool)
    round_ = make_round(config.round, **parts)
    shape = decoder.config
    limits = EngineLimits(vocab_size=shape.vocab_size, max_model_len=max_model_len, eos_ids=shape.eos_ids)
    grammars = Grammars(target.tokenizer, shape.vocab_size, shape.eos_ids)
    return Engine(round_, pool, limits, scheduler, budget, texts_of(target.tokenizer), applications, grammars)
