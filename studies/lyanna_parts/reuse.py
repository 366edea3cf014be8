"""How much of a draft is used a second time: states, and the tokens that re-sampled nodes won, by depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lyanna_parts.common import DIALOGUE, EXTRA, ROWS, STEPS, WIDTH, Asked, lyanna, shape_of, study
from paceline.bench import workloads
from paceline.bench.scores import encoded_prompts, workload_of
from paceline.bench.study import Table
from paceline.core.sampling import SamplingParams
from paceline.core.tree import TokenTree
from paceline.drafters.base import DraftRequest, SequenceView
from paceline.drafters.resampling import AGAIN, FRESH
from paceline.llm import LLM


@dataclass(slots=True)
class Proposed:
    """A tree that was proposed below a text."""

    length: int  # of the text then
    tokens: list[int]  # the root first
    parents: list[int]
    marks: list[int]


@dataclass(slots=True)
class Tally:
    """What became of the trees of one task. Keys are (kind of node, depth)."""

    states: int = 0  # drafted
    reused: int = 0
    proposed: Counter[tuple[int, int]] = field(default_factory=Counter)  # nodes
    won: Counter[tuple[int, int]] = field(default_factory=Counter)  # accepted nodes

    def add(self, last: Proposed, view: SequenceView) -> None:
        """The outcome of a tree: all tokens since but the last, which is the target's own, were nodes of it."""
        depths = [0]
        for parent in last.parents[1:]:
            depths.append(depths[parent] + 1)
        self.proposed.update(zip(last.marks[1:], depths[1:], strict=True))
        places = {pair: n for n, pair in enumerate(zip(last.parents, last.tokens, strict=True)) if n}
        node: int | None = 0
        for token in view.tokens[last.length : -1]:
            node = None if node is None else places.get((node, token))
            if node is None:
                return
            self.won[last.marks[node], depths[node]] += 1

    def of(self, kind: int) -> tuple[int, int]:
        """Nodes proposed and accepted of a kind, at all depths."""
        return _sum(self.proposed, kind), _sum(self.won, kind)


def _sum(counts: Counter[tuple[int, int]], kind: int) -> int:
    return sum(n for (k, _), n in counts.items() if k == kind)


def watched(llm: LLM) -> tuple[Any, Tally]:
    """The drafter of an engine, a `LyannaDrafter`, and what its trees are counted in from now on.

    A tree counts where another one follows it in its text: what came of the last one of an answer is not looked at.
    """
    drafter: Any = llm.engine.round.guard.drafter  # type: ignore[attr-defined]
    inner, tally, waiting = drafter.propose, Tally(), dict[int, Proposed]()

    def propose(want: DraftRequest) -> TokenTree:
        for view in want.sequences:
            last = waiting.pop(view.key, None)
            if last is not None and len(view.tokens) > last.length:
                tally.add(last, view)
        tree: TokenTree = inner(want)
        lists = tree.lists()
        for b, (view, count) in enumerate(zip(want.sequences, lists.counts, strict=True)):
            rows = (part[b][:count] for part in (lists.tokens, lists.parents, lists.sources))
            waiting[view.key] = Proposed(len(view.tokens), *rows)
        return tree

    drafter.propose = propose
    return drafter, tally


def tally_of(ask: Asked, llm: LLM, task: str) -> Tally:
    """Answers the prompts of a task."""
    drafter, found = watched(llm)
    before = drafter.states_drafted, drafter.states_reused
    workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
    prompts, most, _ = encoded_prompts(llm, workload, ask.max_new_tokens)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=most))
    del drafter.propose
    found.states, found.reused = drafter.states_drafted - before[0], drafter.states_reused - before[1]
    return found


@study.table(needs=("lyanna",), tasks=DIALOGUE, prompts=20)
def reuse(ask: Asked) -> Iterator[Table | None]:
    """Share of drafted states that gave logits twice, and tokens won by re-sampled nodes, by depth."""
    shape_of(ask.lyanna)
    options = {"resample": "top", "depth": STEPS, "width": WIDTH, "nodes": ROWS, "extra": EXTRA}
    method = lyanna("fused on top", ask.lyanna, ROWS + EXTRA, **options)
    llm = LLM(ask.model, drafter=method.drafter, **method.settings, **ask.llm)
    tasks = ask.names
    yield None
    found = {task: tally_of(ask, llm, task) for task in tasks}
    rows = [row for task, tally in found.items() for row in _rows(task, tally)]
    yield Table(
        title="Drafted states that were used again, and what re-sampled nodes won",
        head=("task", "depth", "fresh nodes", "accepted", "re-sampled nodes", "accepted", "of all accepted"),
        parts={"": rows},
        values={
            "tasks": {
                task: {
                    "states": tally.states,
                    "reused": tally.reused,
                    "proposed": [[*key, n] for key, n in sorted(tally.proposed.items())],
                    "accepted": [[*key, n] for key, n in sorted(tally.won.items())],
                }
                for task, tally in found.items()
            }
        },
        remarks=[_said(task, tally) for task, tally in found.items()],
        how=[
            [
                f"{method.drafter}, budget {ROWS + EXTRA}, greedy, {ask.prompts} prompts a task at most",
                "a node that both trees have is a fresh one; the last tree of an answer is not counted",
            ]
        ],
    )


def _rows(task: str, tally: Tally) -> list[list[str]]:
    depths = sorted({depth for _, depth in tally.proposed})
    lines = [(str(d), *_line(tally, d)) for d in depths]
    whole = (*tally.of(FRESH), *tally.of(AGAIN))
    return [[task, depth, *map(str, counts), _share(counts[3], counts[1] + counts[3])] for depth, *counts in lines] + [
        [task, "all", *map(str, whole), _share(whole[3], whole[1] + whole[3])]
    ]


def _line(tally: Tally, depth: int) -> tuple[int, int, int, int]:
    (a, b), (c, d) = ((tally.proposed[kind, depth], tally.won[kind, depth]) for kind in (FRESH, AGAIN))
    return a, b, c, d


def _share(part: int, of: int) -> str:
    return f"{part / of:.1%}" if of else "-"


def _said(task: str, tally: Tally) -> str:
    won = tally.of(AGAIN)[1]
    return f"{task}: {_share(tally.reused, tally.states)} of {tally.states} drafted states used again, {won} tokens won"
