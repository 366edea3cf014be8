"""Paceline beside other people's engines: the same weights, the same prompts, in turns.

    make peers
    python studies/peers.py compared --tasks gsm8k,humaneval --prompts 6 --out build/peers
    python studies/peers.py compared --peer llama.cpp --model MADE --out build/random

`make peers` builds them; one that is not there is named in the report. All answers go on to their full length, and
peers decode greedily. The raw report and its page are in the folder `compared`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kit.grid import table_of
from kit.peer_runs import against, agreement_line, peer_headline, peer_methods, read_methods
from kit.peers import PEERS
from kit.study import Entry, Grid, Options, Study, Table, asked, measure

from paceline.bench import report as say
from paceline.bench.methods import default_methods
from paceline.bench.summary import Summary


@dataclass(frozen=True, kw_only=True)
class PeerFlags(Options):
    """What this study can be asked beside what all can."""

    tasks: str = asked("spec_bench,gsm8k,humaneval,humaneval_x,mmlu,wikisql,books", "Workloads' names.", "NAME,..")
    max_new_tokens: int | None = asked(64, "Tokens of an answer.", "N")
    peer: list[str] = asked([], f"{', '.join(PEERS)}; all of them where none is named.", "NAME")
    method: list[str] = asked(
        [], "As of `paceline bench`, or ENGINE/MODE; every drafter that fits where none is named."
    )
    batch: int = asked(1, "Prompts at once.", "N")


study = Study("Paceline beside other engines.", PeerFlags, quick={"tasks": "wikisql", "prompts": 2, "repeats": 1})


@study.table(takes=("method", "batch"))
def own(ask: PeerFlags) -> Grid:
    """Every drafter here, without peers; where passes round by their width, near ties are judged."""
    return beside(ask, [])


@study.table(takes=("peer", "method", "batch"))
def compared(ask: PeerFlags) -> Iterator[Table | None]:
    """Every drafter here and every mode of the peers, over each peer's plain decoding."""
    grid = beside(ask, ask.peer or list(PEERS))
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "compared")
    summary, made = Summary(report), table_of(grid, report)
    ratios = against(summary, summary.main) if summary.main else {}
    # Over all workloads: the first part is that of all of them.
    first, *others = made.parts
    more = [[say.interval(of.get(row[0])) for of in ratios.values()] for row in made.parts[first]]
    parts = {first: [[*row, *cells] for row, cells in zip(made.parts[first], more, strict=True)]}
    parts |= {name: [[*row, *[""] * len(ratios)] for row in made.parts[name]] for name in others}
    remarks = [line for line in (peer_headline(summary), agreement_line(report)) if line]
    head = [*made.head, *(f"over {peer}" for peer in ratios)]
    yield replace(made, head=head, parts=parts, remarks=[*made.remarks, *remarks])


def beside(ask: PeerFlags, engines: list[str]) -> Grid:
    """Methods of this engine and of others."""
    ours = read_methods(ask.method, ask.dtype) if ask.method else default_methods(ask.model, ask.dtype)
    cells: dict[str, Any] = {"batches": (ask.batch,)}
    known = {method.name for method in ours}
    theirs = [m for m in peer_methods(engines, ask.dtype) if m.name not in known]
    methods = [*ours, *theirs]
    return Grid(
        title=f"{ask.model}, method by method",
        entries=[Entry(method, series=method.name) for method in methods],
        cells=cells,
        prompts=ask.batch,
    )


if __name__ == "__main__":
    study.main()
