"""What the documentation names exists: commands and their options, links, files, and what these define."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import COMMANDS, load

ROOT = Path(__file__).resolve().parents[2]
BASES = (ROOT, ROOT / "src" / "paceline")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "zoo").rglob("*.md"),
        *(ROOT / "src" / "paceline" / "papers").rglob("*.md"),
    ]
)
PAST = {"CHANGELOG.md"}  # names what went, too
SPAN = re.compile(r"^```(?:sh|console)?\n(.*?)^```$|`(paceline [^`]+)`", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\"[^\"]*\"|\$?'[^']*'|\S+")
LINK = re.compile(r"\]\(([^()\s]*)\)")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|cpp|toml|md|json|jsonl|svg|txt)|(?:[\w.-]+/)+[\w.-]*")
NAMES = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")
FROM_ROOT = re.compile(r"(?:src|tests|docs|studies|tools|examples|zoo)/")
MADE = re.compile(r"build/|figure_1|table_1|.*[A-Z]{3,}\b.*\.toml")  # by a reader, or a placeholder


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


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


loaded = cache(load)


def wrong(words: list[str]) -> list[str]:
    """What of a command is not there."""
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        return [name]
    sub = getattr(loaded(name), "commands", {}).get(rest[0] if rest else "")
    known = options(sub or loaded(name))
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links, as GitHub calls them: the second of a name ends in -1."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}


def dead(text: str, page: Path) -> list[str]:
    """Links of a page at ``page`` that lead nowhere."""
    lost = []
    for link in LINK.findall(re.sub(r"`[^`\n]+`", "", prose(text))):
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if "://" in link or file.exists() and not anchor:
            continue
        if not file.exists() or anchor not in anchors(file.read_text(encoding="utf-8")):
            lost.append(link)
    return lost


def missing(text: str) -> list[str]:
    """Files that a page names in tables, or from the root on, and that do not exist; names that none defines."""

    def spans(part: str) -> set[str]:
        words = {word for span in re.findall(r"`([^`]+)`", part) for word in span.split()}
        return {word for word in words if FILE.fullmatch(word) and not MADE.match(word)}

    def found(path: str) -> Path | None:
        return next((base / path for base in BASES if (base / path).exists()), None)

    rows = "\n".join(line for line in prose(text).splitlines() if line.startswith("|"))
    paths = spans(rows) | {word for word in spans(prose(text)) if FROM_ROOT.match(word)}
    lost = [path for path in sorted(paths) if found(path) is None]
    for path, names in NAMES.findall(rows):
        source = "" if (file := found(path)) is None else file.read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                if not re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE):
                    lost.append(f"{path}: {name}")
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert dead(text, page) == []
    if page.name not in PAST:
        assert [(" ".join(words), lost) for words in commands(text) if (lost := wrong(words))] == []
        assert missing(text) == [] or ROOT / "zoo" in page.parents  # whose cards name files of recipes and of data


def test_what_is_missing_is_seen(tmp_path: Path) -> None:
    block = "```sh\npaceline bench step --rows 1 \\\n  --gone 2   # --comment\npaceline lost\n```\n"
    text = f"{block}`paceline plan --target X`\n"
    assert [wrong(words) for words in commands(text)] == [["--gone"], ["lost"], []]
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## A page\n\n## What `it` costs: 3.1, 2\n\n```\n# no heading\n```\n", encoding="utf-8")
    links = "[a](#what-it-costs-31-2) [b](page.md#a-page-1) `[c](gone.md)` [d](#no-heading) ![e](gone.svg)"
    assert dead(links, page) == ["#no-heading", "gone.svg"]
    table = "| `core/tree.py`: `TokenTree`, `Gone` | `rounds/gone.py` |\n"
    code = "```\n| `rounds/code.py` |\n```\n"
    lost = ["rounds/gone.py", "tests/gone.py", "core/tree.py: Gone"]
    assert missing(f"{table}{code}`tests/gone.py` and `their/own.py`") == lost
