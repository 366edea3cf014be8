"""Which kind of drafter to train, how far that goes in the time, and what it would be worth: forecasts made before.

    tokens learned  from measured speeds of answering, scoring and training, and the time
    accepted        from those, by what drafters of the kind reached (`reached.toml`), of the target nearest in size
    times plain     tokens a pass, over what draft and pass take beside one row, which is measured

The chance that a drafted token is accepted is taken to be the same at every depth (`planning.acceptance`). Beside
look-ups, where those are right a drafter is taken to be right, too: what it is worth there is not counted twice.
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
from ..planning.acceptance import Acceptance, accept_of
from ..planning.throughput import RoundCost

EPOCHS = 3.0  # times that each answer is learned from
CERTAIN = 0.9  # most that a forecast takes a chance to be
SLOPE_DECADES = 0.5  # beyond a run's end its last slope goes on for so many decades of tokens


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the survey measured of one kind."""

    score: float  # tokens a second of the target's words on disk
    train: float  # tokens a second of training
    draft_ms: float  # a draft of `depth` tokens
    depth: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was measured before anything was chosen; ready for JSON."""

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
        """The table of costs."""
        own = {"chain": tuple(map(tuple, self.chain)), "plain": tuple(map(tuple, self.plain))}
        return CostTable(**own, context=self.context, context_ms=self.context_ms, source="the survey")  # type: ignore[arg-type]

    @classmethod
    def of(cls, parts: Sequence[Mapping[str, Any]]) -> Survey:
        """Of what its parts measured, as it comes from JSON."""
        values = {name: value for part in parts for name, value in part.items()}
        return cls(**values | {"kinds": {name: Speeds(**own) for name, own in values["kinds"].items()}})


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One kind, and what is expected of it; ready for JSON."""

    kind: str
    depth: int  # tokens that it drafts
    tokens: int  # of answers and prompts that it is trained on, each epoch counted
    answers: int  # tokens of answers that are asked for
    accepted: float  # of a draft, on average
    alone: float  # times plain decoding
    hybrid: float  # beside look-ups
    source: str  # of what was reached


def forecasts(survey: Survey, seconds: float) -> list[Forecast]:
    """Every kind that was measured, the one expected to pay most first; alone, where that is equal beside look-ups.

    Args:
        seconds: for answers, scores and training.
    """
    found = [forecast(survey, kind, speeds, seconds) for kind, speeds in survey.kinds.items()]
    return sorted(found, key=lambda made: (-made.hybrid, -made.alone))


def forecast(survey: Survey, kind: str, speeds: Speeds, seconds: float) -> Forecast:
    """One kind, at the depth that pays most."""
    answers = answer_tokens(survey, speeds, seconds)
    tokens = round(EPOCHS * survey.prompt_share * answers)
    run = nearest(kind, survey.parameters)
    accepted = reached(run, tokens)
    chance = min(CERTAIN, accept_of(min(1 + accepted, run["depth"] + 1), run["depth"]))
    guess, table, ways = Acceptance(accept=chance, source=run["source"]), survey.costs, []
    for depth in range(1, speeds.depth + 1):
        draft = speeds.draft_ms * depth / speeds.depth
        cost = RoundCost(plain=table.chain_ms(1), draft=draft, verify=table.chain_ms(1 + depth))
        tau = guess.tokens(depth)
        round_passes = tau / cost.multiplier(tau)
        ways.append((beside_look_ups(survey, tau, depth, round_passes), cost.multiplier(tau), depth, tau - 1))
    hybrid, alone, depth, drafted = max(ways)
    return Forecast(
        kind=kind,
        depth=depth,
        tokens=tokens,
        answers=answers,
        accepted=drafted,
        alone=max(1.0, alone),
        hybrid=max(1.0, survey.lookup_speed, hybrid),
        source=f"{run['target']} ({run['source']})",
    )


def beside_look_ups(survey: Survey, tau: float, depth: int, round_passes: float) -> float:
    """Times plain decoding of a drafter and look-ups together.

    Where look-ups are right the drafter is taken to be right to its depth, and the look-up drafts; elsewhere the
    drafter gives what is left of its mean:

        passes a token  = copied / copied_tokens + (1 - copied) / rest
        1 / tau         = copied / (depth + 1)   + (1 - copied) / rest

    Args:
        tau: tokens a pass of the drafter alone.
        round_passes: what its draft and its pass take, in passes of one row.
    """
    copied, other = survey.copied, 1 - survey.copied
    seconds = 1 / survey.lookup_speed  # of a token, in passes of one row
    if other <= 0:
        return survey.lookup_speed
    looked = max(copied / survey.copied_tokens, seconds - other)  # where look-ups are right
    passes = max(other / (depth + 1), min(other, 1 / tau - copied / (depth + 1)))
    return 1 / (looked + passes * round_passes)


def answer_tokens(survey: Survey, speeds: Speeds, seconds: float) -> int:
    """Tokens of answers for which the time is enough: to ask for them, to score them once, to learn from each of them
    `EPOCHS` times."""
    share = survey.prompt_share
    each = 1 / survey.answer + share / speeds.score + EPOCHS * share / speeds.train
    return max(0, int(seconds / each))


# -- what drafters reached


@cache
def runs() -> list[dict[str, Any]]:
    """Runs whose held-out figures are known; see `tools/reached.py`."""
    text = (resources.files(__package__) / "reached.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["run"]
    return found


def nearest(kind: str, parameters: int) -> dict[str, Any]:
    """The run of a kind whose target is nearest in size."""
    own = [run for run in runs() if run["kind"] == kind]
    return min(own, key=lambda run: abs(math.log(run["parameters"] / max(1, parameters))))


def reached(run: Mapping[str, Any], tokens: float) -> float:
    """Accepted tokens of a draft after so many tokens of training.

    On a line over the logarithm of tokens, from 0 at a tenth of the first ones; beyond the end as it rose at last.
    """
    points = [(run["reached"][0][0] / 10, 0.0), *run["reached"]]
    places, values = zip(*[(math.log10(n), value) for n, value in points], strict=True)
    at = math.log10(max(1.0, tokens))
    found = float(np.interp(at, places, values))
    if at > places[-1]:
        back = float(np.interp(places[-1] - SLOPE_DECADES, places, values))
        found += (values[-1] - back) * min(1.0, (at - places[-1]) / SLOPE_DECADES)
    return found * float(run["first"])


# -- whether going on is worth it


def further_gain(checks: Sequence[tuple[float, float]], tokens: float) -> float:
    """By what factor tokens a pass would still grow until ``tokens`` were learned from: what the last checks rose by a
    logarithm of tokens, and went on to.

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
