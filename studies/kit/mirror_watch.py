"""What becomes of windows in the mirror round, and the times of its steps.

Source: Mirror Speculative Decoding, section 3.1, eq. 9, 10 and 14.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import Levels
from paceline.engine.passes import Pass
from paceline.papers.mirror.rollout import Branch, Outcome, Rollout
from paceline.papers.mirror.round import MirrorRound

MARKS = "began", "drafted", "halfway", "prepared", "started", "checked", "emitted", "ended"  # moments of a step


@dataclass(frozen=True, slots=True)
class WindowVerdict:
    """What became of one sequence's window in one pass."""

    key: int
    window: list[int]  # tokens that were verified
    accepted: int
    said: int  # the correction, or the bonus token
    told: bool  # whether the exit spoke and a draft could follow: what was said is then reused, or a fallback
    reused: bool
    prepared: int  # tokens of the next window that were drafted before the verdict
    candidates: list[int]  # where the window ended, likeliest first; empty: the exit did not speak
    chances: list[float]  # the target's own probability of each

    @property
    def mass(self) -> float:
        """Of the candidates together: the overlap mass of eq. 9 where the window ended."""
        return sum(self.chances)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the terms of eq. 10 and 14 were in one step, in ms. They are no forecast of it: together they are the step.

    While the rollout runs beside the target ``exposed`` is what of ``draft`` the step had to wait for; between the
    layers it is all of it. Of sessions elsewhere ``draft`` is from the start of the rollout until they had drafted the
    last level that they were not called off from, and what was still missing after that.
    """

    fresh: float  # windows drafted before the pass, after outcomes that were not prepared for
    prefix: float  # T_target^{1:l_e}
    rendezvous_exit: float  # the exit's scores, the token channel, candidates laid out
    suffix: float  # T_target^{l_e+1:N}, head and verdict
    exposed: float
    rendezvous_final: float  # the verdict told, surviving branches kept: T_rv^(fv)
    host: float  # emitting tokens, keeping K/V
    draft: float  # T_draft^gen
    nodes: int  # drafted in it


@dataclass(slots=True)
class Laps:
    """What a rollout drafted, and when."""

    ms: float = 0.0  # that its levels took
    told_ms: float = 0.0  # that telling the drafter the verdict took
    nodes: int = 0  # drafted
    prepared: dict[Outcome, int] = field(default_factory=dict)  # tokens that were there at the verdict

    @staticmethod
    def of(rollout: Any) -> Laps:
        """Count and time what a rollout does from now on."""
        laps, began = Laps(), [0.0]
        start, end, go_on, take = rollout.start, rollout._end, rollout._go_on, rollout.take

        def started() -> None:
            began[0] = perf_counter()
            start()

        def ended() -> None:
            growing = rollout._growing
            end()
            if growing is not None:  # of what was drafted, also where nobody looked before the verdict
                laps.ms += ((growing.times[-1][1] if growing.times else perf_counter()) - began[0]) * 1e3

        def gone_on(*args: Any) -> dict[Outcome, Branch]:
            before = perf_counter()
            reused: dict[Outcome, Branch] = go_on(*args)
            laps.told_ms = (perf_counter() - before) * 1e3
            laps.prepared = {outcome: len(branch.chain) for outcome, branch in reused.items()}
            return reused

        def taken(answers: Mapping[int, Any]) -> None:
            take(answers)
            laps.nodes += sum(len(new.nodes) for new in answers.values())

        rollout.start, rollout._end, rollout._go_on, rollout.take = started, ended, gone_on, taken
        return laps


def watch(
    round_: MirrorRound,
    on_verdict: Callable[[WindowVerdict], None],
    on_step: Callable[[StepTimes], None] = lambda times: None,
) -> None:
    """Have every verdict told, and the times of every step, by what the methods of a step take and return."""
    watched: Any = round_
    marks: dict[str, float] = {}
    results: dict[str, Any] = {}  # by method: what it returned last
    windows: dict[int, TokenTree] = {}  # of the step

    def around(name: str, before: str = "", after: str = "") -> None:
        """Note when a method of the step begins and ends, and what it returns."""
        whole = getattr(round_, name)

        def noted(*args: Any) -> Any:
            marks[before] = perf_counter()
            if name == "_speak":
                windows.update(args[1])
            results[name] = whole(*args)
            marks[after] = perf_counter()
            return results[name]

        setattr(watched, name, noted)

    around("_open", before="began")
    around("_draft_fresh", after="drafted")
    around("_speak", before="halfway")
    around("_prepare")
    prepare, laps = round_._prepare, list[Laps]()

    def prepared(*args: Any) -> Rollout:
        rollout = prepare(*args)
        laps[:] = [Laps.of(rollout)]
        return rollout

    watched._prepare = prepared
    around("_start", before="prepared", after="started")
    emit, finish = watched.emitter.emit, round_._finish
    verdicts: list[WindowVerdict] = []

    def emitted(p: Pass) -> None:
        marks["checked"] = perf_counter()
        verdicts[:] = _verdicts(p, windows, results["_speak"])
        windows.clear()
        emit(p)

    def finished(said: Mapping[Outcome, abc.Sequence[int]], ended: abc.Sequence[int]) -> Mapping[Outcome, Branch]:
        marks["emitted"] = perf_counter()
        reused = finish(said, ended)
        marks["ended"] = perf_counter()
        for verdict in verdicts:
            outcome = verdict.key, verdict.accepted, verdict.said
            prepared = laps[-1].prepared.get(outcome, 0)
            on_verdict(replace(verdict, reused=outcome in reused, prepared=prepared))
        if "checked" in marks:  # in a step, and not where sequences are released
            on_step(_times(laps[-1], *(marks.pop(name) for name in MARKS)))
        verdicts.clear()
        return reused

    watched.emitter.emit, watched._finish = emitted, finished


def _times(
    laps: Laps,
    began: float,
    drafted: float,
    halfway: float,
    prepared: float,
    started: float,
    checked: float,
    emitted: float,
    ended: float,
) -> StepTimes:
    """Of the moments of a step; see `MARKS`."""
    return StepTimes(
        fresh=(drafted - began) * 1e3,
        prefix=(halfway - drafted) * 1e3,
        rendezvous_exit=(prepared - halfway) * 1e3,
        suffix=(checked - started) * 1e3,
        exposed=(started - prepared + ended - emitted) * 1e3 - laps.told_ms,
        rendezvous_final=laps.told_ms,
        host=(emitted - checked) * 1e3,
        draft=laps.ms,
        nodes=laps.nodes,
    )


def _verdicts(p: Pass, windows: Mapping[int, TokenTree], messages: Mapping[int, Levels]) -> list[WindowVerdict]:
    """What came out of the windows; taken before tokens are emitted, while samplers stand in front of them."""
    found = []
    for i in p.generating:
        view, window = p.works[i].sequence, windows[i]
        if view.fault is not None or p.works[i].rows > 1:
            continue
        accepted, message = len(p.paths[i]), messages.get(i)
        candidates, chances = list[int](), list[float]()
        if message is not None:
            logits, candidates = p.logits[p.rows[i].start + accepted], message[0][accepted]
            chances = overlap(view, window.tokens, accepted, logits, candidates)
        said, drafts_follow = p.tokens[i][accepted], p.works[i].max_depth > accepted + 1
        told = message is not None and drafts_follow
        found.append(WindowVerdict(view.key, window.tokens, accepted, said, told, False, 0, candidates, chances))
    return found


def overlap(
    view: Sequence, window: abc.Sequence[int], accepted: int, logits: Tensor, said: abc.Sequence[int]
) -> list[float]:
    """The target's own probability of each candidate, where the window ended; their sum is the mass of eq. 9.

    In front of the window's end it is renormalised without the window's own next token, which was wrong.

    Args:
        view: the sequence, as it was before the pass.
        window: [gamma] drafted tokens.
        accepted: how many of them were.
        logits: [V] of the target behind the last accepted one.
        said: the candidates of that position.
    """
    path = torch.tensor([window[:accepted]], device=logits.device) if accepted else None
    p = view.sampler.probs(logits[None], path)[0]
    left = 1.0 - float(p[window[accepted]]) if accepted < len(window) else 1.0
    return [chance / left if left > 0 else 0.0 for chance in p[list(said)].tolist()]
