"""The documentation names files that exist; its tables name functions and classes that these files define."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASES = (ROOT, ROOT / "src" / "paceline")
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.glob("*.md"),
        *(DOCS / "measured").glob("*.md"),
        *(ROOT / "src" / "paceline" / "papers").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)
SUFFIXES = r"(?:py|cpp|toml|md|json|jsonl|svg|txt)"
FILE = re.compile(rf"[\w.-]+(?:/[\w.-]+)*\.{SUFFIXES}|(?:[\w.-]+/)+[\w.-]*")
NAMES = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")
FROM_ROOT = re.compile(r"(?:src|tests|docs|studies|tools|examples|zoo)/")
MADE = re.compile(r"build/|figure_1|table_1|studies/lookup|.*[A-Z]{3,}\b.*\.toml")  # by a reader, or a placeholder


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def rows(text: str) -> list[str]:
    """Lines of tables."""
    return [line for line in prose(text).splitlines() if line.startswith("|")]


def paths(text: str) -> set[str]:
    """Files and folders that a page's code spans name: all of them in tables, elsewhere those from the root on."""

    def spans(part: str) -> set[str]:
        words = {word for span in re.findall(r"`([^`]+)`", part) for word in span.split()}
        return {word for word in words if FILE.fullmatch(word) and not MADE.match(word)}

    return spans("\n".join(rows(text))) | {word for word in spans(prose(text)) if FROM_ROOT.match(word)}


def found(path: str) -> Path | None:
    return next((base / path for base in BASES if (base / path).exists()), None)


def missing(text: str) -> list[str]:
    """Files that a page names and that do not exist, and names that a file does not define."""
    lost = [path for path in sorted(paths(text)) if found(path) is None]
    for path, names in (pair for row in rows(text) for pair in NAMES.findall(row)):
        source = "" if (file := found(path)) is None else file.read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                if not re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE):
                    lost.append(f"{path}: {name}")
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_what_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_the_checker_sees_what_is_missing() -> None:
    table = "| `core/tree.py`: `TokenTree`, `Gone` | `rounds/gone.py` |\n"
    code = "```\n| `rounds/code.py` |\n```\n"
    assert missing(f"{table}{code}`tests/gone.py` and `their/own.py`") == [
        "rounds/gone.py",
        "tests/gone.py",
        "core/tree.py: Gone",
    ]
