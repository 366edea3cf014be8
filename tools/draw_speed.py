"""Draw the README's picture from a report: tokens a second of each engine, plain and in its fastest speculative mode.

    python tools/draw_speed.py build/peers/report.json docs/measured/benchmarks/peers/speed.svg

The figures are written next to the picture, as JSON: the report itself is not kept in the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.bench.records import REPORT
from paceline.bench.summary import Summary

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))
from kit.figures import Panel, Series, bars  # noqa: E402

ENGINES = {"paceline": "Paceline", "llama.cpp": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}


def speeds(report: Path) -> tuple[list[float], list[float]]:
    """Tokens a second over all workloads, by engine: of plain decoding, and of the fastest other method."""
    rows = Summary(REPORT.validate_json(report.read_bytes())).overall
    own = [[row for row in rows if row.method.engine == engine] for engine in ENGINES]
    plain, other = (
        [max(row.speed or 0.0 for row in rows if row.method.plain is wanted) for rows in own]
        for wanted in (True, False)
    )
    return plain, other


def main(report: Path, picture: Path) -> None:
    """Draw the picture, and write its figures."""
    plain, best = speeds(report)
    figures = {
        name: {"plain": round(slow, 2), "fastest": round(fast, 2)}
        for name, slow, fast in zip(ENGINES.values(), plain, best, strict=True)
    }
    picture.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    series = [
        Series(label="plain decoding", x=list(ENGINES.values()), y=plain, colour="#999999"),
        Series(label="fastest speculative mode", x=list(ENGINES.values()), y=best, colour=0),
    ]
    title = "One request, the same model of 24M parameters, 11 tasks, 2 CPU cores"
    bars([Panel(title=title, x_label="tokens a second", y_label="", series=series)], picture, width=1.4)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
