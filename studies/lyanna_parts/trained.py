"""What training and its data say: curves (figure 5), coverage of hot tokens (figure 7)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import figures
from kit.figures import Panel, Series
from kit.study import Table

from lyanna_parts.common import STEPS, LyannaFlags, study, verdict
from paceline.core.errors import ConfigError
from paceline.train.data import Encoder, load_source
from paceline.train.job import occurrences
from paceline.train.recipe import RecipeFile, locate, read_recipe
from paceline.train.trainer import LOG
from paceline.weights.source import load_tokenizer, read_config, resolve_folder

KINDS = {"acceptance": "the likeliest token", "acceptance_top4": "one of the four likeliest"}
HOT = 0.25  # share of the vocabulary (section 6.1)
COVERED = 0.94  # of occurrences, in figure 7
MANY = 40  # points of a line from which on they have no marks

# -- logs


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a training run wrote down."""

    loss: dict[int, float]  # by step
    accuracy: dict[str, dict[int, list[float]]]  # kind -> training step -> [STEPS] means over domains


def read_log(folder: str) -> Log:
    """The log of a run.

    Raises:
        ConfigError: there is none, it is broken, or nothing was evaluated in it.
    """
    path = Path(folder) / LOG
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        loss = {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}
        held = {int(line["step"]): line for line in lines if any(key.startswith("acceptance/") for key in line)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"name the folder that a training run had as --out; it holds {LOG}"
        raise ConfigError(f"training run {folder}", f"{path.name} cannot be read ({error})", remedy) from error
    if not held:
        wrong = f"{LOG} has no held-out acceptance"
        raise ConfigError(f"training run {folder}", wrong, "train with held-out data and evaluate_every")
    return Log(
        loss=loss,
        accuracy={kind: {step: by_step(line, kind) for step, line in held.items()} for kind in KINDS},
    )


def by_step(figures_: Mapping[str, Any], kind: str) -> list[float]:
    """[STEPS] of held-out figures, the mean over domains; 0 at a step that no domain has."""
    found = []
    for step in range(1, STEPS + 1):
        own = [float(v) for k, v in figures_.items() if k.startswith(f"{kind}/") and k.endswith(f"/{step}")]
        found.append(sum(own) / len(own) if own else 0.0)
    return found


def mean(values: Sequence[float]) -> float:
    """Over steps."""
    return sum(values) / len(values)


@study.figure(needs=("runs",))
def figure_5(ask: LyannaFlags) -> Iterator[Table | None]:
    """Training loss and held-out acceptance of each step, by training step, of several runs."""
    logs = {name: read_log(folder) for name, folder in ask.runs.items()}
    yield None
    kind = "acceptance_top4"
    rows = [
        [name, str(step), *(f"{value:.3f}" for value in values), f"{mean(values):.3f}"]
        for name, log in logs.items()
        for step, values in log.accuracy[kind].items()
    ]
    yield Table(
        title=f"Held-out acceptance while training ({KINDS[kind]}; mean over domains)",
        head=("run", "training step", *(f"step {d}" for d in range(1, STEPS + 1)), "mean"),
        parts={"": rows},
        values={"runs": {name: vars(log) for name, log in logs.items()}},
        remarks=["of the rows where every step before named the target's token, the share where this step does"],
        how=[[f"{name}: {folder}" for name, folder in ask.runs.items()]],
        plots={".svg": lambda path: figures.lines(_curves(logs, kind), path)},
    )


def _curves(logs: Mapping[str, Log], kind: str) -> list[Panel]:
    def line(name: str, points: Mapping[int, float]) -> Series:
        return Series(label=name, x=[*points], y=[*points.values()], marker="none" if len(points) > MANY else None)

    panels = [("Training loss", "loss", [line(name, log.loss) for name, log in logs.items()])]
    for d in range(STEPS):
        own = [line(name, {s: v[d] for s, v in log.accuracy[kind].items()}) for name, log in logs.items()]
        panels.append((f"Step {d + 1}", "acceptance, held out", own))
    return [Panel(title=t, series=s, x_label="training step", y_label=y) for t, y, s in panels]


# -- data


def data_of(ask: LyannaFlags) -> RecipeFile:
    """The recipe with its files found.

    Raises:
        ConfigError: a recipe or a file that is not there.
    """
    assert ask.recipe is not None and ask.corpus is not None
    return locate(read_recipe(ask.recipe), ask.corpus)


def encoder_for(ask: LyannaFlags, recipe: RecipeFile) -> tuple[Encoder, int]:
    """As the recipe's training has it, and the longest row."""
    longest = max(phase.length for phase in recipe.phases)
    return Encoder(load_tokenizer(resolve_folder(ask.model)), longest), longest


@study.figure(needs=("recipe", "corpus"))
def figure_7(ask: LyannaFlags) -> Iterator[Table | None]:
    """Share of all tokens of the training data that the most frequent ones are: what the hot quarter covers."""
    recipe = data_of(ask)
    vocab = read_config(resolve_folder(ask.model)).vocab_size
    yield None
    encoder, _ = encoder_for(ask, recipe)
    examples = [load_source(spec, encoder) for spec in recipe.sources]
    covered = occurrences(recipe.sources, examples, vocab).sort(descending=True).values.cumsum(0)
    shares = (0.01, 0.05, 0.1, HOT, 0.5, 0.75, 1.0)
    found = {share: float(covered[max(1, round(share * vocab)) - 1]) for share in shares}
    points = sorted({*range(1, vocab + 1, max(1, vocab // 200)), vocab})
    x, y = [100 * n / vocab for n in points], [float(covered[n - 1]) for n in points]
    line = Series(label="training data", x=x, y=y, marker="none")
    yield Table(
        title=f"Coverage by the most frequent of {vocab:,} tokens",
        head=("share of the vocabulary", "of all tokens in the data"),
        parts={"": [[f"{share:.0%}", f"{value:.2%}"] for share, value in found.items()]},
        values={"vocab": vocab, "covered": found, "tokens": sum(len(e.tokens) for own in examples for e in own)},
        remarks=[verdict("the hot quarter covers", found[HOT], COVERED)],
        how=[[f"data of {ask.recipe}, each source with its weight in training", f"tokenizer of {ask.model}"]],
        plots={
            ".svg": lambda path: figures.lines(
                [
                    Panel(
                        title="Token coverage",
                        series=[line],
                        x_label="most frequent tokens, % of the vocabulary",
                        y_label="share of all tokens",
                        line_at=COVERED,
                        y_from=0.0,
                    )
                ],
                path,
            )
        },
    )
