"""Start learning from the option ``learn``: the part that learns, and the learner's configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...api.assembly.drafting import drafter_context, drafter_of
from ...api.assembly.models import LoadedModel
from ...api.config import LLMConfig
from ...core.errors import CapabilityError, ConfigError
from ...core.inference import inference
from ...draft import registry
from ...draft.fit import TrainedDrafterConfig
from ...draft.states.sessions import StateDrafter
from ...engine.engine import Engine
from ...weights.files import fingerprint
from .serving import Learning, learned_part

log = logging.getLogger(__name__)
DEPTH = 3  # tokens ahead, where a drafter has no depth
RATE, WIDTH = 2e-4, 576  # learning rate at this width of the target: half of what a drafter is made with


def begin(config: LLMConfig, target: LoadedModel, engine: Engine) -> Learning:
    """Start learning next to an engine.

    Raises:
        ConfigError: a drafter that cannot learn, a round that runs it elsewhere, a folder that cannot be used.
    """
    subject = f"learn={config.learn}"
    assert config.learn is not None
    part = learned_part(getattr(engine.round, "drafter", None), subject)
    chosen = _chosen(config, part, subject)
    if engine.round.name != "serial":
        raise CapabilityError(subject, f"the {engine.round.name} round drafts ahead of its steps", "use round=serial")
    if config.tensor_parallel > 1:
        raise CapabilityError(subject, "the target lies in several ranks", "leave out learn or tensor_parallel")
    context = drafter_context(config, target.source)
    shape = target.decoder.config

    @inference
    def build(folder: str) -> Any:
        fresh = registry.build(replace(chosen, path=folder), context)
        info = target.decoder.info(target.name, target.tokenizer)
        fresh.bind(info, config.max_sequences, engine.pool.num_tokens, target.decoder.device)
        return fresh

    task: dict[str, Any] = {
        "model": config.model,
        "target": str(target.folder),
        "fingerprint": fingerprint(target.folder),
        "kind": chosen.kind,
        "weights": str(chosen.folder(context)),
        "options": {"depth": int(getattr(part, "depth", DEPTH))},
        "rate": min(1e-3, RATE * WIDTH / shape.d_model),
    }
    learning = Learning(Path(config.learn).absolute(), engine, part, build, task)
    log.warning(
        "learning is on: token ids of requests are kept in %s; a request with store: false is not", learning.folder
    )
    return learning


def _chosen(config: LLMConfig, part: StateDrafter, subject: str) -> TrainedDrafterConfig:
    """Return the configuration of the part that learns."""
    whole = drafter_of(config)
    for one in getattr(whole, "chosen", (whole,)):
        if isinstance(one, TrainedDrafterConfig) and one.kind == part.spec.name:
            return one
    raise ConfigError(subject, "the drafter's weights were not found", "name them: drafter=eagle:FOLDER")
