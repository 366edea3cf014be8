"""The performance model of SPIRe says what the paper says."""

from __future__ import annotations

import math

import pytest
from spire_parts import law

from paceline.plan import models
from paceline.plan.models import ModelSizes
from paceline.plan.throughput import ServedModel

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


@pytest.mark.parametrize("hoi", [321, 509])
@pytest.mark.parametrize(("drafter", "expected"), [("spire", 2.78), ("magicdec", 2.05), ("vanilla", 1.36)])
def test_figure_4(drafter: str, expected: float, hoi: float) -> None:
    assert round(multiplier(SMALL, drafter, 64, 512, 65, hoi), 2) == expected


@pytest.mark.parametrize("hoi", [321, 400, 509])
def test_critical_contexts_of_figure_3(hoi: float) -> None:
    for target, expected in ((SMALL, 32), (LARGE, 4096)):
        longest = law.critical_context(ServedModel(shape=target), hoi, rows=5)
        assert longest is not None and law.power_of_two(longest) == expected
        assert law.critical_batch(ServedModel(shape=target), longest, hoi, 5) is not None
        assert law.critical_batch(ServedModel(shape=target), longest + 1, hoi, 5) is None


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
