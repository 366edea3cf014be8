"""SpecPipe's equations, and what its own figures say of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specpipe_parts import law

STAGES, HITS, TIME = st.integers(1, 32), st.floats(0, 1), st.floats(0.01, 100)


@given(TIME, STAGES, HITS)
def test_equation_2_is_equation_1_of_equal_stages(time: float, stages: int, hit: float) -> None:
    assert law.equation_1([time] * stages, hit) == pytest.approx(law.equation_2(time, stages, hit))
    assert law.equation_2(time, stages, hit) == pytest.approx(time + (1 - hit) * stages * time)


@pytest.mark.parametrize(("measured", "hit"), [(4.19, 0.870), (5.53, 0.936)])
def test_hit_rates_behind_the_papers_speedups(measured: float, hit: float) -> None:
    """Section 4.2: 4.19 to 5.53 times the plain pipeline with eight stages."""
    found = law.hit_rate_of(8, measured)
    assert round(found, 3) == hit
    assert law.speedup(8, found) == pytest.approx(measured)
