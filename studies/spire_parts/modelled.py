"""What follows from the performance model alone, redrawn by the planner (figures 1, 3, 4 and 6, section 5).

Acceptance is the paper's (table 1, context 512), at every batch and context, as the paper has it. The model is that of
docs/planning.md with the paper's counting: without the LM head and attention's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import figures
from kit.figures import Panel, Series
from kit.study import Table

from paceline.core.errors import ConfigError
from paceline.plan import models
from paceline.plan.models import ModelSizes
from paceline.plan.throughput import ServedModel
from spire_parts import law
from spire_parts.common import DEPTH, MAGICDEC, SPIRE, VANILLA, SpireFlags, study

WINDOW = 65  # 64 keys and a sink
SHARE = 8  # figure 6: a window is an eighth of the context, as it is at 512
TIMES = "times plain decoding"
AROUND = {"L_crit / 4": 1 / 4, "L_crit": 1.0, "2 L_crit": 2.0, "16 L_crit": 16.0}  # contexts of figure 3
BATCH = 64
BATCHES = tuple(4**n for n in range(6))
TAUS = {VANILLA: 2.647, MAGICDEC: 3.891, SPIRE: 3.401}  # table 1, context 512
TRAINING = {VANILLA: 1 / 8, MAGICDEC: 0.0, SPIRE: 1 / 4}  # section 5, in units of the target's training
DECODING = 10.0  # units that plain decoding would cost


def target_of(name: str) -> ModelSizes:
    """A model that the planner knows."""
    found = models.named(name)
    assert found is not None, name
    return found


def multiplier(target: ModelSizes, draft: str, batch: int, context: int, window: int, hoi: float) -> float:
    """The throughput multiplier of section 2 of one of the three drafts."""
    shapes = {VANILLA: target.halved(), MAGICDEC: target, SPIRE: target.last_layers(target.num_layers // 4)}
    keys = None if draft == VANILLA else window
    drafting = ServedModel(shape=shapes[draft], keys=keys)
    return law.round_cost(ServedModel(shape=target), drafting, DEPTH, batch, context, hoi).multiplier(TAUS[draft])


def checked(ask: SpireFlags) -> float:
    """The intensity that is asked for.

    Raises:
        ConfigError: it is not above 0.
    """
    if not ask.hoi > 0:
        raise ConfigError(f"--hoi {ask.hoi:g}", "an intensity is above 0", "give FLOPs a byte, such as 400")
    return ask.hoi


def curves(
    target: ModelSizes, contexts: Sequence[int], windows: Mapping[int, int], hoi: float
) -> dict[str, list[float]]:
    """Multipliers at batch 64 by context, of every draft."""
    return {d: [multiplier(target, d, BATCH, c, windows[c], hoi) for c in contexts] for d in TAUS}


def by_context(target: ModelSizes, contexts: Sequence[int], windows: Mapping[int, int], hoi: float) -> Table:
    """A table and a plot of `curves`."""
    found = curves(target, contexts, windows, hoi)
    series = [Series(label=draft, x=contexts, y=values) for draft, values in found.items()]
    axes: dict[str, Any] = {"x_label": "context", "y_label": TIMES, "log_x": True, "line_at": 1.0, "y_from": 0.0}
    panel = Panel(title=f"Batch {BATCH}", series=series, **axes)
    rows = [[f"{c:,}", *(f"{found[d][n]:.2f}" for d in found)] for n, c in enumerate(contexts)]
    return Table(
        title=f"Speed-up by context, {target.name}, batch {BATCH}, k = {DEPTH} (modelled)",
        head=("context", *found),
        parts={"": rows},
        values={"contexts": list(contexts), "windows": [windows[c] for c in contexts], "curves": found, "hoi": hoi},
        plots={".svg": lambda path: figures.lines([panel], path)},
    )


def grid(target: ModelSizes, contexts: Sequence[int], windows: Mapping[int, int], hoi: float) -> Table:
    """Multipliers by batch and context: a part for each draft."""
    found = {
        draft: [[multiplier(target, draft, b, c, windows[c], hoi) for c in contexts] for b in BATCHES] for draft in TAUS
    }
    parts = {
        draft: [[f"{b:,}", *(f"{value:.2f}" for value in row)] for b, row in zip(BATCHES, rows, strict=True)]
        for draft, rows in found.items()
    }
    axes: dict[str, Any] = {"x_label": "batch", "y_label": TIMES, "log_x": True, "line_at": 1.0, "y_from": 0.0}
    panels = []
    for draft, rows in found.items():
        columns = {f"context {c:,}": [row[n] for row in rows] for n, c in enumerate(contexts)}
        series = [Series(label=label, x=BATCHES, y=values) for label, values in columns.items()]
        panels.append(Panel(title=draft, series=series, columns=4, **axes))
    return Table(
        title=f"Speed-up by batch and context, {target.name}, k = {DEPTH} (modelled; shown: {next(iter(parts))})",
        head=("batch", *(f"{c:,}" for c in contexts)),
        parts=parts,
        values={"batches": list(BATCHES), "contexts": list(contexts), "multipliers": found, "hoi": hoi},
        plots={".svg": lambda path: figures.lines(panels, path, width=0.9)},
    )


SMALL_CONTEXTS = (32, 128, 256, 512, 960, 2048, 8192)
LARGE_CONTEXTS = (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072)  # as many as there are colours


@study.figure(takes=("hoi",))
def figure_1(ask: SpireFlags) -> Iterator[Table | None]:
    """Speed-up by context at batch 64: the paper's 8-layer target."""
    hoi = checked(ask)
    yield None
    yield by_context(target_of("spire-8-layer"), SMALL_CONTEXTS, dict.fromkeys(SMALL_CONTEXTS, WINDOW), hoi)


