"""A round with passes in flight: what comes out of a step went in steps before, and is what plain decoding says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kits.tiny import VOCAB, assemble, draft_model, run, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.drafters.base import Drafter, DraftRule
from paceline.engine.engine import Engine
from paceline.rounds.base import Round, RunningSequence, StepResult, Work

DECODER = tiny_decoder()
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(5 + 6 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=3, max_tokens=14, ignore_eos=True)
NOTHING = StepResult([], {}, [], 0.0, 0.0, 0.0, 0.0)


@dataclass
class Flight:
    """A pass under way."""

    works: list[Work]
    gone: set[int] = field(default_factory=set)  # sequences that were released meanwhile


class LateRound:
    """The serial round, each of whose passes ends ``delay`` steps after it began."""

    name, drafter = "late", None
    admits = None
    failure = None
    past = 0

    def __init__(self, inner: Round, delay: int) -> None:
        self.inner, self.delay = inner, delay
        self.flights: deque[Flight] = deque()
        self.empty = self.late = self.gone = 0  # steps without work, passes of works, works released in flight

    @property
    def busy(self) -> bool:
        return bool(self.flights)

    def step(self, works: Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        assert works or self.busy
        self.empty += not works
        for work in works:
            if work.sequence.cache is not None:
                work.sequence.cache.enter()
        self.flights.append(Flight([*works]))
        return self.end(rule) if len(self.flights) > self.delay or not works else NOTHING

    def end(self, rule: DraftRule | None) -> StepResult:
        flight = self.flights.popleft()
        alive = [work for work in flight.works if id(work.sequence) not in flight.gone]
        self.gone += len(flight.works) - len(alive)
        self.late += len(alive)
        if not self.flights or not any(flight.works for flight in self.flights):
            self.flights.clear()
        return self.inner.step(alive, rule) if alive else NOTHING

    def release(self, sequences: Sequence[RunningSequence]) -> None:
        for flight in self.flights:
            flight.gone |= {id(sequence) for sequence in sequences}
        self.inner.release(sequences)

    def forget(self) -> None:
        self.inner.forget()


def late(delay: int, drafter: Drafter | None = None, **options: Any) -> tuple[Engine, LateRound]:
    engine = assemble(drafter, decoder=DECODER, **options)
    round_ = LateRound(engine.round, delay)
    engine.round = round_  # type: ignore[assignment]
    return engine, round_


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_late_passes_say_what_plain_decoding_says(delay: int, params: SamplingParams) -> None:
    jobs = [(prompt, params) for prompt in PROMPTS]
    plain = [run(assemble(decoder=DECODER), [job])[0].outputs[0].token_ids for job in jobs]
    engine, round_ = late(delay, draft_model(depth=3))
    outputs = run(engine, jobs)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.stats.accepted for output in outputs) > 5
    assert round_.empty and round_.late  # all were in flight at once: then there was no new work
    assert engine.pool.idle and not engine.busy


def test_requests_may_end_in_flight() -> None:
    """Aborts, and preemption in a pool that is too small, while passes are under way."""
    jobs = [(prompt, WARM) for prompt in PROMPTS]
    plain = [run(assemble(decoder=DECODER), [job])[0].outputs[0].token_ids for job in jobs]
    engine, round_ = late(2, kv_tokens=80, block_size=4)
    order = [engine.submit(*job) for job in jobs]
    done: dict[str, list[int]] = {}
    steps = 0
    while engine.busy:
        steps += 1
        if steps == 6:
            assert engine.abort(order[1]) is not None
        for live in engine.step():
            if live.finished:
                done[live.request.id] = engine.output(live).outputs[0].token_ids
        engine.pool.check_integrity()
        assert steps < 500
    assert [done[i] for i in order if i != order[1]] == [plain[n] for n in range(5) if n != 1]
    assert round_.gone and engine.pool.idle
