"""Compare the speed of two checkouts of Paceline on this machine, in turns: A B B A A B ...

    git archive HEAD~1 | (mkdir -p build/before && tar -x -C build/before)
    .venv/bin/python tools/compare_checkouts.py build/before .
    .venv/bin/python tools/compare_checkouts.py build/before . --threads 1 --only stages     # in two processes

Each checkout runs in a process of its own, which has its models loaded and waits while the other one works. A figure
is the geometric mean over the rounds of new over old, in tokens a second, with its 95% interval (bootstrap).

    .venv/bin/python tools/compare_checkouts.py OLD NEW --smollm2 q4_1

compares the zoo's drafters of the chat model in this type of weights (or `bfloat16`).

    .venv/bin/python tools/compare_checkouts.py OLD NEW --tasks gsm8k,books --batch 1,4,16 --data FOLDER

compares what the rule of the draft budget is worth, on each task: each side's rule over its own plain decoding and over
its own 14 nodes, since passes differ as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from paceline.bench.workloads import load

WORKER = """
import json, sys, time
from paceline import LLM, SamplingParams

cases, model = json.loads(sys.stdin.readline())
models = {}
for case in cases.values():
    key = case["drafter"], case["budget"], *case["others"].values()
    if key not in models:
        first = None if case["others"] else next(iter(models.values()), None)
        options = {"budget": case["budget"], "max_model_len": 2048, **model, **case["others"]}
        models[key] = LLM(drafter=case["drafter"], share=first, **options)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    case = cases[json.loads(line)]
    llm = models[case["drafter"], case["budget"], *case["others"].values()]
    prompts, size = case["prompts"], case["batch"]
    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    params = SamplingParams(temperature=case["temperature"], seed=1, max_tokens=case["tokens"], ignore_eos=True)
    # `LLM.forget`, which older checkouts do not have: nothing of the round before is found.
    llm.engine.pool.forget()
    getattr(getattr(llm.engine.round, "drafter", None), "forget", int)()
    begin = time.perf_counter()
    outputs = [output for group in groups for output in llm.generate(group, params)]
    seconds = time.perf_counter() - begin
    tokens = [sample.token_ids for output in outputs for sample in output.outputs]
    print(json.dumps({"rate": sum(map(len, tokens)) / seconds, "ids": tokens}), flush=True)
"""
PROMPTS = [
    "It was a dark night, and",
    "def read_lines(path):\n",
    "CREATE TABLE players (name, team, number)\nQuestion: Who wears number 7?\nSQL:",
    "Write a sentence for the meaning representation.\nname[The Vaults], eatType[pub], area[riverside]\nText:",
]
DRAFT = "draft_model:paceline-small-draft,depth=4"
HYBRID = "hybrid:paceline-small-draft,dtype=int8"


def case(
    drafter: str | None,
    batch: int,
    budget: int | str | None = None,
    temperature: float = 0.0,
    prompts: Sequence[str] = PROMPTS,
    **others: Any,
) -> dict[str, Any]:
    """One measurement: who drafts (``None``: plain), requests at once, nodes, and other options of `LLM`."""
    given = {"drafter": drafter, "batch": batch, "budget": budget, "temperature": temperature, "tokens": 96}
    given["others"] = others
    return given | {"prompts": list(prompts) * -(-batch // len(prompts))}


# Budgets are fixed, so that both sides compute the same passes, but where a case is about the rule that chooses them.
CASES = {
    "plain, batch 1": case(None, 1),
    "plain, batch 8": case(None, 8),
    "plain, batch 32": case(None, 32),
    "plain, batch 8, T=1": case(None, 8, temperature=1.0),
    "ngram, batch 1": case("ngram", 1, 6),
    "ngram, batch 8": case("ngram", 8, 6),
    "hybrid, batch 1": case(HYBRID, 1, 8),
    "hybrid, batch 4": case(HYBRID, 4, 8),
    "ngram, batch 1, auto": case("ngram", 1, "auto"),
    "hybrid, batch 1, auto": case(HYBRID, 1, "auto"),
    "hybrid, batch 1, 14 nodes": case(HYBRID, 1, 14),
    "hybrid, batch 4, auto": case(HYBRID, 4, "auto"),
    "streams, batch 1": case("streams:paceline-small-streams,nodes=7", 1, 7),
    # In processes, a core each (--threads 1).
    "two stages, plain": case(None, 1, pipeline=2, round="pipeline,stages=2"),
    "two stages, ngram": case("ngram", 1, pipeline=2, round="pipeline,stages=2,width=2,children=2"),
    "mirror, its drafter apart": case(DRAFT, 1, round="mirror,rollout=process"),
}

SMOLLM2_CASES = {
    f"{name}, batch {batch}": case(drafter, batch, 6 if drafter else None)
    for name, drafter in {
        "plain": None,
        "ngram": "ngram",
        "hybrid": "hybrid:suffix+eagle:smollm2-135m-eagle",
        "eagle": "eagle:smollm2-135m-eagle",
    }.items()
    for batch in (1, 8)
}

CHARACTERS = 4000  # of a prompt, its end: the model has room for 2,048 tokens
TASK_METHODS = {"plain": (None, None), "auto": (HYBRID, "auto"), "14 nodes": (HYBRID, 14)}


def task_cases(tasks: Sequence[str], batches: Sequence[int], data: Path | None, number: int) -> dict[str, Any]:
    """Plain decoding, the rule and 14 nodes on ``number`` prompts of each task, in groups of each size."""
    found: dict[str, Any] = {}
    for task in tasks:
        prompts = [prompt.turns[0][-CHARACTERS:] for prompt in load(task, folder=data, limit=number).prompts]
        for batch in batches:
            for name, (drafter, budget) in TASK_METHODS.items():
                found[f"{task}, batch {batch}, {name}"] = case(drafter, batch, budget, prompts=prompts)
    return found


def relative(results: dict[str, Result]) -> list[str]:
    """A line a task and batch: the rule over plain (old, new), over 14 nodes (old, new), new over old of the latter.

    At the end one a batch over all tasks.
    """
    lines: list[str] = []
    sizes: dict[str, list[float]] = {}
    for name, auto in results.items():
        cell, _, method = name.rpartition(", ")
        if method == "auto":
            logs = [
                [log(a[side] / b[side]) for a, b in zip(auto.rates, results[f"{cell}, {base}"].rates, strict=True)]
                for base in ("plain", "14 nodes")
                for side in (0, 1)
            ]
            change = [new - old for old, new in zip(logs[2], logs[3], strict=True)]
            shown = "".join(f"{exp(statistics.fmean(one)):>8.2f}" for one in logs)
            lines.append(f"{cell:<26}{shown}   {interval(change)}")
            sizes.setdefault(cell.partition(", ")[2], []).extend(change)
    return lines + [f"all, {size:<53}   {interval(change)}" for size, change in sizes.items()]


class Side:
    """A process with one checkout."""

    def __init__(self, folder: Path, cases: dict[str, Any], model: dict[str, Any]) -> None:
        env = {**os.environ, "PYTHONPATH": str(folder / "src")}
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.tell([cases, model])
        self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; its message is above")
        return dict(json.loads(line))

    def tell(self, said: Any) -> None:
        """A line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()

    def run(self, name: str) -> dict[str, Any]:
        """One measurement."""
        self.tell(name)
        return self.answer()


