"""The drafter that a configuration names, with the models it runs, and the budget that states how much it drafts."""

from __future__ import annotations

from functools import partial

import torch

from ...core.errors import CapabilityError, ConfigError
from ...draft import registry
from ...draft.base import Drafter
from ...draft.registry import DrafterConfig, DrafterContext
from ...engine import calibration
from ...engine.auto import AutoBudget
from ...engine.budget import AUTO, DraftBudget, FixedBudget, parse_budget
from ...engine.rounds import parse_round
from ...model.applications import locate, rows_beside
from ...weights import zoo
from ...weights.source import Source, parse_device, resolve, resolve_folder
from ..config import LLMConfig
from .models import LoadedModel, load_source, stage_devices


def _load_draft(config: LLMConfig, auto: torch.dtype, name: str, dtype: str) -> LoadedModel:
    """Load a model that a drafter runs, as the target was loaded; ``auto`` is what dtype "auto" means."""
    draft_dtype = str(auto).removeprefix("torch.") if dtype == "auto" else dtype
    revision = config.revision if name == config.model else None
    return load_source(config, resolve(name, draft_dtype, revision, config.offline), exact=False)


def drafter_of(config: LLMConfig) -> DrafterConfig | None:
    """Return the drafter that the configuration names, with the zoo's weights for the target where it means those.

    Raises:
        ConfigError: the zoo has none.
    """
    chosen = registry.parse(config.drafter)
    if chosen is None:
        return None
    applications = locate(config.applications or {}, config.offline)
    applied = any(map(rows_beside, applications.values()))
    return chosen.with_weights(partial(_of_the_zoo, config.model), applied)


def _of_the_zoo(model: str, kind: str) -> str:
    weights = zoo.weights(kind, model)
    if weights is None:
        trained = [entry.read_by for entry in zoo.trained_for(model) if entry.read_by in registry.names()]
        fits = ", ".join([*dict.fromkeys(trained), *registry.without_weights()])
        wrong = "it names no weights, and the zoo has none of it for this model"
        remedy = f"name them, as {kind}:FOLDER, or use a drafter that fits this model as it is: {fits}"
        raise ConfigError(f"drafter={kind!r} for {model}", wrong, remedy)
    return weights


def build_drafter(config: LLMConfig, target: LoadedModel, beside: int) -> Drafter | None:
    """Build the drafter that the configuration names; None: it names none.

    Applications have at most ``beside`` rows next to each of theirs.
    """
    chosen = drafter_of(config)
    if chosen is None:
        return None
    return registry.build(chosen, drafter_context(config, target.source, beside))


def drafter_context(config: LLMConfig, target: Source, beside: int = 0) -> DrafterContext:
    """Return what a drafter may use while it is built; ``beside`` as of `build_drafter`."""
    return DrafterContext(
        load_model=partial(_load_draft, config, target.dtype),
        dtype=target.dtype,
        device=parse_device(stage_devices(config)[-1]),
        find=partial(resolve_folder, offline=config.offline),
        target=target.name,
        target_folder=target.folder,
        rows_beside=beside,
    )


def make_budget(config: LLMConfig, drafter: Drafter | None, target: LoadedModel) -> DraftBudget:
    """Make the draft budget that was requested, or let the engine choose."""
    if drafter is None:
        return FixedBudget(0, why="no drafter was named")
    chosen = parse_budget(config.budget)
    if chosen != AUTO:
        return chosen
    round_ = parse_round(config.round)
    if round_ is not None and not round_.weighs:
        if config.budget is not None:
            raise CapabilityError(
                f"budget={config.budget!r} with round={config.round!r}",
                "the automatic budget adds the times of draft and target, which this round lets run at once",
                "give a number of nodes, or leave budget out",
            )
        return FixedBudget(drafter.spec.window)
    if drafter.spec.default_budget == 0:
        return FixedBudget(0, why=f"drafter {drafter.spec.name!r} drafts nothing by default")
    return AutoBudget.of(drafter.spec, calibration.quick_estimate(target.decoder, config.max_sequences))
