"""Stages elsewhere say what plain decoding says, whatever becomes of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
from kit.ticks import watch_ticks
from kits.stage import CONFIG, LAYERS, over_threads
from kits.tiny import VOCAB, alone, assemble, draft_model, ids, run, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.model.stages import Frame
from paceline.runtime.remote import WorkerFailed

DECODER = tiny_decoder(CONFIG)
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=3, max_tokens=30)


def drafter(noise: float = 0.03, **shape: Any) -> Any:
    return draft_model(noise=noise, target={"config": CONFIG} | shape)


def plain(jobs: Sequence[Any], decoder: Any = DECODER) -> list[list[int]]:
    return ids(alone(decoder, jobs))


@pytest.mark.parametrize("stages", [1, 3])
def test_the_same_tokens_and_ticks_as_stages_in_one_process(stages: int) -> None:
    hits = 0
    for params in (GREEDY, WARM):
        jobs = [(PROMPTS[1], params)]
        engine, stage_line, ticks = over_threads(stages, drafter())
        assert stage_line.limit_s(4) == 64.0  # the first pass may read weights from the disk
        assert ids(run(engine, jobs)) == plain(jobs)
        assert stage_line.limit_s(4) == 10.0 * (stages - 1) + 4
        here = assemble(drafter(), round=f"pipeline,stages={stages}", decoder=DECODER)
        others = watch_ticks(here.round)
        (output,) = run(here, jobs)
        assert [(t.entered, t.count, t.hits) for t in ticks] == [(t.entered, t.count, t.hits) for t in others]
        assert engine.pool.idle and not engine.round.busy and engine.round.failure is None and stage_line.faults == []
        assert output.stats.row_layers % LAYERS == 0
        hits += sum(tick.hits for tick in ticks)
    assert hits > 5 or stages == 1


def test_between_hosts_lines_are_encrypted() -> None:
    jobs = [(PROMPTS[1], GREEDY)]
    engine, stage_line, ticks = over_threads(3, drafter(), host="127.0.0.1")
    broken(stage_line, ticks, 1, (9,))
    assert ids(run(engine, jobs)) == plain(jobs)
    assert stage_line._first.startswith("tcp://127.0.0.1:") and stage_line._inbox.socket.mechanism == zmq.CURVE
    assert stage_line.faults == ["worker stage 1 failed: OSError: out of order"]
    stage_line.stop()


def broken(stage_line: Any, ticks: list[Any], stage: int, at: Sequence[int]) -> None:
    """A stage raises at some ticks."""
    left, stand = [*at], stage_line.workers[stage]
    start = stand.start

    def breaking() -> None:
        whole = stand.service.stage.run

        def computing(frame: Frame) -> Frame:
            if left and len(ticks) >= left[0]:
                left.pop(0)
                raise OSError("out of order")
            return whole(frame)

        stand.service.stage.run = computing

    def started() -> None:
        start()
        breaking()

    stand.start = started
    breaking()


def test_a_stage_that_is_lost_is_named_and_no_token_changes() -> None:
    jobs = [(prompt, params) for prompt in PROMPTS[:3] for params in (GREEDY, WARM)]
    engine, stage_line, ticks = over_threads(4, drafter())
    broken(stage_line, ticks, 1, (1, 9, 20))
    broken(stage_line, ticks, 2, (15,))
    assert ids(run(engine, jobs)) == plain(jobs)
    assert [f for f in stage_line.faults if "stage 1" in f] == ["worker stage 1 failed: OSError: out of order"] * 3
    assert len(stage_line.faults) == 4 and stage_line.workers[1].starts == 4 and stage_line.workers[0].starts == 1
    assert engine.pool.idle and sum(tick.hits for tick in ticks) > 5
    assert ids(run(engine, jobs)) == plain(jobs)  # prefixes that are found again are right


def test_a_second_failure_in_a_row_ends_the_requests_with_its_words() -> None:
    engine, stage_line, ticks = over_threads(3, drafter())
    broken(stage_line, ticks, 0, (6, 6))
    with pytest.raises(WorkerFailed, match="worker stage 0 failed: OSError: out of order; before that: worker stage 0"):
        run(engine, [(PROMPTS[1], GREEDY)])
    for name in [*engine.live]:
        engine.abort(name)
    assert ids(run(engine, [(PROMPTS[2], GREEDY)])) == plain([(PROMPTS[2], GREEDY)])


def test_a_tick_that_is_interrupted_changes_no_token() -> None:
    engine, stage_line, ticks = over_threads(3, drafter())
    whole, left = stage_line._arrived, [9, 14]

    def interrupted(*given: Any) -> Any:
        if left and len(ticks) >= left[0]:
            left.pop(0)
            raise KeyboardInterrupt
        return whole(*given)

    stage_line._arrived = interrupted  # type: ignore[method-assign]
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    with pytest.raises(KeyboardInterrupt):
        run(engine, jobs)
    live = [*engine.live.values()]
    with pytest.raises(KeyboardInterrupt):
        while engine.busy:
            engine.step()
    while engine.busy:
        engine.step()
    assert [one.sequences[0].output_ids for one in live] == plain(jobs)
    assert not left and stage_line.faults == []


def test_a_message_that_is_interrupted_costs_its_stage_and_no_token() -> None:
    engine, stage_line, ticks = over_threads(3, drafter())
    line: Any = stage_line.workers[0].line
    whole = line.send

    def interrupted(*given: Any) -> None:
        if len(ticks) >= 9:
            line.send = whole
            raise KeyboardInterrupt
        whole(*given)

    line.send = interrupted
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    with pytest.raises(KeyboardInterrupt):
        run(engine, jobs)
    live = [*engine.live.values()]
    while engine.busy:
        engine.step()
    assert [one.sequences[0].output_ids for one in live] == plain(jobs)
    assert stage_line.faults == ["worker stage 0 was sent half a message"]


def test_a_stage_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stage_line, ticks = over_threads(3, drafter())
    monkeypatch.setattr("paceline.runtime.stage_workers.StageWorkers.limit_s", lambda self, rows: 0.2)
    stage, silent = stage_line.workers[0], []
    whole = stage.service.stage.run

    def computing(frame: Frame) -> Frame:
        if len(ticks) >= 10 and not silent:  # ticks end in another thread: this one may never see just the tenth
            silent.append(frame)
            time.sleep(2.5)
        return whole(frame)

    stage.service.stage.run = computing
    assert ids(run(engine, [(PROMPTS[0], GREEDY)])) == plain([(PROMPTS[0], GREEDY)])
    assert silent and len(stage_line.faults) == 1
    said = re.fullmatch(r"worker stage 0 hangs: at \d+ rows for ([\d.]+) s", stage_line.faults[0])
    assert said is not None and 0.2 <= float(said[1]) < 2.5
