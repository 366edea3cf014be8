"""What steps cost, measured with care: the figures that ``budget="auto"`` begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ..assembly import draft_key
from ..drafters import registry
from ..drafters.registry import DrafterConfig
from ..engine import calibration
from ..engine.calibration import Calibration
from ..engine.costs import CostTable
from ..llm import LLM
from ..planning.costs import ROWS

BATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one row each
CONTEXTS = (128, 1024)  # committed tokens: of the table, and to see how costs grow


def calibrate(
    llm: LLM,
    drafter: str | DrafterConfig | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    *,
    repeats: int = 15,
    rows: Sequence[int] = ROWS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> tuple[Calibration, Path]:
    """Measure the target's passes, and those of the model that ``drafter`` runs, and write them down.

    Args:
        llm: the model, loaded as it will be used (dtype, exact, kernels, threads).
        drafter: as ``LLM(drafter=...)`` takes it; None: the target alone.
        progress: called with whose passes are timed, the rounds done, and of how many.
        repeats: passes of each kind; medians count.
        rows: of one sequence.
        batches: sequences of one row each.
        contexts: committed tokens of each.

    Returns:
        The figures, and the file that they were written to.

    Raises:
        ConfigError: no place to write to, or a drafter that cannot be loaded.
    """

    def measured(of: LLM, name: str) -> CostTable:
        room = of.decoder.config.max_position
        most = [count for count in rows if count < room]
        return calibration.measure(
            of.decoder,
            rows=most,
            batches=batches,
            contexts=[context for context in contexts if context + most[-1] <= room] or [0],
            repeats=repeats,
            source="measured now",
            progress=lambda done: progress(f"timing passes of {name}", done, repeats + 1),
        )

    chosen = registry.parse(drafter)
    draft, dtype = getattr(chosen, "model", None), str(getattr(chosen, "dtype", "auto"))
    table, drafts = measured(llm, "the target"), {}
    if draft:
        wanted = str(llm.decoder.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        other = LLM(str(draft), dtype=wanted, device=llm.config.device, kernels=llm.config.kernels)
        drafts[draft_key(str(draft), dtype)] = measured(other, str(draft))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    made = Calibration(fingerprint=llm.fingerprint, table=table, drafts=drafts, created=created, repeats=repeats)
    return made, calibration.save(llm.folder, made)
