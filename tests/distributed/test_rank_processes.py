"""Ranks in real processes, which are killed and stopped, and a rank 0 that is interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kits.ranks import ranked
from kits.tiny import VOCAB, assemble, draft_model, ids, run, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.model.decoder import Decoder

PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(3)]
JOBS = [(prompt, SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True)) for prompt in PROMPTS]
PLAN = {3: signal.SIGKILL, 8: signal.SIGSTOP}  # run -> what the other rank gets
WHYS = "died: killed by SIGKILL", "hangs: "


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with ranked(2) as made:
        yield made


def engine_over(decoder: Decoder) -> tuple[Any, Any]:
    engine = assemble(draft_model(), decoder=decoder)
    assert decoder.ranks is not None
    line: Any = decoder.ranks.line
    line.follow(engine.pool)
    return engine, line


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return ids(run(assemble(decoder=tiny_decoder()), JOBS))


def test_ranks_that_are_killed_and_stopped_are_named_in_time_and_change_no_token(
    decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, line = engine_over(decoder)
    monkeypatch.setattr(line, "limit_s", lambda rows: 2.0)
    assert ids(run(engine, JOBS)) == expected and line.faults == []
    engine.forget()
    left, sent, named, runs = dict(PLAN), list[tuple[str, float]](), list[float](), line.runs
    send, lost = line.send, line.lost

    def sending(*given: Any) -> None:
        send(*given)
        if (order := left.pop(line.runs - runs, None)) is not None:
            [worker] = line.workers
            sent.append((f"worker rank 1 (pid {worker.pid}) ", time.monotonic()))
            os.kill(worker.pid, order)

    def losing() -> Any:
        found = lost()
        named.append(time.monotonic())
        return found

    monkeypatch.setattr(line, "send", sending)
    monkeypatch.setattr(line, "lost", losing)
    assert ids(run(engine, JOBS)) == expected
    assert not left and len(line.faults) == len(named) == 2 and engine.pool.idle
    for fault, (who, began), seen, why in zip(line.faults, sent, named, WHYS, strict=True):
        assert fault.startswith(who + why) and seen - began < 15


def test_a_rank_0_that_is_interrupted_goes_on(
    decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, line = engine_over(decoder)
    known, runs, done = len(line.faults), line.runs, line.done

    def interrupted() -> None:
        if line.runs == runs + 5:
            line.runs += 1
            raise KeyboardInterrupt
        done()

    monkeypatch.setattr(line, "done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, JOBS)
    monkeypatch.undo()
    engine, line = engine_over(decoder)
    assert ids(run(engine, JOBS)) == expected and len(line.faults) == known
