"""How far should prompt lookup look ahead?"""

from __future__ import annotations

from collections.abc import Iterator

from kit.study import Entry, Grid, Options, Study, Table

from paceline.bench.methods import parse_method

study = Study("Prompt lookup: how far to look ahead.")


@study.figure(tasks="humaneval", prompts=2, repeats=2, max_new_tokens=32)
def figure_1(settings: Options) -> Grid:
    """Speed-up by the number of tokens drafted, of two drafters."""
    entries = [
        Entry(parse_method(f"{name} {depth}={name};budget={depth}"), series=name, x=depth)
        for name in ("ngram", "suffix")
        for depth in (2, 4, 8)
    ]
    return Grid(title="Tokens drafted", entries=entries, x_label="most tokens drafted")


@study.table()
def table_1(settings: Options) -> Iterator[Table | None]:
    """Tokens a pass at best, by acceptance: 1 + a + a^2 + .. (not measured)."""
    yield None  # what stands above this line is checked before the first run begins
    rows = [[f"{a:.1f}", f"{1 / (1 - a):.2f}"] for a in (0.5, 0.7, 0.9)]
    yield Table(title="Tokens a pass at best", head=("acceptance", "tokens"), parts={"": rows}, values={"rows": rows})


if __name__ == "__main__":
    study.main()