class Result:
    """What both sides did in one case."""

    def __init__(self) -> None:
        self.rates: list[tuple[float, float]] = []
        self.same = True

    def add(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """One comparison."""
        self.rates.append((old["rate"], new["rate"]))
        self.same = self.same and old["ids"] == new["ids"]

    def line(self) -> str:
        """Medians, the ratio with its interval, and whether ids are the same."""
        old, new = (statistics.median(rate[which] for rate in self.rates) for which in (0, 1))
        ids = "same ids" if self.same else "OTHER IDS"
        return f"{old:>10.0f} {new:>10.0f}   {interval([log(new / old) for old, new in self.rates])}  {ids}"


def interval(logs: Sequence[float]) -> str:
    """The geometric mean of ratios, whose logarithms these are, with its 95% interval (bootstrap)."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    return f"{exp(statistics.fmean(logs)):.3f} [{exp(means[50]):.3f}, {exp(means[1949]):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=8, help="comparisons of a case in each start")
    parser.add_argument("--starts", type=int, default=4, help="starts of both processes, each first in half of them")
    parser.add_argument("--threads", type=int, help="default: the engine's; 1 is much less noisy")
    parser.add_argument("--smollm2", metavar="DTYPE", help="the chat model in this type, in place of the embedded one")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tasks", help="tasks of the benchmark, such as gsm8k,books, in place of the cases")
    parser.add_argument("--batch", default="1", help="requests at once, such as 1,4,16, with --tasks")
    parser.add_argument("--prompts", type=int, default=16, help="of a task")
    parser.add_argument("--data", type=Path, help="the folder of tasks that do not come along")
    asked = parser.parse_args()
    cases, model = CASES, {"model": "paceline-small", "threads": asked.threads}
    if asked.smollm2:
        cases, model = SMOLLM2_CASES, model | {"model": "smollm2-135m", "dtype": asked.smollm2}
    if asked.tasks:
        cases = task_cases(asked.tasks.split(","), [*map(int, asked.batch.split(","))], asked.data, asked.prompts)
    cases = {name: c for name, c in cases.items() if asked.only in name}
    results = {name: Result() for name in cases}
    for start in range(asked.starts):
        # Which of two processes was started first can be worth 5% here: memory lies elsewhere.
        order = (0, 1) if start % 2 else (1, 0)
        sides = {which: Side((asked.old, asked.new)[which].resolve(), cases, model) for which in order}
        for turn in range(asked.rounds + 1):
            for name, result in results.items():
                said = {which: sides[which].run(name) for which in ((0, 1) if turn % 2 else (1, 0))}
                if turn:  # the first one warms up
                    result.add(said[0], said[1])
        for side in sides.values():
            side.process.kill()
    print(f"{'case':<26} {'old tok/s':>10} {'new tok/s':>10}   new / old")
    for name, result in results.items():
        print(f"{name:<26} {result.line()}")
    if asked.tasks:
        print("\nthe rule over plain (old, new), over 14 nodes (old, new), new / old of the latter")
        print(*relative(results), sep="\n")


if __name__ == "__main__":
    main()
