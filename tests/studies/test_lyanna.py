"""The study of Lyanna: what it measures, what it says of it, what it refuses; on drafters that are hardly trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lyanna  # noqa: F401  (all its figures are known from then on)
import numpy as np
import pytest
import torch
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kit.study import Grid
from kits.draft import text, view
from kits.native import needs_kernels
from kits.state import lyanna as lyanna_drafter
from kits.stream_sets import MODEL, save_set
from lyanna_parts import acceptance, draft_pass, extra_pass, laps, reuse, throughput, trained
from lyanna_parts.acceptance import FIRST_TAKEN, FULL, INFO_TAKEN, MEAN, NO_FIRST, NO_INFO, TRAINED, Shares, conditional
from lyanna_parts.common import STEPS, LyannaFlags, shape_of, study
from lyanna_parts.throughput import ALONE, OFF, PASS, TOP
from typer.testing import CliRunner

from paceline import LLM, SamplingParams, native
from paceline.bench.records import PLAIN, Cell, Method, Report, Trial
from paceline.cli import app
from paceline.core.errors import ConfigError
from paceline.drafters.eagle.model import EagleFacts, EagleModel
from paceline.drafters.fit import tokenizer_mark
from paceline.drafters.lyanna.model import LyannaModel, LyannaShape
from paceline.drafters.medusa.heads import Heads, HeadsConfig
from paceline.drafters.resampling import AGAIN, FRESH
from paceline.drafters.states.head import layer_json
from paceline.network.files import fingerprint
from paceline.network.hot import load_hot, save_hot
from paceline.network.loader import load_tokenizer, read_config, resolve_folder
from paceline.rounds import parse_round
from paceline.rounds.base import RoundParts
from paceline.training.data import SourceSpec
from paceline.training.network import Network
from paceline.training.target import ModelShape
from paceline.training.tokenizer import train_tokenizer

pytestmark = pytest.mark.timeout(300)
SMALL = ("--model", MODEL, "--prompts", 2, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1, "--tasks", "sql")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders by option: a drafter of each kind for `MODEL`, untrained."""
    root, place = tmp_path_factory.mktemp("heads"), resolve_folder(MODEL)
    config, mark = read_config(place), fingerprint(place)
    facts = {"layer": layer_json(config), "target": MODEL, "fingerprint": mark}
    draw = torch.Generator().manual_seed(0)
    for name, shape in {
        "lyanna": {"rank": 4},
        "without-info": {"rank": 0},
        "without-first": {"rank": 4, "first_token": False},
        "shallow": {"rank": 4, "steps": 2},
    }.items():
        whole = LyannaShape(**{**facts, **shape, "tokenizer": tokenizer_mark(load_tokenizer(place))})  # type: ignore[arg-type]
        LyannaModel.fresh(whole, None, draw).save(root / name)
    EagleModel.fresh(layer_json(config), EagleFacts(steps=STEPS, target=MODEL, fingerprint=mark), draw).save(
        root / "eagle"
    )
    medusa = HeadsConfig(heads=3, d_model=config.d_model, vocab_size=config.vocab_size, target=MODEL, fingerprint=mark)
    Heads.fresh(medusa).save(root / "medusa")
    save_set(root / "streams")
    write_log(root, 160)
    return {path.name: str(path) for path in root.iterdir()}


def write_log(folder: Path, steps: int) -> None:
    """What a training of so many steps leaves beside its ``result``."""
    lines = ({"step": steps, "loss": 1.0}, {"step": steps, "acceptance/sql/1": 0.5})
    (folder / trained.LOG).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run(*given: Any) -> int:
    return study.run([*map(str, given)])


def named(heads: dict[str, str], *options: str) -> list[str]:
    return [part for option in options for part in (f"--{option}", heads[option])]


