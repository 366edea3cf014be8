"""The time of a draft (figure 13): one product with the head against one a step, and the share of every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lyanna_parts.common import FRESH_TREE, ROWS, STEPS, WIDTH, Asked, drafting, fastest, lyanna, shape_of, study
from paceline import native
from paceline.bench import figures, machine, workloads
from paceline.bench import parts as step_parts
from paceline.bench.figures import Panel, Series
from paceline.bench.records import Method
from paceline.bench.scores import encoded_prompts, workload_of
from paceline.bench.study import Table
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.drafters.lyanna import LyannaDrafter
from paceline.llm import LLM
from paceline.target.handle import TargetHandle
from paceline.target.native_linear import top
from paceline.target.native_states import Sprout, sample

MOST_STEPS = 5  # of the paper's measurement
TIMES = 100
SINGLE = ("pl_linear", "pl_top", "pl_sample")  # compiled calls: of the head, of a choice, of Algorithm 1
PARTS = ("layer", "head", "choice of tokens", "host")
NAMES = {"head": "head", "choice": f"softmax and top {WIDTH}"}
DRAWN = 0  # seed of states


@dataclass(frozen=True, kw_only=True)
class DraftPass:
    """Ms of a draft, part by part."""

    drafter: str
    layer: float  # compiled call less head and choice
    head: float
    choice: float
    host: float  # outside of compiled calls

    @property
    def parts(self) -> list[float]:
        """As `PARTS` names them."""
        return [self.layer, self.head, self.choice, self.host]


@study.figure(repeats=TIMES, quick={"repeats": 3})
def figure_13a(ask: Asked) -> Iterator[Table | None]:
    """The head, and softmax with top-k, for the states of all steps at once and one after the other, by steps."""
    llm = LLM(ask.model, max_sequences=1, **ask.llm)
    yield None
    found = [head_times(llm.decoder.handle(), k, ask.repeats) for k in range(1, MOST_STEPS + 1)]
    yield Table(
        title="One product with the head against one a step",
        head=("steps", *(f"{what}, {way}" for what in NAMES.values() for way in ("one pass ms", "each ms", "ratio"))),
        parts={"": [[str(k), *_both(cost, "head"), *_both(cost, "choice")] for k, cost in enumerate(found, 1)]},
        values={"heads": found, "machine": machine.describe(ask.device).as_dict()},
        how=[[f"the fastest of {ask.repeats} calls in turns, {ask.model}", machine.describe(ask.device).line()]],
        plots={".svg": lambda path: _draw(found, path)},
    )


@study.figure(needs=("lyanna",), takes=("eagle",), prompts=4, repeats=TIMES, quick={"repeats": 3})
def figure_13b(ask: Asked) -> Iterator[Table | None]:
    """The share of every part of a draft: the layer, the head, the choice of tokens; Lyanna and EAGLE-2."""
    shape_of(ask.lyanna)
    if native.library() is None:
        why = native.unavailable() or "no compiled layers"
        raise CapabilityError("figure_13b", why, "it times compiled calls: use a CPU with g++")
    drafters = {"Lyanna": lyanna("Lyanna", ask.lyanna, ROWS, **FRESH_TREE, nodes=ROWS)}
    if ask.eagle:
        shape = {"depth": STEPS, "topk": WIDTH, "nodes": ROWS}
        drafters["EAGLE-2"] = drafting("EAGLE-2", f"eagle:{ask.eagle}", ROWS, **shape)
    tasks = ask.names
    yield None
    found = [pass_of(ask, name, method, tasks) for name, method in drafters.items()]
    yield Table(
        title="Parts of a draft",
        head=("drafter", *(f"{part}, ms" for part in PARTS), "all, ms"),
        parts={"": [[one.drafter, *(f"{ms:.3f}" for ms in (*one.parts, sum(one.parts)))] for one in found]},
        values={
            "drafts": [dict(zip(("drafter", *PARTS), (d.drafter, *d.parts), strict=True)) for d in found],
            "machine": machine.describe(ask.device).as_dict(),
        },
        remarks=[_said(one) for one in found],
        how=[
            [
                f"medians over steps, {ask.prompts} prompts a task at most, batch 1, {STEPS} levels, {ROWS} nodes",
                f"head and choice: timed apart on as many rows, the fastest of {ask.repeats}",
                "layer: the compiled call less these",
                machine.describe(ask.device).line(),
            ]
        ],
        plots={".svg": lambda path: _draw_parts(found, path)},
    )


def _both(cost: Mapping[str, float], what: str) -> list[str]:
    one, each = cost[f"{what}_one"], cost[f"{what}_each"]
    return [f"{one:.3f}", f"{each:.3f}", f"{each / one:.2f}"]


def _said(one: DraftPass) -> str:
    shares = ", ".join(f"{part} {ms / sum(one.parts):.0%}" for part, ms in zip(PARTS, one.parts, strict=True))
    return f"{one.drafter}: {sum(one.parts):.3f} ms a draft: {shares}"


# -- the head


def drawn_states(handle: TargetHandle, rows: int) -> Tensor:
    """[rows, d] made-up states."""
    draw = torch.Generator().manual_seed(DRAWN)
    return torch.randn(rows, handle.embedding.shape[1], generator=draw).to(handle.dtype)


@torch.inference_mode()
def head_times(handle: TargetHandle, steps: int, repeats: int) -> dict[str, float]:
    """Lowest ms for the states of ``steps`` steps, at once and one after the other: head, and softmax with top-k."""
    states = drawn_states(handle, steps)
    logits, rows = handle.logits(states, normed=True), states.split(1)
    parts = [row.contiguous() for row in logits.split(1)]
    return fastest(
        {
            "head_one": lambda: handle.logits(states, normed=True),
            "head_each": lambda: [handle.logits(row, normed=True) for row in rows],
            "choice_one": lambda: top(logits, WIDTH),
            "choice_each": lambda: [top(part, WIDTH) for part in parts],
        },
        repeats,
    )


# -- a draft


@torch.inference_mode()
def spent(drafter: Any, handle: TargetHandle, repeats: int) -> dict[str, float]:
    """Lowest ms inside the compiled calls of the head and of the choice of tokens that a draft needs.

    Lyanna: one product of all states, then Algorithm 1. EAGLE: a product a level, of the root and then of `WIDTH` rows,
    and their likeliest tokens.
    """
    rows = (STEPS,) if isinstance(drafter, LyannaDrafter) else (1, *[WIDTH] * (STEPS - 1))
    levels = [drawn_states(handle, count) for count in rows]
    found = [handle.logits(level, normed=True).contiguous() for level in levels]

    def choice() -> None:
        for logits in found:
            if isinstance(drafter, LyannaDrafter):
                algorithm_1(drafter, logits)
            else:
                top(logits, WIDTH)

    return compiled_ms({"head": lambda: [handle.logits(x, normed=True) for x in levels], "choice": choice}, repeats)


def compiled_ms(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Lowest ms that each of several calls spends in compiled ones (`SINGLE`), made in turns after one that is not
    counted."""
    library, inside = native.library(), 0.0
    assert library is not None, "it was asked for"
    before = {name: getattr(library, name) for name in SINGLE}
    times: dict[str, list[float]] = {name: [] for name in calls}

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            nonlocal inside
            began = perf_counter()
            try:
                return call(*given)
            finally:
                inside += perf_counter() - began

        return run

    try:
        for name, compiled in before.items():
            setattr(library, name, timed(compiled))
        for turn in range(repeats + 1):
            for name, call in calls.items():
                inside = 0.0
                call()
                if turn:
                    times[name].append(1e3 * inside)
    finally:
        for name, compiled in before.items():
            setattr(library, name, compiled)
    return {name: min(each) for name, each in times.items()}


