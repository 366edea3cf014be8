"""The mirror round over sessions that go on by themselves: late, called off, lost and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.mirror_watch import StepTimes, WindowVerdict, watch
from kits.tiny import assemble, run
from test_mirror import DECODER, PARAMS, PROMPTS, drafter, ids, plain

from paceline.draft.local_sessions import LocalSessions
from paceline.draft.sessions import Ask, GoingSessions, Grown, Opening
from paceline.engine.base import RoundParts
from paceline.engine.engine import Engine
from paceline.papers.mirror.config import MirrorConfig
from paceline.papers.mirror.rollout import Rollout
from paceline.papers.mirror.round import MirrorRound


@pytest.fixture(autouse=True)
def _without_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollout, "spin_s", 0.0)


@dataclass
class Growth:
    asks: dict[int, Ask]
    left: dict[int, list[int]]  # tokens wanted below each node of an ask
    levels: list[dict[int, Grown]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    done: bool = False


class Going:
    """Sessions that draft ``pace`` levels whenever somebody looks, and are lost in every ``lost``-th growth."""

    def __init__(self, inner: Any, pace: int, lost: int = 0) -> None:
        self.inner, self.pace, self.lost = inner, pace, lost
        self.growths: list[Growth] = []
        self.open_keys: set[int] = set()
        self.begun = self.called_off = self.losses = self.rest = 0

    def ready(self) -> bool:
        self.rest = max(0, self.rest - 1)
        return self.rest == 0

    def open(self, opening: Opening) -> None:
        assert self.rest == 0
        self.open_keys.add(opening.key)
        self.inner.open(opening)

    def begin(self, asks: Sequence[Ask], levels: Sequence[Sequence[int]]) -> Growth:
        self.begun += 1
        if self.lost and self.begun % self.lost == 0:
            for key in self.open_keys:
                self.inner.close(key)
            self.open_keys, self.growths, self.rest = set(), [], 3
            self.losses += 1
            raise RuntimeError("the worker is gone")
        assert all(len(own) == len(ask.given) + len(ask.expand) for ask, own in zip(asks, levels, strict=True))
        growth = Growth({ask.key: ask for ask in asks}, {a.key: [*own] for a, own in zip(asks, levels, strict=True)})
        self.growths.append(growth)
        return growth

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        raise AssertionError("the round waits for no level")

    def look(self) -> None:
        for _ in range(self.pace):
            if self.growths:
                self.level(self.growths[0])

    def wait(self, growth: Growth) -> None:
        while not growth.done:
            self.level(self.growths[0])

    def level(self, growth: Growth) -> None:
        asks, found = [*growth.asks.values()], {}
        for ask, grown in zip(asks, self.inner.grow(asks) if asks else [], strict=True):
            found[ask.key] = grown
            left = dict(zip([*grown.given, *ask.expand], growth.left[ask.key], strict=True))
            tips = {n: left[p] - 1 for p, n in zip(grown.parents, grown.nodes, strict=True) if left[p] > 1}
            growth.asks[ask.key], growth.left[ask.key] = Ask(ask.key, (), [*tips]), [*tips.values()]
            if not tips:
                del growth.asks[ask.key]
        growth.levels.append(found)
        growth.done = not growth.asks
        if growth.done:
            self.growths.remove(growth)

    def call_off(self, key: int) -> None:
        for growth in self.growths:
            self.called_off += growth.asks.pop(key, None) is not None

    def reroot(self, key: int, node: int) -> None:
        self.call_off(key)
        self.inner.reroot(key, node)

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        self.call_off(key)
        self.inner.commit(key, tokens)

    def close(self, key: int) -> None:
        self.call_off(key)
        self.open_keys.discard(key)
        self.inner.close(key)

    def forget(self) -> None:
        self.inner.forget()


def elsewhere(pace: int, lost: int = 0, **options: Any) -> tuple[Engine, Going, list[WindowVerdict], list[StepTimes]]:
    engine = assemble(drafter(depth=4), round="mirror,kappa=4,exit=2", decoder=DECODER, **options)
    made = engine.round
    assert isinstance(made, MirrorRound)
    assert isinstance(made.sessions, LocalSessions)
    going = Going(made.sessions.inner, pace, lost)
    assert isinstance(going, GoingSessions)
    parts = RoundParts(target=made.target, pool=made.pool, drafter=drafter(depth=4))
    config = MirrorConfig(kappa=4, exit="2")
    round_ = MirrorRound(config, parts, config.exit_head(made.target), going)
    verdicts: list[WindowVerdict] = []
    times: list[StepTimes] = []
    watch(round_, verdicts.append, times.append)
    engine.round = round_
    return engine, going, verdicts, times


def trace(verdicts: Sequence[WindowVerdict]) -> list[Any]:
    return [(v.window, v.accepted, v.said) for v in verdicts]


@pytest.mark.parametrize("name", ["greedy", "warm"])
def test_windows_are_the_same_however_late_they_come(name: str) -> None:
    """From everything at the verdict to nothing at all, when it is waited for."""
    job, traces, reused = (PROMPTS[2], PARAMS[name]), [], []
    for pace in (99, 2, 1, 0):
        engine, going, verdicts, _ = elsewhere(pace)
        assert ids(run(engine, [job])) == plain([job])
        traces.append(trace(verdicts))
        reused.append(sum(v.reused for v in verdicts))
        assert (going.called_off > 0) is (pace < 99) and not going.growths
        assert going.inner.pool.idle and engine.pool.idle
    assert all(one == traces[0] for one in traces)
    assert reused[0] == reused[1] == reused[2] == reused[3] > 0


@pytest.mark.parametrize("lost", [3, 7])
def test_what_is_lost_comes_back(lost: int) -> None:
    """No token changes, and drafting goes on."""
    jobs = [(prompt, PARAMS["warm"]) for prompt in PROMPTS]
    engine, going, verdicts, _ = elsewhere(1, lost)
    outputs = run(engine, jobs)
    assert ids(outputs) == plain(jobs)
    assert going.losses > 1 and engine.round.failure is None
    last = max(i for i, v in enumerate(verdicts) if not v.window)
    assert any(v.window for v in verdicts[:last]) and going.inner.pool.idle
    assert sum(bool(v.window) for v in verdicts) > 3
