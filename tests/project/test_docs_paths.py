"""Tables of the documentation name files that exist, and functions and classes that these files define."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASES = (ROOT, ROOT / "src" / "paceline")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SUFFIXES = r"(?:py|cpp|toml|md|json|jsonl|svg|txt)"
FILE = re.compile(rf"[\w.-]+(?:/[\w.-]+)*\.{SUFFIXES}|(?:[\w.-]+/)+[\w.-]*")
NAMES = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")
MADE = re.compile(
    r"build/|figure_1|table_1|.*[A-Z]{3,}\b.*\.toml"
)  # what a command makes, or a word in place of a name


def rows(text: str) -> Iterator[str]:
    """Lines of tables outside of code blocks."""
    for block in re.split(r"^```.*?^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield from (line for line in block.splitlines() if line.startswith("|"))


def paths(text: str) -> set[str]:
    """Files and folders that the code spans of a page's tables name."""
    words = (word for row in rows(text) for span in re.findall(r"`([^`]+)`", row) for word in span.split())
    return {word for word in words if FILE.fullmatch(word) and not MADE.match(word)}


def found(path: str) -> Path | None:
    return next((base / path for base in BASES if (base / path).exists()), None)


def missing(text: str) -> list[str]:
    """What a page's tables name and nobody has: files, and names that a file does not define."""
    lost = [path for path in sorted(paths(text)) if found(path) is None]
    for row in rows(text):
        for path, names in NAMES.findall(row):
            source = "" if (file := found(path)) is None else file.read_text(encoding="utf-8")
            for name in re.findall(r"`([\w.]+)`", names):
                parts = name.split(".")
                lost += [
                    f"{path}: {name}"
                    for part in parts
                    if not re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b.* = ", source, re.M)
                ]
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_name_what_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_the_map_names_the_parts() -> None:
    """It is about the whole of the code: every package, and every module of the parts that implement papers."""
    named = paths((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    package = ROOT / "src" / "paceline"
    parts = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert {path.split("/")[0] for path in named} >= parts - {"cli"}
    assert named >= {f"attention/{path.name}" for path in (package / "attention").glob("[a-z]*.py")} - {
        "attention/base.py"
    }
    assert named >= {
        f"drafters/{name}.py" for name in ("ngram", "suffix", "draft_model", "hybrid", "none", "synthetic")
    }


def test_the_checker_sees_what_is_missing() -> None:
    page = (
        "| `core/tree.py`: `TokenTree`, `Gone` | `rounds/gone.py` |\n```\n| `rounds/code.py` |\n```\n`rounds/text.py`\n"
    )
    assert missing(page) == ["rounds/gone.py", "core/tree.py: Gone"]
