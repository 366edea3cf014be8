"""SpecPipe's equations, and what its own figures say of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specpipe_parts import law

from paceline.core.errors import ConfigError
from paceline.planning import models

STAGES, HITS, TIME = st.integers(1, 32), st.floats(0, 1), st.floats(0.01, 100)


@given(TIME, STAGES, HITS)
def test_equation_2_is_equation_1_of_equal_stages(time: float, stages: int, hit: float) -> None:
    assert law.equation_1([time] * stages, hit) == pytest.approx(law.equation_2(time, stages, hit))
    assert law.equation_2(time, stages, hit) == pytest.approx(time + (1 - hit) * stages * time)


@given(TIME, STAGES, HITS)
def test_equation_2_charges_a_miss_one_step_too_many(time: float, stages: int, hit: float) -> None:
    exact = law.expected_tbt(time, stages, hit)
    assert law.equation_2(time, stages, hit) - exact == pytest.approx((1 - hit) * time, abs=1e-9)
    assert exact <= law.plain_tbt([time] * stages) * (1 + 1e-12)  # a miss costs the plain pipeline's time
    bubbles = (1 - hit) * (stages - 1)  # of full flushes alone
    assert law.tbt_with_bubbles(time, bubbles) == pytest.approx(exact)


def test_the_slowest_stage_sets_the_step() -> None:
    assert law.equation_1([1.0, 3.0, 2.0], 1.0) == 3.0
    assert law.equation_1([1.0, 3.0, 2.0], 0.5) == 6.0


@pytest.mark.parametrize(("measured", "hit"), [(4.19, 0.870), (5.53, 0.936)])
def test_hit_rates_behind_the_papers_speedups(measured: float, hit: float) -> None:
    """Section 4.2: 4.19 to 5.53 times the plain pipeline with eight stages."""
    found = law.hit_rate_of(8, measured)
    assert round(found, 3) == hit
    assert law.speedup(8, found) == pytest.approx(measured)


def test_memory_of_the_stages_of_table_1() -> None:
    """The paper says 23.5, 21.5 and 23.5 GiB, with 4 d^2 of attention; grouped queries have less."""
    large = models.named("llama-3.1-70b")
    assert large is not None
    held = law.stage_bytes(large, 8, kv_tokens=81_920, runtime=256 * 2**20)
    assert [round(stage / 2**30, 1) for stage in held] == [21.3, *[19.3] * 6, 21.3]
    uneven = law.stage_bytes(large, 8, kv_tokens=81_920, runtime=256 * 2**20, layers=[12, *[10] * 6, 8])
    assert sum(uneven) == pytest.approx(sum(held)) and uneven[0] - held[0] == pytest.approx(held[-1] - uneven[-1])
    assert uneven[1] == pytest.approx(held[1]) and uneven[0] > held[0]


@pytest.mark.parametrize("hit", [-0.1, 1.1])
def test_probabilities_only(hit: float) -> None:
    with pytest.raises(ConfigError, match="no probability"):
        law.expected_tbt(1.0, 8, hit)


@pytest.mark.parametrize(("stages", "measured"), [(1, 1.0), (8, 8.5), (8, 0.9)])
def test_speedups_that_no_hit_rate_gives(stages: int, measured: float) -> None:
    with pytest.raises(ConfigError, match="no hit rate"):
        law.hit_rate_of(stages, measured)
    with pytest.raises(ConfigError, match="one or more"):
        law.equation_1([], 0.5)


def test_the_width_stays_in_front_of_a_leap_once_hits_are_saturated() -> None:
    rates = {1: 0.6, 16: 0.85, 64: 0.93, 80: 0.935, 128: 0.936}
    candidates = [
        law.MeasuredTree(width, k, rate - 0.2 * (k == 2)) for width, rate in rates.items() for k in (2, 4, 16)
    ]
    leaping = law.choose_tree(candidates, lambda width: 1.0 + 0.3 * ((width - 1) // 64), stages=8)
    assert (leaping.width, leaping.children) == (64, 4)  # section 3.3.3; of equals the smaller k
    assert law.choose_tree(candidates, lambda width: 1.0, stages=8).width == 128
    assert law.choose_tree(candidates, lambda width: float(width), stages=8).width == 1
