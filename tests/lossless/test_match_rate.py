"""Coupled drafts match more often than point drafts at temperature 1, and change no token."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_coupled_drafts_match_more_often_than_point_drafts() -> None:
    """By more than chance could make it; the seeds are fixed."""
    measure = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "match_rate.py"))["measure"]
    point, coupled = measure("point"), measure("coupled")
    error = (point.standard_error**2 + coupled.standard_error**2) ** 0.5
    assert point.first > 4 * point.standard_error and coupled.first > point.first + 4 * error
    assert coupled.ids == point.ids and len(point.ids) == 20
