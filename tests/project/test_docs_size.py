"""Pages for readers stay short: what is longer belongs to ``docs/measured/``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions.md"  # a list to look things up in: each entry is short
LINES = {"README.md": 100, "write-a-kernel.md": 40}
LINES_ELSE = 150
FIRST_SCREEN = 20
DECISION_LINES = 4
PAGES = [ROOT / "README.md", *sorted({*DOCS.glob("*.md")} - {DECISIONS})]


def decisions(text: str) -> list[str]:
    """Entries of a list, each with the lines that go on with it."""
    return re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_for_readers_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LINES.get(page.name, LINES_ELSE)


def test_the_first_screen_of_the_readme_shows_a_picture_and_the_two_commands() -> None:
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN])
    (picture,) = re.findall(r"!\[[^\]]+\]\((.+)\)", screen)
    assert (ROOT / picture).is_file()
    assert re.findall(r"^make (\w+)", screen, re.MULTILINE) == ["demo", "test"]


def test_a_decision_takes_at_most_four_lines() -> None:
    entries = decisions(DECISIONS.read_text(encoding="utf-8"))
    assert len(entries) > 20
    assert [entry for entry in entries if len(entry.splitlines()) > DECISION_LINES] == []


def test_decisions_are_counted_whole() -> None:
    assert decisions("# D\n\n- one\n  two\n- three\n\nNo entry.\n") == ["- one\n  two", "- three"]