def values(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


# -- what is missing or wrong


@pytest.mark.parametrize("name", [name for name, item in study.items.items() if item.needs])
def test_what_is_not_there_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--out", tmp_path) == 2
    assert f"--{study.items[name].needs[0].replace('_', '-')} is not given" in capsys.readouterr().err


def test_folders_that_are_something_else(heads: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="trained for 2 steps, 3 are drafted"):
        shape_of(heads["shallow"])
    given = {"lyanna": heads["lyanna"], "without_info": heads["without-info"], "without_first": heads["lyanna"]}
    with pytest.raises(ConfigError, match="without first token: .* with token-info and with the first token"):
        acceptance.arms(LyannaFlags(**given))
    with pytest.raises(ConfigError, match="trained without token-info or the first token"):
        next(acceptance.table_1_shipped(LyannaFlags(lyanna=heads["without-info"])))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it has token-info"):
        acceptance.beam_against_algorithm_1(LyannaFlags(lyanna=heads["lyanna"], without_info=heads["lyanna"]))


def test_trainings_of_other_lengths_are_no_ablation(heads: dict[str, str], tmp_path: Path) -> None:
    given = {name.replace("-", "_"): heads[name] for name in ("lyanna", "without-info", "without-first")}
    assert acceptance.arms(LyannaFlags(**given)) == {
        **{FULL: heads["lyanna"], NO_INFO: heads["without-info"]},
        NO_FIRST: heads["without-first"],
    }
    longer = tmp_path / "run" / "result"
    shutil.copytree(heads["lyanna"], longer)
    with pytest.raises(ConfigError, match="no log beside it"):
        acceptance.arms(LyannaFlags(**{**given, "lyanna": str(longer)}))
    write_log(longer.parent, 3100)
    with pytest.raises(ConfigError, match="trained for 160 steps, .* for 3,100"):
        acceptance.arms(LyannaFlags(**{**given, "lyanna": str(longer)}))


# -- table 1


def answered(method: str, workload: str, group: int, offered: list[int], accepted: list[int]) -> Trial:
    cell = Cell(workload=workload)
    counts: dict[str, Any] = {"depth_offered": offered, "depth_accepted": accepted}
    given: dict[str, Any] = {"prompts": [str(group)], "prompt_tokens": [1], "outputs": [[1]], "finish": ["stop"]}
    return Trial(method=method, cell=cell, group=group, repeat=0, wall_ms=1.0, ttft_ms=[1.0], **given, **counts)


def test_acceptance_is_conditional_and_means_weigh_tasks_alike() -> None:
    trials = [
        answered(FULL, "wikisql", 0, [10, 8, 4], [8, 4, 1]),
        answered(FULL, "wikisql", 1, [10, 4, 4], [8, 4, 3]),
        answered(FULL, "e2e", 0, [100], [0]),
    ]
    report: Any = SimpleNamespace(trials=trials)
    found = conditional(report, [FULL], {"wikisql": "sql", "e2e": "e2e"})
    assert found["sql"][FULL].values.tolist() == [0.8, 0.5, 0.5]
    assert found["e2e"][FULL].values.tolist() == [0, 0, 0]
    assert found[MEAN][FULL].values.tolist() == [0.4, 0.25, 0.25] and [*found][-1] == MEAN
    assert found["sql"][FULL].cells[2] == [0.5, 0.25, 0.75]  # one prompt or the other, drawn twice
    with pytest.raises(ConfigError, match="no prompt was answered"):
        conditional(report, [NO_INFO], {"wikisql": "sql"})


def test_differences_are_of_the_same_prompts() -> None:
    """Prompts differ far more than methods: paired, nothing of that is in the interval of the difference."""
    trials = [
        answered(name, "wikisql", group, [100], [5 * group + extra])
        for name, extra, groups in ((FULL, 10, range(16)), (NO_INFO, 0, range(15, -1, -1)))
        for group in groups
    ]
    found = conditional(SimpleNamespace(trials=trials), [FULL, NO_INFO], {"wikisql": "sql"})["sql"]  # type: ignore[arg-type]
    value, low, high = found[FULL].less(found[NO_INFO]).cells[0]
    assert value == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    assert found[FULL].cells[0][2] - found[FULL].cells[0][1] > 0.1


def line(*shares: float, wide: float = 0.0) -> Shares:
    """With the interval of so much up and down."""
    drawn = [[share + shift for share in shares] for shift in np.linspace(-wide, wide, 401)]
    return Shares(np.array(shares), np.array(drawn))


def test_trainings_as_long_say_who_is_better() -> None:
    of = {FULL: line(0.92, 0.7, 0.7), NO_INFO: line(0.9, 0.71, 0.6), NO_FIRST: line(0.8, 0.7, 0.6)}
    assert acceptance.better({"sql": of}) == ["sql, step 2: without token-info is better than full (0.710, 0.700)"]
    del of[NO_INFO]
    assert acceptance.better({"sql": of}) == ["full is nowhere worse than the other two"]


def test_the_papers_figures_are_the_goal_and_a_near_one_is_not_called_reached() -> None:
    found = {"sql": {TRAINED: line(0.95, 0.81, 0.6, wide=0.02), FIRST_TAKEN: line(0.9, 0.85, 0.6, wide=0.02)}}
    assert acceptance.beside_paper(found) == [
        "sql, step 1: 0.950 [0.931, 0.969], the paper's 0.91: reached",
        "sql, step 2: 0.810 [0.791, 0.829], the paper's 0.80: the interval holds it",
        "sql, step 3: 0.600 [0.581, 0.619], the paper's 0.70: not reached",
    ]
    [said] = acceptance.losses(found)
    assert said == (f"sql: {FIRST_TAKEN}, lower by 0.050 [0.050, 0.050], -0.040 [-0.040, -0.040], 0.000 [0.000, 0.000]")


def test_a_part_is_taken_away_and_all_others_stay(heads: dict[str, str], tmp_path: Path) -> None:
    whole = LyannaModel.load(heads["lyanna"]).tensors()
    for arm, change in acceptance.TAKEN.items():
        made = LyannaModel.load(acceptance.without(heads["lyanna"], change, tmp_path / arm))
        assert (made.reads_tokens, made.info is not None) == (arm != FIRST_TAKEN, arm != INFO_TAKEN)
        left = made.tensors()
        gone = {name for name in whole if name.startswith("token_info")} if arm == INFO_TAKEN else set()
        assert left.keys() == whole.keys() - gone and (gone or arm == FIRST_TAKEN)
        assert all(torch.equal(value, whole[name]) for name, value in left.items())


def test_a_part_is_taken_away_from_a_drafter_of_hot_tokens(heads: dict[str, str], tmp_path: Path) -> None:
    """What is left drafts the same tokens: a larger head would be another drafter."""
    whole = shutil.copytree(heads["lyanna"], tmp_path / "whole")
    hot = torch.arange(3, 90)
    save_hot(hot, whole)
    made = acceptance.without(str(whole), acceptance.TAKEN[INFO_TAKEN], tmp_path / "made")
    assert (load_hot(Path(made), 10**6) == hot).all()  # type: ignore[union-attr]


def test_what_a_part_is_worth_at_use_comes_from_the_engine(heads: dict[str, str], tmp_path: Path) -> None:
    assert run("table_1_shipped", *named(heads, "lyanna"), *SMALL, "--out", tmp_path) == 0
    made = values(tmp_path, "table_1_shipped")
    assert [*made["acceptance"]["sql"]] == [TRAINED, INFO_TAKEN, FIRST_TAKEN]
    raw = json.loads((tmp_path / "table_1_shipped" / "report.json").read_text("utf-8"))
    assert len({m["drafter"] for m in raw["methods"]}) == 4
    drafted = {name: sum(t["drafted"] for t in raw["trials"] if t["method"] == name) for name in (TRAINED, FIRST_TAKEN)}
    assert min(drafted.values()) > 16


def test_table_1_comes_from_the_engine(heads: dict[str, str], tmp_path: Path) -> None:
    given = named(heads, "lyanna", "without-info", "without-first")
    assert run("table_1", *given, *SMALL, "--out", tmp_path) == 0
    made = values(tmp_path, "table_1")
    assert {*made["acceptance"]["sql"]} == {FULL, NO_INFO, NO_FIRST} and made["prompts"] == {"sql": 2}
    raw = json.loads((tmp_path / "table_1" / "report.json").read_text("utf-8"))
    assert {m["drafter"].partition(":")[0] for m in raw["methods"]} == {"none", "lyanna"}
    assert all("nodes=16" in m["drafter"] and m["settings"] == {"budget": 16} for m in raw["methods"][1:])
    assert sum(t["drafted"] for t in raw["trials"]) > 16  # whole trees were verified


# -- reuse


def test_accepted_nodes_are_counted_by_kind_and_depth() -> None:
    last = reuse.Proposed(
        length=5, tokens=[9, 1, 2, 3, 4], parents=[-1, 0, 1, 0, 3], marks=[0, FRESH, FRESH, AGAIN, AGAIN]
    )
    tally = reuse.ReuseCounts()
    for new, won in (([3, 4, 7], {(AGAIN, 1): 1, (AGAIN, 2): 1}), ([1, 8], {(FRESH, 1): 1}), ([6], {})):
        before = tally.won.copy()
        view: Any = SimpleNamespace(tokens=[0, 0, 0, 0, 9, *new])
        tally.add(last, view)
        assert tally.won - before == won
    assert tally.proposed == {(kind, depth): 3 for kind in (FRESH, AGAIN) for depth in (1, 2)}
    assert tally.of(AGAIN) == (6, 2)
    assert (tally.trees, tally.winners) == (3, 1)


def test_shares_of_few_have_exact_intervals() -> None:
    """Beside values of the tables of Clopper and Pearson, and the closed form where nothing was found."""
    assert reuse.clopper_pearson(0, 51) == pytest.approx((0, 1 - 0.025 ** (1 / 51)))
    assert reuse.clopper_pearson(5, 20) == pytest.approx((0.0866, 0.4910), abs=1e-4)
    assert reuse.clopper_pearson(20, 20) == pytest.approx((0.8316, 1), abs=1e-4)
    assert reuse.share_of(0, 51) == "0 of 51 (0.0% [0.00%, 6.98%])"


def test_what_is_counted_is_what_the_engine_accepted() -> None:
    """On trees that are mostly right: the counts are the engine's, but for the last tree of each answer."""
    llm = LLM(MODEL, drafter=f"draft_model:{MODEL},topk=3,depth=3,nodes=8", budget=8, threads=1)
    _, tally = reuse.watched(llm)
    prompts = ["SELECT name FROM", "The quick brown fox"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    accepted = sum(output.stats.accepted for output in outputs)
    assert accepted > 20 and accepted - 3 * len(prompts) <= tally.won.total() <= accepted
    assert tally.won[0, 1] >= tally.won[0, 2] >= tally.won[0, 3] > 0


def test_states_are_used_again(heads: dict[str, str], tmp_path: Path) -> None:
    assert run("reuse", *named(heads, "lyanna"), *SMALL, "--out", tmp_path) == 0
    for way in (TOP, ALONE):
        found = values(tmp_path, "reuse")[way]["sql"]
        assert 0 < found["reused"] < found["states"] and found["trees"] > 0
        counts = {(kind, depth): n for kind, depth, n in found["proposed"]}
        assert counts[FRESH, 1] > 0 and counts[AGAIN, 1] > 0


# -- throughput


def test_arms_verify_the_rows_that_they_are_compared_at() -> None:
    methods = {m.name: m for m in throughput.fusion_arms("FOLDER")}
    assert {name: m.settings["budget"] for name, m in methods.items() if name != PLAIN} == {
        name: budget for name, (budget, _) in throughput.ARMS.items()
    }
    assert {name: m.round for name, m in methods.items() if m.round != "auto"} == {PASS: "extra_pass"}
    assert throughput.targets_of("m", 8) == ["m", "stretch:m,times=8"]
    assert throughput.targets_of("m", 1) == ["m"]
    assert throughput.targets_of("stretch:m,times=4", 8) == ["stretch:m,times=4"]


def test_fusion_is_measured_on_two_targets(heads: dict[str, str], tmp_path: Path) -> None:
    assert run("figure_12", *named(heads, "lyanna"), *SMALL, "--out", tmp_path) == 0
    made = values(tmp_path, "figure_12")
    assert {arm["target"] for arm in made["arms"]} == {MODEL, f"{MODEL}, stretched 8x"}
    assert {arm["method"] for arm in made["arms"]} == {PLAIN, *throughput.ARMS}
    assert all(arm["tokens_ratio"] == 1 for arm in made["arms"] if arm["method"] == OFF)
    said = [line for line in made["remarks"] if line.startswith(f"{MODEL}: ")]
    assert [line.split(": ")[1] for line in said] == [name for name in throughput.ARMS if name != OFF]
    assert "(the paper's: 0.84)" in said[0]
    assert (tmp_path / "figure_12.svg").is_file()


def test_the_extra_pass_is_for_what_was_re_sampled_alone() -> None:
    """Sequences with levels left over go first; where there are none, all go."""
    drafter = lyanna_drafter(resample="alone")
    asked: list[list[int]] = []
    inner: Any = SimpleNamespace(guard=SimpleNamespace(drafter=drafter), emitter=None, drafter=drafter)
    inner.step = lambda works, rule: asked.append([work.sequence.view.key for work in works])
    round_ = extra_pass.ExtraPass(inner)
    works: Any = [SimpleNamespace(sequence=SimpleNamespace(view=view(text(9, key), key))) for key in range(3)]
    for kept, accepted in ((None, 0), (1, 0), (1, STEPS)):
        if kept is not None:
            seen = works[kept].sequence.view
            drafter._resampling.keep(seen, torch.zeros(STEPS, 4))
            seen.tokens += [5] * (accepted + 1)
        round_.step(works)
    assert asked == [[0, 1, 2], [1], [0, 1, 2]]


def test_the_extra_pass_is_known_within_figure_12_alone() -> None:
    with pytest.raises(ConfigError, match="no such round"):
        parse_round("extra_pass")
    with extra_pass.known():
        config = parse_round("extra_pass")
        assert config is not None and config.refusal(lyanna_drafter(resample="alone").spec) is None
        assert config.refusal(None) is not None
        with pytest.raises(ConfigError, match="beside fresh ones"):
            config.build(RoundParts(target=None, pool=None, drafter=lyanna_drafter(resample="top")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such round"):
        parse_round("extra_pass")


def test_every_contestant_stands_with_both_budgets(heads: dict[str, str]) -> None:
    ask = LyannaFlags(lyanna=heads["lyanna"], eagle=heads["eagle"], medusa=heads["medusa"], streams=heads["streams"])
    entries = throughput.both_budgets(ask)
    budgets = {e.method.name: e.method.settings["budget"] for e in entries}
    assert all((value == "auto") == name.endswith(throughput.AUTO) for name, value in budgets.items())
    assert len(budgets) == 2 * len(throughput.contestants(ask)) == 24
    made = throughput.figure_8_9(replace(ask, model=MODEL, tasks="sql", draft=MODEL))
    assert next(made) is None  # every method is one that the bench takes


def test_drafters_that_are_not_named_are_the_zoos_for_the_target() -> None:
    def drafters(model: str, **given: str) -> dict[str, str]:
        ask = LyannaFlags(model=model, lyanna="L", eagle="E", medusa="M", **given)  # type: ignore[arg-type]
        return {name: drafter for name, drafter, *_ in throughput.contestants(ask)}

    found = drafters("paceline-small")
    assert found["draft model"] == "draft_model:paceline-small-draft"
    assert found["suffix + streams"] == "hybrid:suffix+streams:paceline-small-streams;k=3"
    lacking = drafters("another")
    assert not [name for name in lacking if "streams" in name or "draft" in name]
    more = {*drafters("another", streams="S")} - {*lacking}
    assert more == {"streams", "suffix + streams + Lyanna", "suffix + streams"}


def test_verdicts_compare_at_batch_2_and_choose_on_other_prompts() -> None:
    def trial(method: str, batch: int, group: int, ms: float) -> Trial:
        found = answered(method, "wikisql", group, [], [])
        return replace(found, cell=Cell(workload="wikisql", batch=batch), wall_ms=ms)

    speeds = {
        "plain": 8.0,
        "Lyanna": 3.0,
        "EAGLE-2": 4.5,
        "suffix + Lyanna": 2.0,
        "suffix + EAGLE-2": 5.0,
        "suffix": 4.0,
    }
    trials = [
        trial(name, batch, group, ms * (2 if batch == 1 and name == "Lyanna" else 1))
        for name, ms in speeds.items()
        for batch in (1, 2)
        for group in range(4)
    ]
    methods = [Method(name=name, drafter="none" if name == "plain" else "ngram") for name in speeds]
    report = Report(**{**EMPTY, "methods": methods, "trials": trials})
    fixed, auto = throughput.beside_eagle(report)
    assert "batch 2, fixed budgets: 1.50 [1.50, 1.50], wanted 1.20: reached" in fixed
    assert auto.endswith("not measured (wanted 1.20)")
    [said] = throughput.hybrid_verdict(LyannaFlags(lyanna="l", eagle="e", medusa="m"), report)
    assert "(suffix + Lyanna) over the best before (suffix)" in said and "2.00 [2.00, 2.00]" in said


EMPTY: dict[str, Any] = {
    **{"title": "", "created": "", "command": [], "model": {}, "machine": {}, "versions": {}, "commit": None},
    **{"settings": {}, "workloads": {}},
}


# -- section 5.2, figure 13


def test_beam_sampling_stands_beside_algorithm_1(heads: dict[str, str]) -> None:
    given = {"lyanna": heads["lyanna"], "without_info": heads["without-info"]}
    grid = acceptance.beam_against_algorithm_1(LyannaFlags(**given))
    assert isinstance(grid, Grid) and len({e.series for e in grid.entries}) == 3
    grid.config(LyannaFlags(model=MODEL, tasks="sql"))
    assert {e.x for e in grid.entries} == {*acceptance.SWEPT_NODES}
    assert all(e.method.settings["budget"] == e.x for e in grid.entries)


@needs_kernels
def test_the_parts_of_a_draft_are_timed(heads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-O1", *native.FLAGS[1:]))  # compiled in half the time
    longer = [24 if value == 6 else value for value in SMALL]
    given = (*named(heads, "lyanna", "eagle"), *longer, "--out", tmp_path)
    assert run("figure_13a", "figure_13b", *given) == 0
    found = values(tmp_path, "figure_13a")["heads"]
    assert len(found) == 5 and all(ms > 0 for cost in found for ms in cost.values())
    made = values(tmp_path, "figure_13b")
    assert [d["drafter"] for d in made["drafts"]] == ["Lyanna", "EAGLE-2"] and min(made["count"].values()) > 4
    assert all(d[part] > 0 for d in made["drafts"] for part in draft_pass.PARTS)
    assert native.library() is not None and not hasattr(native.library(), "pl_laps")  # the library's have no clock


def test_parts_of_the_same_drafts_add_up() -> None:
    draw = np.random.default_rng(0)
    drafts = draw.uniform(0.1, 1.0, (41, len(draft_pass.PARTS)))
    drafts[0] *= 100  # a pause
    found, whole = draft_pass.middle(drafts), np.sort(drafts.sum(1))
    assert found.sum() == pytest.approx(whole[10:31].mean())
    slow = [drafts[:20] * 3, drafts[20:] * 3]
    parts = {"Lyanna": np.array([1.0, 9, 9, 9]), "EAGLE-2": np.array([2.0, 3, 9, 9])}
    [said] = draft_pass.beside({"Lyanna": slow, "EAGLE-2": [drafts[:20], drafts[20:]]}, parts)
    assert "takes 3.00 [3.00, 3.00] times one of EAGLE-2; its layer alone 0.20 times EAGLE-2's layer and head" in said


def test_a_clock_is_put_where_the_source_has_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = laps.with_clock(tmp_path / "timed")
    timed = "".join(path.read_text("utf-8") for path in source.with_suffix("").rglob("*.h"))
    assert timed.count("lap.to(0)") == timed.count("lap.to(1)") == timed.count("  Lap lap;\n") == 2
    header = source.with_suffix("") / "drafts" / "states.h"
    header.write_text(header.read_text("utf-8").replace("if (total) head(", "if (total > 0) head("), "utf-8")
    monkeypatch.setattr(native, "SOURCE", source)
    with pytest.raises(ConfigError, match="the kernels have 0 lines"):
        laps.with_clock(tmp_path / "twice")


# -- what training says


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A tiny target, its data, a recipe, and two runs of a few steps: for all tokens, and for hot ones."""
    root = tmp_path_factory.mktemp("training")
    data, target = root / "boxes.jsonl", root / "target"
    colours = ("red", "green", "blue", "grey")
    records = [{"prompt": f"What colour is box {i}?", "completion": f"Box {i} is {colours[i % 4]}."} for i in range(24)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    shape = ModelShape(layers=1, d_model=32, d_ff=48, heads=4, kv_heads=2, vocab_size=300, context=128)
    train_tokenizer([SourceSpec(file=str(data))], 300, target, 128)
    from paceline.network.families import decoder_config

    config = shape.config(0, 1, 2)
    network = Network(decoder_config(config))
    network.init_weights(0)
    network.save(target, config, torch.float32)
    entry = {"sha256": None, "source": "made here", "obtain": "as it is"}
    (root / "manifest.json").write_text(json.dumps({"files": {"boxes.jsonl": entry}}), encoding="utf-8")
    for name, options in (("dense", ""), ("sparse", "hot = 0.25\n")):
        (root / f"{name}.toml").write_text(
            f'recipe = "lyanna"\n[options]\nrank = 4\n{options}[train]\nsteps = 4\nwarmup = 1\nprecision = "fp32"\n'
            "evaluate_every = 2\nlog_every = 1\n[[phase]]\nrows = 2\nlength = 64\n[data]\n"
            '[[data.source]]\nfile = "boxes.jsonl"\n[[data.held_out]]\nfile = "boxes.jsonl"\n',
            encoding="utf-8",
        )
        flags = ["--data", root, "--target", target, "--out", root / name, "--no-tensorboard"]
        done = CliRunner().invoke(app, ["train", str(root / f"{name}.toml"), *map(str, flags)])
        assert done.exit_code == 0, done.output
    yield SimpleNamespace(root=root, target=target, recipe=root / "dense.toml")


def test_curves_come_from_logs(training: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [f"--runs={name}={training.root / name}" for name in ("dense", "sparse")]
    assert run("figure_5", *runs, "--out", tmp_path) == 0
    found = values(tmp_path, "figure_5")["runs"]
    assert {*found} == {"dense", "sparse"}
    assert [*found["dense"]["accuracy"]["acceptance_top4"]] == ["2", "4"] and len(found["dense"]["loss"]) == 4
    assert run("figure_5", f"--runs=none={training.target}", "--out", tmp_path) == 2
    assert "log.jsonl cannot be read" in capsys.readouterr().err


def test_sparse_tables_are_held_against_the_dense_one(training: SimpleNamespace, tmp_path: Path) -> None:
    given = ["--dense", training.root / "dense", "--sparse", training.root / "sparse", "--model", training.target]
    data = ["--recipe", training.recipe, "--corpus", training.root]
    assert run("table_2", *given, *data, "--repeats", 3, "--out", tmp_path) == 0
    made = values(tmp_path, "table_2")
    assert {*made["exported"]} == {trained.DENSE, trained.SPARSE, trained.AT_LOAD}
    costs = made["costs"]
    assert costs[trained.DENSE]["collapsed"] == 2 * 300 * 300
    assert costs[trained.SPARSE]["collapsed"] == costs[trained.AT_LOAD]["collapsed"] == 2 * 75 * 75
    assert costs[trained.SPARSE]["factors"] < costs[trained.AT_LOAD]["factors"] == costs[trained.DENSE]["factors"]
    last = made["by_evaluation"][trained.DENSE]["4"]
    assert last == pytest.approx(np.mean(made["exported"][trained.DENSE]), abs=0.05)  # stored in bf16
    with pytest.raises(ConfigError, match="it has no token-info for all tokens"):
        trained.load_three(str(training.root / "sparse"), str(training.root / "sparse"))


def test_both_look_ups_say_the_same(training: SimpleNamespace) -> None:
    models = trained.load_three(str(training.root / "dense"), str(training.root / "sparse"))
    embedding = Network.load(training.target, frozen=True).decoder.embedding.data
    tokens = torch.arange(len(embedding))
    for model in models.values():
        info = trained.info_of(model)
        place = torch.full((len(embedding),), -1)
        if info.hot is not None:
            place[info.hot] = torch.arange(len(info.hot))
        zero = torch.zeros(len(embedding), len(embedding))
        table = trained.collapsed(info, embedding)
        by_table = trained.looked_up(table, zero, tokens, info.hot, place)
        by_factors = info.factors(embedding, tokens) @ info.table().t()
        assert by_factors.abs().max() > 0.01 and torch.allclose(by_table, by_factors, atol=1e-2)


def test_coverage_is_a_share_of_the_data(training: SimpleNamespace, tmp_path: Path) -> None:
    given = ["--model", training.target, "--recipe", training.recipe, "--corpus", training.root]
    assert run("figure_7", *given, "--out", tmp_path) == 0
    covered = values(tmp_path, "figure_7")["covered"]
    assert 0 < covered["0.01"] < covered["0.05"] < covered["0.25"] <= covered["1.0"] == pytest.approx(1)
