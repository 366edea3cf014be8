"""What counts as the same output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench import lossless
from paceline.bench.lossless import compare_outputs
from paceline.bench.records import Cell, Method, Report, Trial

CELL = Cell(workload="toy", max_new_tokens=32)


def trial(method: str, said: Sequence[Sequence[int]], **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "method": method,
        "cell": CELL,
        "group": 0,
        "repeat": 0,
        "prompts": [f"p{i}" for i in range(len(said))],
        "prompt_tokens": [8] * len(said),
        "outputs": [list(ids) for ids in said],
        "finish": ["length"] * len(said),
        "wall_ms": 1.0,
        "ttft_ms": [0.5] * len(said),
    }
    return Trial(**(values | changes))


def failing(found: Any) -> list[tuple[str, str]]:
    return [(failure["prompt"], failure["what"]) for failure in found.failures]


OUTPUTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
PLAIN = trial("plain", OUTPUTS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outputs": [[1, 2, 3], [4, 5, 5], [7, 8, 9]]}, [("p1", "wrong token")]),
        ({"outputs": [[1, 2], [4, 5, 6], [7, 8, 9]]}, [("p0", "one token short")]),
        ({"finish": ["length", "stop", "length"]}, [("p1", "finish reason 'stop', plain decoding's is 'length'")]),
        ({"outputs": [[4, 5, 6], [1, 2, 3], [7, 8, 9]]}, [("p0", "wrong token"), ("p1", "wrong token")]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_difference_is_a_failure_with_a_name(changes: dict[str, Any], expected: list[tuple[str, str]]):
    found = compare_outputs([PLAIN], [trial("ngram", OUTPUTS, **changes)])
    assert failing(found) == expected
    assert not found.passed
    assert found.sequences == 3 and found.identical == 3 - len(expected)


def report_of(methods: Sequence[Method], trials: Sequence[Trial]) -> Report:
    return Report(
        title="toy",
        created="2026-01-01T00:00:00Z",
        command=["paceline", "bench"],
        model={"dtype": "bfloat16"},
        machine={},
        versions={},
        commit=None,
        settings={},
        workloads={},
        methods=list(methods),
        trials=list(trials),
    )


OWN = [Method(name="plain"), Method(name="fast", drafter="draft_model:x")]


def test_a_method_is_held_against_plain_decoding_of_its_own_dtype():
    methods = [
        *OWN,
        Method(name="plain32", dtype="float32"),
        Method(name="fast32", drafter="ngram", dtype="float32"),
        Method(name="same", drafter="ngram", dtype="bfloat16"),
        Method(name="lone", drafter="ngram", dtype="int8"),
    ]
    wide = [[9, 9, 9]] * 3
    trials = [trial(m.name, wide if "32" in m.name else OUTPUTS) for m in methods]
    found, notes = lossless.check(report_of(methods, trials))
    assert {e.method: e.reference for e in found} == {"fast": "plain", "fast32": "plain32", "same": "plain"}
    assert all(e.passed for e in found)
    assert notes == ["lone: ids not compared; plain decoding in int8 is not among the methods."]


def test_ids_that_differ_by_design_are_not_compared_but_named():
    methods = [*OWN, Method(name="drawn", drafter="draft_model:x", settings={"verifier": "rejection"})]
    methods.append(Method(name="llama.cpp", engine="llama.cpp", drafter="plain"))
    warm = replace(CELL, temperature=1.0)
    trials = [trial(m.name, OUTPUTS, cell=cell) for cell in (CELL, warm) for m in methods]
    found, notes = lossless.check(report_of(methods, trials))
    compared = [(e.method, e.cell.temperature) for e in found]
    assert compared == [("fast", 0), ("drawn", 0), ("llama.cpp", 0), ("fast", 1)]
    assert len(notes) == 2 and "rejection" in notes[0] and "llama.cpp draws with noise of its own" in notes[1]


def test_passes_that_round_by_their_width_are_left_to_a_judge():
    torch = {"kernels": "torch", "exact": False}
    methods = [Method(name="plain", settings=torch), Method(name="fast", drafter="ngram", settings=torch)]
    trials = [trial("plain", OUTPUTS), trial("fast", [[1, 2, 3], [4, 5, 5], [7, 8, 9]])]
    report = report_of(methods, trials)
    found, notes = lossless.check(report)
    assert found == [] and [e.passed for e in lossless.check(report, rounded=True)[0]] == [False]
    assert len(notes) == 2 and "torch's kernels round" in notes[0] and "float32" in notes[0]
    wide = report_of([replace(m, dtype="float32") for m in methods], trials)
    by_default = report_of([replace(m, settings={"kernels": "torch"}) for m in methods], trials)
    for each in (wide, by_default):
        found, notes = lossless.check(each)
        assert [e.passed for e in found] == [False] and notes == []
