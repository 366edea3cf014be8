"""Ask the engine which drafters run in which rounds, and write docs/matrix.md.

    python tools/matrix.py [--out docs/matrix.md] [--only TABLE]

Every cell builds the embedded model with a drafter, a round and a placement, answers five requests (greedy, T=1,
penalties, a JSON schema, a regular expression), and compares the ids with plain decoding's.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline import LLM, SamplingParams
from paceline.core.errors import PacelineError
from paceline.core.grammar import Grammar
from paceline.core.speculation import Speculation

MODEL = "paceline-small"
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "color": {"enum": ["red", "blue"]},'
    ' "count": {"type": "integer", "maximum": 99}}, "required": ["name", "color", "count"],'
    ' "additionalProperties": false}'
)
REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "T=1": SamplingParams(temperature=1, seed=5, max_tokens=24),
    "penalties": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=24),
    "JSON schema": SamplingParams(temperature=0, max_tokens=40, grammar=Grammar("json_schema", SCHEMA)),
    "regex": SamplingParams(temperature=0, max_tokens=24, grammar=Grammar("regex", "[a-z]{3,9}( [a-z]{3,9}){2,4}")),
}
PROMPTS = [
    "SELECT name FROM users",
    "The sea is",
    "def add(a, b):\n    return a + b\n\n\ndef",
    "JSON: ",
    "Words: ",
]
DRAFTERS = (
    "ngram",
    "suffix",
    "prediction",
    "grammar",
    "draft_model",
    "eagle",
    "lyanna",
    "spire",
    "medusa",
    "magicdec",
    "streams",
    "hybrid:grammar+prediction+suffix",
    "hybrid:grammar+eagle",
)
Columns = dict[str, dict[str, Any]]
HERE: Columns = {name: {"round": name} for name in ("serial", "fused", "mirror", "pipeline")}
APART: Columns = {
    "mirror, drafter's process": {"round": "mirror,rollout=process"},
    "pipeline, drafter's process": {"round": "pipeline,source=process"},
    "two stages": {"pipeline": 2},
    "two ranks, serial": {"round": "serial", "tensor_parallel": 2},
    "two ranks, mirror": {"round": "mirror", "tensor_parallel": 2},
}
TABLES: dict[str, tuple[Sequence[str], Columns]] = {
    "One process": (DRAFTERS, HERE),
    "Several processes": (("ngram", "grammar", "draft_model", "eagle", "spire"), APART),
}
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 256, "max_sequences": 8, "kv_memory": "64MiB", "exact": True}


def answers(llm: LLM, predicted: Sequence[list[int]] = ()) -> tuple[list[list[int]], list[Any]]:
    """Return ids and statistics of the requests, each of which predicts some tokens, where these are given."""
    if not predicted:
        outputs = llm.generate(PROMPTS, [*REQUESTS.values()])
    else:
        rows = zip(PROMPTS, REQUESTS.values(), predicted, strict=True)
        chunks = [[*llm.stream(p, params, speculation=Speculation(prediction=ids))] for p, params, ids in rows]
        outputs = [own[-1].output for own in chunks]
    return [output.outputs[0].token_ids for output in outputs], [output.stats for output in outputs]


class Matrix:
    """Cells that were asked for, and the reasons of refusals."""

    def __init__(self) -> None:
        self.base = LLM(MODEL, **OPTIONS)
        self.ids, _ = answers(self.base)
        self.reasons: list[str] = []

    def cell(self, drafter: str, column: dict[str, Any]) -> str:
        """Return what became of a drafter in a round and a placement."""
        shared = {} if column.keys() & {"pipeline", "tensor_parallel"} else {"share": self.base}
        try:
            llm = LLM(MODEL, drafter=drafter, **OPTIONS, **column, **shared)
        except PacelineError as error:
            return self.note(getattr(error, "wrong", str(error)))
        if "process" in str(column):  # a drafter's process that compiles its first grammar is late for all requests
            answers(llm)
        ids, stats = answers(llm, self.ids if "prediction" in drafter else ())
        failure = llm.engine.round.failure
        del llm
        gc.collect()
        if failure is not None:
            return self.note(failure)
        if wrong := [name for name, own, plain in zip(REQUESTS, ids, self.ids, strict=True) if own != plain]:
            return f"other ids: {', '.join(wrong)}"
        return f"{fmean(100 * one.accepted / one.emitted for one in stats):.0f}"

    def note(self, reason: str) -> str:
        """Return the number of a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"[{self.reasons.index(reason) + 1}]"

    def table(self, drafters: Sequence[str], columns: Columns) -> str:
        """Return a table and the reasons of its refusals."""
        self.reasons = []
        lines = [["drafter", *columns], ["---"] * (1 + len(columns))]
        for drafter in drafters:
            lines.append([f"`{drafter}`", *(self.cell(drafter, column) for column in columns.values())])
            print(*lines[-1], sep=" | ", flush=True)
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        reasons = [f"{n}. {reason[:1].upper()}{reason[1:]}." for n, reason in enumerate(self.reasons, start=1)]
        return "\n".join([*rows, "", *reasons])


def main() -> None:
    """Fill the tables and write them; one that is not named is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "matrix.md")
    parser.add_argument("--only", choices=TABLES, help="fill this table alone")
    ask = parser.parse_args()
    written = ask.out.read_text("utf-8") if ask.out.exists() else ""
    known = dict(part.split("\n\n", 1) for part in written.split("\n## ")[1:])
    for name in TABLES if ask.only is None else [ask.only]:
        known[name] = Matrix().table(*TABLES[name])
    page = [
        "# Drafters, rounds and processes",
        f"Written by `python tools/matrix.py` with `{MODEL}`. A cell has the percentage of output tokens that were "
        f"accepted drafts, the mean of requests of five kinds: {', '.join(REQUESTS)}. All ids are those of plain "
        "decoding. In brackets: why it is refused. Drafts of a process come too late where a tick is short.",
        *(f"## {name}\n\n{known[name].strip()}" for name in TABLES if name in known),
    ]
    ask.out.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    os._exit(0)  # workers end with their parent


if __name__ == "__main__":
    main()
