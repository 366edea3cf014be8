"""What the documentation shows as code is code that runs."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from paceline.core.sequence import Sequence
from paceline.draft import registry
from paceline.draft.base import DraftRequest, StepFeatures

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
EXAMPLE = ROOT / "examples" / "custom_drafter.py"
NETWORK_EXAMPLE = ROOT / "examples" / "network_drafter.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example, as if nothing were registered."""
    monkeypatch.setattr(registry, "_registered", {})
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    return run(EXAMPLE, monkeypatch)


def view(tokens: list[int], key: int = 0) -> Sequence:
    return Sequence(key=key, tokens=tokens, prompt_len=len(tokens), sampler=None)


def test_page_shows_part_of_the_example():
    (shown,) = blocks("python")
    assert shown in EXAMPLE.read_text(encoding="utf-8")


def test_the_drafter_learns_and_keeps_to_its_limits(example):
    drafter = registry.build(registry.parse("follower,depth=3"))
    served = view([1, 2, 3, 4, 5, 6], key=1)
    drafter.observe(StepFeatures([served], [[6]]))
    views = [view([9, 1, 2]), view([1, 2]), view([7]), view([2, 3])]
    trees = drafter.draft(DraftRequest(views, [8, 2, 8, 0], [3] * 4))
    assert [tree.tokens for tree in trees] == [[3, 4, 5], [3, 4], [], []] and all(tree.is_chain for tree in trees)
    drafter.release([1])
    assert not drafter.learned


def test_the_network_drafts_for_a_prompt_of_one_token(monkeypatch):
    example = run(NETWORK_EXAMPLE, monkeypatch)
    llm = example.LLM("paceline-small", drafter="head", budget=1)
    (answer,) = llm.generate([{"prompt_token_ids": [5]}], example.PARAMS)  # nothing before the first root
    assert answer.stats.off_reason is None and answer.stats.drafted > 0


def test_the_entry_point_is_in_the_group_that_is_read():
    declared = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    assert list(declared) == [registry.ENTRY_POINT_GROUP]
