"""Many requests: SpecPipe-DB against a micro-batched pipeline (figures 16 and 17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.bench import figures
from paceline.bench.figures import Panel, Series
from paceline.bench.study import Table
from paceline.distributed.clock import VIRTUAL
from paceline.rounds.pipeline import PipelineConfig
from specpipe_parts.common import HOW, LEAP, OWN, Asked, decode, draft_of, greedy, levels, plain, prompts, study

POOLS = 2  # requests for each one that runs: a new one begins where one has ended (section 4.4)
DB, BATCHED = "SpecPipe-DB", "micro-batched"


def tail(values: Sequence[float], share: float) -> float:
    """The value that so large a share of all lies at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@study.figure(takes=OWN, tasks="sql,e2e,gsm8k", prompts=12, max_new_tokens=24)
def figure_16(ask: Asked) -> Iterator[Table | None]:
    """Throughput and time between tokens by requests at once, with tails (figure 17)."""
    tokens = ask.max_new_tokens or 0
    tasks = [prompts(replace(ask, tasks=task), tokens) for task in ask.names]
    found = [prompt for one in zip(*tasks, strict=False) for prompt in one]  # in turn, so that few are of all tasks
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = True
    curves: dict[str, list[tuple[float, float]]] = {DB: [], BATCHED: []}
    for batch in ask.few((1, 2, 4, 8, 16)):
        count = POOLS * batch
        jobs = [(found[place % len(found)], greedy(tokens)) for place in range(count)]
        answers = plain(ask, jobs)
        micro = PipelineConfig(stages=ask.stages, texts=-(-batch // ask.stages))
        runs = {
            BATCHED: decode(ask, jobs, None, micro, together=batch),
            DB: decode(ask, jobs, draft_of(ask), levels(ask, rows=LEAP - batch), together=batch),
        }
        for name, run in runs.items():
            same &= run.said == answers
            tails = {f"P{p}": tail(run.gaps, p / 100) * 1e3 for p in (50, 90, 99)}
            figure = {
                "method": name,
                "batch": batch,
                "throughput": run.throughput,
                "tbt_ms": run.tbt * 1e3,
                "tails_ms": tails,
            }
            values.append(figure)
            curves[name].append((run.tbt * 1e3, run.throughput))
            shown = [f"{value:.0f}" for value in tails.values()]
            rows.append([str(batch), name, f"{run.throughput:.1f}", f"{run.tbt * 1e3:.1f}", *shown])
        rows[-1][2] += f" ({runs[DB].throughput / runs[BATCHED].throughput:.2f}x)"
    series = [Series(label=n, x=[x for x, _ in curve], y=[y for _, y in curve]) for n, curve in curves.items()]
    panel = Panel(title="", x_label=f"ms between tokens ({VIRTUAL})", y_label="tokens a second", series=series)
    yield Table(
        title=f"Requests at once in {ask.stages} stages ({VIRTUAL})",
        head=("B", "method", "tokens/s", "TBT ms", "P50", "P90", "P99"),
        parts={"": rows},
        values={"rows": values},
        how=[[HOW, f"{POOLS} B requests, B at once, {tokens} tokens each, prompts computed in the same stages"]],
        plots={".svg": lambda path: figures.lines([panel], path)},
        same=same,
    )
