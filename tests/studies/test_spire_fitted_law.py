"""The law of a machine's passes: what it recovers, how it is held against them, and the budget that its table gives."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import pytest
from spire_parts.fitted_law import FITTED, HELD_OUT, Timed, errors, fit

from paceline import zoo
from paceline.core.errors import ConfigError
from paceline.engine.costs import CostTable, cost_points
from paceline.planning import models
from paceline.planning.machines import machine
from paceline.planning.throughput import PassLaw, ServedModel, pass_seconds

TRUE = PassLaw(host=4e-4, row=3e-5, weight=1 / 30e9, hoi=2 ** (14 / 4), kv=1 / 12e9, attention=1 / 40e9)


def small() -> ServedModel:
    """The embedded target."""
    folder = zoo.find("paceline-small")
    assert folder is not None
    return ServedModel(shape=models.read_shape(folder))


def predicted(network: ServedModel, name: str) -> dict[str, Any]:
    return cost_points(lambda *size: pass_seconds(network, machine(name), *size), network.shape.max_position)


def timed(law: PassLaw, network: ServedModel, sizes: tuple[tuple[int, int, int, bool], ...]) -> Timed:
    quarter = replace(network, shape=network.shape.last_layers(network.shape.num_layers // 4))
    found = [(quarter if part else network, batch, context, rows) for batch, context, rows, part in sizes]
    return {size: law.seconds(*size) for size in found}


def test_a_law_is_found_again_from_the_passes_that_are_timed() -> None:
    """Also for sizes that were not, and for a sparse draft of a quarter of the layers."""
    network = small()
    found = fit(timed(TRUE, network, FITTED))
    assert found.hoi == TRUE.hoi
    assert max(map(abs, errors(found, timed(TRUE, network, HELD_OUT)))) < 1e-6
    sparse = replace(network, shape=network.shape.last_layers(3), keys=65)
    assert found.seconds(sparse, 64, 1984) == pytest.approx(TRUE.seconds(sparse, 64, 1984), rel=1e-6)
    assert found.seconds(sparse, 64, 1984) < 0.2 * found.seconds(network, 64, 1984)
    assert found.weight == pytest.approx(1 / 30e9)


def test_noise_moves_it_little_and_no_term_falls_below_zero() -> None:
    draw, network = random.Random(1), small()
    clean = timed(TRUE, network, FITTED)
    found = fit({size: seconds * draw.uniform(0.92, 1.08) for size, seconds in clean.items()})
    assert min(asdict(found).values()) >= 0
    assert 0 < median(map(abs, errors(found, timed(TRUE, network, HELD_OUT)))) < 0.05
    bare = replace(TRUE, kv=0.0, attention=0.0)
    found = fit({size: s * draw.uniform(0.99, 1.01) for size, s in timed(bare, network, FITTED).items()})
    assert min(asdict(found).values()) >= 0
    assert median(map(abs, errors(found, timed(bare, network, HELD_OUT)))) < 0.02


@pytest.mark.parametrize("wrong", [0.0, -1.0, None])
def test_passes_that_make_no_law(wrong: float | None) -> None:
    points = dict(timed(TRUE, small(), FITTED))
    points = dict([*points.items()][:7]) if wrong is None else points | {next(iter(points)): wrong}
    with pytest.raises(ConfigError, match="timed passes"):
        fit(points)


def test_tables_of_costs_are_what_is_predicted() -> None:
    network = small()
    table = CostTable(**cost_points(lambda batch, context, rows: TRUE.seconds(network, batch, context, rows), 2048))
    assert table.chain_ms(8) == pytest.approx(1e3 * TRUE.seconds(network, 1, 128, 8))
    assert table.step_ms(16, 0) == pytest.approx(1e3 * TRUE.seconds(network, 16, 128))
    assert table.step_ms(16, 0, 16 * 1000) == pytest.approx(1e3 * TRUE.seconds(network, 16, 1000), rel=1e-3)
    far = CostTable(**predicted(network, "h100"))
    assert far.chain_ms(4) == pytest.approx(1e3 * pass_seconds(network, machine("h100"), 1, 128, 4))
    tiny = replace(network, shape=replace(network.shape, max_position=140))
    assert predicted(tiny, "cpu")["context"] == 12
