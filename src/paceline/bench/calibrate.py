"""What steps cost, measured with care: the figures that ``budget="auto"`` begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..assembly import draft_key
from ..drafters import registry
from ..drafters.registry import DrafterConfig
from ..engine import calibration
from ..engine.calibration import Calibration
from ..engine.costs import CostTable
from ..llm import LLM

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one sequence
BATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one row each
CONTEXTS = (128, 1024)  # committed tokens: of the table, and to see how costs grow


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """How much is measured."""

    repeats: int = 15  # passes of each kind; medians count
    rows: tuple[int, ...] = ROWS
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS


def rounds(config: CalibrateConfig, drafter: str | DrafterConfig | None) -> int:
    """Calls of ``progress`` that `calibrate` makes, at most."""
    return (config.repeats + 1) * (2 if draft_of(drafter) else 1)


def draft_of(drafter: str | DrafterConfig | None) -> tuple[str, str] | None:
    """(name, dtype) of the model that a drafter runs; None for those that run none."""
    chosen = registry.parse(drafter)
    name = getattr(chosen, "model", None)
    return (str(name), str(getattr(chosen, "dtype", "auto"))) if name else None


def calibrate(
    llm: LLM,
    drafter: str | DrafterConfig | None = None,
    config: CalibrateConfig | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Calibration, Path]:
    """Measure the target's passes, and those of the model that ``drafter`` runs, and write them down.

    Args:
        llm: the model, loaded as it will be used (dtype, exact, kernels, threads).
        drafter: as ``LLM(drafter=...)`` takes it; None: the target alone.
        config: how much is measured.
        progress: called with the number of rounds done.

    Returns:
        The figures, and the file that they were written to.

    Raises:
        ConfigError: no place to write to, or a drafter that cannot be loaded.
    """
    config = config or CalibrateConfig()
    table = _measured(llm, config, 0, progress)
    drafts = {}
    draft = draft_of(drafter)
    if draft is not None:
        name, dtype = draft
        wanted = str(llm.decoder.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        other = LLM(name, dtype=wanted, device=llm.config.device, kernels=llm.config.kernels)
        drafts[draft_key(name, dtype)] = _measured(other, config, config.repeats + 1, progress)
    made = Calibration(
        fingerprint=llm.fingerprint,
        table=table,
        drafts=drafts,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        repeats=config.repeats,
    )
    return made, calibration.save(llm.folder, made)


def _measured(llm: LLM, config: CalibrateConfig, done: int, progress: Callable[[int], None] | None) -> CostTable:
    room = llm.decoder.config.max_position
    rows = [r for r in config.rows if r < room]
    contexts = [c for c in config.contexts if c + rows[-1] <= room] or [0]
    return calibration.measure(
        llm.decoder,
        rows=rows,
        batches=config.batches,
        contexts=contexts,
        repeats=config.repeats,
        source="measured now",
        progress=(lambda count: progress(done + count)) if progress else None,
    )
