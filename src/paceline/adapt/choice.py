"""Which kind of drafter to train, how far that goes in the time, and what it would be worth: forecasts made before.

    tokens learned  from measured speeds of answering, scoring and training, and the time
    accepted        from those, by what drafters of the kind reached (`reached.toml`), of the target nearest in size
    times plain     tokens a pass, over what steps take that draft so many nodes, which is measured

The table's figures are of checks, which count a chain at every place of a text; what the engine's trees accept of such
a drafter was measured next to them, at the nodes that the budget chose. Of fewer nodes it is less, as the logarithm of
their number. Where look-ups are right a drafter is assumed to be right, too: what it is worth there is not
counted twice.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from ..engine.costs import CostTable

EPOCHS = 3.0  # times that each answer is learned from
CLOSE = 0.9  # of the best, above which another kind may be as good: measurements of a few seconds are no better
CERTAIN = 0.9  # most that a forecast takes a chance to be
SLOPE_DECADES = 0.5  # beyond a run's end its last slope continues for so many decades of tokens


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of one kind, measured by the survey."""

    score: float  # tokens a second of the target's words on disk
    train: float  # tokens a second of training
    steps: Sequence[tuple[float, float]]  # nodes that are drafted, and what such a step takes, in plain steps
    start: float = 0.0  # seconds before the first step, scores aside


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Measurements that precede the choice; ready for JSON."""

    chain: Sequence[tuple[int, float]]  # rows of one sequence, ms of a pass
    plain: Sequence[tuple[int, float]]  # sequences of one row, ms of a pass
    context: int  # tokens in front of the rows
    context_ms: float  # what 1,000 further tokens add
    answer: float  # tokens a second that the model answers, many at once
    lookup_tokens: float  # tokens a pass of look-ups on the prompts
    lookup_speed: float  # times plain decoding
    copied: float  # share of the tokens that came from passes in which a look-up was right
    copied_tokens: float  # tokens of such a pass
    parameters: int  # of the target
    prompt_share: float  # tokens of prompt and answer, over those of the answer
    kinds: Mapping[str, Speeds] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  # kinds that were not measured, and why

    @property
    def costs(self) -> CostTable:
        """Return the table of costs."""
        own = {"chain": tuple(map(tuple, self.chain)), "plain": tuple(map(tuple, self.plain))}
        return CostTable(**own, context=self.context, context_ms=self.context_ms, source="the survey")  # type: ignore[arg-type]

    @classmethod
    def of(cls, parts: Sequence[Mapping[str, Any]]) -> Survey:
        """Return the survey from JSON, with the types of its parts."""
        values = {name: value for part in parts for name, value in part.items()}
        return cls(**values | {"kinds": {name: Speeds(**own) for name, own in values["kinds"].items()}})


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One kind, and what is expected of it; ready for JSON."""

    kind: str
    nodes: int  # that it drafts
    step: float  # what such a step takes, in plain steps
    tokens: int  # of answers and prompts that it is trained on, each epoch counted
    answers: int  # tokens of answers to generate
    accepted: float  # of a draft, on average
    alone: float  # times plain decoding
    hybrid: float  # with look-ups
    source: str  # of what was reached


def forecasts(survey: Survey, seconds: float) -> list[Forecast]:
    """Return every kind that was measured, the one to be made first.

    That is the one expected to pay most next to look-ups. Times of steps differ from moment to moment, so kinds that
    differ by less than `CLOSE` are ranked by their value alone, and those that differ by less in that, too, by their
    acceptance.

    Args:
        seconds: for answers, scores and training.
    """
    found = [forecast(survey, kind, speeds, seconds) for kind, speeds in survey.kinds.items()]
    found.sort(key=lambda made: -made.hybrid)
    near = [made for made in found if made.hybrid >= CLOSE * found[0].hybrid]
    alone = max((made.alone for made in near), default=1.0)
    first = max((made for made in near if made.alone >= CLOSE * alone), key=lambda made: made.accepted, default=None)
    return sorted(found, key=lambda made: made is not first)


