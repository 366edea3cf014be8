"""Tables that come with the package, as TOML files."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def read_table(path: str) -> dict[str, Any]:
    """Return a table by its place in the package (``plan/models.toml``); it is read once, and nobody changes it."""
    return tomllib.loads((resources.files("paceline") / path).read_text(encoding="utf-8"))
