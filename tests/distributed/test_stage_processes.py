"""Stages in real processes, which are killed and stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.ticks import watch_ticks
from kits import stage
from kits.stage import CONFIG, engine_over, part, pool_of, split
from kits.tiny import VOCAB, assemble, draft_model, run, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.runtime.handshake import Facts
from paceline.runtime.messages import KINDS
from paceline.runtime.placement import Placement, cores
from paceline.runtime.remote import Remote, WorkerSpec
from paceline.runtime.stage_workers import StageWorkers
from paceline.runtime.workers import TIMEOUTS

DECODER = tiny_decoder(CONFIG)
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(3)]
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
PLAN = {5: (0, signal.SIGKILL), 12: (1, signal.SIGKILL), 25: (0, signal.SIGSTOP)}  # tick -> stage and signal


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Remote]]:
    here = str(Path(stage.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    made: list[Remote] = []
    yield made
    for worker in made:
        worker.stop()


def start(workers: list[Remote], stages: int, slots: int) -> None:
    """One a core."""
    usable = cores()
    for index, (first, last) in enumerate(split(stages)[:-1]):
        spec = WorkerSpec(
            name=f"stage {index}",
            service="kits.stage:service",
            options={"start": first, "stop": last, "slots": slots},
            kinds=KINDS,
            expected=Facts(weights="tiny", dtype="float64"),
            placement=Placement(cores=(usable[index % len(usable)],)),
        )
        workers.append(Remote(spec, TIMEOUTS))
    for worker in workers:
        worker.poll()
    for worker in workers:
        worker.start()


class Killer:
    """Sends signals at some ticks, and notes how long it takes until somebody says who is gone."""

    def __init__(self, workers: Sequence[Remote], stage_line: StageWorkers) -> None:
        self.workers, self.ticks = workers, 0
        self.left = dict(PLAN)
        self.sent: list[tuple[int, int, float]] = []  # stage, process, when
        self.named: list[tuple[str, float]] = []  # what was said, and seconds until then
        self._look = stage_line.look
        stage_line.look = self.look  # type: ignore[method-assign]

    def on_tick(self, tick: object) -> None:
        self.ticks += 1
        if order := self.left.pop(self.ticks, None):
            pid = self.workers[order[0]].pid or 0
            os.kill(pid, order[1])
            self.sent.append((order[0], pid, time.monotonic()))

    def look(self) -> None:
        try:
            self._look()
        finally:
            if len(self.named) < len(self.sent):
                index, pid, when = self.sent[-1]
                words = [fault for fault in self.workers[index].faults if f"(pid {pid})" in fault]
                self.named += [(word, time.monotonic() - when) for word in words]


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_processes_that_are_killed_and_stopped_are_named_in_time_and_change_no_token(workers: list[Remote]) -> None:
    jobs = [(prompt, PARAMS) for prompt in PROMPTS]
    expected = ids([run(assemble(decoder=DECODER), [job])[0] for job in jobs])
    decoder = part(*split(3)[-1], True)
    pool = pool_of(decoder)
    start(workers, 3, pool.tensors.all_k.shape[2])
    engine, stage_line, ticks = engine_over(workers, draft_model(noise=0.03, target={"config": CONFIG}), decoder, pool)
    assert [os.sched_getaffinity(w.pid or 0) for w in workers] == [{*w.spec.placement.cores} for w in workers]
    assert ids(run(engine, jobs)) == expected
    assert sum(tick.hits for tick in ticks) > 10 and stage_line.faults == []

    killer = Killer(workers, stage_line)
    watch_ticks(engine.round, killer.on_tick)
    assert ids(run(engine, jobs)) == expected
    whys = "died: killed by SIGKILL", "died: killed by SIGKILL", "hangs: "  # no sign of life, or too long at a frame
    assert not killer.left and len(killer.named) == 3
    for (index, pid, _), (said, seconds), why in zip(killer.sent, killer.named, whys, strict=True):
        assert said.startswith(f"worker stage {index} (pid {pid}) {why}") and seconds < 5
    assert engine.round.failure is None and engine.pool.idle
