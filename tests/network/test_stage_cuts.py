"""Choosing w, k and the cut."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.rounds import parse_round
from paceline.papers.specpipe.config import PipelineConfig


def test_a_cut_that_is_named() -> None:
    named = parse_round("pipeline,stages=3,layers=5x4x3")
    assert isinstance(named, PipelineConfig) and named.bounds(12) == [0, 5, 9, 12]
    with pytest.raises(ConfigError, match="12 layers, and the target has 8"):
        named.bounds(8)
    for bad in ("layers=5x7", "layers=5x0x7", "layers=a", "rows=0", "texts=0"):
        with pytest.raises(ConfigError, match=bad.split("=")[0]):
            parse_round(f"pipeline,stages=3,{bad}")
