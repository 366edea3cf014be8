"""Commands that the documentation shows exist, and so do their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import COMMANDS, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/measured").glob("*.md"),
        *(ROOT / "src" / "paceline" / "papers").rglob("*.md"),
    ]
)
SHOWN = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names what went, too
SPAN = re.compile(r"^```(?:sh|console)?\n(.*?)^```$|`(paceline [^`]+)`", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\"[^\"]*\"|\$?'[^']*'|\S+")


def commands(text: str) -> list[list[str]]:
    """Words of each `paceline` command in code blocks and spans, comments cut off."""
    parts = [block or span for block, span in SPAN.findall(text)]
    lines = re.sub(r"\\\n|\n +(?=--)", " ", "\n".join(parts)).splitlines()
    shown = [re.split(r"\s#\s|\s{2,}\.\.", line.strip())[0] for line in lines]
    return [WORD.findall(line)[1:] for line in shown if re.match(r"(\.venv/bin/)?paceline [a-z]", line)]


def options(command: Any) -> set[str]:
    """Of a command, and of a group's commands."""
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return own.union({"--help"}, *(options(each) for each in getattr(command, "commands", {}).values()))


def wrong(words: list[str], loaded: dict[str, Any]) -> list[str]:
    """What of a command is not there."""
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        return [name]
    command = loaded.setdefault(name, load(name))
    sub = getattr(command, "commands", {}).get(rest[0] if rest else "")
    known = options(sub or command)
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path, loaded: dict[str, Any]) -> None:
    shown = commands(page.read_text(encoding="utf-8"))
    assert [(" ".join(words), lost) for words in shown if (lost := wrong(words, loaded))] == []


def test_the_checker_sees_what_is_missing(loaded: dict[str, Any]) -> None:
    block = "```sh\npaceline bench step --rows 1 \\\n  --gone 2   # --comment\npaceline lost\n```\n"
    text = f"{block}`paceline plan --target X`\n"
    assert [wrong(words, loaded) for words in commands(text)] == [["--gone"], ["lost"], []]
