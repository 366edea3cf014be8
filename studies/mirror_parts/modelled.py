"""What follows from the paper's own numbers: table 1 inverted, and the parameters of exits. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp, log
from statistics import fmean
from typing import Any

from kit.study import Table

from mirror_parts.common import MirrorFlags, study
from mirror_parts.latency import MirrorStep
from paceline.papers.mirror.exits import shares
from paceline.plan.models import read_shape
from paceline.weights.source import resolve_folder

TASKS = ("Translation", "Summarization", "Question Answering", "Mathematical Reasoning", "RAG", "Conversation")
# Table 1: speed-ups of Vanilla-SD and of Mirror-SD over decoding with the target alone, by task.
TABLE_1: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "Qwen3-14B, T=0": ((2.34, 1.76, 1.81, 2.80, 2.02, 2.07), (4.13, 3.07, 3.18, 5.32, 3.49, 3.70)),
    "Qwen3-14B, T=1": ((2.19, 1.50, 1.36, 2.53, 1.68, 1.98), (3.89, 2.81, 2.80, 5.02, 2.95, 3.48)),
    "Qwen3-32B, T=0": ((2.74, 2.07, 2.06, 3.33, 2.33, 2.67), (3.72, 3.14, 3.04, 5.84, 3.42, 3.59)),
    "Qwen3-32B, T=1": ((2.43, 1.92, 1.89, 2.88, 2.08, 2.39), (3.15, 2.92, 2.90, 5.08, 3.33, 3.28)),
}
# Appendix E.2: width and parameters of the targets (their published configurations), and the shares it states.
PAPERS = {"Qwen3-14B": (5120, 14.8e9, 0.18), "Qwen3-32B": (5120, 32.8e9, 0.08)}
HALF = 0.5  # of the target lies behind the exit in table 1


def ratios(model: str) -> dict[str, float]:
    """Mirror over vanilla, by task."""
    return {task: mirror / vanilla for task, vanilla, mirror in zip(TASKS, *TABLE_1[model], strict=True)}


def constant(found: Mapping[str, float]) -> tuple[float, float]:
    """One number for all ratios, and the largest error that it makes, as a share."""
    value = exp(fmean(log(ratio) for ratio in found.values()))
    return value, max(abs(ratio / value - 1) for ratio in found.values())


def exception(found: Mapping[str, float]) -> str:
    """The task without which one number explains the others best."""
    return min(found, key=lambda task: constant({name: r for name, r in found.items() if name != task})[1])


@study.table()
def table_1(ask: MirrorFlags) -> Iterator[Table | None]:
    """Table 1 inverted: Mirror over vanilla is 1 + T_draft / T_target at equal acceptance, one constant a model."""
    yield None
    rows, values = [], {}
    for model in TABLE_1:
        found = ratios(model)
        other = exception(found)
        value, error = constant({task: ratio for task, ratio in found.items() if task != other})
        whole, worst = constant(found)
        spread = f"{min(found.values()):.2f} to {max(found.values()):.2f}"
        rows.append([model, spread, f"{whole:.3f}", f"{worst:.1%}", f"{value:.3f}", f"{error:.1%}", other])
        values[model] = {"ratios": found, "all": [whole, worst], "without": [value, error], "exception": other}
    most = MirrorStep(prefix=1 - HALF, suffix=HALF, draft=HALF).speedup
    yield Table(
        title="Table 1 inverted: Mirror-SD over Vanilla-SD",
        head=("target", "ratio", "constant of six", "error", "constant of five", "error", "left out"),
        parts={"": rows},
        values={"models": values, "most_with_one_draft": most},
        remarks=[
            "error: of the ratio that is farthest from the constant, a geometric mean",
            "T_draft / T_target is the constant less 1",
            f"With one draft time on both sides and an exit at half, eq. 14 gives {most:.2f} at most: what is above it "
            "compares Vanilla-SD's plain draft with Mirror-SD's streaming one",
        ],
    )


@study.table()
def parameters(ask: MirrorFlags) -> Iterator[Table | None]:
    """Parameters of exits: H^2 a head, beside the shares that appendix E.2 states."""
    shape = read_shape(resolve_folder(ask.model))
    yield None
    rows: list[list[str]] = []
    values: dict[str, Any] = {}
    own = (shape.d_model, float(shape.body_parameters + shape.head_parameters), None)
    for name, (width, total, stated) in {**PAPERS, ask.model: own}.items():
        one = width**2
        layers = shares(shape.num_layers) if name == ask.model else ()
        said = "" if stated is None else f"{stated:.2f}%"
        rows.append([name, f"{width:,}", f"{one:,}", f"{one / total:.2%}", f"{3 * one / total:.2%}", said])
        values[name] = {"d_model": width, "head": one, "share": one / total, "stated": stated, "layers": layers}
    yield Table(
        title="Parameters of early exits",
        head=("target", "H", "one head (H^2)", "share", "three heads", "stated in E.2 (less than)"),
        parts={"": rows},
        values={"targets": values},
        remarks=["the shares that the paper states are those of one head; it trains three"],
    )
