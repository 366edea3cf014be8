"""Links of the documentation lead to files that exist, and to headings that these files have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPERS = sorted((ROOT / "src" / "paceline" / "papers").rglob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "zoo").rglob("*.md"), *PAPERS])
LINK = re.compile(r"\]\(([^()\s]*)\)")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """What a page's headings are called in links, as GitHub calls them: the second of a name ends in -1."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}


def dead(target: str, page: Path) -> bool:
    """Whether a link of ``page`` leads nowhere."""
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return not file.exists() or bool(anchor) and anchor not in anchors(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page.read_text(encoding="utf-8"))) if "://" not in link]
    assert [link for link in links if dead(link, page)] == []


def test_the_checker_sees_what_is_dead(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## A page\n\n## What `it` costs: 3.1, 2\n\n```\n# no heading\n```\n", encoding="utf-8")
    assert anchors(page.read_text(encoding="utf-8")) == {"a-page", "a-page-1", "what-it-costs-31-2"}
    assert not dead("#what-it-costs-31-2", page) and not dead("page.md#a-page", page)
    assert dead("#no-heading", page) and dead("gone.md", page) and dead("page.md#gone", page)
    assert LINK.findall(prose("[a](b.md#c) `[d](e.md)` ![f](g.svg)")) == ["b.md#c", "g.svg"]
