"""The performance model of SPIRe: the paper's numbers, and what must hold for any model and machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.cli.plan_view import critical_batch
from paceline.core.errors import ConfigError
from paceline.plan import machines, models, throughput
from paceline.plan.models import ModelSizes
from paceline.plan.throughput import ServedModel

HOI = 400.0


def shape(name: str) -> ModelSizes:
    found = models.named(name)
    assert found is not None
    return found


SMALL, LARGE = shape("spire-8-layer"), shape("llama-3-70b")


def test_critical_batch_is_where_the_two_costs_cross() -> None:
    network = ServedModel(shape=SMALL)
    found = critical_batch(network, 16, HOI, 5)
    weights = 2**26 + SMALL.head_parameters
    flops = 5 * (2 * weights + 4 * SMALL.num_heads * SMALL.head_dim * SMALL.num_layers * 16)
    assert found == math.ceil(2 * weights * HOI / (flops - 16 * 32_768 * HOI))
    costs = [throughput.pass_cost(network, batch, 16, 5) for batch in (found - 1, found)]
    assert [cost.bound(HOI) for cost in costs] == ["weights", "compute"]


# -- the parts that the paper leaves out


def test_attention_is_four_flops_a_key_a_head_and_a_dimension() -> None:
    network = ServedModel(shape=LARGE)
    cost = throughput.pass_cost(network, 3, 1000, 5)
    assert cost.attention == 3 * 5 * 4 * 64 * 128 * 80 * 1000
    assert cost.forward(0.0) == cost.compute + cost.attention


def test_sliding_layers_see_their_window() -> None:
    mistral = shape("mistral-7b")
    assert mistral.kv_values(4096) == mistral.kv_values(32_768) == 4096 * mistral.kv_values(1)
    half = replace(mistral, sliding_layers=16)
    assert half.kv_values(8192) == pytest.approx(1.5 * mistral.kv_values(8192))


def test_a_tree_pays_for_its_rows() -> None:
    target, draft, machine = (*(ServedModel(shape=s) for s in (LARGE, shape("llama-3-8b"))), machines.machine("h100"))
    asked: list[tuple[ServedModel, int]] = []

    def each(network: ServedModel, rows: int) -> float:
        asked.append((network, rows))
        return throughput.pass_seconds(network, machine, 64, 128, rows)

    costs = [throughput.round_of(each, target, draft, 4, width) for width in (1, 8)]
    assert {rows for network, rows in asked if network == target} == {1, 5, 33}
    assert costs[1].verify > 2 * costs[0].verify and costs[1].draft > costs[0].draft


# -- what holds for any


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: SMALL.last_layers(9), "the model has 8"),
        (lambda: machines.machine("h10"), "Did you mean 'h100'"),
    ],
)
def test_what_cannot_be_is_refused(make: object, wrong: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=wrong):
        make()
