"""What all parts share: the study, its options, and methods with trained drafters of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from kit.grid import show
from kit.study import Options, Study, asked

from paceline.bench.records import Method
from paceline.core.errors import ConfigError
from paceline.papers.lyanna.model import LyannaShape, read_shape
from paceline.weights.source import resolve_folder

Value = TypeVar("Value")
STEPS = 3  # of a draft (section 7.2)
WIDTH = 4  # children of a node, and nodes of a level that have some
ROWS = 12  # drafted nodes that a sequence verifies
EXTRA = 4  # re-sampled ones on top of them
FULL_ROWS = 16  # of table 1
DIALOGUE = "sql,e2e,dialogsum"  # the tasks of the paper's kind: a query, a description, a dialogue
FRESH_TREE: Mapping[str, Any] = {"extra": 0, "depth": STEPS, "width": WIDTH}  # a fresh tree, nothing else


@dataclass(frozen=True, kw_only=True)
class LyannaFlags(Options):
    """What this study can be asked beside what all can."""

    lyanna: str | None = asked(None, "Trained Lyanna drafter.", "FOLDER")
    without_info: str | None = asked(None, "Trained as --lyanna is and as long, with --rank 0.", "FOLDER")
    eagle: str | None = asked(None, "Trained EAGLE head.", "FOLDER")
    medusa: str | None = asked(None, "Trained Medusa heads.", "FOLDER")
    streams: str | None = asked(None, "Trained set of streams, lossless. Default: the zoo's for the target.", "FOLDER")
    draft: str | None = asked(None, "Draft model. Default: the zoo's for the target.", "MODEL")
    batches: str = asked("1,2,4,8,16", "Requests at once, of figure_8_9.", "N,..")
    stretched: int = asked(8, "Times that figure_12's second target is the first; 1: there is none.", "N")
    runs: dict[str, str] = asked({}, "Training run (what --out named), with its log.", "NAME=FOLDER")
    recipe: Path | None = asked(None, "Recipe file that names training and held-out data.", "FILE")
    corpus: Path | None = asked(None, "Folder with the files that the recipe names.", "DIR")

    def few(self, values: Sequence[Value]) -> Sequence[Value]:
        """What is swept; the first two where it is to be quick."""
        return values[:2] if self.quick else values


study = Study(
    "Lyanna, with EAGLE-2 and Medusa beside it: the paper's tables and figures, measured on this machine.",
    LyannaFlags,
    quick={"tasks": "sql", "max_new_tokens": 12, "prompts": 2, "repeats": 1},
)


def drafting(name: str, drafter: str, budget: int | str, **options: Any) -> Method:
    """A method with these options of its drafter and this budget."""
    text = ",".join([drafter, *(f"{key}={show(value)}" for key, value in options.items())])
    return Method(name=name, drafter=text, settings={"budget": budget})


def lyanna(name: str, folder: str | None, budget: int | str, **options: Any) -> Method:
    """Lyanna with these options."""
    return drafting(name, f"lyanna:{folder}", budget, **options)


def shape_of(folder: str | None) -> LyannaShape:
    """What a trained drafter is.

    Raises:
        ConfigError: there is none, or it was trained for fewer steps than are drafted.
    """
    found = read_shape(resolve_folder(str(folder)))
    if found.steps < STEPS:
        wrong = f"it was trained for {found.steps} steps, {STEPS} are drafted"
        raise ConfigError(f"lyanna drafter {folder}", wrong, f"train it with depth={STEPS}")
    return found


def fastest(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Lowest ms of each of several calls, made in turns after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = perf_counter()
            call()
            if turn:
                times[name].append(1e3 * (perf_counter() - began))
    return {name: min(each) for name, each in times.items()}


def verdict(what: str, value: float | None, wanted: float, told: str = "") -> str:
    """A sentence: what was measured, what was wanted, and whether it was reached."""
    if value is None:
        return f"{what}: not measured (wanted {wanted:.2f})"
    return f"{what}: {told or f'{value:.2f}'}, wanted {wanted:.2f}: {'' if value >= wanted else 'not '}reached"
