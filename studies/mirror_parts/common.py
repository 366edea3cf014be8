"""What all parts share: the study, its options, and runs of the mirror round that are listened to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from kit.mirror_watch import StepTimes, WindowVerdict, watch
from kit.scores import encoded_prompts, workload_of
from kit.stretched import stretched
from kit.study import Options, Study, asked

from paceline import LLM, SamplingParams
from paceline.bench import workloads
from paceline.core.options import written
from paceline.core.outputs import RequestOutput
from paceline.papers.mirror.round import MirrorRound

CATEGORIES = "spec_bench"  # the workload whose categories are tasks, too
SIX = "humanities,math,roleplay,stem,coding,math_reasoning"  # of figure 7


@dataclass(frozen=True, kw_only=True)
class MirrorFlags(Options):
    """The options of this study."""

    draft: str = asked("paceline-small-draft", "Draft model.", "MODEL")
    draft_times: int = asked(1, "Layers for each of the draft's own; more add zero (tools/stretch.py).", "N")
    gamma: int = asked(3, "Tokens of a window.", "N")
    heads: str | None = asked(None, "Trained early exits; none: the target's own norm and head.", "FOLDER")
    exits: str = asked("1/4,1/2,3/4", "Depths of the exit.", "DEPTH,..")
    kappas: str = asked("1,2,4,8,16", "Candidates of a position.", "K,..")
    candidates: int = asked(4, "Candidates of a position where the round is timed.", "N")
    log: Path | None = asked(None, "Log of a run that trained exits (log.jsonl).", "FILE")
    measured: Path | None = asked(None, "law.json, whose exit and rendezvous are charged.", "FILE")
    level_ms: float | None = asked(None, "What a level is given, as on another device; none: what it takes.", "MS")
    core: int = asked(1, "Core of the drafter's process; the target keeps to the first other one.", "N")

    def resolved(self) -> Self:
        """Return the options with models in the place of those that are to be stretched."""
        return replace(
            super().resolved(),
            draft=stretched(self.draft, self.draft_times),
            heads=self.heads and stretched(self.heads, self.times),
        )

    @property
    def depths(self) -> list[str]:
        """Of the exit."""
        return [text.strip() for text in self.exits.split(",") if text.strip()]

    @property
    def widths(self) -> list[int]:
        """Candidates of a position, ascending."""
        return sorted({int(text) for text in self.kappas.split(",") if text.strip()})

    @property
    def exit_words(self) -> str:
        """Which exits they are."""
        return f"trained exits {self.heads}" if self.heads else "the target's own norm and head as exits, untrained"


study = Study(
    "Mirror Speculative Decoding: tables and figures.",
    MirrorFlags,
    quick={
        "times": 1,
        "draft_times": 1,
        "tasks": "sql",
        "max_new_tokens": 8,
        "prompts": 1,
        "repeats": 1,
        "kappas": "1,4",
        "exits": "1/2",
        "gamma": 2,
    },
)


def drafter_of(ask: MirrorFlags, gamma: int | None = None) -> str:
    """The draft model, as it is named."""
    return f"draft_model:{written(ask.draft)},depth={gamma or ask.gamma}"


def mirror_of(ask: MirrorFlags, kappa: int, exit_: str = "1/2", more: str = "") -> str:
    """The mirror round, as it is named."""
    heads = f",heads={ask.heads or 'own'}"
    return f"mirror,kappa={kappa},exit={exit_}{heads}{more}"


def prompts_of(ask: MirrorFlags, llm: LLM, task: str) -> list[dict[str, Any]]:
    """Of a workload, or of a category of Spec-Bench."""
    if task in {prompt.category for prompt in workloads.load(CATEGORIES, folder=ask.data).prompts}:
        whole = workloads.load(CATEGORIES, folder=ask.data)
        own = [prompt for prompt in whole.prompts if prompt.category == task]
        workload = replace(whole, prompts=tuple(workloads.choose(own, ask.prompts, ask.seed)))
    else:
        workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
    return [{"prompt_token_ids": ids} for ids in encoded_prompts(llm, workload, ask.max_new_tokens)[0]]


@dataclass(slots=True)
class Heard:
    """What one run said."""

    outputs: list[RequestOutput]
    verdicts: list[WindowVerdict] = field(default_factory=list)
    steps: list[tuple[StepTimes, list[WindowVerdict]]] = field(default_factory=list)  # with the verdicts of each
    walls: list[float] = field(default_factory=list)  # ms of each, by a clock around the engine's whole step


def plain_llm(ask: MirrorFlags) -> LLM:
    """The target, which others share."""
    return LLM(ask.model, **ask.llm)


def listen(
    llm: LLM, prompts: Sequence[dict[str, Any]], ask: MirrorFlags, temperature: float, alone: bool = False
) -> Heard:
    """Answer prompts in the mirror round, or another one, and write down what it tells.

    Each request has a seed of its own: noise goes by seed and position, and requests of one seed would err together.

    Args:
        alone: one request after the other.
    """
    usual = SamplingParams(temperature=temperature, max_tokens=ask.max_new_tokens, ignore_eos=True)
    jobs = [(prompt, replace(usual, seed=1000 * ask.seed + place)) for place, prompt in enumerate(prompts)]
    heard, pending = Heard([]), list[WindowVerdict]()
    round_: Any = llm.engine.round

    def step(times: StepTimes) -> None:
        heard.steps.append((times, [*pending]))
        heard.verdicts.extend(pending)
        pending.clear()

    if isinstance(round_, MirrorRound):
        watch(round_, pending.append, step)
    with _clocked(llm.engine, heard):
        for part in [[job] for job in jobs] if alone else [jobs]:
            heard.outputs += llm.generate([prompt for prompt, _ in part], [params for _, params in part])
    failed = round_.failure
    assert failed is None, failed
    return heard


@contextmanager
def _clocked(engine: Any, heard: Heard) -> Iterator[None]:
    """Note the time around every step that tells its own."""
    inner = engine.step

    def step() -> Any:
        began, told = perf_counter(), len(heard.steps)
        touched = inner()
        heard.walls += [(perf_counter() - began) * 1e3] * (len(heard.steps) - told)
        return touched

    engine.step = step
    try:
        yield
    finally:
        engine.step = inner
