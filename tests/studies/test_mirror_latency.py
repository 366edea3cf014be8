"""Mirror's latency law: the statements of its section 3.4 and appendix C, on any times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror_parts import latency
from mirror_parts.latency import MirrorStep

TIMES = st.floats(0.001, 1000)
STEPS = st.builds(MirrorStep, prefix=TIMES, suffix=TIMES, draft=TIMES, rendezvous_exit=TIMES, rendezvous_final=TIMES)


@given(STEPS)
def test_a_step_is_one_of_two_cases(step: MirrorStep) -> None:
    """Appendix C: T_target + T_rv while the draft fits the budget, else the prefix, the draft and T_rv."""
    expected = step.target if step.draft <= step.budget else step.prefix + step.draft
    assert step.time == pytest.approx(expected + step.rendezvous)
    assert step.hidden == (step.exposed == 0)


def test_hidden_drafts_gain_what_serial_ones_cost() -> None:
    """Table 1: Mirror over vanilla, 1.73 to 1.90 of a 14B target, is 1 + T_draft / T_target at the same acceptance."""
    for ratio in (0.73, 0.90):
        step = MirrorStep(prefix=0.1, suffix=0.9, draft=ratio)
        assert step.speedup == pytest.approx(1 + ratio)
    half = MirrorStep(prefix=0.5, suffix=0.5, draft=0.9)  # an exit at half depth hides no more than half
    assert not half.hidden and half.speedup == pytest.approx(1.9 / 1.4)


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
