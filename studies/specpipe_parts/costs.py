"""What a tick costs beside the layers, in real time: the coordinator's work, and a stage's plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from kit.study import Table

from paceline.engine.base import RoundParts
from paceline.model.stages import Frame, StagesInTurn
from paceline.runtime.messages import Compute
from paceline.runtime.wire import decode, encode
from specpipe_parts.common import (
    LEAP,
    OWN,
    PipeFlags,
    draft_of,
    engine_over,
    greedy,
    levels,
    plain,
    pool_of,
    prompts,
    study,
    target,
)


@dataclass
class Seconds:
    """Of what does not belong to the coordinator, since they were taken last."""

    layers: float = 0.0
    elsewhere: float = 0.0  # stages, drafts and the head

    def timed(self, call: Any, name: str) -> Any:
        """The same call, timed."""

        def run(*given: Any, **named: Any) -> Any:
            began = perf_counter()
            found = call(*given, **named)
            setattr(self, name, getattr(self, name) + perf_counter() - began)
            return found

        return run


@dataclass
class Costs:
    """Rows and seconds of ticks and frames."""

    ticks: list[tuple[int, float]] = field(default_factory=list)  # rows in flight, of the coordinator
    plans: list[tuple[int, float]] = field(default_factory=list)  # rows of a frame, of its stage beside the layers


class TimedStages(StagesInTurn):
    """Stages in turn, with the messages that the coordinator and stages in processes would send each other."""

    def __init__(self, stages: Any, seconds: Seconds, costs: Costs) -> None:
        super().__init__(stages)
        self.seconds, self.costs, self.rows = seconds, costs, 0

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """See `StagesInTurn`; the coordinator prunes every frame, and sends all but the last stage's."""
        frames = [None if frame is None else self.stages[-1].pruned(frame) for frame in held]
        self.rows = sum(frame.rows for frame in frames if frame is not None)
        done = []
        for index, frame in enumerate(frames):
            done.append(None if frame is None else self._run(index, frame))
        return done

    def _run(self, index: int, frame: Frame) -> Frame:
        apart = bool(frame.rows) and index < self.count - 1
        sent = encode(Compute(self._embedded(frame))) if apart else None
        began, layers = perf_counter(), self.seconds.layers
        if sent is not None:
            decode(sent)
        out = self.stages[index].run(frame)
        answer = encode(Compute(out)) if apart and out.hidden is not None else None
        took = perf_counter() - began
        self.seconds.elsewhere += took
        if frame.rows:
            self.costs.plans.append((frame.rows, took - (self.seconds.layers - layers)))
        if answer is not None:
            decode(answer)
        return out

    def _embedded(self, frame: Frame) -> Frame:
        if frame.hidden is not None:
            return frame
        decoder = self.stages[0].decoder
        tokens = torch.tensor([token for part in frame.parts for token in part.tokens])
        return replace(frame, hidden=decoder.embed_tokens(tokens))


def costs_of(ask: PipeFlags, batch: int, found: Sequence[Sequence[int]]) -> Costs:
    """Of so many requests at once; ticks with a prompt among them do not count."""
    tokens = ask.max_new_tokens or 0
    jobs = [(found[place % len(found)], greedy(tokens)) for place in range(batch)]
    expected = plain(ask, jobs)
    drafter = draft_of(ask)
    decoder: Any = target(ask).decoder
    pool, config = pool_of(ask, jobs, drafter), levels(ask, rows=LEAP - batch)
    seconds, costs = Seconds(), Costs()
    stage_line = TimedStages(config.cut(decoder, pool), seconds, costs)
    round_: Any = config.over(RoundParts(target=decoder, pool=pool, drafter=drafter), stage_line)
    sessions = round_.source.sessions.inner
    sessions.grow = seconds.timed(sessions.grow, "elsewhere")
    whole = round_._tick

    def tick() -> Any:
        began, seconds.elsewhere = perf_counter(), 0.0
        said = whole()
        took = perf_counter() - began - seconds.elsewhere
        if 0 < stage_line.rows <= stage_line.count * LEAP:
            costs.ticks.append((stage_line.rows, took))
        return said

    round_._tick = tick
    own = decoder.run_layers, decoder.read
    decoder.run_layers = seconds.timed(decoder.run_layers, "layers")
    decoder.read = seconds.timed(decoder.read, "elsewhere")
    try:
        engine = engine_over(ask, round_, pool, batch)
        live = [engine.live[engine.submit(ids, params)].sequences[0] for ids, params in jobs]
        while engine.busy:
            engine.step()
    finally:
        decoder.run_layers, decoder.read = own
    assert [state.output_ids for state in live] == expected
    costs.plans = [(rows, took) for rows, took in costs.plans if rows <= LEAP]
    return costs


def fitted_ms(points: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> list[float]:
    """Least squares through the medians of equal points: ms, and ms for each unit of every column."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for point, took in zip(points, seconds, strict=True):
        groups.setdefault(point, []).append(1e3 * took)
    weights = np.sqrt([len(found) for found in groups.values()])
    columns = np.array([[1, *point] for point in groups]) * weights[:, None]
    found = np.linalg.lstsq(columns, np.array([median(own) for own in groups.values()]) * weights, rcond=None)[0]
    return [float(value) for value in found]


@study.table(takes=OWN, tasks="sql,e2e,gsm8k", prompts=2, max_new_tokens=24)
def costs(ask: PipeFlags) -> Iterator[Table | None]:
    """Real time, on an idle machine: verdicts, pruning, frames and plans, by requests at once."""
    found = prompts(ask, ask.max_new_tokens or 0)
    yield None
    costs_of(ask, 1, found)  # a warm-up
    ticks: list[tuple[tuple[int, int], float]] = []
    plans: list[tuple[tuple[int], float]] = []
    rows = []
    for batch in ask.few((1, 2, 4, 8, 16)):
        own = costs_of(ask, batch, found)
        ticks += [((count, batch), took) for count, took in own.ticks]
        plans += [((count,), took) for count, took in own.plans]
        shown = [
            f"{median(n for n, _ in some)}, {1e3 * median(s for _, s in some):.2f}" for some in (own.ticks, own.plans)
        ]
        rows.append([str(batch), *shown])
    tick, plan = (fitted_ms(*zip(*found, strict=True)) for found in (ticks, plans))
    yield Table(
        title="What a tick costs beside the layers",
        head=("B", "rows in flight, coordinator's ms", "rows of a frame, plan's ms"),
        parts={"": rows},
        values={"coordinator_ms": tick, "plan_ms": plan},
        remarks=[
            f"coordinator: {tick[0]:.2f} ms a tick, {1e3 * tick[1]:.1f} us a row in flight, {tick[2]:.2f} ms a request",
            f"a stage's plan: {plan[0]:.3f} ms a frame and {1e3 * plan[1]:.1f} us a row",
        ],
        how=[[f"{ask.stages} stages in turn, w = {ask.width}, k = {ask.children}, {LEAP} - B rows at most, medians"]],
        same=True,
    )
