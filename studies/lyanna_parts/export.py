"""An EAGLE head of ours in vLLM: its accepted length there beside that here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kit.grid import how
from kit.peers import HEAD, available
from kit.scores import workload_of
from kit.study import Entry, Grid, Table, measure

from lyanna_parts.common import DIALOGUE, STEPS, LyannaFlags, drafting, study, verdict
from paceline.bench.records import Method, Trial
from paceline.core.errors import CapabilityError

HERE, THERE, PEER = "EAGLE", "vLLM, EAGLE", "vllm"
WITHIN = 0.05  # wanted: the two accepted lengths differ by at most so much


def accepted_length(trials: Sequence[Trial]) -> float:
    """1 + accepted tokens / passes, over all of them."""
    return 1 + sum(t.accepted for t in trials) / max(1, sum(t.passes for t in trials))


@study.table(needs=("eagle",), tasks=DIALOGUE, prompts=16, repeats=1)
def eagle_in_vllm(ask: LyannaFlags) -> Iterator[Table | None]:
    """Accepted length of the EAGLE head here and in vLLM's build for CPUs: a chain of likeliest tokens, greedily."""
    reason = available(PEER)
    if reason:
        raise CapabilityError("eagle_in_vllm", reason, f"run `make peer-{PEER}`")
    here = drafting(HERE, f"eagle:{ask.eagle}", STEPS, depth=STEPS, topk=1, nodes=STEPS, proposes="point")
    there = Method(
        name=THERE, engine=PEER, drafter="eagle", settings={HEAD: str(ask.eagle), "num_speculative_tokens": STEPS}
    )
    grid = Grid(title="The EAGLE head here and in vLLM", entries=[Entry(m, m.name) for m in (here, there)])
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "eagle_in_vllm")
    lengths: dict[str, tuple[float, float]] = {}
    for task in ask.names:
        found = [t for t in report.trials if t.cell.workload == workload_of(task)]
        ours, theirs = ([t for t in found if t.method == name] for name in (HERE, THERE))
        lengths[task] = accepted_length(ours), accepted_length(theirs)
    rows = [[task, f"{a:.3f}", f"{b:.3f}", f"{b / a:.3f}"] for task, (a, b) in lengths.items()]
    nearest = min(1 - abs(b / a - 1) for a, b in lengths.values())
    yield Table(
        title=f"Accepted length of the EAGLE head, chains of {STEPS}",
        head=("task", "here", "in vLLM", "ratio"),
        parts={"": rows},
        values={"accepted_length": {task: list(pair) for task, pair in lengths.items()}},
        remarks=[verdict("1 - the largest difference of a task", nearest, 1 - WITHIN)],
        how=how(report, grid.facts),
        same=all(one.passed for one in report.exactness),
    )
