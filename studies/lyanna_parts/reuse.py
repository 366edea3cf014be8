"""How much of a draft is used a second time: states, and the tokens that re-sampled nodes won, by depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import exp, lgamma, log
from typing import Any

from kit.scores import encoded_prompts, workload_of
from kit.study import Table

from lyanna_parts.common import DIALOGUE, EXTRA, ROWS, STEPS, WIDTH, LyannaFlags, lyanna, shape_of, study
from lyanna_parts.throughput import TOP
from paceline.api.llm import LLM
from paceline.bench import workloads
from paceline.bench.records import Method
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRequest
from paceline.papers.lyanna.drafter import AGAIN, FRESH


@dataclass(slots=True)
class Proposed:
    """A tree that was proposed below a text."""

    length: int  # of the text then
    tokens: list[int]  # the root first
    parents: list[int]
    marks: list[int]


@dataclass(slots=True)
class ReuseCounts:
    """What became of the trees of one task. Keys are (kind of node, depth)."""

    states: int = 0  # drafted
    reused: int = 0
    trees: int = 0  # with re-sampled nodes
    winners: int = 0  # of these, with one that was accepted
    proposed: Counter[tuple[int, int]] = field(default_factory=Counter)  # nodes
    won: Counter[tuple[int, int]] = field(default_factory=Counter)  # accepted nodes

    def add(self, last: Proposed, view: Sequence) -> None:
        """The outcome of a tree: all tokens since but the last, which is the target's own, were nodes of it."""
        depths = [0]
        for parent in last.parents[1:]:
            depths.append(depths[parent] + 1)
        self.proposed.update(zip(last.marks[1:], depths[1:], strict=True))
        path = _accepted(last, view.tokens[last.length : -1])
        self.won.update((last.marks[node], depths[node]) for node in path)
        self.trees += AGAIN in last.marks[1:]
        self.winners += any(last.marks[node] == AGAIN for node in path)

    def of(self, kind: int) -> tuple[int, int]:
        """Nodes proposed and accepted of a kind, at all depths."""
        return _sum(self.proposed, kind), _sum(self.won, kind)


def _sum(counts: Counter[tuple[int, int]], kind: int) -> int:
    return sum(n for (k, _), n in counts.items() if k == kind)


def _accepted(tree: Proposed, tokens: list[int]) -> list[int]:
    """The nodes that are these tokens."""
    places = {pair: n for n, pair in enumerate(zip(tree.parents, tree.tokens, strict=True)) if n}
    path: list[int] = []
    for token in tokens:
        node = places.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return path


def watched(llm: LLM) -> tuple[Any, ReuseCounts]:
    """The drafter of an engine, a `LyannaDrafter`, and what its trees are counted in from now on.

    A tree counts where another one follows it in its text: what came of the last one of an answer is not looked at.
    """
    drafter: Any = llm.engine.round.guard.drafter  # type: ignore[attr-defined]
    inner, tally, waiting = drafter.draft, ReuseCounts(), dict[int, Proposed]()

    def draft(want: DraftRequest) -> list[TokenTree]:
        for view in want.sequences:
            last = waiting.pop(view.key, None)
            if last is not None and len(view.tokens) > last.length:
                tally.add(last, view)
        trees: list[TokenTree] = inner(want)
        for view, tree in zip(want.sequences, trees, strict=True):
            waiting[view.key] = Proposed(len(view.tokens), [-1, *tree.tokens], [-1, *tree.parents], [0, *tree.marks])
        return trees

    drafter.draft = draft
    return drafter, tally


def tally_of(ask: LyannaFlags, llm: LLM, task: str) -> ReuseCounts:
    """Answers the prompts of a task."""
    drafter, found = watched(llm)
    before = drafter.states_drafted, drafter.states_reused
    workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
    prompts, most, _ = encoded_prompts(llm, workload, ask.max_new_tokens)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=most))
    del drafter.draft
    found.states, found.reused = drafter.states_drafted - before[0], drafter.states_reused - before[1]
    return found


