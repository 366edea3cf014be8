"""The report as one HTML page: its Markdown with plots. Nothing is loaded from anywhere, and it reads on a phone.

The plots need matplotlib. Where there is none the page is whole without them and says what to install.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from markdown_it import MarkdownIt

from .. import figures
from ..figures import COLOURS
from ..records import Cell, Method
from ..summary import Summary
from . import markdown
from . import wording as say

NO_PLOTS = (
    "<p>This page has no plots: matplotlib was not there when it was written. "
    "<code>pip install 'paceline[bench]'</code> brings it.</p>"
)
GREY = "#7d858c"  # plain decoding
PALETTE = COLOURS[:6]  # without black, which a dark page swallows
MARKERS, PEER_MARKERS = ("o", "^", "D", "v"), ("s", "P", "X", "*")
WIDE, NARROW = 8.2, 3.4  # inches: of a page, and of a phone's
DOT_HEIGHT, LINE_HEIGHT = 0.15, 0.2  # inches
NAME_WIDTH = 26  # letters of a name in one line
CAPTION = "Times plain decoding of the same engine, with 95% intervals. Squares, crosses: other engines."


def render(summary: Summary, lead: str = "", pictures: Sequence[str] = ()) -> str:
    """The whole page; ``lead`` and ``pictures`` as for `write_all`."""
    drawn: list[str] = []

    def mark(picture: str) -> str:
        """In the text where a picture belongs: Markdown would change it."""
        drawn.append(picture)
        return f'<div id="plot-{len(drawn) - 1}"></div>' if picture else ""

    lead = "\n\n".join([lead, *map(mark, pictures)])
    body = _parser().render(markdown.render(summary, lambda section: mark(speedups(summary, section)), lead))
    for number, picture in enumerate(drawn):
        body = body.replace(f'<div id="plot-{number}"></div>', picture)
    parts = {
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "body": body + ("" if figures.drawable() else NO_PLOTS),
    }
    return Template(_asset("page.html")).substitute(parts, title=escape(summary.report.title))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _parser() -> MarkdownIt:
    """HTML stays as it is: `markdown.text` lets none of a report's words become any."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0" role="region"><table>')
    parser.add_render_rule("table_close", lambda *_: "</table></div>")
    return parser


# -- its plots; their figures stand in the tables beside them


def looks(methods: Iterable[Method]) -> dict[str, dict[str, Any]]:
    """How matplotlib draws each method, the same in all plots.

    Plain decoding is grey, other engines have squares and other corners, a synthetic method is hollow.
    """
    found: dict[str, dict[str, Any]] = {}
    place = 0
    for method in methods:
        markers = MARKERS if method.own else PEER_MARKERS
        look = {
            "label": _wrapped(say.method_name(method)),
            "color": GREY if method.plain else PALETTE[place % len(PALETTE)],
            "marker": markers[0 if method.plain else place // len(PALETTE) % len(markers)],
        }
        found[method.name] = look | ({"markerfacecolor": "none"} if method.synthetic else {})
        place += not method.plain
    return found


def speedups(summary: Summary, section: Cell) -> str:
    """A section's speed-ups: a dot with a whisker for each method in a row of each workload, and a line at 1.

    Empty where there is nothing to draw, or no matplotlib.
    """
    total, names = summary.total(section), summary.workloads(section)
    rows, look = [*([None] if len(names) > 1 else []), *names], looks(summary.report.methods)
    found = {(row.workload, row.method.name): row.speedup for row in (*total, *summary.of(section))}
    methods = [row.method.name for row in total if row.speedup]
    if not methods or not figures.drawable():
        return ""
    drawn = ""
    for width, columns, letters in ((WIDE, 3, NAME_WIDTH), (NARROW, 1, NAME_WIDTH // 2)):  # of a phone
        height = 1.1 + DOT_HEIGHT * len(rows) * len(methods) + LINE_HEIGHT * len(methods) / columns
        with figures.canvas(width, height, page=True) as (picture, [axis]):
            for number, method in enumerate(methods):
                shift = 0.8 / len(methods) * (number - (len(methods) - 1) / 2)
                marks = [
                    (ratio, place + shift) for place, row in enumerate(rows) if (ratio := found.get((row, method)))
                ]
                ends = [(max(0.0, r.value - r.low), max(0.0, r.high - r.value)) for r, _ in marks]
                values, places = [r.value for r, _ in marks], [place for _, place in marks]
                axis.errorbar(
                    values, places, xerr=[*zip(*ends, strict=True)], linestyle="none", capsize=2, **look[method]
                )
            figures.name_rows(axis, [_wrapped(say.workload_title(summary.report, row), letters) for row in rows])
            axis.axvline(1.0, color="#808080", linestyle="--", linewidth=1)
            figures.legend(picture, axis, columns=columns)
            drawn += figures.svg(picture)
    return framed(drawn, CAPTION, "The tables of this section have the figures.")


def framed(drawn: str, caption: str, label: str) -> str:
    """Frame an SVG element, or one and another for a narrow page; ``label`` is for those who do not see it."""
    plot = f'<div class="plot" role="img" aria-label="{escape(f"{caption} {label}")}">{drawn}</div>'
    return f"<figure><figcaption>{escape(caption)}</figcaption>{plot}</figure>"


def _wrapped(name: str, letters: int = NAME_WIDTH) -> str:
    """Wrap a name into lines, and cut the end of a very long one."""
    return "\n".join(textwrap.wrap(name, letters, max_lines=3, placeholder=" ..")) or name
