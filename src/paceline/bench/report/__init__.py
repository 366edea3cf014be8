"""The report of a benchmark: JSON with all raw trials, one HTML page, Markdown, tables for the terminal."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..records import Report

JSON_NAME, PAGE_NAME, MARKDOWN_NAME = "report.json", "report.html", "report.md"


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
        raise ConfigError(
            f"report {file}", f"cannot be read ({getattr(error, 'strerror', None) or error})", remedy
        ) from error
    except ValueError as error:  # not JSON, or not text at all
        raise ConfigError(f"report {file}", f"not JSON ({error})", remedy) from error
    if not isinstance(values, dict):
        raise ConfigError(f"report {file}", "not a benchmark report", remedy)
    try:
        report = Report.from_dict(values)
        _check(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"report {file}", f"not a benchmark report ({error})", remedy) from error
    return report


def save_report(report: Report, path: Path | str) -> Path:
    """Write a report as JSON, all of it or nothing.

    Raises:
        ConfigError: it cannot be written.
    """
    values = report.as_dict()
    try:
        text = _dumps(values)
    except ValueError:  # rare, and looking for them takes long
        text = _dumps(_finite(values))
    return _write(Path(path), text + "\n")


def write_all(report: Report, folder: Path | str) -> list[Path]:
    """Write JSON, page and Markdown into a folder, which is made where it is missing.

    Raises:
        ConfigError: they cannot be written.
    """
    from ..summary import summarise
    from . import markdown, page

    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(target, error) from error
    summary = summarise(report)
    return [
        save_report(report, target / JSON_NAME),
        _write(target / PAGE_NAME, page.render(summary, JSON_NAME)),
        _write(target / MARKDOWN_NAME, markdown.render(summary)),
    ]


def _dumps(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """The same with None for infinities and NaN, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(report: Report) -> None:
    """Every trial and comparison belongs to a method of the report, and no method is there twice."""
    names = [method.name for method in report.methods]
    if len(set(names)) < len(names):
        raise ValueError("two methods of one name")
    unknown = {t.method for t in report.trials} | {e.method for e in report.exactness}
    unknown -= set(names)
    if unknown:
        raise ValueError(f"trials of methods that it does not list: {', '.join(sorted(unknown))}")


def _write(path: Path, text: str) -> Path:
    """Beside it first, then in its place: a reader never meets half a file."""
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o666 & ~_umask())  # mkstemp lets nobody else read it
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"report {path}", f"cannot be written ({error.strerror or error})", "name a folder that you can write to"
    )
