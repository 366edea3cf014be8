"""Draft sessions over a channel say what they say in the process, go on by themselves, and end with the verdict."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed_drafts import bound
from kit.clock import VirtualClock
from kit.links import Link
from kit.mirror_watch import WindowVerdict, watch
from kit.paced import PacedDrafts
from kits.channels import InProcess, RealTime
from kits.tiny import VOCAB, alone, assemble, draft_model, ids, run, tiny_decoder

from paceline.core.grammar import Grammar
from paceline.core.sampling import SamplingParams
from paceline.draft.sessions import ROOT, AsyncSessions, Expand, Opening
from paceline.engine.base import RoundParts
from paceline.papers.mirror.round import MirrorRound
from paceline.runtime.draft_worker import service
from paceline.runtime.drafts import DraftService, DraftsLost, Grew, RemoteSessions
from paceline.runtime.handshake import Facts, Fault
from paceline.runtime.placement import Placement
from paceline.runtime.remote import Remote, Timeouts, WorkerSpec
from paceline.runtime.serving import Service

LONG = 120.0  # seconds: an end of waiting that no test comes to
WARM = SamplingParams(temperature=0.9, repetition_penalty=1.3, logit_bias={7: -3.0, 12: 0.5}, stop=["x"], seed=2**70)
PROMPT = [(5 * i + 11) % (VOCAB - 10) + 10 for i in range(21)]


def opening(key: int = 0, length: int = 21, params: SamplingParams = WARM) -> Opening:
    return Opening(key, PROMPT[:length], length - 3, params, seed=2**70, sample_index=1, max_len=200)


def beside() -> tuple[Any, RemoteSessions, InProcess]:
    """Sessions here, and the same ones behind a channel."""
    served = InProcess(DraftService(bound(), Facts()), RealTime())
    return bound(), RemoteSessions(served, LONG), served


def test_a_worker_drafts_within_a_grammar():
    """The tokens that the schema forces come from the worker, which compiles the grammar with the first request."""
    served = service("cpu", {"model": "paceline-small", "drafter": "grammar"}, rows=16, pool_tokens=256)
    schema = '{"type": "object", "properties": {"name": {"const": "a"}}, "required": ["name"]}'
    params = SamplingParams(grammar=Grammar("json_schema", schema))
    served.handle(Opening(0, PROMPT, len(PROMPT), params, seed=1, sample_index=0))
    (grown,) = served.sessions.grow([Expand(0, (), [ROOT])])
    assert len(grown.tokens) == 1 and grown.log_q[0] > -0.1


def test_random_lives_are_the_same_here_and_there():
    draw = random.Random(4)
    here, there, _ = beside()
    nodes: dict[int, list[int]] = {}
    drafted = rerooted = 0
    for key in range(2):
        for one in (here, there):
            one.open(opening(key, 10 + 6 * key))
        nodes[key] = []
    for turn in range(40):
        asks = []
        for key, known in nodes.items():
            given = [(draw.choice([ROOT, *known]), draw.randrange(10, VOCAB))]
            asks.append(Expand(key, given, [draw.choice(known)] if known else [ROOT], draw.choice([1, 3])))
        found = here.grow(asks)
        assert there.grow(asks) == found
        for ask, grown in zip(asks, found, strict=True):
            nodes[ask.key] += [n for n in (*grown.added, *grown.nodes) if n not in nodes[ask.key]]
            drafted += len(grown.nodes)
        key = draw.choice([*nodes])
        if turn % 4 == 0:
            node = draw.choice(nodes[key])
            for one in (here, there):
                one.reroot(key, node)
            nodes[key] = [n for n in here._open[key].nodes if n != here._open[key].root]
            rerooted += 1
        elif turn % 7 == 0:
            said = [draw.randrange(10, VOCAB) for _ in range(2)]
            for one in (here, there):
                one.commit(key, said)
            nodes[key] = []
    assert drafted > 60 and rerooted == 10
    for key in nodes:
        there.close(key)


class Timed:
    """Virtual time: a level takes 2 ms, a message 0.5 ms."""

    def __init__(self, clock: VirtualClock) -> None:
        self.rows: list[int] = []
        link = Link(latency_ms=0.5)
        self.clock = clock
        service = PacedDrafts(bound(), Facts(), clock, seconds=self.seconds)
        self.served = InProcess(service, clock, link)
        self.sessions = RemoteSessions(self.served, LONG)
        self.sessions.open(opening())

    def seconds(self, rows: int) -> float:
        self.rows.append(rows)
        return 0.002


@pytest.fixture
def timed() -> Iterator[Timed]:
    with VirtualClock() as clock:
        yield Timed(clock)


def test_levels_come_while_somebody_else_works_and_a_verdict_ends_them(timed: Timed):
    clock, sessions = timed.clock, timed.sessions
    growing = sessions.begin([Expand(0, [(ROOT, 20), (ROOT, 30)], [ROOT], levels=[9, 9, 9])])
    clock.sleep_until(0.0071)  # levels end at 2.5, 4.5 and 6.5 ms, and are known 0.5 ms later
    sessions.look()
    assert len(growing.levels) == 3 and not growing.done
    sessions.reroot(0, growing.levels[0][0].added[0])  # is there at 7.6 ms, after the level that ends at 8.5 ms
    sessions.wait(growing)
    assert len(growing.levels) == 5 and growing.levels[4] == {}
    assert clock.now() == pytest.approx(0.009) and timed.rows == [3, 3, 3, 3]
    assert [end for _, end in growing.times[:4]] == pytest.approx([0.0025, 0.0045, 0.0065, 0.0085])
    again = sessions.begin([Expand(0, [], [n for n in growing.levels[3][0].nodes if n][:1])])
    clock.sleep_until(0.1)
    sessions.look()
    assert again.done and sessions.ready()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Fault("ValueError: no"), "failed: ValueError: no"),
        (opening(), "sent Opening, which is not an answer"),
        (Grew(1, {}, True, 0.0, 0.0), "leaves a sequence out"),
    ],
)
def test_a_drafter_that_lies_is_given_up(answer: Any, why: str):
    class Liar(Service):
        def handle(self, message: Any) -> Any:
            return [answer, answer] if not isinstance(message, Opening) else []

        def work(self) -> None:
            return None

    served = InProcess(Liar(), RealTime())
    sessions = RemoteSessions(served, LONG)
    sessions.open(opening())
    with pytest.raises(DraftsLost, match=why):
        sessions.grow([Expand(0, [], [ROOT])])
    assert why in served.faults[0] and not sessions.ready()
    with pytest.raises(DraftsLost, match="is not there"):
        sessions.open(opening())


def test_one_that_is_late_is_given_up():
    class Sleeper(DraftService):
        def work(self) -> Any:
            return None

    served = InProcess(Sleeper(bound(), Facts()), RealTime())
    sessions = RemoteSessions(served, 0.05)
    sessions.open(opening())
    with pytest.raises(DraftsLost, match="answered nothing for 0.05 s"):
        sessions.grow([Expand(0, [], [ROOT])])


TARGET = tiny_decoder()
JOBS = [
    ([(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(6 + 5 * i)], SamplingParams(seed=i, max_tokens=24))
    for i in range(2)
]


def mirrored(sessions: AsyncSessions) -> tuple[list[list[int]], list[WindowVerdict]]:
    """What the mirror round says with these sessions, and what became of its windows."""
    engine = assemble(draft_model(noise=0.2, depth=4), round="mirror,kappa=4,exit=2", decoder=TARGET)
    made, verdicts = engine.round, list[WindowVerdict]()
    assert isinstance(made, MirrorRound) and isinstance(sessions, AsyncSessions)
    parts = RoundParts(target=made.target, pool=made.pool, drafter=draft_model(noise=0.2, depth=4))
    engine.round = MirrorRound(made.config, parts, made.exit, sessions)
    watch(engine.round, verdicts.append)
    return ids(run(engine, JOBS)), verdicts


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return ids(alone(TARGET, JOBS))


def test_a_worker_process_serves_and_dies(monkeypatch: pytest.MonkeyPatch, plain: list[list[int]]):
    """In the midst of a growth, and no token of the round that goes on without it is another one."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "distributed"), str(tests), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    spec = WorkerSpec(
        name="draft",
        service="distributed_drafts:service",
        expected=Facts(weights="tiny"),
        placement=Placement(threads=1),  # as these tests: sums of several threads end in other bits
    )
    worker = Remote(spec, Timeouts(start_s=LONG, silent_s=LONG, stuck_s=LONG, rest_s=0.01))
    here, ask = bound(), [Expand(0, [(ROOT, 20)], [ROOT])]
    here.open(opening())
    expected = here.grow(ask)
    try:
        worker.start()
        there = RemoteSessions(worker, LONG)
        there.open(opening())
        assert there.grow(ask) == expected
        there.close(0)
        said, verdicts = mirrored(there)
        assert said == plain and any(v.reused for v in verdicts)
        there.open(opening())
        threading.Timer(0.02, lambda: os.kill(worker.pid or 0, signal.SIGKILL)).start()
        with pytest.raises(DraftsLost):
            while True:
                there.wait(there.begin([Expand(0, [(ROOT, 21)], [], levels=[50])]))
        assert "died: killed by SIGKILL" in worker.faults[0]
        assert mirrored(there)[0] == plain
    finally:
        worker.stop()
