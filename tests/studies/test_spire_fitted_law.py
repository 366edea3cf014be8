"""The law of a machine's passes: what it recovers, how it is held against them, and the budget that its table gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from spire_parts.fitted_law import FITTED, HELD_OUT, PassLaw, Timed, errors, fit

from paceline.plan import models
from paceline.plan.throughput import ServedModel
from paceline.weights import zoo

TRUE = PassLaw(host=4e-4, row=3e-5, weight=1 / 30e9, hoi=2 ** (14 / 4), kv=1 / 12e9, attention=1 / 40e9)


def small() -> ServedModel:
    """The embedded target."""
    folder = zoo.find("paceline-small")
    assert folder is not None
    return ServedModel(shape=models.read_shape(folder))


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