def algorithm_1(drafter: LyannaDrafter, logits: Tensor) -> Any:
    """The tree of these raw logits [steps, V], by the compiled call without a pass."""
    body = drafter.body
    assert body.stack is not None and body.fuse is not None
    sprout = Sprout([], 0, slice(0, 0), 0, 0, 1, None, logits)
    return sample(body.stack, [sprout], WIDTH, False, body.fuse, drafter._info, body.pool)


def pass_of(ask: Asked, name: str, method: Method, tasks: Sequence[str]) -> DraftPass:
    """The median draft of real answers, and its parts."""
    watch, most = step_parts.Stopwatch(), 1
    groups: list[list[Sequence[int]]] = []
    with step_parts.compiled_calls(watch):
        llm = LLM(ask.model, drafter=method.drafter, max_sequences=1, **method.settings, **ask.llm)
        for task in tasks:
            workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
            prompts, limit, _ = encoded_prompts(llm, workload, ask.max_new_tokens)
            groups += [[ids] for ids in prompts]
            most = max(most, limit)
        measured = step_parts.measure(llm, watch, groups, SamplingParams(temperature=0, max_tokens=most))
    own = next(part for part in measured.parts if part.part == "propose")
    alone = spent(llm.engine.round.guard.drafter, llm.decoder.handle(), ask.repeats)  # type: ignore[attr-defined]
    layer = max(0.0, own.native_ms - alone["head"] - alone["choice"])
    return DraftPass(drafter=name, layer=layer, head=alone["head"], choice=alone["choice"], host=own.host_ms)


def _draw(heads: Sequence[Mapping[str, float]], path: Path) -> Path:
    steps = [float(k) for k in range(1, len(heads) + 1)]
    panels = []
    for what, title in NAMES.items():
        series = [
            Series(label=label, x=steps, y=[cost[f"{what}_{way}"] for cost in heads])
            for label, way in (("one pass", "one"), ("step by step", "each"))
        ]
        panels.append(Panel(title=title, series=series, x_label="draft steps", y_label="ms", y_from=0.0))
    return figures.lines(panels, path)


def _draw_parts(found: Sequence[DraftPass], path: Path) -> Path:
    names = [one.drafter for one in found]
    series = [Series(label=part, x=names, y=[one.parts[n] for one in found]) for n, part in enumerate(PARTS)]
    axes = Panel(title="Parts of a draft", series=series, x_label="ms", y_label="", columns=len(PARTS))
    return figures.lines([axes], path, width=1.4, kind="stacked")
