"""Drafters by name: what is read, what is refused and with which words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from paceline.core.errors import ConfigError
from paceline.draft import registry
from paceline.draft.ngram import NgramConfig
from paceline.draft.registry import DrafterConfig, DrafterContext, build, describe, option, parse, register


@dataclass(frozen=True, kw_only=True)
class SampleConfig(DrafterConfig):
    """A drafter for this test.

    More about it.
    """

    kind: ClassVar[str] = "sample"

    model: str = option(help="the model")
    depth: int = option(4, help="how deep", minimum=1)
    rate: float = option(0.5, help="how often", maximum=1)
    eager: bool = option(False, help="whether at once")
    tree: tuple[int, ...] | None = option(None, help="branching factors")
    draws: Literal["point", "coupled"] = option("coupled", help="how")
    note: str | None = option(None, help="a remark")

    def build(self, context: DrafterContext):
        return context.load_model(self.model, context.dtype)


@pytest.fixture
def sample(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    return register(SampleConfig)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make a distribution whose entry points are the lines given."""

    def install(lines: str, code: str = "") -> None:
        info = tmp_path / "thirdparty-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[paceline.drafters]\n{lines}\n")
        (tmp_path / "thirdparty_drafters.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        registry._discovered.cache_clear()

    yield install
    monkeypatch.undo()
    sys.modules.pop("thirdparty_drafters", None)
    registry._discovered.cache_clear()


def row(name: str):
    return next(r for r in describe() if r.name == name)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sufix", ["no such drafter", "did you mean 'suffix'", "ngram", "draft_model"]),
        (3, ["neither a name nor a config object"]),
        ("ngram,dept=3", ["no option 'dept'", "did you mean 'depth'", "max_ngram"]),
        ("ngram,", ["is not option=value"]),
        ("ngram,depth=0", ["depth must be 1 or more"]),
        ("ngram:model", ["no model of its own"]),
        ("ngram:depth=4", ["options follow a comma. Write 'ngram,depth=4'"]),
        ("eagle:depth=4,width=2", ["Write 'eagle,depth=4,width=2', or within a hybrid 'eagle;depth=4;width=2'"]),
        ("sample", ["needs model", "write sample:model"]),
        ("sample:a,model=b", ["model is given twice"]),
        ("sample:a,rate=2", ["rate must be 1 or less"]),
        ("sample:a,eager=perhaps", ["takes true or false"]),
        ("sample:a,draws=sampled", ["takes point or coupled"]),
    ],
)
def test_bad_specs_say_what_to_do(sample, spec, words):
    with pytest.raises(ConfigError) as caught:
        parse(spec)
    for word in words:
        assert word.lower() in str(caught.value).lower()


def test_names_are_taken_once(sample):
    assert register(SampleConfig) is SampleConfig  # again: no harm
    other = type("Other", (DrafterConfig,), {"kind": "sample"})
    with pytest.raises(ConfigError, match="taken"):
        register(other)
    with pytest.raises(ConfigError, match="taken"):
        register(type("Other", (DrafterConfig,), {"kind": "ngram"}))
    with pytest.raises(ConfigError, match="is not a name"):
        register(type("Other", (DrafterConfig,), {"kind": "a,b"}))


def test_entry_points_are_found(installed):
    installed(
        "copycat = thirdparty_drafters:CopyConfig",
        "from dataclasses import dataclass\n"
        "from paceline.draft.ngram import NgramConfig\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class CopyConfig(NgramConfig):\n"
        "    '''Copies.'''\n"
        "    kind = 'copycat'\n",
    )
    assert "thirdparty_drafters" not in sys.modules  # listed, not loaded
    assert "copycat" in registry.names()
    config = parse("copycat,depth=2")
    assert type(config).__name__ == "CopyConfig" and config.depth == 2
    assert build(config).spec.name == "copycat"
    assert (row("copycat").origin, row("copycat").help) == ("thirdparty", "Copies.")


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ("bad = thirdparty_drafters:Config", "import no_such_module_anywhere", "no_such_module_anywhere"),
        ("bad = thirdparty_drafters:Config", "Config = 3", "not a subclass of DrafterConfig"),
    ],
)
def test_a_broken_entry_point_matters_only_when_asked_for(installed, lines, code, words):
    installed(lines, code)
    assert parse("ngram") == NgramConfig()
    assert words in (row("bad").error or "")
    with pytest.raises(ConfigError, match="thirdparty") as caught:
        parse("bad")
    assert words in str(caught.value)


def test_a_builtin_name_cannot_be_taken_over(installed):
    installed("ngram = thirdparty_drafters:Config", "Config = 3")
    assert parse("ngram") == NgramConfig()
    rows = [r for r in describe() if r.name == "ngram"]
    assert [r.error is None for r in rows] == [True, False]
    assert "another drafter has the name" in (rows[1].error or "")
