"""Coupled drafts match more often than point drafts at temperature 1, and change no token."""

from __future__ import annotations

import pytest
from match_rate import WAYS, Rate, measure, prompts, row


def test_match_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Coupled above point above nothing, each by more than chance could make it; the seeds are fixed."""
    rates = {way: measure(way) for way in WAYS}
    with capsys.disabled():
        print("", *map(row, rates.values()), sep="\n")
    point, coupled, independent, rejection = (rates[w] for w in ("point", "coupled", "independent", "rejection"))
    assert point.first > 4 * point.standard_error
    assert coupled.first > point.first + 4 * _error(coupled, point)
    assert coupled.first > independent.first + 4 * _error(coupled, independent)
    assert coupled.stats.mean_accepted_length > point.stats.mean_accepted_length > 1
    # No two draws can be coupled to agree more often than rejection sampling accepts, but for chance.
    assert rejection.first > coupled.first - 4 * _error(rejection, coupled)

    # And the way of drafting changes no token, on the real model in its own dtype.
    assert len(prompts()) == 20
    assert point.ids == coupled.ids == independent.ids
    assert rejection.ids != point.ids  # other noise: only the distribution is the same


def _error(a: Rate, b: Rate) -> float:
    return (a.standard_error**2 + b.standard_error**2) ** 0.5
