"""Requests of all sorts while the engine's process is killed and stopped."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_nothing_is_lost_and_no_token_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    tool: Any = import_module("server_chaos")
    seen = asyncio.run(tool.chaos(200, 16, 24, 2))
    assert not seen.wrong
    assert seen.kinds["kill"] == seen.kinds["stop"] == 1
    assert all(seen.kinds[kind] > 5 for kind in ("whole", "stream", "leave", "wrong"))
