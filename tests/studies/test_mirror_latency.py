"""Mirror's latency law: the statements of its section 3.4 and appendix C, on any times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror_parts import latency
from mirror_parts.latency import MirrorStep

from paceline.core.errors import ConfigError

TIMES = st.floats(0.001, 1000)
STEPS = st.builds(MirrorStep, prefix=TIMES, suffix=TIMES, draft=TIMES, rendezvous_exit=TIMES, rendezvous_final=TIMES)


@given(STEPS)
def test_a_step_is_one_of_two_cases(step: MirrorStep) -> None:
    """Appendix C: T_target + T_rv while the draft fits the budget, else the prefix, the draft and T_rv."""
    expected = step.target if step.draft <= step.budget else step.prefix + step.draft
    assert step.time == pytest.approx(expected + step.rendezvous)
    assert step.hidden == (step.exposed == 0)


@given(STEPS)
def test_what_is_saved_is_the_smaller_of_budget_and_draft(step: MirrorStep) -> None:
    assert step.serial - step.time == pytest.approx(step.saved, abs=1e-9)
    assert (step.speedup > 1) == (step.time < step.serial)
    if step.rendezvous < min(step.budget, step.draft) * (1 - 1e-9):
        assert step.time < step.serial


@given(STEPS, st.floats(1.0, 5.0))
def test_a_draft_is_free_up_to_the_budget(step: MirrorStep, times: float) -> None:
    larger = MirrorStep(
        prefix=step.prefix,
        suffix=step.suffix,
        draft=step.draft * times,
        rendezvous_exit=step.rendezvous_exit,
        rendezvous_final=step.rendezvous_final,
    )
    assert larger.time >= step.time
    if larger.hidden:
        assert larger.time == step.time


def test_hidden_drafts_gain_what_serial_ones_cost() -> None:
    """Table 1: Mirror over vanilla, 1.73 to 1.90 of a 14B target, is 1 + T_draft / T_target at the same acceptance."""
    for ratio in (0.73, 0.90):
        step = MirrorStep(prefix=0.1, suffix=0.9, draft=ratio)
        assert step.speedup == pytest.approx(1 + ratio)
    half = MirrorStep(prefix=0.5, suffix=0.5, draft=0.9)  # an exit at half depth hides no more than half
    assert not half.hidden and half.speedup == pytest.approx(1.9 / 1.4)


def test_an_exit_splits_the_layers() -> None:
    prefix, suffix = latency.split_at_exit([1.0, 2.0, 3.0, 4.0], 1)
    assert (prefix, suffix) == (1.0, 9.0)
    for exit_layer in (0, 4):
        with pytest.raises(ConfigError, match="1 to 3"):
            latency.split_at_exit([1.0] * 4, exit_layer)


def test_streams_make_a_window_in_fewer_passes() -> None:
    assert [latency.internal_steps(7, eta) for eta in (1, 2, 3, 7, 9)] == [7, 4, 3, 1, 1]
    assert latency.draft_time(4, 2.0, 0.5) == 10.0


def test_tracks_synchronise_twice_a_pass_and_layers_do_so_each() -> None:
    words = latency.message_words(batch=2, tokens=3, width=64, devices=8)
    assert words == 48
    reduce = latency.allreduce_time(words, 8, per_hop=5.0, per_word=0.5)
    assert reduce == pytest.approx(5 * math.log2(8) + 24)
    assert latency.target_communication(40, reduce) == pytest.approx(80 * reduce)
    assert latency.draft_communication(1, reduce) == pytest.approx(latency.target_communication(40, reduce) / 40)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_a_ring_sends_what_ranks_that_do_it_send(devices: int) -> None:
    """G ranks with G shares each: shares go round to be summed, then round again; what rank 0 sends is counted."""
    width = 24
    ranks = [[rank + 10.0 * word for word in range(width)] for rank in range(devices)]
    expected = [sum(column) for column in zip(*ranks, strict=True)]
    size, sent = width // devices, 0
    for summing in (True, False):
        for turn in range(devices - 1):
            moves = []
            for rank in range(devices):
                share = (rank - turn + (0 if summing else 1)) % devices
                words = range(share * size, (share + 1) * size)
                moves.append(((rank + 1) % devices, [(word, ranks[rank][word]) for word in words]))
                sent += len(words) if rank == 0 else 0
            for to, values in moves:
                for word, value in values:
                    ranks[to][word] = value + (ranks[to][word] if summing else 0.0)
    assert all(rank == expected for rank in ranks)
    assert latency.ring_words(1, 1, width, devices) == sent


def test_the_papers_volume_is_one_share_of_a_ring() -> None:
    printed, sent = (words(2, 3, 64, 8) for words in (latency.message_words, latency.ring_words))
    assert (printed, sent) == (48, 672) and sent == 14 * printed


def test_times_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft must be 0 or more"):
        MirrorStep(prefix=1.0, suffix=1.0, draft=-0.1)
