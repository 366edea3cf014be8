"""Axes of figures: numbers that fit, as they are written elsewhere."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from kit import figures


@pytest.mark.parametrize(
    ("last", "shown"), [(5, ["1", "2", "4", "8", "16", "32"]), (17, ["1", "4", "16", "64", "256", "1024", "4096"])]
)
def test_a_logarithmic_axis_shows_numbers_that_fit(last: int, shown: list[str]) -> None:
    values = [2**n for n in range(last + 1)]
    with figures.canvas(4.6, 3.5) as (_, [axis]):
        axis.plot(values, values)
        figures.tick_values(axis, values, log=True)
        assert [label.get_text() for label in axis.get_xticklabels()] == shown
