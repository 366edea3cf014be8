"""A drafter in a process of its own: from the options of an `LLM` to a worker that serves its draft sessions.

The target is not loaded there: of it a drafter that runs ahead knows name, sizes and vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from ..api.assembly.drafting import drafter_context, drafter_of
from ..api.assembly.models import draft_device
from ..api.config import LLMConfig
from ..core.errors import CapabilityError, ConfigError
from ..core.options import written
from ..draft import registry
from ..draft.fit import tokenizer_mark
from ..draft.registry import DrafterConfig
from ..engine.base import WorkerPlace
from ..engine.grammar import Grammars
from ..model.decoder import TargetInfo
from ..weights.files import fingerprint
from ..weights.source import Source, parse_device, read_config, resolve_folder
from .drafts import DraftService, RemoteSessions
from .handshake import Facts
from .placement import Placement, cores, pin
from .remote import LocalHandle, Remote, Timeouts, WorkerSpec

if TYPE_CHECKING:
    from .ray_cluster import ClusterHosts

# What the drafter's process must know of the options; the rest is the target's and its engine's.
OPTIONS = ("model", "dtype", "kernels", "kv_memory", "max_sequences", "revision", "offline")


# Drafting is to be back within seconds, however often a drafter died; taking one for dead too soon costs no token.
TIMEOUTS = Timeouts(silent_s=5.0, most_rest_s=1.0)


def draft_worker(config: LLMConfig, source: Source, rows: int, pool_tokens: int, placement: Placement) -> WorkerSpec:
    """Describe a worker that serves the draft sessions of the drafter that the configuration names.

    Args:
        config: the options of the target's process.
        source: the target.
        rows: drafted nodes that a sequence may hold at once.
        pool_tokens: tokens that the target's K/V pool holds.
        placement: where it runs.

    Raises:
        ConfigError: no drafter is named, or one that cannot run ahead of the target.
    """
    chosen = _chosen(config)
    options = {name: getattr(config, name) for name in OPTIONS} | {"drafter": named(chosen)}
    return WorkerSpec(
        name="draft",
        service=f"{__name__}:service",
        options={"options": options, "rows": rows, "pool_tokens": pool_tokens},
        expected=_facts(config, chosen, source),
        placement=placement,
    )


def start_drafter(
    hosts: ClusterHosts | None, config: LLMConfig, source: Source, pool_tokens: int, rows: int, place: WorkerPlace
) -> RemoteSessions:
    """Start the process of a configuration's drafter, and wait until it is ready. It ends with what is returned.

    Where it gets cores of its own, this process keeps to the others, and its layers to as many threads.

    Args:
        hosts: one of which it runs on; None: this one.
        config, source: the options, and the target.
        pool_tokens: tokens that the target's K/V pool holds.
        rows: drafted nodes that a sequence may hold at once.
        place: where it runs.

    Raises:
        ConfigError: cores that are not there, or no core left for the target; a drafter that cannot be had there.
        WorkerFailed: it does not start.
    """
    device = draft_device(config, place)
    if hosts is None:
        placement = Placement(cores=place.cores, threads=place.threads, device=device)
    else:
        placement = hosts.placement(device, place.threads)
    rest = [core for core in cores() if core not in place.cores]
    if place.cores and not rest:
        wrong = "no core is left for the target"
        raise ConfigError(f"cores={written(place.cores)} of the drafter", wrong, "leave one out")
    spec = draft_worker(config, source, rows, pool_tokens, placement)
    worker = Remote(spec, TIMEOUTS, LocalHandle if hosts is None else hosts.launch(None))
    worker.start()
    sessions = RemoteSessions(worker)
    finalize(sessions, worker.stop)
    if place.cores:
        pin(rest)
        torch.set_num_threads(min(torch.get_num_threads(), len(rest)))
    return sessions


def service(device: str, options: Mapping[str, Any], rows: int, pool_tokens: int) -> DraftService:
    """Make that worker's service, in its own process; arguments as of `draft_worker`.

    Raises:
        ConfigError: the drafter cannot be had, or is not for the target.
    """
    config = LLMConfig(**{**options, "device": device})
    chosen, source = _chosen(config), config.resolve()
    drafter: Any = registry.build(chosen, drafter_context(config, source))
    if not drafter.spec.ahead:
        wrong = "it cannot draft below tokens that are not decided on"
        raise CapabilityError(f"drafter {named(chosen)} in a process of its own", wrong, "use draft_model")
    info = TargetInfo.of(source.name, source.shape, source.dtype, source.tokenizer())
    drafter.bind(info, config.max_sequences, pool_tokens, parse_device(device))

    grammars = Grammars(info.tokenizer, source.shape.vocab_size, source.shape.eos_ids)
    return DraftService(drafter.sessions(rows), _facts(config, chosen, source), matcher=grammars.matcher)


def named(chosen: DrafterConfig) -> str:
    """Return a drafter's options as they are written; `registry.parse` reads it."""
    values = [(spec.name, getattr(chosen, spec.name), spec.default) for spec in fields(chosen)]
    return ",".join([chosen.kind, *(f"{name}={written(value)}" for name, value, usual in values if value != usual)])


def _chosen(config: LLMConfig) -> DrafterConfig:
    chosen = drafter_of(config)
    if chosen is None:
        raise ConfigError("a drafter in a process of its own", "no drafter is named", "name one, such as draft_model")
    return chosen


def _facts(config: LLMConfig, chosen: DrafterConfig, source: Source) -> Facts:
    """Return the draft's weights, where it has any, and the target's vocabulary and dtype."""
    draft = getattr(chosen, "model", None)
    folder = None if draft is None else resolve_folder(draft, offline=config.offline)
    return Facts(
        weights="" if folder is None else f"{fingerprint(folder)} ({read_config(folder).num_layers} layers)",
        vocabulary=tokenizer_mark(source.tokenizer()),
        dtype=str(source.dtype).removeprefix("torch."),
        torch=torch.__version__,
    )
