"""Made-up benchmark reports with known truths: what a run would have written, without running anything."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.bench.records import Cell, Exactness, Method, Report, Trial

BANDWIDTH = 75e9  # bytes/s
PASS_BYTES = 113_000_000
PLAIN_PASS_MS = 2.1


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a method is made to do."""

    method: Method
    accept: float = 0.0  # chance that a drafted token is right, at every depth
    depth: int = 0
    draft_ms: float = 0.0  # a pass
    pass_ms: float = PLAIN_PASS_MS
    batch_cost: float = 0.02  # a pass grows by this share with every further request
    batches: tuple[int, ...] | None = None  # None: all


TRUTHS = (
    Truth(method=Method(name="plain")),
    Truth(method=Method(name="ngram", drafter="ngram"), accept=0.35, depth=6, draft_ms=0.02, batch_cost=0.09),
    Truth(
        method=Method(name="draft_model depth=4", drafter="draft_model", settings={"budget": 4}),
        accept=0.72,
        depth=4,
        draft_ms=1.1,
        batch_cost=0.06,
    ),
    Truth(method=Method(name="hybrid", drafter="hybrid:paceline-small-draft"), accept=0.78, depth=6, draft_ms=0.8),
    Truth(method=Method(name="llama.cpp", engine="llama.cpp", drafter="plain"), pass_ms=2.0, batches=(1,)),
)
WORKLOADS = {
    "gsm8k": "GSM8K (school maths)",
    "humaneval": "HumanEval (Python)",
    "spec_bench": "Spec-Bench (13 categories)",
    "wikisql": "WikiSQL (text to SQL)",
    "books": "Book continuation",
}


@dataclass(kw_only=True)
class World:
    """How a run went."""

    truths: Sequence[Truth] = TRUTHS
    workloads: dict[str, str] = field(default_factory=lambda: dict(WORKLOADS))
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    groups: int = 5
    repeats: int = 3
    new_tokens: int = 64
    noise: float = 0.04  # of a trial's time, as the standard deviation of its log
    seed: int = 0
    bandwidth: float | None = BANDWIDTH
    dtype: str = "bfloat16"

    def report(self) -> Report:
        """The whole run."""
        chance = random.Random(self.seed)
        cells = [
            Cell(workload=name, batch=batch, temperature=temperature, max_new_tokens=self.new_tokens, ignore_eos=True)
            for temperature in self.temperatures
            for batch in self.batches
            for name in self.workloads
        ]
        trials = [
            self._trial(chance, truth, cell, group, repeat)
            for cell in cells
            for group in range(self.groups)
            for repeat in range(self.repeats)
            for truth in self.truths
            if truth.batches is None or cell.batch in truth.batches
        ]
        methods = [truth.method for truth in self.truths]
        return Report(
            title="paceline-small on a laptop",
            created="2025-03-02T09:41:07+00:00",
            command=["paceline", "bench", "--model", "paceline-small", "--title", "a b", "--out", "out"],
            model={
                "name": "paceline-small",
                "parameters": 56_500_000,
                "dtype": self.dtype,
                "pass_bytes": PASS_BYTES,
                "kv_bytes_per_token": 6144,
            },
            machine={
                "processor": "Some Processor 9000",
                "cores": 2,
                "threads": 2,
                "system": "Linux x86_64",
                "device": "cpu",
                "read_bandwidth_bytes_per_s": self.bandwidth,
            },
            versions={"paceline": "0.3.0", "torch": "2.13.0", "llama.cpp": "b7000"},
            commit="0123456789abcdef0123456789abcdef01234567-dirty",
            settings={"seed": 0, "repeats": self.repeats, "prompts": self.groups},
            workloads={
                name: {"title": title, "source": f"source of {name}", "licence": "MIT", "prompts": self.groups}
                for name, title in self.workloads.items()
            },
            methods=methods,
            trials=trials,
            exactness=[_exactness(t.method, cell, self) for cell in cells for t in self.truths[1:] if _own(t)],
            unavailable={"vllm": "not built: run `make peers`"},
        )

    def _trial(self, chance: random.Random, truth: Truth, cell: Cell, group: int, repeat: int) -> Trial:
        hard = 0.85 + 0.3 * random.Random(f"{cell.workload}{group}").random()  # some prompts are easier to draft
        accept = min(truth.accept * hard * (0.9 if cell.temperature else 1.0), 0.97)
        passes: list[int] = []  # tokens of each
        offered, accepted = [0] * truth.depth, [0] * truth.depth
        while sum(passes) < self.new_tokens:
            kept = 0
            while kept < truth.depth:
                offered[kept] += 1
                if chance.random() >= accept:
                    break
                accepted[kept] += 1
                kept += 1
            passes.append(kept + 1)
        noise = math.exp(chance.gauss(0, self.noise))
        crowd = 1 + truth.batch_cost * (cell.batch - 1)
        verify, draft = truth.pass_ms * crowd * noise, truth.draft_ms * crowd * noise
        host = 0.09 * noise
        ttft = 6.0 * crowd * noise
        own = truth.method.engine == "paceline"
        wall = ttft + len(passes) * (verify + draft + host)
        many = cell.batch
        return Trial(
            method=truth.method.name,
            cell=cell,
            group=group,
            repeat=repeat,
            prompts=[f"{cell.workload}-{group}-{i}" for i in range(many)],
            prompt_tokens=[40] * many,
            outputs=[[7] * self.new_tokens for _ in range(many)],
            finish=["length"] * many,
            wall_ms=wall,
            ttft_ms=[ttft] * many if own else [],
            waits_ms=[verify + draft + host] * len(passes) * many if own else [],
            arrivals=passes * many if own else [],
            passes=len(passes) * many if own else 0,
            drafted=truth.depth * len(passes) * many,
            accepted=sum(accepted) * many,
            depth_offered=[n * many for n in offered] if own else [],
            depth_accepted=[n * many for n in accepted] if own else [],
            draft_ms=len(passes) * draft if own else 0.0,
            verify_ms=ttft * 0.9 + len(passes) * verify if own else 0.0,
            host_ms=len(passes) * host if own else 0.0,
            steps=len(passes),
            bytes_read=PASS_BYTES * len(passes) if own else 0,
        )


def _own(truth: Truth) -> bool:
    return truth.method.engine == "paceline"


def _exactness(method: Method, cell: Cell, world: World) -> Exactness:
    count = world.groups * cell.batch
    return Exactness(method=method.name, reference="plain", cell=cell, sequences=count, identical=count)


def fail(report: Report, method: str, workload: str, why: str) -> None:
    """Let one trial of a method fail."""
    for place, trial in enumerate(report.trials):
        if trial.method == method and trial.cell.workload == workload:
            report.trials[place] = replace(trial, outputs=[], finish=[], error=why)
            return
    raise AssertionError("no such trial")


def differ(report: Report, method: str, workload: str) -> None:
    """Let one sequence of a method differ from plain decoding's, and another by a near tie."""
    for found in report.exactness:
        if found.method == method and found.cell.workload == workload:
            found.identical -= 2
            found.explained = 1
            found.failures = [{"prompt": f"{workload}-3", "position": 17, "what": "another token", "gap": 1.25}]
            return
    raise AssertionError("no such comparison")
