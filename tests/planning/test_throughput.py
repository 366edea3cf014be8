"""The performance model of SPIRe: the paper's numbers, and what must hold for any model and machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.plan_view import critical_batch
from paceline.core.errors import ConfigError
from paceline.planning import machines, models, throughput
from paceline.planning.models import ModelSizes
from paceline.planning.throughput import Cost, RoundCost, ServedModel

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


def test_the_head_is_a_large_part_of_a_small_draft() -> None:
    """Three layers of the embedded target's width and vocabulary: the head is over a third of what a pass reads."""
    small = replace(SMALL, d_model=384, d_ff=1024, num_layers=3, num_heads=6, num_kv_heads=6, head_dim=64, gated=True)
    network = ServedModel(shape=replace(small, vocab_size=8192))
    bare = throughput.pass_cost(replace(network, shape=replace(small, vocab_size=0)), 1, 0)
    cost = throughput.pass_cost(network, 1, 0)
    assert cost.weights - bare.weights == 2 * 384 * 8192
    assert 0.3 < 1 - bare.weights / cost.weights < 0.4
    assert cost.compute - bare.compute == 2 * 384 * 8192


def test_attention_is_four_flops_a_key_a_head_and_a_dimension() -> None:
    network = ServedModel(shape=LARGE)
    cost = throughput.pass_cost(network, 3, 1000, 5)
    assert cost.attention == 3 * 5 * 4 * 64 * 128 * 80 * 1000
    assert cost.forward(0.0) == cost.compute + cost.attention


def test_quantised_weights_and_caches_are_read_in_fewer_bytes() -> None:
    whole = throughput.pass_cost(ServedModel(shape=LARGE), 4, 1000)
    small = throughput.pass_cost(ServedModel(shape=LARGE, weight_bytes=1, kv_bytes=0.5), 4, 1000)
    assert (small.weights, small.kv) == (whole.weights / 2, whole.kv / 4) and small.compute == whole.compute


def test_a_mixture_reads_the_union_of_the_experts_that_its_rows_choose() -> None:
    mixed = shape("mixtral-8x7b")
    one, all_of_them = mixed.read_parameters(1), mixed.read_parameters(10_000)
    assert one == pytest.approx(mixed.active_parameters) and all_of_them == pytest.approx(mixed.body_parameters)
    assert mixed.experts is not None and mixed.experts.touched(2) == pytest.approx(8 * (1 - 0.75**2))
    costs = [throughput.pass_cost(ServedModel(shape=mixed), 1, 0, rows) for rows in (1, 5)]
    assert costs[1].compute == pytest.approx(5 * costs[0].compute)
    assert 1.5 < costs[1].weights / costs[0].weights < 3  # so that verification costs more than one pass


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


def test_seconds_on_one_device_are_the_cost_over_its_arithmetic() -> None:
    machine = machines.machine("a100")
    spire = ServedModel(shape=LARGE.last_layers(20), keys=8192)
    pair, hoi = (ServedModel(shape=LARGE), spire), machine.hoi
    seconds = throughput.round_of(lambda n, rows: throughput.pass_seconds(n, machine, 64, 65_536, rows), *pair, 4)
    flops = throughput.round_of(lambda n, rows: throughput.pass_cost(n, 64, 65_536, rows).forward(hoi), *pair, 4)
    assert seconds.multiplier(3.0) == pytest.approx(flops.multiplier(3.0))
    assert seconds.plain * machine.flops == pytest.approx(flops.plain)


# -- several devices


def test_devices_share_the_work_and_talk() -> None:
    machine, network = machines.machine("h100"), ServedModel(shape=LARGE)
    one = throughput.pass_seconds(network, machine, 64, 4096)
    eight = throughput.pass_seconds(network, machine, 64, 4096, devices=8)
    fast = throughput.pass_seconds(network, replace(machine, link=1e30), 64, 4096, devices=8)
    assert fast == pytest.approx(one / 8) and fast < eight < one / 4
    sixteen = throughput.pass_seconds(network, replace(machine, link=1e30), 64, 4096, devices=16)
    assert sixteen > fast / 2  # eight K/V heads cannot be shared by sixteen