def forecast(survey: Survey, kind: str, speeds: Speeds, seconds: float) -> Forecast:
    """Return the forecast of one kind, with the number of nodes that pays most."""
    answers = answer_tokens(survey, speeds, seconds)
    tokens = round(EPOCHS * survey.prompt_share * answers)
    run = nearest(kind, survey.parameters)
    most = min(CERTAIN * run["depth"], reached(run, tokens))
    counts, took = zip(*speeds.steps, strict=True)
    ways = []
    for nodes in range(1, round(counts[-1]) + 1):
        tau = 1 + min(most * min(1.0, math.log1p(nodes) / math.log1p(run["nodes"])), float(nodes))
        step = float(np.interp(nodes, counts, took))
        ways.append((beside_look_ups(survey, tau, min(nodes, run["depth"]), step), tau / step, nodes, tau - 1, step))
    hybrid, alone, nodes, accepted, step = max(ways)
    return Forecast(
        kind=kind,
        nodes=nodes,
        step=step,
        tokens=tokens,
        answers=answers,
        accepted=accepted,
        alone=max(1.0, max(way[1] for way in ways)),
        hybrid=max(1.0, survey.lookup_speed, hybrid),
        source=f"{run['target']} ({run['source']})",
    )


def beside_look_ups(survey: Survey, tau: float, depth: int, step: float) -> float:
    """Return the speed-up over plain decoding of a drafter and look-ups together.

    Where look-ups are right the drafter is taken to be right to its depth, and the look-up drafts; elsewhere the
    drafter gives what is left of its mean:

        passes a token  = copied / copied_tokens + (1 - copied) / rest
        1 / tau         = copied / (depth + 1)   + (1 - copied) / rest

    Args:
        tau: tokens a pass of the drafter alone.
        step: what a step with its draft takes, in plain steps.
    """
    copied, other = survey.copied, 1 - survey.copied
    seconds = 1 / survey.lookup_speed  # of a token, in plain steps
    if other <= 0:
        return survey.lookup_speed
    looked = max(copied / survey.copied_tokens, seconds - other)  # where look-ups are right
    passes = max(other / (depth + 1), min(other, 1 / tau - copied / (depth + 1)))
    return 1 / (looked + passes * step)


def answer_tokens(survey: Survey, speeds: Speeds, seconds: float) -> int:
    """Return how many tokens of answers fit into the time.

    The time covers generating them, scoring them once, and learning from each of them `EPOCHS` times.
    """
    return max(0, int(seconds / answer_seconds(survey, speeds)))


def answer_seconds(survey: Survey, speeds: Speeds) -> float:
    """Return the seconds that a token of an answer takes: to generate it, to score it, to learn from it."""
    share = survey.prompt_share
    return 1 / survey.answer + share / speeds.score + EPOCHS * share / speeds.train


# -- what drafters reached


@cache
def runs() -> list[dict[str, Any]]:
    """Return runs whose held-out figures are known; see `tools/reached.py`."""
    text = (resources.files(__package__) / "reached.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["run"]
    return found


def nearest(kind: str, parameters: int) -> dict[str, Any]:
    """Return the run of a kind whose target is nearest in size."""
    own = [run for run in runs() if run["kind"] == kind]
    return min(own, key=lambda run: abs(math.log(run["parameters"] / max(1, parameters))))


def reached(run: Mapping[str, Any], tokens: float) -> float:
    """Return accepted tokens of the engine's drafts, of the run's ``nodes``, after so many tokens of training.

    They lie on a line over the logarithm of tokens, from 0 at a tenth of the first ones; beyond the end with the last
    slope.
    """
    points = [(run["reached"][0][0] / 10, 0.0), *run["reached"]]
    places, values = zip(*[(math.log10(n), value) for n, value in points], strict=True)
    at = math.log10(max(1.0, tokens))
    found = float(np.interp(at, places, values))
    if at > places[-1]:
        back = float(np.interp(places[-1] - SLOPE_DECADES, places, values))
        found += (values[-1] - back) * min(1.0, (at - places[-1]) / SLOPE_DECADES)
    return found * float(run["used"])


# -- whether going on is worth it


def further_gain(checks: Sequence[tuple[float, float]], tokens: float) -> float:
    """Return the factor by which tokens a pass would still grow until ``tokens`` were learned from.

    It continues the rise of the last checks by the logarithm of tokens.

    Args:
        checks: tokens and accepted tokens of a draft, of each check.
        tokens: at the end.
    """
    if len(checks) < 3 or tokens <= checks[-1][0]:
        return math.inf
    recent = checks[-4:]
    x, y = np.log([n for n, _ in recent]), np.array([value for _, value in recent])
    slope = float(np.polyfit(x, y, 1)[0])
    return max(0.0, slope) * math.log(tokens / checks[-1][0]) / (1 + float(y[-1]))
