"""A source that drafts beside the stages, elsewhere: late, called off, lost and back, it never changes a token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.paced import PacedDrafts
from kit.ticks import watch_ticks
from kits.stage import Stand
from kits.tiny import VOCAB, assemble, draft_model, run, tiny_config, tiny_decoder

from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.draft.base import DrafterSpec
from paceline.engine.base import Place, RoundParts
from paceline.engine.engine import Engine
from paceline.engine.rounds import parse_round
from paceline.kv.pool import KVPool
from paceline.papers.specpipe.config import PipelineConfig
from paceline.papers.specpipe.records import Tick
from paceline.papers.specpipe.round import PipelineRound
from paceline.runtime.drafts import DraftService, RemoteSessions
from paceline.runtime.handshake import Facts

CONFIG = tiny_config(num_layers=8)
DECODER = tiny_decoder(CONFIG)
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def plain(jobs: Sequence[Any]) -> list[list[int]]:
    return ids([run(assemble(decoder=DECODER), [job])[0] for job in jobs])


def apart(level_s: float = 0.0, noise: float = 0.03) -> tuple[Engine, Stand, list[Tick]]:
    """The pipeline round of a configuration, whose drafter is served by a thread."""
    drafter = draft_model(noise=noise, target={"config": CONFIG})
    asked: list[tuple[int, Place]] = []

    def service(rows: int) -> DraftService:
        own = draft_model(noise=noise, target={"config": CONFIG})
        own.bind(DECODER.info("tiny"), 8, 1024, torch.device("cpu"))
        return PacedDrafts(own.sessions(rows), Facts(), seconds=lambda nodes: level_s)

    made: list[Stand] = []

    def serve(rows: int, place: Place) -> RemoteSessions:
        asked.append((rows, place))
        made.append(Stand("draft", lambda: service(rows), rest=6))
        return RemoteSessions(made[0])

    engine = assemble(drafter, round="pipeline,stages=4", decoder=DECODER)
    assert isinstance(engine.pool, KVPool)
    config = PipelineConfig(stages=4, source="process", threads=1)
    round_ = config.build(RoundParts(target=DECODER, pool=engine.pool, drafter=drafter, serve=serve))
    assert isinstance(round_, PipelineRound) and asked == [(config.nodes, Place((), 1))]
    engine.round = round_
    return engine, made[0], watch_ticks(round_)


def slowly(ticks: list[Tick], engine: Engine) -> None:
    """Ticks take a while, so that drafts come in time."""
    stage_line = engine.round.stage_line  # type: ignore[attr-defined]
    whole = stage_line.tick

    def tick(entering: Any) -> Any:
        time.sleep(0.01)
        return whole(entering)

    stage_line.tick = tick


def test_in_time_or_late_it_changes_no_token() -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for level_s, late in ((0.0, False), (0.03, True)):
        engine, stand, ticks = apart(level_s)
        slowly(ticks, engine)
        assert ids(run(engine, jobs)) == plain(jobs)
        assert engine.round.failure is None and stand.faults == [] and engine.pool.idle
        assert any(tick.waits for tick in ticks) or not late
        assert sum(tick.hits for tick in ticks) > (10 if not late else 0)


def test_one_that_is_lost_comes_back_and_drafts_again() -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine, stand, ticks = apart()
    slowly(ticks, engine)
    lost = []

    def on_tick(tick: Tick) -> None:
        if len(ticks) in (9, 30):
            lost.append(len(ticks))
            stand.failed("died")

    watch_ticks(engine.round, on_tick)
    assert ids(run(engine, jobs)) == plain(jobs)
    assert lost == [9, 30] and stand.starts == 3 and engine.round.failure is None
    assert sum(tick.hits for tick in ticks[45:]) > 3
    assert ids(run(engine, jobs)) == plain(jobs)


def test_growths_that_are_called_off_are_asked_for_again() -> None:
    jobs = [(PROMPTS[1], GREEDY)]
    engine, stand, ticks = apart()
    slowly(ticks, engine)
    off = []
    whole = stand.service.handle

    def handle(message: Any) -> Any:
        said = whole(message)
        if type(message).__name__ == "Grow" and len(ticks) % 5 == 3:
            off.append(message)
            for growth in stand.service._growths:
                for wanted in message.wanted:
                    growth.call_off(wanted.key)
        return said

    stand.service.handle = handle
    assert ids(run(engine, jobs)) == plain(jobs)
    assert off and sum(tick.hits for tick in ticks) > 5 and engine.round.failure is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cores is for source=process"):
        parse_round("pipeline,cores=<0>")
    config = parse_round("pipeline,source=process,cores=<0>,threads=1")
    assert config is not None and config.place == Place((0,), 1)
    alone = config.refusal(None)
    assert alone is not None and "no drafter" in alone[0]
    assert config.refusal(DrafterSpec(name="draft", ahead=True)) is None
