"""The study of Mirror: the paper's numbers, and every figure that runs, in small."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mirror
import pytest
import torch
from kit.mirror_watch import WindowVerdict
from kits.stream_sets import save_set
from mirror_parts.common import MirrorFlags, plain_llm, prompts_of
from mirror_parts.counted import Costs, Fallbacks, after_the_verdict, clock
from mirror_parts.forecast import Forecast, Parts, after, others_of, whole
from mirror_parts.timed import law_of

from paceline.distributed.placement import cores

pytest.importorskip("matplotlib")
needs_two_cores = pytest.mark.skipif(not {0, 1} <= {*cores()}, reason="needs the cores 0 and 1")


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of the one figure that is named first."""
    threads = torch.get_num_threads()
    try:
        assert mirror.study.run([*arguments, "--quick", "--model", "paceline-small", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads((out / f"{arguments[0]}.json").read_text("utf-8"))


def test_table_1_inverted(tmp_path: Path) -> None:
    models = run(tmp_path, "table_1")["models"]
    first, last = models["Qwen3-14B, T=0"], models["Qwen3-32B, T=0"]
    assert (first["exception"], last["exception"]) == ("Mathematical Reasoning", "Mathematical Reasoning")
    assert [round(bound(first["ratios"].values()), 2) for bound in (min, max)] == [1.73, 1.90]
    assert [round(bound(last["ratios"].values()), 2) for bound in (min, max)] == [1.34, 1.75]
    for own in models.values():
        assert own["without"][1] < own["all"][1] < 0.2


def test_parameters_are_those_of_one_head(tmp_path: Path) -> None:
    targets = run(tmp_path, "parameters")["targets"]
    for name in ("Qwen3-14B", "Qwen3-32B"):
        assert round(100 * targets[name]["share"], 2) == pytest.approx(targets[name]["stated"], abs=0.005)
    assert targets["paceline-small"]["head"] == targets["paceline-small"]["d_model"] ** 2


def test_tracks_join_twice_and_choose_where_ranks_join_twice_a_layer(tmp_path: Path) -> None:
    """What is computed is measured; a pass is that and its joins, alpha log2 G + beta M each."""
    found = run(tmp_path, "tracks_law")
    for tracks in (2, 4):
        own, ranks, *alone = [way for way in found["ways"] if (way["tracks"], way["rows"]) == (tracks, 1)]
        assert (own["joins"], ranks["joins"], [way["joins"] for way in alone]) == (3, 2 * 2 + 2, [0, 0])
        assert 0.98 < own["parameters"] / ranks["parameters"] < 1.02
        for way in (own, ranks):
            slope = (way["ms"][-1] - way["ms"][0]) / (found["alphas_ms"][-1] - found["alphas_ms"][0])
            assert slope == pytest.approx(way["joins"] * math.log2(tracks)) and way["ms"][0] > way["compute_ms"] > 0


def test_fallbacks_of_fewer_candidates_come_from_one_run() -> None:
    said = {"window": [1], "accepted": 0, "told": True, "reused": False, "prepared": 0}
    said |= {"candidates": [5, 6], "chances": [0.5, 0.2]}
    verdicts = [WindowVerdict(**{**said, "key": key, "said": token}) for key, token in ((0, 5), (0, 6), (1, 9), (1, 5))]
    found = Fallbacks.of([*verdicts, WindowVerdict(**{**said, "key": 1, "said": 9, "told": False})], [1, 2])
    assert found.rates() == [0.5, 0.25] and found.predicted() == pytest.approx([0.5, 0.3])
    for (low, high), mean, mass in zip(found.differences(), (0.0, -0.05), (0.5, 0.7), strict=True):
        assert (low + high) / 2 == pytest.approx(mean)
        assert (high - low) / 2 == pytest.approx(1.96 * (mass * (1 - mass) / 4) ** 0.5)


def test_levels_that_are_left_after_the_verdict() -> None:
    said = {"accepted": 0, "said": 1, "told": True, "candidates": [], "chances": []}
    rows = [(0, 0, False, 0), (0, 3, True, 2), (1, 3, True, 3), (0, 3, True, 1), (1, 2, True, 1)]
    verdicts = [
        WindowVerdict(**said, key=key, window=[9] * width, reused=reused, prepared=prepared)
        for key, width, reused, prepared in rows
    ]
    assert after_the_verdict(verdicts) == pytest.approx(
        {"verdicts": 3, "fallbacks": 1 / 3, "left": (3 + 1 + 0) / 3, "wanted": (3 + 3 + 2) / 3}
    )


FREE, DEAR = Costs(exit=0.0, verdict=0.0), Costs(exit=0.1, verdict=0.02)


def test_the_virtual_clock_is_the_law() -> None:
    assert clock([False] * 10, 0.5, 3, FREE) == pytest.approx(1.5)
    assert clock([False] * 10, 0.5, 3, DEAR) == pytest.approx(1.5 / 1.12)
    assert clock([False] * 10, 0.9, 3, FREE) == pytest.approx(1.9 / 1.4)  # no longer hidden
    assert clock([True, False] * 5, 0.4, 3, FREE) == pytest.approx(2 * 1.4 / 2.4)
    assert clock([True] * 10, 0.8, 4, FREE) == pytest.approx(1.8 / 1.9)  # called off at 0.6, then a window of 0.8


@pytest.mark.parametrize("missed, draft, costs", [(0, 0.01, DEAR), (10, 0.4, DEAR), (10, 0.8, FREE), (8, 0.83, DEAR)])
def test_on_the_virtual_clock_mirror_can_lose(missed: int, draft: float, costs: Costs) -> None:
    """To a draft that costs less than the rendezvous, and where most outcomes are not prepared for."""
    assert clock([True] * missed + [False] * (10 - missed), draft, 4, costs) < 1
    assert clock([False] * 10, 0.4, 4, costs) > 1


def test_costs_are_those_that_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "law.json"
    file.write_text(json.dumps({"parts": {"alone": asdict(PARTS)}}))
    assert Costs.read(file) == Costs(exit=0.06, verdict=0.02)
    file.write_text("{}")
    given = ["simulated", "--quick", "--out", str(tmp_path / "out")]
    assert mirror.study.run(given) == mirror.study.run([*given, "--measured", str(file)]) == 2
    said = capsys.readouterr().err
    assert "--measured is not given" in said and "no parts" in said


PARTS = Parts(prefix=10.0, exit=1.0, suffix=10.0, host=0.5, send=0.2, draft=8.0, verdict=0.4, fresh=3.0)


def steps(reuse: float, fallback: float) -> list[dict[str, Any]]:
    """Of a request, by turns behind an outcome that was prepared for and one that was not, which take so many ms."""
    kinds = [(1.0, True), *[(reuse, False), (fallback, True)] * 6]
    own = {"told": True, "window": 4, "exposed": 0.1}
    return [own | {"wall": wall, "reused": reused} for wall, reused in kinds]


def late(found: list[dict[str, Any]], parts: Parts = PARTS, share: float = 0.5) -> dict[str, float]:
    return law_of(found, Forecast(parts={"alone": parts}, share=share, counted=10), 4)["late"]["alone"]


def test_the_law_holds_where_steps_are_as_forecast() -> None:
    assert (PARTS.reuse, PARTS.fallback) == pytest.approx((22.1, 25.1))
    assert late(steps(22.1, 25.1)) == pytest.approx({"reuse": 0.0, "fallback": 0.0, "mean": 0.0}, abs=1e-9)
    assert replace(PARTS, draft=15.0).reuse == pytest.approx(27.1)  # no longer hidden


def test_the_law_does_not_hold_for_wrong_times() -> None:
    """Steps 9 times slower; and each term, too large or left out, where the steps are as they were."""
    assert all(off > 7 for off in late(steps(9 * 22.1, 9 * 25.1)).values())
    right = steps(22.1, 25.1)
    for term in ("prefix", "suffix"):
        for wrong in (0.5, 1.5):
            assert all(off > 0.05 for off in late(right, replace(PARTS, **{term: wrong * 10})).values()), term
    assert late(right, replace(PARTS, draft=20.0))["reuse"] > 0.05
    assert late(right, replace(PARTS, fresh=0.0))["fallback"] > 0.05
    assert late(right, share=0.0)["mean"] > 0.05 and late(right, replace(PARTS, exit=5.0))["reuse"] > 0.05


def test_steps_by_what_went_before() -> None:
    kinds = [(True, True), (True, False), (False, False), (True, True)]
    made = [{"n": n, "told": told, "reused": reused, "window": 3 - n} for n, (told, reused) in enumerate(kinds)]
    reuse, fallback = after(made)
    assert [step["n"] for step in reuse] == [1] and [step["n"] for step in fallback] == [2]
    assert [step["n"] for step in whole(made, 3)] == [0] and [step["n"] for step in whole(made, 1)] == []


@needs_two_cores
def test_a_forecast_rests_on_other_prompts() -> None:
    ask = MirrorFlags(draft="paceline-small-draft", tasks="sql", prompts=2, max_new_tokens=8, gamma=2)
    llm = plain_llm(ask)
    own, others = prompts_of(ask, llm, "sql"), others_of(ask, llm)
    assert len(own) == len(others) == 2 and not any(prompt in own for prompt in others)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_counted(tmp_path: Path) -> None:
    found = run(tmp_path, "figure_7", "--max-new-tokens", "24")
    (trace,) = found["traces"]
    assert found["widths"] == [1, 4] and trace["rates"] == sorted(trace["rates"], reverse=True)
    assert trace["verdicts"] > 2 and (tmp_path / "figure_7.svg").is_file()
    assert all(own["equal"] == own["ids"] == own["requests"] for own in run(tmp_path, "traces")["tasks"].values())
    assert 0 <= run(tmp_path, "figure_3b")["tasks"]["sql"]["mean"] <= 2
    (tmp_path / "law.json").write_text(json.dumps({"parts": {"alone": asdict(PARTS)}}))
    simulated = run(tmp_path, "simulated", "--measured", str(tmp_path / "law.json"))
    assert simulated["label"] == "virtual clock" and simulated["costs"] == {"exit": 0.06, "verdict": 0.02}
    assert all(0 < one["ratio"] <= one["most"] < 1.5 / 1.08 + 1e-9 for one in simulated["runs"].values())


@pytest.mark.full
@pytest.mark.timeout(900)
@needs_two_cores
@pytest.mark.parametrize("name", ["law", "figure_3a", "figure_4", "figure_5"])
def test_what_is_timed_runs(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, name, "--tasks", "sql")
    if name == "law":
        assert found["all"] > sum(found["steps"].values()) > 0 and len(found["ms"]) == 4
        assert all(ms > 0 for parts in found["parts"].values() for ms in parts.values())
        assert found["forecast"]["alone"] > found["parts"]["alone"]["prefix"] + found["parts"]["alone"]["suffix"]
    elif name == "figure_3a":
        assert [len(point["accepted"]) for point in found["points"]] == [2, 2]


@pytest.mark.full
@pytest.mark.timeout(900)
@needs_two_cores
def test_streams_in_the_draft_are_timed(tmp_path: Path) -> None:
    """With a made-up set, whose guesses are seldom right: the same windows, in no more passes than tokens."""
    streams = ["--streams", save_set(tmp_path / "set", gamma=3), "--tasks", "sql"]
    own = run(tmp_path, "figure_6b", *streams, "--gamma", "4")["tasks"]["sql"]
    assert own["same"] and 2 <= own["internal_steps"] <= 4
    run(tmp_path, "figure_4", *streams)
    assert mirror.study.run(["figure_6b", "--out", str(tmp_path / "other")]) == 2


def test_training_curves_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"step": 10, "ce_6": 3.5, "loss": 1.0}, {"step": 20, "ce_6": 2.5, "agreement/sql/6": 0.5}]
    log.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = run(tmp_path / "out", "figure_9", "--log", str(log))
    assert found["losses"] == {"ce_6": {"10": 3.5, "20": 2.5}}
    assert found["agreements"] == {"agreement/sql/6": {"20": 0.5}}
    log.write_text('{"step": 1}\n')
    assert mirror.study.run(["figure_9", "--log", str(log), "--out", str(tmp_path / "other")]) == 2
    assert "no loss of an exit" in capsys.readouterr().err
