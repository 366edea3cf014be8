"""What all parts share: the study, its options, the drafts, and means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from kit.grid import show
from kit.study import Options, Study, asked
from numpy.typing import NDArray

from paceline.bench.methods import parse_method
from paceline.bench.records import Method, Trial
from paceline.bench.summary import RESAMPLES, SEED, percentile_bounds
from paceline.core.errors import ConfigError

Value = TypeVar("Value")
Floats = NDArray[np.float64]
DEPTH = 4  # k
CONTEXTS = (256, 512, 960, 1984)
MIDDLE = 960  # of what is measured at one context
VANILLA, DRAFT, MAGICDEC, SPIRE = "vanilla", "draft model", "MagicDec", "SPIRe"
FLAGS = {VANILLA: "vanilla", DRAFT: "draft", SPIRE: "spire"}  # of drafts that are trained
DOMAINS = "sql,e2e,gsm8k"  # that the embedded target and its drafts are trained for
INTERVALS = "intervals: 95%, bootstrap over prompts"


@dataclass(frozen=True, kw_only=True)
class SpireFlags(Options):
    """The options of this study."""

    hoi: float = asked(
        400.0, "Hardware operational intensity, FLOPs a byte; all from 321 to 509 give the same numbers."
    )
    spire: str | None = asked(None, "Trained SPIRe draft.", "FOLDER")
    vanilla: str | None = asked(None, "Vanilla draft: a draft model trained on text.", "FOLDER")
    draft: str | None = asked(None, "Another draft model beside them, such as the zoo's.", "FOLDER")
    others: str = asked("", "Workloads of other text than the target's domains.", "NAME,..")
    drawn: dict[str, str] = asked({}, "Answers drawn from the target at temperature 1 (JSONL).", "DOMAIN=FILE")
    starts: int = asked(20_000, "Starts of a draft at least, over all that is drawn.", "N")
    here: bool = asked(False, "Time passes of this machine.")
    temperature: float = asked(1.0, "Of the answers whose throughput is measured; 0: greedy.")
    batches: str = asked("1,4,16,64", "Sequences at once, of the cells.", "N,..")
    contexts: str = asked("", "Contexts in place of 256, 512, 960 and 1,984.", "N,..")
    texts: int = asked(0, "Prompts that are computed; more sequences at once take copies of their K/V. 0: all.", "N")
    lookup: str = asked("", "Look-ups beside the drafts, such as ngram,depth=4;budget=4.", "DRAFTER")
    kv: str = asked("auto", "K/V of the target: auto, or int8.")
    measured: str = asked("", "What cells wrote (JSON).", "FILE")
    accepted: str = asked("", "What runs of table_1 wrote of other prompts (JSON).", "FILE,..")
    window: int = asked(64, "Last tokens that drafting passes of MagicDec see.", "N")

    def numbers(self, name: str) -> list[int]:
        """What an option lists, each 1 or more; the first two where it is to be quick.

        Raises:
            ConfigError: something that is no such number.
        """
        parts = [part.strip() for part in getattr(self, name).split(",") if part.strip()]
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"--{name} {getattr(self, name)}", "not a list of numbers above 0", "write 1,4,16")
        return list(self.few([int(part) for part in parts]))

    def contexts_or(self, usual: Sequence[int]) -> Sequence[int]:
        """The contexts that are asked for, or the usual ones."""
        return (*self.numbers("contexts"),) or self.few(usual)

    def few(self, values: Sequence[Value]) -> Sequence[Value]:
        """What is swept; the first two where it is to be quick."""
        return values[:2] if self.quick else values


study = Study(
    "SPIRe, with MagicDec and a vanilla draft beside it: the paper's tables and figures.",
    SpireFlags,
    quick={"tasks": "sql", "max_new_tokens": 12, "prompts": 2, "repeats": 1, "starts": 40},
)


# -- drafts


def drafter_of(ask: SpireFlags, name: str) -> str:
    """What ``--method`` calls a draft."""
    if name == MAGICDEC:
        return f"magicdec,window={ask.window}"
    return f"{'spire' if name == SPIRE else 'draft_model'}:{folder_of(ask, name)}"


def folder_of(ask: SpireFlags, name: str) -> str:
    """The folder of a trained draft.

    Raises:
        ConfigError: it is not given.
    """
    folder = getattr(ask, FLAGS[name])
    if not folder:
        raise ConfigError(f"{name} draft", f"--{FLAGS[name]} is not given", "name the folder of a trained draft")
    return str(folder)


def contestants(ask: SpireFlags) -> list[str]:
    """The drafts that are there, in the order of the paper's table."""
    return [name for name in (VANILLA, DRAFT, MAGICDEC, SPIRE) if name == MAGICDEC or getattr(ask, FLAGS[name])]


def method_of(ask: SpireFlags, name: str, depth: int = DEPTH, verifier: str = "rejection", **options: Any) -> Method:
    """A draft of ``depth`` sampled tokens in every step; under sample_and_match, of tokens with the target's noise."""
    proposes = "coupled" if verifier == "sample_and_match" else "sampled"
    text = ",".join(
        [
            drafter_of(ask, name),
            f"depth={depth}",
            f"proposes={proposes}",
            *(f"{k}={show(v)}" for k, v in options.items()),
        ]
    )
    made = parse_method(f"{text};budget={depth};verifier={verifier}")
    return replace(made, name=name)


# -- means with intervals


@dataclass(frozen=True, slots=True)
class BoundedMean:
    """A figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """With its interval."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def listed(self) -> list[float]:
        """For JSON."""
        return [self.value, self.low, self.high]


def ratio_of(counts: Floats, stream: int = 0) -> tuple[float, Floats]:
    """Sum over sum of clusters [n, 2], and [resamples] the same of drawn clusters: of one ``stream`` the same ones."""
    draw = np.random.default_rng([SEED, stream]).integers(0, len(counts), (RESAMPLES, len(counts)))
    sums = counts[draw].sum(1)
    resampled = np.divide(sums[:, 0], sums[:, 1], out=np.zeros(RESAMPLES), where=sums[:, 1] > 0)
    top, bottom = counts.sum(0)
    return (float(top / bottom) if bottom else 0.0), resampled


def mean_of(value: float, resampled: Floats) -> BoundedMean:
    """With percentile bounds."""
    return BoundedMean(value, *percentile_bounds(resampled))


def tau(trials: Sequence[Trial], stream: int = 0) -> tuple[float, Floats]:
    """Mean tokens a round, the target's own included, over passes with a draft; and the same of drawn prompts.

    Args:
        stream: of the draw; groups of prompts whose means are added are drawn apart.
    """
    rows = [[sum(t.depth_accepted), sum(t.depth_offered[:1])] for t in trials if t.error is None]
    value, resampled = ratio_of(np.array(rows, dtype=np.float64).reshape(-1, 2), stream)
    return 1 + value, 1 + resampled


def verdict(what: str, holds: bool) -> str:
    """A sentence: what was wanted, and whether it was reached."""
    return f"{what}: {'' if holds else 'not '}reached"


def path_of(text: str) -> Path:
    """A file that is named.

    Raises:
        ConfigError: there is none.
    """
    file = Path(text)
    if not file.is_file():
        raise ConfigError(f"file {text}", "there is no such file", "name one that exists")
    return file
