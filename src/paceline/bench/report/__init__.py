"""The report of a benchmark: JSON with all raw trials, Markdown, the same as a page with plots; a terminal's table."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError
from ..records import Report

FILES = JSON_NAME, PAGE_NAME, MARKDOWN_NAME = "report.json", "report.html", "report.md"


def load_report(path: Path | str) -> Report:
    """Read a report from its JSON file (``.json`` or ``.json.gz``), or from the folder that holds it.

    Raises:
        ConfigError: no such file, not JSON, not a report, or a report of another schema.
    """
    file = Path(path)
    file = file / JSON_NAME if file.is_dir() else file
    remedy = "name a report.json that `paceline bench --out` wrote"
    try:
        packed = file.suffix == ".gz"
        values = json.loads(gzip.decompress(file.read_bytes()) if packed else file.read_text(encoding="utf-8"))
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"report {file}", f"cannot be read ({why})", remedy) from error
    except ValueError as error:  # not JSON, or not text at all
        raise ConfigError(f"report {file}", f"not JSON ({error})", remedy) from error
    try:
        return Report.from_dict(values)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"report {file}", f"not a benchmark report ({error})", remedy) from error


def write_all(report: Report, folder: Path | str, lead: str = "", pictures: Sequence[str] = ()) -> list[Path]:
    """Write JSON, page and Markdown into a folder, which is made where it is missing.

    Args:
        lead: Markdown that stands before the figures.
        pictures: HTML behind it, on the page alone.

    Raises:
        ConfigError: they cannot be written.
    """
    from ..summary import Summary
    from . import markdown, page

    target, summary = Path(folder), Summary(report)
    return [
        write_text(target / JSON_NAME, report.as_json() + "\n"),
        write_text(target / PAGE_NAME, page.render(summary, lead, pictures)),
        write_text(target / MARKDOWN_NAME, markdown.render(summary, lead=lead)),
    ]


def write_text(path: Path, text: str, what: str = "report") -> Path:
    """Write a file, and its folder where it is missing: beside it first, so that a reader never meets half a file.

    Raises:
        ConfigError: it cannot be written; ``what`` is what the message calls it.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror or error})"
        raise ConfigError(f"{what} {path}", wrong, "name a folder that you can write to") from error
    return path
