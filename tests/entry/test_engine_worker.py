"""Which drafter a server's engine has where its options name none."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import engine_worker
from paceline.drafters import registry
from paceline.drafters.hybrid import HybridConfig

OPTIONS: dict[str, Any] = {"drafter": None, "model": "paceline-small", "offline": True}


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [(None, "grammar+prediction+suffix"), ("none", "grammar+prediction"), ("ngram", "grammar+prediction+ngram")],
)
def test_a_server_s_own_drafters_stand_beside_the_one_that_is_chosen(
    chosen: str | None, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_worker, "default_drafter", lambda *asked: chosen)
    found = registry.parse(engine_worker._filled(OPTIONS, "cpu")["drafter"])
    assert isinstance(found, HybridConfig) and found.parts == parts
