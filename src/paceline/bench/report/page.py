"""The report as one HTML page: its Markdown with plots. Nothing is loaded from anywhere, and it reads on a phone.

The plots need matplotlib. Where there is none the page is whole without them and says what to install.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template

from markdown_it import MarkdownIt

from ..figures import drawable
from ..records import Cell
from ..summary import Summary
from . import markdown, plots

NO_PLOTS = (
    "<p>This page has no plots: matplotlib was not there when it was written. "
    "<code>pip install 'paceline[bench]'</code> brings it.</p>"
)


def render(summary: Summary) -> str:
    """The whole page."""
    drawn: list[str] = []

    def place(kind: str, summary: Summary, section: Cell) -> str:
        """A mark in the text where a plot belongs: Markdown would change it."""
        drawn.append(plots.plot(kind, summary, section))
        return f'<div id="plot-{len(drawn) - 1}"></div>' if drawn[-1] else ""

    body = _parser().render(markdown.render(summary, place))
    for number, picture in enumerate(drawn):
        body = body.replace(f'<div id="plot-{number}"></div>', picture)
    parts = {"css": _asset("page.css"), "js": _asset("page.js"), "body": body + ("" if drawable() else NO_PLOTS)}
    return Template(_asset("page.html")).substitute(parts, title=escape(summary.report.title))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _parser() -> MarkdownIt:
    """HTML stays as it is: `markdown.text` lets none of a report's words become any."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0" role="region"><table>')
    parser.add_render_rule("table_close", lambda *_: "</table></div>")
    return parser
