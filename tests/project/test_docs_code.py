"""What the documentation shows as code is code that runs."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from paceline.drafters import registry
from paceline.drafters.base import DraftRequest, SequenceView, StepFeatures

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "write-a-drafter.md"
NETWORK_PAGE = ROOT / "docs" / "write-a-network-drafter.md"
EXAMPLE = ROOT / "examples" / "custom_drafter.py"


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    monkeypatch.setattr(registry, "_registered", {})
    spec = spec_from_file_location("custom_drafter", EXAMPLE)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "custom_drafter", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def view(tokens: list[int], key: int = 0) -> SequenceView:
    return SequenceView(key=key, tokens=tokens, prompt_len=len(tokens), sampler=None)


def test_page_shows_the_example():
    assert blocks("python")[0] == EXAMPLE.read_text(encoding="utf-8")


def test_the_drafter_learns_and_keeps_to_its_limits(example):
    drafter = registry.build(registry.parse("follower,depth=3"))
    served = view([1, 2, 3, 4, 5, 6], key=1)
    drafter.observe(StepFeatures([served], [[6]], [0], [[]]))
    views = [view([9, 1, 2]), view([1, 2]), view([7]), view([2, 3])]
    tree = drafter.propose(DraftRequest(views, [8, 2, 8, 0], [3] * 4))
    tree.check()
    assert [row[1:] for row in tree.tokens] == [[3, 4, 5], [3, 4], [], []] and tree.is_chain
    drafter.release([1])
    assert not drafter.learned


@pytest.fixture
def run_page(monkeypatch):
    """Run all blocks of a page in order, as a stranger would paste them into one file."""

    def run(path: Path) -> ModuleType:
        monkeypatch.setattr(registry, "_registered", {})
        page = ModuleType("page")
        monkeypatch.setitem(sys.modules, "page", page)  # dataclasses look their module up
        for block in blocks("python", path):
            exec(compile(block, path.name, "exec", dont_inherit=True), vars(page))
        return page

    return run


def test_the_code_of_the_page_runs_as_it_stands(run_page):
    assert run_page(PAGE).alternatives.parents == [0, 1, 0]


def test_the_code_of_the_page_on_networks_runs_as_it_stands(run_page, capsys):
    page = run_page(NETWORK_PAGE)  # it compares answers itself
    assert "tokens" in capsys.readouterr().out
    llm = page.LLM("paceline-small", drafter="head", budget=1)
    (answer,) = llm.generate([{"prompt_token_ids": [5]}], page.params)  # nothing in front of the first root
    assert answer.stats.off_reason is None and answer.stats.drafted > 0
