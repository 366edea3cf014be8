"""A drafter trained within a time: at one rate as long as it pays, then while the rate falls to nearly nothing.

How long a run can be is not known before it ends, and a rate that falls with the steps would have to know. So the first
part has a constant rate and ends where its time is over, or where the rest of it would bring next to nothing; the
second part continues from its result, over as many steps as there is time for (a warm-up, a plateau and a fall, as in
Hu et al. 2024, MiniCPM). Both are ordinary runs of `train.job`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from ..core.errors import CapabilityError, ConfigError
from ..model.families import DecoderConfig
from ..train.data import SourceSpec
from ..train.job import TrainingJob, finish, prepare
from ..train.trainer import LOG, Phase, TrainConfig, Trainer

ROWS = 4  # of a step
FALL = 0.2  # of the training's time, in which the rate falls
LEAST_GAIN = 0.01  # in tokens a pass, below which the first part ends
CHECKS = 12  # of the first part
LEVEL = 2  # consecutive checks that must agree: one may be an accident
HOT_TOKENS = 16_384  # of a larger vocabulary, which are drafted and learned alone; a quarter of it at most
RATE, WIDTH = 4e-4, 576  # learning rate of a head that begins as the target's last layer, at this width of the target
FROM_NOTHING = 5.0  # times that, for one that begins at random


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The settings that all runs of one drafter share."""

    kind: str
    target: Path
    shape: DecoderConfig
    sources: Sequence[SourceSpec]
    held_out: Sequence[SourceSpec]
    length: int  # tokens of a row
    cache: Path
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # next to those that `options_of` chooses


def options_of(plan: TrainingPlan) -> dict[str, Any]:
    """Return the options of its kind for its target."""
    vocab = plan.shape.vocab_size
    hot = {"hot_head": min(0.25, HOT_TOKENS / vocab)} if vocab > HOT_TOKENS else {}
    return {"anchors": 0.5, "start": "target", **hot, **plan.options}


def rate_of(options: Mapping[str, Any], shape: DecoderConfig) -> float:
    """Return the highest learning rate: smaller for wider targets, larger for modules that begin at random."""
    start = 1.0 if options.get("start") == "target" else FROM_NOTHING
    return min(3e-3, RATE * start * WIDTH / shape.d_model)


def job_of(plan: TrainingPlan, out: Path, config: TrainConfig, init: Path | None = None) -> TrainingJob:
    """Return one run."""
    return TrainingJob(
        kind=plan.kind,
        options=options_of(plan),
        config=config,
        phases=[Phase(rows=ROWS, length=plan.length)],
        sources=plan.sources,
        held_out=plan.held_out,
        target=plan.target,
        init=init,
        out=out,
        cache=plan.cache,
    )


