"""Choosing w, k and the cut."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.rounds import parse_round
from paceline.model.stages import cut_by_rows, even_cuts
from paceline.papers.specpipe.config import PipelineConfig


def test_stages_with_fewer_rows_get_more_layers() -> None:
    rows = [64.0, 32.0, 8.0, 1.0]
    bounds = cut_by_rows(24, rows, lambda n: 1 + n / 16, head_time=2.0)
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum(sizes) == 24 and sizes == sorted(sizes) and sizes[0] < 6 < sizes[-1]
    times = [size * (1 + n / 16) for size, n in zip(sizes, rows, strict=True)]
    assert max(times) < max(6 * (1 + n / 16) for n in rows)  # than with an even cut
    heavy = cut_by_rows(24, rows, lambda n: 1 + n / 16, head_time=12.0)
    assert 24 - heavy[-2] < sizes[-1]  # the head is work, too
    assert cut_by_rows(12, [1.0] * 4, lambda n: n) == even_cuts(12, 4)


def test_a_cut_that_is_named() -> None:
    named = parse_round("pipeline,stages=3,layers=5x4x3")
    assert isinstance(named, PipelineConfig) and named.bounds(12) == [0, 5, 9, 12]
    with pytest.raises(ConfigError, match="12 layers, and the target has 8"):
        named.bounds(8)
    for bad in ("layers=5x7", "layers=5x0x7", "layers=a", "rows=0", "texts=0", "accept=loose"):
        with pytest.raises(ConfigError, match=bad.split("=")[0]):
            parse_round(f"pipeline,stages=3,{bad}")
