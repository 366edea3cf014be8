"""``paceline plan --measured``: the law of the present machine, beside the passes that it was held against."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bench.law import LawConfig, LawFound, calibrate_law, measure_law
from ..bench.report.terminal import figures_table
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..engine.calibration import processor
from ..llm import LLM
from ..planning.machines import Machine
from ..planning.measured import TimedPass, errors, median_error
from ..planning.throughput import Network
from .console import note, stdout
from .session import counting

DTYPES = ("float32", "bfloat16", "int8")  # of weights that this engine runs
ASSUMED_BYTES = 8e9  # of memory, where the system does not tell


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """The present machine."""

    machine: Machine
    found: LawFound
    file: Path  # what the draft budget reads

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        parts = {"fitted": self.found.fitted, "held_out": self.found.held_out}
        passes = {name: self._passes(part) for name, part in parts.items()}
        return {"law": asdict(self.found.law), **passes, "file": str(self.file), "machine": asdict(self.machine)}

    def _passes(self, points: Sequence[TimedPass]) -> list[dict[str, Any]]:
        return [
            {"layers": p.network.shape.num_layers, "batch": p.batch, "context": p.context, "rows": p.rows}
            | {"measured_ms": 1e3 * p.seconds, "error": error}
            for p, error in zip(points, errors(self.found.law, points), strict=True)
        ]

    def show(self) -> None:
        """The law, and what it says of passes that it was not fitted to."""
        law, console = self.found.law, stdout()
        console.print(f"this machine ({self.machine.about}):", style="bold", markup=False)
        per = f"a pass {1e3 * law.host:.2f} ms, a row {1e6 * law.row:.0f} us"
        rates = f"weights {_rate(law.weight)}, products {self.machine.flops / 1e9:,.0f} GFLOP/s, K/V {_rate(law.kv)}"
        attention = f"{1e-9 / law.attention:,.0f} GFLOP/s" if law.attention else "beside its reads"
        console.print(f"  {per}, {rates}, attention {attention}", markup=False)
        head = ("layers", "sequences", "context", "rows each", "measured, ms", "predicted, ms", "error")
        console.print(figures_table(head, [_line(row) for row in self._passes(self.found.held_out)], words=0))
        sizes = [abs(error) for error in errors(law, self.found.held_out)]
        console.print(
            f"  error of passes that it was not fitted to: median {median_error(law, self.found.held_out):.0%}, "
            f"largest {max(sizes):.0%}; of the others: median {median_error(law, self.found.fitted):.0%}",
            markup=False,
        )
        note(f"written to {self.file}, where the automatic budget finds it")


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:,.1f} GB/s" if seconds else "at no cost"


def _line(row: dict[str, Any]) -> list[str]:
    told = [str(row[name]) for name in ("layers", "batch", "context", "rows")]
    measured = row["measured_ms"]
    return [*told, f"{measured:.2f}", f"{measured * (1 + row['error']):.2f}", f"{row['error']:+.0%}"]


def look_here(
    name: str | None, network: Network, weights: str, draft: tuple[str, Network] | None, config: LawConfig | None = None
) -> MeasuredMachine:
    """Time passes of the target on this machine, and write down what the draft budget reads.

    Args:
        name: of the target, as ``--model`` takes it; None: there are no weights of it.
        network: its sizes.
        weights: dtype of its weights.
        draft: name and sizes of the draft model.
        config: which passes are timed.

    Raises:
        ConfigError: a target without weights, or one that is gone when the command ends; weights that the engine does
            not run.
    """
    asked = "paceline plan --measured"
    if name is None:
        raise ConfigError(asked, "there are no weights of this model to time", "name a model that can be loaded")
    if parse_model(name).random:
        raise ConfigError(f"{asked} of {name}", "it is gone when the command ends", "name a model that stays")
    if weights not in DTYPES:
        raise ConfigError(f"--weights {weights} with --measured", "they do not run here", f"use {', '.join(DTYPES)}")
    config = config or LawConfig()
    llm = LLM(name, dtype=weights)
    with counting("timing passes", config.repeats + 1) as progress:
        found = measure_law(llm, network, config, progress)
    file = calibrate_law(llm, network, found, draft)
    return MeasuredMachine(machine=found.law.machine(processor("cpu"), _memory(), "cpu"), found=found, file=file)


def _memory() -> float:
    """Bytes of this machine's memory."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return ASSUMED_BYTES
