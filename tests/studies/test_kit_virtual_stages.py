"""The pipeline round in virtual time: plain decoding's tokens at the times that the formula gives."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kit.clock import VirtualClock
from kit.ticks import watch_ticks
from kit.virtual_stages import VirtualSessions, VirtualStages
from kits.tiny import TOY_TEXTS, VOCAB, assemble, run, tiny_config, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft.base import Drafter, DrafterSpec
from paceline.draft.text_sessions import LookUps, TextSessions
from paceline.engine.base import RoundParts
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine, EngineLimits
from paceline.engine.scheduler import SchedulerConfig
from paceline.kv.pool import KVPool
from paceline.papers.specpipe.config import PipelineConfig
from paceline.papers.specpipe.records import Tick

STAGES = 8
CONFIG = tiny_config(num_layers=STAGES)
DECODER = tiny_decoder(CONFIG)
PROMPT = [(7 + 3 * j) % (VOCAB - 10) + 10 for j in range(12)]
TOKENS = 300
FEW = 60  # where every figure is exact
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


class Synthetic:
    """Knows the answer, and is right about every token but those at some places."""

    spec, idle_reason = DrafterSpec(name="synthetic", ahead=True), Drafter.idle_reason

    def __init__(self, text: abc.Sequence[int], wrong: Callable[[int], bool]) -> None:
        self.text, self.wrong = text, wrong

    def sessions(self, rows: int) -> TextSessions:
        return TextSessions(LookUps({0: self}), VOCAB, ())  # type: ignore[dict-item]

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        place = len(sequence.tokens) + len(path)
        if place >= len(self.text):
            return []
        right = [*sequence.tokens, *path] == [*self.text[:place]]
        shift = 1 if not right or self.wrong(place) else 0
        return [((self.text[place] + shift) % VOCAB, -0.1)]

    def release(self, keys: abc.Sequence[int]) -> None:
        pass


@pytest.fixture(scope="module")
def answer() -> list[int]:
    (output,) = run(assemble(decoder=DECODER), [(PROMPT, PARAMS)])
    return [*PROMPT, *output.outputs[0].token_ids]


def decode(
    clock: VirtualClock,
    drafter: Synthetic | None,
    stage_s: Callable[[int], float] = lambda rows: 1.0,
    source_s: Callable[[int], float] = lambda rows: 0.5,
    tokens: int = FEW,
    **parts: Any,
) -> tuple[list[int], float, list[Tick], VirtualStages]:
    """Tokens, seconds of virtual time, ticks and stages of one request."""
    pool = KVPool(*DECODER.cache_shape, 1024, DECODER.dtype, DECODER.device)
    config = PipelineConfig(stages=STAGES, width=1, children=1)
    stage_line = VirtualStages(clock, config.cut(DECODER, pool), [stage_s] * STAGES, **parts)

    def going(sessions: Any) -> VirtualSessions:
        return VirtualSessions(clock, sessions, source_s, stage_line.timeline)

    parts = RoundParts(target=DECODER, pool=pool, drafter=drafter)  # type: ignore[arg-type]
    round_ = config.over(parts, stage_line, going)
    ticks = watch_ticks(round_)
    limits = EngineLimits(vocab_size=VOCAB, max_model_len=CONFIG.max_position, eos_ids=CONFIG.eos_ids)
    engine = Engine(round_, pool, limits, SchedulerConfig(), FixedBudget(size=1), TOY_TEXTS, {})
    (output,) = run(engine, [(PROMPT, replace(PARAMS, max_tokens=tokens))])
    assert round_.failure is None
    return output.outputs[0].token_ids, clock.now(), ticks, stage_line


@pytest.mark.parametrize("measured", [4.19, 5.53])
def test_a_hit_rate_gives_the_formulas_time(answer: list[int], measured: float) -> None:
    """Hit rates inverted from figure 11's lowest and highest speed-up give these again: the clock is the formula's."""
    rate = (STAGES - STAGES / measured) / (STAGES - 1)  # P of a step each hit and m steps each miss
    wrong = lambda place: int(place * (1 - rate)) != int((place - 1) * (1 - rate))  # noqa: E731
    with VirtualClock() as clock:
        said, seconds, ticks, _ = decode(clock, Synthetic(answer, wrong), tokens=TOKENS)
        assert clock.label == "virtual clock"
    assert said == answer[len(PROMPT) :]
    hits = sum(tick.hits for tick in ticks)
    assert seconds == STAGES + hits + (TOKENS - 1 - hits) * STAGES  # the formula, to the tick
    assert hits / (TOKENS - 1) == pytest.approx(rate, abs=0.02)
    plain = STAGES * TOKENS
    assert plain / seconds == pytest.approx(measured, rel=0.03)
    share = hits / (TOKENS - 1)
    tbt = share + (1 - share) * STAGES  # P t + (1 - P) m t
    assert seconds / TOKENS == pytest.approx(tbt, rel=0.03)
    assert plain / seconds == pytest.approx(STAGES / tbt, rel=0.03)


def test_a_level_that_takes_longer_than_a_tick_costs_stalls_and_no_token(answer: list[int]) -> None:
    times = []
    for seconds in (1.0, 1.5, 3.0, 100.0):
        with VirtualClock() as clock:
            source = Synthetic(answer, lambda place: False)
            said, took, ticks, _ = decode(clock, source, source_s=lambda rows, seconds=seconds: seconds)
        assert said == answer[len(PROMPT) :][:FEW]
        assert any(tick.waits for tick in ticks) == (seconds > 1)
        times.append(took)
    late = [STAGES + ticks * (FEW - 1) for ticks in (1, 2, 3)]  # one that takes as long as a tick is in time
    assert times == [*late, STAGES * FEW]