def config_of(plan: TrainingPlan, steps: int, **changes: Any) -> TrainConfig:
    """Return how a run is trained."""
    rate = rate_of(options_of(plan), plan.shape)
    common = {"warmup": min(50, max(1, steps // 10)), "weight_decay": 0.02, "seed": plan.seed}
    return TrainConfig(**{"steps": steps, "learning_rate": rate, **common, **changes})


def trainable(
    plan: TrainingPlan, out: Path, config: TrainConfig, say: Callable[[str], None]
) -> tuple[TrainingPlan, TrainingJob, Trainer]:
    """Return a run, ready; if the target's last layer cannot be the start, one that begins at random."""
    try:
        job = job_of(plan, out, config)
        return plan, job, prepare(job, (), say)
    except CapabilityError as error:
        if not error.subject.startswith("start="):
            raise
        plan = replace(plan, options={**plan.options, "start": "random"})
        config = replace(config, learning_rate=rate_of({"start": "random"}, plan.shape))
        job = job_of(plan, out, config)
        return plan, job, prepare(job, (), say)


# -- the run


class TrainingPace:
    """Watches a run: ends it where its time is over or little is left to gain, and reports its progress.

    Args:
        left: seconds that the part has left.
        tokens: that the whole training is expected to learn from.
        tell: called with the figures of each step.
    """

    def __init__(self, rest: Callable[[], float], tokens: float, tell: Callable[[Mapping[str, float]], object]) -> None:
        self.left, self.tokens, self.tell = rest, tokens, tell
        self.checks: list[tuple[float, float]] = []
        self.trainer: Trainer | None = None
        self.early = False  # whether it ended since little was left to gain
        self._seen, self._level = 0.0, 0

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Do what `Watcher` describes."""
        self._seen = figures["tokens"]
        self.tell(figures)
        if self.left() <= 0:
            self._end()

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Do what `Watcher` describes."""
        if (value := accepted_of(figures)) is not None:
            self.checks.append((self._seen, value))
            self._level = self._level + 1 if further_gain(self.checks, self.tokens) < LEAST_GAIN else 0
            if self._level == LEVEL:
                self.early = True
                self._end()

    def _end(self) -> None:
        assert self.trainer is not None
        self.trainer.stop()


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


def accepted_of(figures: Mapping[str, float]) -> float | None:
    """Mean accepted tokens of a draft over the held-out domains; None: none was measured."""
    lengths = [value for name, value in figures.items() if name.startswith("accepted/")]
    return fmean(lengths) if lengths else None


def _logged(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log."""
    log = run / LOG
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def accepted_in(run: Path) -> list[tuple[float, float]]:
    """Return the checks in the log of a run's folder: tokens seen, accepted tokens of a draft."""
    curve, tokens = [], 0.0
    for figures in _logged(run):
        tokens = figures.get("tokens", tokens)
        if (value := accepted_of(figures)) is not None:
            curve.append((tokens, value))
    return curve


def train(
    plan: TrainingPlan,
    out: Path,
    steps: int,
    checks: int,
    rest_s: Callable[[], float],
    tell: Callable[[str, Mapping[str, float]], None],
    say: Callable[[str], None],
    once: Callable[[str, Callable[[], Any]], Any],
) -> dict[str, Any]:
    """Train both parts, except those that are done.

    Args:
        steps: most of the first part, which its data are scored for.
        checks: most of the first part, on held-out prompts.
        rest_s: seconds that are left for both.
        tell: called with each step's part and figures.
        once: gives what a phase gave, or makes it; see `RunFolder`.

    Returns:
        Where the result is, and how it went; ready for JSON.

    Raises:
        KeyboardInterrupt: a signal ended it, with a checkpoint.
        ConfigError: a full disk; a loss that is not finite. Results so far are kept.
    """
    began = rest_s()
    first, second = out / "first", out / "second"
    every = max(1, steps // min(CHECKS, checks))
    config = config_of(plan, steps, schedule="constant", evaluate_every=every)
    plan, job, trainer = trainable(plan, first, config, say)
    config = trainer.config
    trainer.resume()
    pace = TrainingPace(lambda: rest_s() - FALL * began, float(steps * ROWS * plan.length), partial(tell, "training"))
    pace.checks = accepted_in(first)

    def run_first() -> dict[str, Any]:
        _run(trainer, pace)
        if not trainer.step:
            raise ConfigError("--hours", "the time ended before the first step of training", "raise --hours")
        finish(job, trainer)
        speeds = [line["tokens_per_s"] for line in _logged(first) if line.get("tokens_per_s")]
        earlier = {"steps": trainer.step, "tokens": trainer.tokens, "early": pace.early}
        return earlier | {"speed": median(speeds or [ROWS * plan.length])}

    facts, result = once("first part", run_first), first / "result"
    room = rest_s() * 0.9 * facts["speed"] / (ROWS * plan.length)
    fall = once("last steps", lambda: max(5, min(facts["steps"] // 2, int(room))))
    falling = config_of(plan, fall, schedule="linear", final_ratio=0.05, learning_rate=config.learning_rate)
    falling = replace(falling, warmup=min(5, fall), evaluate_every=fall)
    falls = job_of(plan, second, falling, init=result)
    trainer = prepare(falls, (), say)  # the first one's memory is free from here on
    trainer.resume()
    pace = TrainingPace(rest_s, 0.0, partial(tell, "last steps"))
    if not trainer.finished:
        _run(trainer, pace)
    last = finish(falls, trainer)
    earlier, final = accepted_in(first), accepted_in(second)
    better = not final or not earlier or final[-1][1] >= earlier[-1][1]
    return {
        "result": str((last if better else result).relative_to(out.parent)),
        "tokens": facts["tokens"] + trainer.tokens,
        "steps": facts["steps"] + trainer.step,
        "early": facts["early"],
        "checks": earlier + [(facts["tokens"] + n, value) for n, value in final],
    }


def _run(trainer: Trainer, pace: TrainingPace) -> None:
    """Run to the end, or to where ``pace`` ends it.

    Raises:
        KeyboardInterrupt: a signal ended it.
    """
    pace.trainer = trainer
    trainer.watchers.append(pace)
    if pace.left() > 0:
        trainer.run()
    if trainer.interrupted:
        raise KeyboardInterrupt