@study.figure(takes=("hoi",))
def figure_3(ask: SpireFlags) -> Iterator[Table | None]:
    """Operational intensity of verification by batch size, and where it becomes compute-bound."""
    hoi = checked(ask)
    yield None
    rows, panels, values = [], [], {}
    batches = [4**n for n in range(7)]
    for name in ("spire-8-layer", "llama-3-70b"):
        network = ServedModel(shape=target_of(name))
        longest = law.critical_context(network, hoi, DEPTH + 1)
        if not longest:
            raise ConfigError(f"--hoi {hoi:g}", f"no context makes {name} compute-bound", "give less, such as 400")
        power = law.power_of_two(longest)
        values[name] = {"critical_context": longest, "power_of_two": power}
        series = []
        for words, share in AROUND.items():
            context = max(1, int(power * share))
            found = [law.paper_cost(network, batch, context, DEPTH + 1).intensity for batch in batches]
            series.append(Series(label=words, x=batches, y=found))
            critical = law.critical_batch(network, context, hoi, DEPTH + 1)
            rows.append([name, f"{context:,}", "none" if critical is None else f"{critical:,}", f"{max(found):.0f}"])
        axes: dict[str, Any] = {"x_label": "batch", "y_label": "FLOPs a byte", "log_x": True, "line_at": hoi}
        panels.append(Panel(title=f"{name}, L_crit = {power:,}", series=series, **axes))
    yield Table(
        title=f"Where verification of {DEPTH + 1} rows is compute-bound at {hoi:g} FLOPs a byte",
        head=("target", "context", "critical batch", f"intensity at batch {batches[-1]:,}"),
        parts={"": rows},
        values={"hoi": hoi, "targets": values},
        remarks=[
            f"{name}: up to context {value['critical_context']:,}; as a power of two, {value['power_of_two']:,}"
            for name, value in values.items()
        ],
        plots={".svg": lambda path: figures.lines(panels, path)},
    )


@study.figure(takes=("hoi",))
def figure_4(ask: SpireFlags) -> Iterator[Table | None]:
    """Speed-up by batch and context: the paper's 8-layer target."""
    hoi = checked(ask)
    yield None
    yield grid(target_of("spire-8-layer"), SMALL_CONTEXTS, dict.fromkeys(SMALL_CONTEXTS, WINDOW), hoi)


@study.figure(takes=("hoi",))
def figure_6(ask: SpireFlags) -> Iterator[Table | None]:
    """Speed-up by context at batch 64, and by batch and context in the appendix: Llama 3 70B."""
    hoi = checked(ask)
    yield None
    target, windows = target_of("llama-3-70b"), {c: c // SHARE for c in LARGE_CONTEXTS}
    made, whole = by_context(target, LARGE_CONTEXTS, windows, hoi), grid(target, LARGE_CONTEXTS, windows, hoi)

    def appendix(path: Path) -> Path:
        return whole.plots[".svg"](path)

    yield Table(
        title=made.title,
        head=made.head,
        parts=made.parts,
        values={**made.values, "appendix": whole.values},
        plots={**made.plots, "-appendix.svg": appendix},
    )


@study.table(takes=("hoi",))
def section_5(ask: SpireFlags) -> Iterator[Table | None]:
    """Cost analysis: what a draft saves of ten units of decoding, less its training, and when that is paid for."""
    hoi = checked(ask)
    yield None
    rows, values = [], []
    for name, context, window in (("spire-8-layer", 512, WINDOW), ("llama-3-70b", 65_536, 65_536 // SHARE)):
        for draft in TAUS:
            times = multiplier(target_of(name), draft, BATCH, context, window, hoi)
            saved = law.saved_units(DECODING, times)
            due = law.payback_units(TRAINING[draft], times)
            net = saved - TRAINING[draft]
            values.append({"target": name, "draft": draft, "multiplier": times, "saved": saved, "net": net, "due": due})
            rows.append(
                [name, draft, f"{times:.2f}", f"{saved:.2f}", f"{TRAINING[draft]:.3f}", f"{net:.2f}", f"{due:.2f}"]
            )
    yield Table(
        title=f"Units saved of {DECODING:g} units of decoding (one unit trains the target)",
        head=("target", "draft", "times plain", "saved", "training", "net", "paid for after decoding"),
        parts={"": rows},
        values={"hoi": hoi, "lines": values},
    )