@study.table(needs=("lyanna",), tasks=DIALOGUE, prompts=20)
def reuse(ask: LyannaFlags) -> Iterator[Table | None]:
    """Share of drafted states that gave logits twice, and tokens won by re-sampled nodes, by depth."""
    shape_of(ask.lyanna)
    shape = {"depth": STEPS, "width": WIDTH, "nodes": ROWS, "extra": EXTRA}
    methods, tasks = {TOP: lyanna(TOP, ask.lyanna, ROWS + EXTRA, **shape)}, ask.names
    yield None
    found = {way: tallies(ask, method, tasks) for way, method in methods.items()}
    yield Table(
        title="Drafted states that were used again, and what re-sampled nodes won",
        head=("re-sampled nodes stand", "task", "depth", "fresh", "accepted", "re-sampled", "accepted", "of accepted"),
        parts={
            "": [row for way, own in found.items() for task, tally in own.items() for row in _rows(way, task, tally)]
        },
        values={way: {task: vars_of(tally) for task, tally in own.items()} for way, own in found.items()},
        remarks=[line for way, own in found.items() for line in _said(way, own)],
        how=[
            [
                *(f"{way}: {m.drafter}, budget {m.settings['budget']}, greedy" for way, m in methods.items()),
                f"{ask.prompts} prompts a task at most",
                "a node that both trees have is a fresh one; the last tree of an answer is not counted",
                "intervals: 95%, Clopper and Pearson's, as if nodes or trees were independent of each other",
            ]
        ],
    )


def tallies(ask: LyannaFlags, method: Method, tasks: list[str]) -> dict[str, ReuseCounts]:
    """Of every task."""
    llm = LLM(ask.model, drafter=method.drafter, **method.settings, **ask.llm)
    return {task: tally_of(ask, llm, task) for task in tasks}


def vars_of(tally: ReuseCounts) -> dict[str, Any]:
    """For JSON."""
    return {
        **{name: getattr(tally, name) for name in ("states", "reused", "trees", "winners")},
        "proposed": [[*key, n] for key, n in sorted(tally.proposed.items())],
        "accepted": [[*key, n] for key, n in sorted(tally.won.items())],
    }


def _rows(way: str, task: str, tally: ReuseCounts) -> list[list[str]]:
    depths = sorted({depth for _, depth in tally.proposed})
    lines = [(str(d), *_line(tally, d)) for d in depths] + [("all", *tally.of(FRESH), *tally.of(AGAIN))]
    return [[way, task, depth, *map(str, n), _share(n[3], n[1] + n[3])] for depth, *n in lines]


def _line(tally: ReuseCounts, depth: int) -> tuple[int, int, int, int]:
    (a, b), (c, d) = ((tally.proposed[kind, depth], tally.won[kind, depth]) for kind in (FRESH, AGAIN))
    return a, b, c, d


def _share(part: int, of: int) -> str:
    return f"{part / of:.1%}" if of else "-"


def _said(way: str, found: Mapping[str, ReuseCounts]) -> list[str]:
    """What was used again, and what was won by it, over all tasks."""
    sums = [sum(getattr(t, name) for t in found.values()) for name in ("reused", "states", "winners", "trees")]
    nodes, won = (sum(t.of(AGAIN)[i] for t in found.values()) for i in range(2))
    reused, states, winners, trees = sums
    return [
        f"{way}: {_share(reused, states)} of {states:,} drafted states used again",
        f"{way}: accepted of the re-sampled nodes {share_of(won, nodes)}; of the trees that have any "
        f"{share_of(winners, trees)} won a token by them",
    ]


def share_of(part: int, of: int) -> str:
    """So many of so many, and the interval of the share."""
    low, high = clopper_pearson(part, of)
    return f"{part:,} of {of:,} ({_share(part, of)} [{low:.2%}, {high:.2%}])"


def clopper_pearson(part: int, of: int, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share, of so many independent draws.

    Source: Clopper and Pearson 1934.
    """
    tail = (1 - level) / 2
    low = 0.0 if part == 0 else _root(lambda p: 1 - _at_most(part - 1, of, p), tail)
    return low, 1.0 if part == of else _root(lambda p: 1 - _at_most(part, of, p), 1 - tail)


def _root(rising: Any, value: float) -> float:
    """Where a function that rises from 0 to 1 has a value, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2


def _at_most(part: int, of: int, p: float) -> float:
    """P(X <= part) of a binomial X."""
    ways = (lgamma(of + 1) - lgamma(k + 1) - lgamma(of - k + 1) for k in range(part + 1))
    return sum(exp(w + k * log(p) + (of - k) * log(1 - p)) for k, w in enumerate(ways))
