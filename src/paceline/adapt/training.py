"""Train a drafter within a time: a few steps show how many there is time for, and the rate falls over so many.

A step's answers are scored when a run begins that reads them: where time is short most never are.

Both are ordinary runs of `train.job`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..model.families import DecoderConfig
from ..train.job import TrainingJob, finish, prepare
from ..train.trainer import Phase, TrainConfig, Trainer

ROWS = 4  # of a step
TIMED = 12  # steps that show how long one takes
SLACK = 0.85  # of the steps that fit by that: the machine may become slower
HOT_TOKENS = 16_384  # of a larger vocabulary, which are drafted and learned alone; a quarter of it at most
RATE, WIDTH = 4e-4, 576  # learning rate of a head that begins as the target's last layer, at this width of the target
FROM_NOTHING = 5.0  # times that, for one that begins at random


Progress = Callable[[Mapping[str, float]], object]


def job_of(
    *,
    shape: DecoderConfig,
    length: int,
    steps: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    **job: Any,
) -> TrainingJob:
    """Return a run; its highest rate is smaller for wider targets, larger for modules that begin at random.

    Args:
        shape: of the target.
        length: tokens of a row.
        options: of its kind, before those that its target suggests.
        config: fields of its `TrainConfig`, in the same way.
        job: further fields of `TrainingJob`.
    """
    hot = {"hot_head": min(0.25, HOT_TOKENS / shape.vocab_size)} if shape.vocab_size > HOT_TOKENS else {}
    options = {"anchors": 0.5, "start": "target", **hot, **(options or {})}
    start = 1.0 if options["start"] == "target" else FROM_NOTHING
    settings = {
        "steps": steps,
        "learning_rate": min(3e-3, RATE * start * WIDTH / shape.d_model),
        "warmup": min(50, max(1, steps // 10)),
        "weight_decay": 0.02,
        "schedule": "linear",
        "final_ratio": 0.05,
        "seed": seed,
        "evaluate_every": 0,  # the verdict measures what it is worth
        **(config or {}),
    }
    return TrainingJob(options=options, config=TrainConfig(**settings), phases=[Phase(rows=ROWS, length=length)], **job)


def accepted_of(figures: Mapping[str, float]) -> float | None:
    """Mean accepted tokens of a draft over the held-out domains; None: none was measured."""
    lengths = [value for name, value in figures.items() if name.startswith("accepted/")]
    return fmean(lengths) if lengths else None


def train(
    plan: Callable[..., TrainingJob],
    out: Path,
    epoch: float,
    most: int,
    left_s: Callable[[], float],
    tell: Progress,
    say: Callable[[str], None],
    once: Callable[[str, Callable[[], Any]], Any],
) -> dict[str, Any]:
    """Train the drafter, or continue.

    Args:
        plan: `job_of`, but for its steps and its folder.
        epoch: steps that read each answer once.
        most: steps at most.
        left_s: seconds that are left.
        tell: called with each step's figures.
        once: gives what a phase gave, or makes it; see `RunFolder`.

    Returns:
        Where the result is, and how it went; ready for JSON.

    Raises:
        KeyboardInterrupt: a signal ended it, with a checkpoint.
        ConfigError: a full disk; a loss that is not finite. Results so far are kept.
    """

    def run(part: str, steps: int, until: int, **more: Any) -> tuple[TrainingJob, Trainer]:
        def watch(step: int, figures: Mapping[str, float]) -> bool:
            tell(figures)
            return step >= until or left_s() <= 0

        job = plan(out=out / part, steps=steps, **more)
        try:
            trainer = prepare(job, watch, say)
        except CapabilityError as error:  # the target's last layer cannot be the start
            if not error.subject.startswith("start="):
                raise
            job = plan(out=out / part, steps=steps, options={"start": "random"}, **more)
            trainer = prepare(job, watch, say)
        trainer.resume()
        if trainer.step < until:
            trainer.run()
        if trainer.interrupted:
            raise KeyboardInterrupt
        return job, trainer

    def possible() -> int:
        shutil.rmtree(out / "timed", ignore_errors=True)
        cache = out / "timed" / "states"  # of its own: what an earlier run has scored would seem to take no time
        first, before_s = min(TIMED, most), left_s()
        run("timed", first, 0, cache=cache)  # loads, and scores what so many steps read
        scoring_s, before_s = before_s - left_s(), left_s()
        _, trainer = run("timed", first, first, cache=cache)  # loads, and takes them
        loading_s = before_s - left_s() - trainer.seconds
        step_s, scored_s = (s / max(1, trainer.step) for s in (trainer.seconds, max(0.0, scoring_s - loading_s)))
        time_s = SLACK * (left_s() - loading_s)
        steps = min(most, int(max(time_s / (step_s + scored_s), (time_s - epoch * scored_s) / step_s)))
        if steps < min(most, TIMED):
            raise ConfigError("--hours", f"{max(0, steps)} steps fit the time that is left", "give more hours")
        return steps

    steps = once("steps", possible)
    job, trainer = run("run", steps, steps)
    result = finish(job, trainer)
    return {"result": str(result.relative_to(out.parent)), "tokens": trainer.tokens, "steps": trainer.step}
