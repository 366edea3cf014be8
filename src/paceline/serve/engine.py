"""From options to an `EngineClient`; nothing of it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..distributed.placement import Placement
from ..distributed.requests import KINDS
from ..distributed.worker import Patience, WorkerSpec
from .client import EngineClient
from .config import ServeConfig

SILENT_S = 2.5  # without one of the beats, of which six come in this time; a pass, however long, does not hold them up
HEALTHY_S = 1.0  # an engine that was well for so long is started again at once


def engine_client(config: ServeConfig, options: Mapping[str, Any]) -> EngineClient:
    """A client whose engine is not started yet.

    Args:
        config: the server's.
        options: fields of `LLMOptions`, all of them.
    """
    spec = WorkerSpec(
        name="engine",
        service="paceline.engine_worker:service",
        options={"options": {name: value for name, value in options.items() if name != "device"}},
        kinds=KINDS,
        placement=Placement(device=options["device"]),
        channel="socket",
    )
    patience = Patience(start_s=config.start_s, stuck_s=config.stuck_s, silent_s=SILENT_S, healthy_s=HEALTHY_S)
    return EngineClient(spec, patience, None if config.no_spare else "paceline.engine_worker:prepare")