def test_an_all_reduce_is_a_rings() -> None:
    """Two a layer, of 64 x 5 rows x 8,192 numbers in two bytes, on eight devices."""
    machine, network = machines.machine("h100"), ServedModel(shape=LARGE)
    endless = replace(machine, link=1e30)

    on, off = (throughput.pass_seconds(network, m, 64, 4096, 5, devices=8) for m in (machine, endless))
    volume = 2 * 80 * 64 * 5 * 8192 * 2 / machine.link
    assert on - off == pytest.approx(volume * 2 * 7 / 8)


def test_stages_work_on_parts_of_the_batch() -> None:
    machine, network = replace(machines.machine("h100"), link=1e30), ServedModel(shape=LARGE)
    four = throughput.pass_seconds(network, machine, 64, 4096, stages=4)
    assert four == pytest.approx(throughput.pass_seconds(network, machine, 16, 4096))
    alone = throughput.pass_seconds(network, machine, 1, 4096, stages=4)
    assert alone == pytest.approx(throughput.pass_seconds(network, machine, 1, 4096))  # one request fills one stage


def test_devices_without_a_link_are_refused() -> None:
    with pytest.raises(ConfigError, match="no link"):
        throughput.pass_seconds(ServedModel(shape=SMALL), machines.machine("cpu"), 1, 8, devices=2)


# -- what holds for any


SHAPES = st.sampled_from([shape(name) for name in models.names()])
BATCH, CONTEXT, ROWS = st.integers(1, 4096), st.integers(1, 131_072), st.integers(1, 64)


@given(SHAPES, BATCH, CONTEXT, ROWS, st.floats(1.0, 10.0))
def test_a_better_machine_is_never_slower(model: ModelSizes, batch: int, context: int, rows: int, times: float) -> None:
    network, base = ServedModel(shape=model), machines.machine("rtx-3090")
    seconds = throughput.pass_seconds(network, base, batch, context, rows)
    for better in (replace(base, bandwidth=base.bandwidth * times), replace(base, flops=base.flops * times)):
        assert throughput.pass_seconds(network, better, batch, context, rows) <= seconds * (1 + 1e-12)


@given(SHAPES, BATCH, CONTEXT, ROWS)
def test_more_work_never_costs_less(model: ModelSizes, batch: int, context: int, rows: int) -> None:
    network, machine = ServedModel(shape=model), machines.machine("l40")
    seconds = throughput.pass_seconds(network, machine, batch, context, rows)
    for more in ((batch + 1, context, rows), (batch, context + 1, rows), (batch, context, rows + 1)):
        assert throughput.pass_seconds(network, machine, *more) >= seconds * (1 - 1e-12)
    sparse = replace(network, keys=max(1, context // 8))
    assert throughput.pass_seconds(sparse, machine, batch, context, rows) <= seconds


@given(SHAPES, BATCH, CONTEXT)
def test_one_pass_for_the_batch_is_cheaper_than_one_a_sequence(model: ModelSizes, batch: int, context: int) -> None:
    network, machine = ServedModel(shape=model), machines.machine("h200")
    together = throughput.pass_seconds(network, machine, batch, context)
    assert together <= batch * throughput.pass_seconds(network, machine, 1, context) * (1 + 1e-12)


@given(st.floats(1, 9), st.floats(0.01, 10), st.floats(0, 10), st.floats(0.01, 10))
def test_the_multiplier_is_tokens_over_time(tau: float, plain: float, draft: float, verify: float) -> None:
    made = RoundCost(plain=plain, draft=draft, verify=verify)
    assert made.multiplier(tau) * (draft + verify) == pytest.approx(tau * plain)


def test_bounds_by_name() -> None:
    assert Cost(compute=10, weights=1, kv=2).bound(1) == "compute"
    assert [Cost(weights=w, kv=3).bound(1) for w in (2, 4)] == ["KV", "weights"]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: replace(machines.machine("h100"), bandwidth=0.0), "bandwidth must be above 0"),
        (lambda: SMALL.last_layers(9), "the model has 8"),
        (lambda: machines.machine("h10"), "Did you mean 'h100'"),
    ],
)
def test_what_cannot_be_is_refused(make: object, wrong: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=wrong):
        make()
