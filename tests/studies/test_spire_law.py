"""The performance model of SPIRe says what the paper says."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from spire_parts import law
from spire_parts.fitted_law import errors, fit

from paceline import zoo
from paceline.engine.costs import CostTable, cost_points
from paceline.planning import models
from paceline.planning.models import ModelSizes
from paceline.planning.throughput import ServedModel

HOI = 400.0  # any from 321 to 509 gives the same figures (to 510 with all digits of the parameters)
TAUS = {"spire": 3.401, "magicdec": 3.891, "vanilla": 2.647}  # Table 1 at context 512


def shape(name: str) -> ModelSizes:
    found = models.named(name)
    assert found is not None
    return found


SMALL, LARGE = shape("spire-8-layer"), shape("llama-3-70b")


def multiplier(
    target: ModelSizes, drafter: str, batch: int, context: int, window: int | None, hoi: float = HOI
) -> float:
    drafts = {"spire": target.last_layers(target.num_layers // 4), "magicdec": target, "vanilla": target.halved()}
    draft = ServedModel(shape=drafts[drafter], keys=None if drafter == "vanilla" else window)
    return law.round_cost(ServedModel(shape=target), draft, 4, batch, context, hoi).multiplier(TAUS[drafter])


# -- the paper's numbers


def test_the_papers_target_has_its_sizes() -> None:
    assert SMALL.body_parameters == 2**26
    assert 2 * SMALL.kv_values(1) == 32_768
    assert SMALL.last_layers(2).body_parameters == 2**24
    assert SMALL.halved().body_parameters == 2**23 and SMALL.halved().kv_values(1) == SMALL.kv_values(1) / 4
    assert LARGE.body_parameters == pytest.approx(68.45e9, rel=1e-3) and 2 * LARGE.kv_values(1) == 327_680


@pytest.mark.parametrize("hoi", [321, 509])
@pytest.mark.parametrize(("drafter", "expected"), [("spire", 2.78), ("magicdec", 2.05), ("vanilla", 1.36)])
def test_figure_4(drafter: str, expected: float, hoi: float) -> None:
    assert round(multiplier(SMALL, drafter, 64, 512, 65, hoi), 2) == expected


@pytest.mark.parametrize(
    ("drafter", "window", "expected"),
    [("spire", 8192, 2.82), ("magicdec", 8192, 2.14), ("spire", 65, 3.12), ("magicdec", 65, 2.85)],
)
def test_figure_6_and_why_its_window_is_an_eighth_of_the_context(drafter: str, window: int, expected: float) -> None:
    assert round(multiplier(LARGE, drafter, 64, 65_536, window), 2) == expected


def test_a_larger_batch_helps_sparse_drafts_alone() -> None:
    """Figure 4: with a sparse cache the multiplier rises with the batch, with a dense one it never does (3.1)."""
    for context in (256, 512, 960):
        dense = [multiplier(SMALL, "vanilla", 2**n, context, None) for n in range(12)]
        assert all(after <= before + 1e-12 for before, after in zip(dense, dense[1:], strict=False))
        for drafter in ("spire", "magicdec"):
            sparse = [multiplier(SMALL, drafter, 2**n, context, 65) for n in range(12)]
            assert sparse == sorted(sparse) and sparse[-1] > 1.2 * sparse[0]


def test_spire_with_a_dense_cache_does_not_depend_on_the_context() -> None:
    """Section 4.2: k = 4 passes of a quarter are one more pass, whatever the context: tau / 2."""
    found = {round(multiplier(SMALL, "spire", 64, context, None), 9) for context in (64, 512, 8192)}
    assert found == {round(3.401 / 2, 9)}


@pytest.mark.parametrize("hoi", [321, 400, 509])
def test_critical_contexts_of_figure_3(hoi: float) -> None:
    for target, expected in ((SMALL, 32), (LARGE, 4096)):
        longest = law.critical_context(ServedModel(shape=target), hoi, rows=5)
        assert longest is not None and law.power_of_two(longest) == expected
        assert law.critical_batch(ServedModel(shape=target), longest, hoi, 5) is not None
        assert law.critical_batch(ServedModel(shape=target), longest + 1, hoi, 5) is None


@pytest.mark.parametrize(("hoi", "target", "other"), [(320, SMALL, 64), (511, LARGE, 2048)])
def test_other_intensities_give_other_critical_contexts(hoi: float, target: ModelSizes, other: int) -> None:
    longest = law.critical_context(ServedModel(shape=target), hoi, rows=5)
    assert longest is not None and law.power_of_two(longest) == other


def test_cost_analysis_of_section_5() -> None:
    assert law.saved_units(10, 2.78) == pytest.approx(6.40, abs=0.005)
    assert law.saved_units(10, 2.05) == pytest.approx(5.12, abs=0.005)
    assert law.saved_units(10, 2.78, training=0.25) == pytest.approx(6.15, abs=0.005)
    assert law.saved_units(10, 2.82, training=0.25) == pytest.approx(6.20, abs=0.005)
    assert law.saved_units(10, 2.14) == pytest.approx(5.33, abs=0.005)
    due = law.payback_units(0.25, 2.78)
    assert law.saved_units(due, 2.78, training=0.25) == pytest.approx(0, abs=1e-12)
    assert law.payback_units(0.25, 1.0) == math.inf


# -- the planner's table of costs beside a calibrated one


# Measured on 2 threads of Zen 4 without AMX (tables in 0.2.0): ms of passes over rows, of 24M and of 91M parameters
CALIBRATED = ((1, 2.08), (2, 2.10), (4, 2.70), (8, 3.17), (16, 4.6))
LARGER = ((1, 8.0), (8, 10.9), (64, 45.5))


def test_the_planners_table_chooses_within_one_node_of_a_calibrated_one() -> None:
    """Real passes of two models: a law fitted to both, and the table of the one as it was measured."""
    folder = zoo.find("paceline-small")
    assert folder is not None
    network = ServedModel(shape=models.read_shape(folder))
    sizes = {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_kv_heads": 12, "max_position": 4096}
    larger = ServedModel(shape=replace(network.shape, **sizes))
    points = {
        (of, 1, context, rows): ms / 1e3
        for of, context, measured in ((network, 256, CALIBRATED), (larger, 1024, LARGER))
        for rows, ms in measured
    }
    found = fit(points)
    assert median(map(abs, errors(found, points))) < 0.03
    points_ = cost_points(lambda batch, context, rows: found.seconds(network, batch, context, rows), 2048)
    planned = CostTable(**points_, source="planned")
    calibrated = CostTable(chain=CALIBRATED, plain=CALIBRATED, context=256)
    chosen = {
        (batch, accept): [law.nodes_that_pay(table, accept / 10, batch) for table in (calibrated, planned)]
        for batch in (1, 2, 4)
        for accept in range(1, 10)
    }
    assert max(abs(first - second) for first, second in chosen.values()) <= 1
    assert {min(pair) for pair in chosen.values()} >= {0, 1, 2, 3, 4, 6, 10}  # they say something


def test_nodes_that_pay_are_those_of_most_tokens_a_millisecond() -> None:
    flat = CostTable(chain=((1, 1.0), (128, 1.0)), plain=((1, 1.0),))
    steep = CostTable(chain=((1, 1.0), (128, 128.0)), plain=((1, 1.0),))
    assert law.nodes_that_pay(flat, 0.5, 1, most=9) == 9 and law.nodes_that_pay(steep, 0.9, 1) == 0
