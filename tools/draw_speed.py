"""The README's picture: tokens a second of each engine, plainly and in its fastest speculative mode, from a report.

cd docs/measured/benchmarks/peers && python ../../../../tools/draw_speed.py report.json.gz speed.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.bench.report import load_report
from paceline.bench.summary import Summary

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))
from kit.figures import Panel, Series, bars  # noqa: E402

ENGINES = {"paceline": "Paceline", "llama.cpp": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}


def speeds(report: Path) -> tuple[list[float], list[float]]:
    """Tokens a second over all workloads, by engine: of plain decoding, and of the fastest other method."""
    rows = Summary(load_report(report)).overall
    own = [[row for row in rows if row.method.engine == engine] for engine in ENGINES]
    plain, other = (
        [max(row.speed or 0.0 for row in rows if row.method.plain is wanted) for rows in own]
        for wanted in (True, False)
    )
    return plain, other


def main(report: Path, picture: Path) -> None:
    """Draw the picture."""
    plain, best = speeds(report)
    series = [
        Series(label="plain decoding", x=list(ENGINES.values()), y=plain, colour="#999999"),
        Series(label="fastest speculative mode", x=list(ENGINES.values()), y=best, colour=0),
    ]
    title = "One request, the same model of 24M parameters, 11 tasks, 2 CPU cores"
    bars([Panel(title=title, x_label="tokens a second", y_label="", series=series)], picture, width=1.4)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
