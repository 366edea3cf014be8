"""The study of Lyanna: what it measures, what it says of it, what it refuses; on drafters that are hardly trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lyanna  # noqa: F401  (all its figures are known from then on)
import pytest
import torch
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kits.draft import text, view
from kits.native import needs_kernels
from kits.state import lyanna as lyanna_drafter
from kits.stream_sets import MODEL, save_set
from lyanna_parts import draft_pass, extra_pass, reuse
from lyanna_parts.acceptance import FIRST_TAKEN, INFO_TAKEN, TRAINED
from lyanna_parts.common import STEPS, study
from train_target import train_tokenizer
from typer.testing import CliRunner

from paceline import LLM, SamplingParams, kernels
from paceline.cli import app
from paceline.draft.eagle.model import EagleFacts, EagleModel
from paceline.draft.fit import tokenizer_mark
from paceline.draft.medusa.heads import Heads, HeadsConfig
from paceline.draft.states.head import layer_json
from paceline.papers.lyanna.model import LyannaModel, LyannaShape
from paceline.train.data import SourceSpec
from paceline.train.network import Network
from paceline.train.recipes.distillation import ModelShape
from paceline.weights.files import fingerprint
from paceline.weights.source import load_tokenizer, read_config, resolve_folder

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
        "shallow": {"rank": 4, "steps": 2},
    }.items():
        whole = LyannaShape(**{**facts, **shape, "tokenizer": tokenizer_mark(load_tokenizer(place))})  # type: ignore[arg-type]
        LyannaModel.fresh(whole, draw).save(root / name)
    EagleModel.fresh(layer_json(config), EagleFacts(steps=STEPS, target=MODEL, fingerprint=mark), draw).save(
        root / "eagle"
    )
    medusa = HeadsConfig(heads=3, d_model=config.d_model, vocab_size=config.vocab_size, target=MODEL, fingerprint=mark)
    Heads.fresh(medusa).save(root / "medusa")
    save_set(root / "streams")
    return {path.name: str(path) for path in root.iterdir()}


def run(*given: Any) -> int:
    return study.run([*map(str, given)])


def named(heads: dict[str, str], *options: str) -> list[str]:
    return [part for option in options for part in (f"--{option}", heads[option])]


def values(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


# -- table 1


def test_table_1_comes_from_the_engine(heads: dict[str, str], tmp_path: Path) -> None:
    assert run("table_1_shipped", *named(heads, "lyanna"), *SMALL, "--out", tmp_path) == 0
    made = values(tmp_path, "table_1_shipped")
    assert {*made["acceptance"]["sql"]} == {TRAINED, INFO_TAKEN, FIRST_TAKEN} and made["prompts"] == {"sql": 2}
    raw = json.loads((tmp_path / "table_1_shipped" / "report.json").read_text("utf-8"))
    assert {m["drafter"].partition(":")[0] for m in raw["methods"]} == {"none", "lyanna"}
    assert all("nodes=16" in m["drafter"] and m["settings"] == {"budget": 16} for m in raw["methods"][1:])
    assert sum(t["drafted"] for t in raw["trials"]) > 16  # whole trees were verified


# -- reuse


def test_what_is_counted_is_what_the_engine_accepted() -> None:
    """On trees that are mostly right: the counts are the engine's, but for the last tree of each answer."""
    llm = LLM(MODEL, drafter=f"draft_model:{MODEL},topk=3,depth=3,nodes=8", budget=8, threads=1)
    _, tally = reuse.watched(llm)
    prompts = ["SELECT name FROM", "The quick brown fox"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    accepted = sum(output.stats.accepted for output in outputs)
    assert accepted > 20 and accepted - 3 * len(prompts) <= tally.won.total() <= accepted
    assert tally.won[0, 1] >= tally.won[0, 2] >= tally.won[0, 3] > 0


# -- throughput


def test_the_extra_pass_is_for_what_was_re_sampled_alone() -> None:
    """Sequences with levels left over go first; where there are none, all go."""
    drafter = lyanna_drafter(resample="alone")
    asked: list[list[int]] = []
    inner: Any = SimpleNamespace(guard=SimpleNamespace(drafter=drafter), emitter=None, drafter=drafter)
    inner.step = lambda works, rule: asked.append([work.sequence.key for work in works])
    round_ = extra_pass.ExtraPass(inner)
    works: Any = [SimpleNamespace(sequence=view(text(9, key), key)) for key in range(3)]
    for kept, accepted in ((None, 0), (1, 0), (1, STEPS)):
        if kept is not None:
            seen = works[kept].sequence
            drafter._resampling.keep(seen, torch.zeros(STEPS, 4))
            seen.tokens += [5] * (accepted + 1)
        round_.step(works)
    assert asked == [[0, 1, 2], [1], [0, 1, 2]]


# -- section 5.2, figure 13


@needs_kernels
def test_the_parts_of_a_draft_are_timed(heads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FLAGS", ("-O1", *kernels.FLAGS[1:]))  # compiled in half the time
    longer = [24 if value == 6 else value for value in SMALL]
    given = (*named(heads, "lyanna", "eagle"), *longer, "--out", tmp_path)
    assert run("figure_13a", "figure_13b", *given) == 0
    found = values(tmp_path, "figure_13a")["heads"]
    assert len(found) == 5 and all(ms > 0 for cost in found for ms in cost.values())
    made = values(tmp_path, "figure_13b")
    assert [d["drafter"] for d in made["drafts"]] == ["Lyanna", "EAGLE-2"] and min(made["count"].values()) > 4
    assert all(d[part] > 0 for d in made["drafts"] for part in draft_pass.PARTS)
    assert kernels.library() is not None and not hasattr(kernels.library(), "pl_laps")  # the library's have no clock


# -- what training says


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A tiny target, its data, a recipe, and two runs of a few steps: with token-info, and without."""
    root = tmp_path_factory.mktemp("training")
    data, target = root / "boxes.jsonl", root / "target"
    colours = ("red", "green", "blue", "grey")
    records = [{"prompt": f"What colour is box {i}?", "completion": f"Box {i} is {colours[i % 4]}."} for i in range(24)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    shape = ModelShape(layers=1, d_model=32, d_ff=48, heads=4, kv_heads=2)
    train_tokenizer([SourceSpec(file=str(data))], 300, target, 128)
    from paceline.model.families import decoder_config

    config = shape.config(300, 128, 0, 1, 2)
    network = Network(decoder_config(config))
    network.init_weights(0)
    network.save(target, config, torch.float32)
    entry = {"sha256": None, "source": "made here", "obtain": "as it is"}
    (root / "manifest.json").write_text(json.dumps({"files": {"boxes.jsonl": entry}}), encoding="utf-8")
    for name, options in (("with", "rank = 4\n"), ("without", "rank = 0\n")):
        (root / f"{name}.toml").write_text(
            f'recipe = "lyanna"\n[options]\n{options}[train]\nsteps = 4\nwarmup = 1\nprecision = "fp32"\n'
            "evaluate_every = 2\n[[phase]]\nrows = 2\nlength = 64\n[data]\n"
            '[[data.source]]\nfile = "boxes.jsonl"\n[[data.held_out]]\nfile = "boxes.jsonl"\n',
            encoding="utf-8",
        )
        flags = ["--data", root, "--target", target, "--out", root / name]
        done = CliRunner().invoke(app, ["train", str(root / f"{name}.toml"), *map(str, flags)])
        assert done.exit_code == 0, done.output
    yield SimpleNamespace(root=root, target=target, recipe=root / "with.toml")


def test_curves_come_from_logs(training: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [f"--runs={name}={training.root / name}" for name in ("with", "without")]
    assert run("figure_5", *runs, "--out", tmp_path) == 0
    found = values(tmp_path, "figure_5")["runs"]
    assert {*found} == {"with", "without"}
    assert [*found["with"]["accuracy"]["acceptance_top4"]] == ["2", "4"] and [*found["with"]["loss"]] == ["1", "2", "4"]
    assert run("figure_5", f"--runs=none={training.target}", "--out", tmp_path) == 2
    assert "log.jsonl cannot be read" in capsys.readouterr().err
