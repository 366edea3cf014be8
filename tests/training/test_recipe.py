"""Recipe files and kinds: what is read, what is refused, and with which hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_target import TargetOptions

from paceline.core.errors import ConfigError
from paceline.train.data import STDLIB
from paceline.train.job import TrainingJob, prepare
from paceline.train.recipe import locate, read_recipe
from paceline.train.registry import kind
from paceline.train.trainer import Phase, TrainConfig
from paceline.weights.files import fill

RECIPES = Path(__file__).parents[2] / "zoo" / "recipes"
TEXT = """
recipe = "target"
[options]
layers = 2
grow = [0, 1]
[train]
steps = 20
learning_rate = 1e-3
[[phase]]
until = 0.5
rows = 4
[[phase]]
length = 64
[data]
prompt_weight = 0.25
[[data.source]]
file = "a.txt"
weight = 2
[[data.source]]
file = "python-stdlib"
max_tokens = 100
[[data.held_out]]
file = "b.jsonl"
domain = "b"
"""


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "some.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_file_fills_its_dataclasses(tmp_path: Path) -> None:
    made = read_recipe(write(tmp_path))
    assert made.config == TrainConfig(steps=20, learning_rate=1e-3)
    assert made.phases == (Phase(until=0.5, rows=4), Phase(length=64))
    assert fill(TargetOptions, made.options, "recipe") == TargetOptions(layers=2, grow=(0, 1))
    assert [(s.file, s.weight, s.name) for s in made.sources] == [("a.txt", 2.0, "a"), (STDLIB, 1.0, STDLIB)]
    assert (made.held_out[0].name, made.prompt_weight) == ("b", 0.25)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('recipe = "target"', "", "does not name its kind"),
        ("steps = 20", "stepps = 20", "unknown entry 'stepps'. Did you mean 'steps'"),
        ("steps = 20", "steps = true", "steps=True: input should be a valid integer"),
        ("steps = 20", 'schedule = "flat"', "schedule='flat': input should be 'cosine', 'linear' or"),
        ('file = "a.txt"', "", "file is missing"),
        ("prompt_weight", "promt_weight", "unknown entry 'promt_weight'. Did you mean 'prompt_weight'"),
        ("[options]\nlayers = 2\ngrow = [0, 1]\n", "options = 3\n", "options=3: input should be an object"),
        ("steps = 20", "steps = 0", "steps=0: steps must be 1 or more"),
        ("[train]", "[train", "not TOML"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(tmp_path, TEXT.replace(old, new)))


def test_files_are_found_in_the_folder(tmp_path: Path) -> None:
    recipe, data = read_recipe(write(tmp_path)), tmp_path / "data"
    found = locate(recipe, data)
    assert [s.file for s in found.sources] == [str(data / "a.txt"), STDLIB]
    assert (found.sources[0].weight, found.sources[0].name, found.held_out[0].name) == (2.0, "a", "b")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_of_the_zoo_are_whole(path: Path) -> None:
    made = read_recipe(path)
    fill(TargetOptions if made.kind == "target" else kind(made.kind).Options, made.options, str(path))
    known = json.loads((RECIPES / "manifest.json").read_text("utf-8"))["files"]
    assert {s.file for s in (*made.sources, *made.held_out)} - {STDLIB} <= known.keys()
    measured = {name for name, entry in known.items() if entry.get("use") == "measuring"}
    assert not {s.file for s in made.sources} & measured  # nothing is trained on what is measured with


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "streams", "cache": Path("somewhere")}, "which are what a cache holds"),
        ({"sources": []}, "there is no data"),
        ({"options": {"layer": 3}}, "Did you mean 'layers'"),
    ],
)
def test_a_job_that_does_not_fit_its_kind_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, TEXT.replace("grow = [0, 1]", "").replace('"target"', '"draft_model"')))
    job = TrainingJob(**vars(recipe), out=tmp_path / "out")
    for name, value in change.items():
        setattr(job, name, value)
    with pytest.raises(ConfigError, match=message):
        prepare(job)
    assert not (tmp_path / "out").exists()
