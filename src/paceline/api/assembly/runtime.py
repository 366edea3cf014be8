"""Where the processes of a model run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...draft.sessions import AsyncSessions
from ...engine.base import WorkerPlace
from ...kv.pool import KVPool
from ...model.parallel import Ranks
from ...model.stage_line import StageLine
from ...weights.source import Source
from ..config import LLMConfig
from .models import LoadedModel, TargetPart


class Runtime:
    """Start the processes of a model, on this host or on a cluster; they end with what is returned.

    What does it is imported by its name, when it is needed.

    Args:
        config: the options.

    Raises:
        ConfigError, CapabilityError: a cluster that cannot be joined, or has no room.
    """

    def __init__(self, config: LLMConfig) -> None:
        self._hosts = None if config.cluster is None else _module("cluster").ClusterHosts(config)

    def start_ranks(self, config: LLMConfig, source: Source, part: TargetPart) -> Ranks:
        """Start the other ranks of a target, or of a part of it; return rank 0, with the line to them."""
        return _module("rank_worker").start_ranks(config, source, part)

    def start_tracks(self, config: LLMConfig, source: Source) -> Ranks:
        """Start the other tracks of a draft in the same way."""
        return _module("rank_worker").start_tracks(config, source)

    def start_stages(self, config: LLMConfig, target: LoadedModel, pool: KVPool) -> StageLine:
        """Start the stages of a target but the last one, which ``target`` and ``pool`` have."""
        return _module("stage_worker").start_stages(config, target, pool, self._hosts)

    def start_drafter(
        self, config: LLMConfig, source: Source, pool_tokens: int, rows: int, place: WorkerPlace
    ) -> AsyncSessions:
        """Start a configuration's drafter.

        Args:
            config: the options.
            source: the target.
            pool_tokens: tokens that the target's K/V pool holds.
            rows: drafted nodes that a sequence may hold at once.
            place: where it runs.
        """
        start = _module("draft_worker").start_drafter
        return start(config, source, pool_tokens, rows, place, self._hosts)


def _module(name: str) -> Any:
    return import_module(f"paceline.runtime.{name}")
