"""The time of a draft (figure 13): one product with the head against one a step, and the share of every part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from kit import figures
from kit.figures import Panel, Series
from kit.scores import encoded_prompts, workload_of
from kit.study import Table
from numpy.typing import NDArray
from torch import Tensor

from lyanna_parts.common import (
    FRESH_TREE,
    ROWS,
    STEPS,
    WIDTH,
    LyannaFlags,
    drafting,
    fastest,
    lyanna,
    shape_of,
    study,
)
from lyanna_parts.laps import Read, timed_kernels
from paceline import kernels
from paceline.api.llm import LLM
from paceline.bench import machine, workloads
from paceline.bench.records import Method
from paceline.bench.summary import RESAMPLES, SEED, percentile_bounds
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRule
from paceline.engine.base import Work
from paceline.kernels.linear import top
from paceline.model.handle import TargetHandle

Floats = NDArray[np.float64]
MOST_STEPS = 5  # of the paper's measurement
TIMES = 100
PARTS = ("layer", "head", "choice of tokens", "host")
NAMES = {"head": "head", "choice": f"softmax and top {WIDTH}"}
LYANNA, EAGLE = "Lyanna", "EAGLE-2"
DRAWN = 0  # seed of states


@study.figure(repeats=TIMES, quick={"repeats": 3})
def figure_13a(ask: LyannaFlags) -> Iterator[Table | None]:
    """The head, and softmax with top-k, for the states of all steps at once and one after the other, by steps."""
    llm = LLM(ask.model, max_sequences=1, **ask.llm)
    yield None
    found = [head_times(llm.decoder.handle(), k, ask.repeats) for k in range(1, MOST_STEPS + 1)]
    yield Table(
        title="One product with the head against one a step",
        head=("steps", *(f"{what}, {way}" for what in NAMES.values() for way in ("one pass ms", "each ms", "ratio"))),
        parts={"": [[str(k), *_both(cost, "head"), *_both(cost, "choice")] for k, cost in enumerate(found, 1)]},
        values={"heads": found, "machine": machine.describe(ask.device)},
        how=[
            [
                f"the fastest of {ask.repeats} calls in turns, weights as far as caches hold them, {ask.model}",
                f"{machine.line(ask.device)}, kernels: {kernels.describe()}",
            ]
        ],
        plots={".svg": lambda path: _draw(found, path)},
    )


@study.figure(needs=("lyanna",), takes=("eagle",), prompts=4, repeats=1)
def figure_13b(ask: LyannaFlags) -> Iterator[Table | None]:
    """The share of every part of a draft: the layer, the head, the choice of tokens; Lyanna and EAGLE-2."""
    shape_of(ask.lyanna)
    if kernels.library() is None:
        why = kernels.unavailable() or "no compiled layers"
        raise CapabilityError("figure_13b", why, "it times compiled calls: use a CPU with g++")
    methods = {LYANNA: lyanna(LYANNA, ask.lyanna, ROWS, **FRESH_TREE, nodes=ROWS)}
    if ask.eagle:
        shape = {"depth": STEPS, "topk": WIDTH, "nodes": ROWS}
        methods[EAGLE] = drafting(EAGLE, f"eagle:{ask.eagle}", ROWS, **shape)
    yield None
    drafts = drafts_of(ask, methods)
    found = {name: middle(np.concatenate(texts)) for name, texts in drafts.items()}
    yield Table(
        title="Parts of a draft",
        head=("drafter", *(f"{part}, ms" for part in PARTS), "all, ms"),
        parts={"": [[name, *(f"{ms:.3f}" for ms in (*parts, parts.sum()))] for name, parts in found.items()]},
        values={
            "drafts": [{"drafter": name, **dict(zip(PARTS, map(float, p), strict=True))} for name, p in found.items()],
            "count": {name: sum(map(len, texts)) for name, texts in drafts.items()},
            "machine": machine.describe(ask.device),
        },
        remarks=[*(_said(name, parts) for name, parts in found.items()), *beside(drafts, found)],
        how=[
            [
                f"drafts of answers to {ask.prompts} prompts a task, batch 1, {STEPS} levels, {ROWS} nodes; "
                "methods in turns; the first draft of an answer and shorter ones left out",
                "all parts of a draft are timed in one call; means over the middle half of the drafts by their time",
                f"head: {EAGLE}'s ranks its logits as it makes them; host: outside of the compiled call",
                f"{machine.line(ask.device)}, kernels: {kernels.describe()}",
            ]
        ],
        plots={".svg": lambda path: _draw_parts(found, path)},
    )


def _both(cost: Mapping[str, float], what: str) -> list[str]:
    one, each = cost[f"{what}_one"], cost[f"{what}_each"]
    return [f"{one:.3f}", f"{each:.3f}", f"{each / one:.2f}"]


def _said(name: str, parts: Floats) -> str:
    shares = ", ".join(f"{part} {ms / parts.sum():.0%}" for part, ms in zip(PARTS, parts, strict=True))
    return f"{name}: {parts.sum():.3f} ms a draft: {shares}"


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


def drafts_of(ask: LyannaFlags, methods: Mapping[str, Method]) -> dict[str, list[Floats]]:
    """Of each method and answer: [drafts, PARTS] ms."""
    found: dict[str, list[Floats]] = {name: [] for name in methods}
    with timed_kernels(ask.out / "figure_13b") as read:
        llms = {
            n: LLM(ask.model, drafter=m.drafter, max_sequences=1, **m.settings, **ask.llm) for n, m in methods.items()
        }
        rows = {name: watched(llm, read) for name, llm in llms.items()}
        for task in ask.names:
            workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
            prompts, most, _ = encoded_prompts(llms[LYANNA], workload, ask.max_new_tokens)
            for ids in prompts * ask.repeats:
                for llm in llms.values():
                    llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=most))
                if all(rows.values()):  # none too short
                    for name, own in rows.items():
                        found[name].append(np.array(own))
                for own in rows.values():
                    own.clear()
    return found


def watched(llm: LLM, read: Read) -> list[list[float]]:
    """Rows of `PARTS` in ms, which grow with every whole draft of an engine but the first of an answer."""
    guard: Any = llm.engine.round.guard  # type: ignore[attr-defined]
    inner, rows = guard.draft, list[list[float]]()

    def draft(drafting: Sequence[Work], rule: DraftRule | None = None) -> list[TokenTree]:
        before, began = read(), perf_counter()
        trees: list[TokenTree] = inner(drafting, rule)
        whole = 1e3 * (perf_counter() - began)
        parts = [now - then for now, then in zip(read(), before, strict=True)]
        views = [work.sequence for work in drafting if work.max_depth >= STEPS]
        if any(len(view.tokens) > view.prompt_len + 1 for view in views):
            rows.append([*parts, whole - sum(parts)])
        return trees

    guard.draft = draft
    return rows


def middle(drafts: Floats) -> Floats:
    """[PARTS] means over the half of the drafts [n, PARTS] whose times lie in the middle: they add up to its mean."""
    order = drafts.sum(1).argsort()
    return drafts[order[len(order) // 4 : max(1, len(order) - len(order) // 4)]].mean(0)


def beside(drafts: Mapping[str, Sequence[Floats]], found: Mapping[str, Floats]) -> list[str]:
    """A draft of Lyanna over one of EAGLE-2, with an interval over answers.

    And its layer alone over layer and head: the paper's is of the pass "beyond LM head and sampling" (section 7.4).
    """
    if EAGLE not in drafts:
        return []
    times = np.array([[np.median(own.sum(1)) for own in drafts[name]] for name in (LYANNA, EAGLE)])
    draw = np.random.default_rng(SEED).integers(0, times.shape[1], (RESAMPLES, times.shape[1]))
    over = times[:, draw].mean(2)
    low, high = percentile_bounds(over[0] / over[1])
    ratio = times[0].mean() / times[1].mean()
    bare = found[LYANNA][0] / found[EAGLE][:2].sum()
    return [
        f"a draft of {LYANNA} takes {ratio:.2f} [{low:.2f}, {high:.2f}] times one of {EAGLE}; "
        f"its layer alone {bare:.2f} times {EAGLE}'s layer and head (the paper's: 0.39)"
    ]


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


def _draw_parts(found: Mapping[str, Floats], path: Path) -> Path:
    series = [
        Series(label=part, x=[*found], y=[float(own[n]) for own in found.values()]) for n, part in enumerate(PARTS)
    ]
    axes = Panel(title="Parts of a draft", series=series, x_label="ms", y_label="", columns=len(PARTS))
    return figures.lines([axes], path, width=1.4, kind="stacked")
