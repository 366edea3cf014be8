"""Half of the prompts chooses, the other half reports: no prompt does both, and turns stay together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.grid import ALL, best_by, lines_of, split_lines, table_of
from kit.halves import conversations, halves
from kit.study import Entry, Grid
from kits.reports import Truth, World

from paceline.bench.methods import parse_method
from paceline.bench.records import Method, Report

DEPTHS = (1, 2, 4)


def report(groups: int = 7, batches: tuple[int, ...] = (1,)) -> Report:
    methods = [Method(name=f"depth {depth}", drafter="ngram") for depth in DEPTHS]
    truths = [Truth(method=Method(name="plain")), *(Truth(method=m, accept=0.6, depth=3) for m in methods)]
    return World(truths=truths, workloads={"a": "A", "b": "B"}, groups=groups, repeats=2, batches=batches).report()


def grid(**more: object) -> Grid:
    entries = [Entry(Method(name=f"depth {depth}", drafter="ngram"), "look-ups", depth) for depth in DEPTHS]
    return Grid(title="t", entries=entries, x_label="depth", **more)  # type: ignore[arg-type]


def test_no_prompt_both_chooses_and_reports() -> None:
    whole = report()
    first, second = halves(whole)
    assert len(first.trials) + len(second.trials) == len(whole.trials)
    keys = [{(t.cell.workload, name) for t in half.trials for name in t.prompts} for half in (first, second)]
    assert not keys[0] & keys[1]
    assert conversations(first.trials) == {"a": 3, "b": 3} and conversations(second.trials) == {"a": 4, "b": 4}
    again = halves(replace(whole, trials=whole.trials[::-1]))
    assert {id(t) for t in again[0].trials} == {id(t) for t in first.trials}


def test_every_method_is_judged_on_the_same_prompts() -> None:
    for half in halves(report()):
        prompts = {
            m.name: {(t.cell.workload, *t.prompts) for t in half.trials if t.method == m.name} for m in half.methods
        }
        assert len({frozenset(found) for found in prompts.values()}) == 1


def test_turns_of_a_conversation_stay_together() -> None:
    """But an id with a number behind a slash is no turn where there is no first one."""
    whole = report()
    names = ["x", "x/2", "x/3", "HumanEval/2", "HumanEval/3", "y", "y/2"]
    trials = [replace(t, prompts=[names[t.group]]) for t in whole.trials]
    assert conversations(trials) == {"a": 4, "b": 4}
    for half in halves(replace(whole, trials=trials)):
        found = {t.prompts[0] for t in half.trials if t.cell.workload == "a"}
        assert len(found & {"x", "x/2", "x/3"}) in (0, 3) and len(found & {"y", "y/2"}) in (0, 2)


def test_a_single_conversation_reports() -> None:
    first, second = halves(report(groups=1))
    assert not first.trials and len(second.trials) == len(report(groups=1).trials)


def test_a_grid_shows_the_reporting_half_and_marks_what_the_other_chose() -> None:
    made, whole = grid(choose="speedup"), report()
    lines, choosing, said = split_lines(made, whole)
    first, second = halves(whole)
    assert [replace(line, chosen=False) for line in lines] == lines_of(made, second)
    assert choosing == lines_of(made, first)
    for task in ("a", "b", ALL):
        best = best_by([line for line in choosing if line.task == task], "speedup")
        assert best is not None
        assert [line.method for line in lines if line.task == task and line.chosen] == [best.method]
    table = table_of(made, whole)
    assert "chosen" in table.head and said[0] in table.how[0] and "3 of a" in said[0] and "4 of a" in said[0]
    assert len(table.values["chosen_on"]) == len(choosing)


def test_a_grid_that_chooses_nothing_shows_all() -> None:
    made, whole = grid(), report()
    lines, choosing, said = split_lines(made, whole)
    assert lines == lines_of(made, whole) and not choosing and not said
    assert "chosen" not in table_of(made, whole).head


@pytest.mark.parametrize(("asked", "given"), [(1, 2), (5, 5)])
def test_two_prompts_are_the_fewest_to_choose_by(asked: int, given: int) -> None:
    from kit.study import Options

    entries = [Entry(parse_method("ngram"), "ngram", 1)]
    config = Grid(title="t", entries=entries, choose="speedup").config(Options(prompts=asked))
    assert config.prompts == given
