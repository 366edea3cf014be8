"""Many requests: SpecPipe-DB against micro-batched pipelines (figures 16 and 17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kit import figures
from kit.clock import VIRTUAL
from kit.figures import Panel, Series
from kit.study import Table

from paceline.papers.specpipe.config import PipelineConfig
from specpipe_parts.common import (
    ASSUMED,
    BARE,
    HOW,
    LEAP,
    OWN,
    STAGE_MS,
    VLLM_STAGE_MS,
    PipeFlags,
    decode,
    draft_of,
    greedy,
    levels,
    plain,
    prompts,
    stage_of,
    study,
)

POOLS = 2  # requests for each one that runs: a new one begins where one has ended (section 4.4)
DB, DOUBLE = "SpecPipe-DB", "SpecPipe-DB, batching as in the paper"
PLAIN, VLLM = "micro-batched, the paper's PP", "micro-batched, PP-vLLM"


def ways(batch: int) -> dict[str, dict[str, Any]]:
    """Times of each way. In the paper batching costs as much as inference (section 4.4), from two requests on."""
    twice = stage_of((2 if batch > 1 else 1) * STAGE_MS)
    return {
        PLAIN: BARE,
        VLLM: BARE | {"stage_s": stage_of(VLLM_STAGE_MS)},
        DB: {},
        DOUBLE: {"stage_s": twice},
    }


def tail(values: Sequence[float], share: float) -> float:
    """The value that so large a share of all lies at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@study.figure(takes=OWN, tasks="sql,e2e,gsm8k", prompts=12, max_new_tokens=24)
def figure_16(ask: PipeFlags) -> Iterator[Table | None]:
    """Throughput and time between tokens by requests at once, with tails (figure 17)."""
    tokens = ask.max_new_tokens or 0
    tasks = [prompts(replace(ask, tasks=task), tokens) for task in ask.names]
    found = [prompt for one in zip(*tasks, strict=False) for prompt in one]  # in turn, so that few are of all tasks
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = True
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in ways(1)}
    for batch in ask.few((1, 2, 4, 8, 16)):
        count = POOLS * batch
        jobs = [(found[place % len(found)], greedy(tokens)) for place in range(count)]
        answers = plain(ask, jobs)
        micro = PipelineConfig(stages=ask.stages, texts=-(-batch // ask.stages))
        runs = {}
        for name, times in ways(batch).items():
            drafts = name in (DB, DOUBLE)
            config = levels(ask, rows=LEAP - batch) if drafts else micro
            source = draft_of(ask) if drafts else None
            runs[name] = decode(ask, jobs, source, config, together=batch, **times)
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
            over = [run.throughput / runs[base].throughput for base in (PLAIN, VLLM)]
            rows.append(
                [str(batch), name, f"{run.throughput:.1f}", *(f"{x:.2f}" for x in over), f"{run.tbt * 1e3:.1f}"]
            )
            rows[-1] += shown
    series = [Series(label=n, x=[x for x, _ in curve], y=[y for _, y in curve]) for n, curve in curves.items()]
    panel = Panel(title="", x_label=f"ms between tokens ({VIRTUAL})", y_label="tokens a second", series=series)
    yield Table(
        title=f"Requests at once in {ask.stages} stages ({VIRTUAL})",
        head=("B", "method", "tokens/s", "times PP", "times PP-vLLM", "TBT ms", "P50", "P90", "P99"),
        parts={"": rows},
        values={"rows": values},
        remarks=[ASSUMED, f"PP-vLLM: {VLLM_STAGE_MS:.1f} ms a stage; the paper has 1.64 to 2.08 times its throughput"],
        how=[[HOW, f"{POOLS} B requests, B at once, {tokens} tokens each, prompts computed in the same stages"]],
        plots={".svg": lambda path: figures.lines([panel], path)},
        same=same,
    )
