"""`paceline adapt` from beginning to end: survey, answers, training, verdict, and the result.

OUT/adapted.json      how it is drafted with: `draft.adapted` reads it
OUT/drafter/          the drafter, with training.json, a card for a zoo, and a page that describes it
OUT/report/           the bench's report on prompts that nobody learned from
OUT/adapt.json        completed phases: the same command continues after them
OUT/prompts, answers  token ids; OUT/states the model's states of them; OUT/training checkpoints and logs
"""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

import torch

from ..api.llm import LLM
from ..bench.config import BenchConfig
from ..bench.methods import parse_methods, with_plain
from ..bench.run import Run
from ..core.errors import ConfigError, StorageError
from ..engine.calibration import quick_estimate
from ..train.answers import AnswerConfig
from ..train.data import SourceSpec, sha256
from ..train.files import writing
from ..weights.files import fingerprint, free_bytes
from ..weights.names import weight_map
from ..weights.source import load_tokenizer, read_config, resolve_folder
from . import answering, verdict
from .config import KIND, AdaptConfig
from .folder import REPORT, leave
from .prompts import Questions, collect, write_prompts
from .training import ROWS, TrainingPlan, train
from .work import FULL, RunFolder

ROOM, ANSWER = 512, 128  # tokens of prompt and answer, and of an answer: what people read of it
JUDGING, JUDGING_LEAST_S, JUDGING_MOST_S = 0.12, 5.0, 900.0  # share of the time, and its bounds
JUDGED, JUDGED_SHARE = 30, 0.25  # prompts that a verdict is over, and the most of the time that is kept for them
ANSWERING = 0.35  # share of the time without the verdict's in which the model answers; in the rest a drafter learns
EPOCHS = 3.0  # times that each answer is learned from
MARGIN, SLACK = 1.1, 1.5  # on the hours that are advised, and on held-out answers: the machine may become slower
CHECKING = 0.1  # most share of the training's time that checks on held-out prompts take
LEAST_ANSWERS = 2_000  # tokens, below which nothing is learned
MOST_ANSWERS = 8_000_000  # tokens
SAMPLE = 48  # prompts that are answered to see how fast that goes
ROUNDS, HEAT = 12, 0.8  # times that a prompt is answered, and the temperature of all but the first time
GIVEN, DRAWN, HELD = "given", "own", "held-"  # files of prompts: to learn from, drawn by the model, to judge on
OWN = 0.4  # least share of the answers that are to prompts that the model draws
SPARE = 1.5  # steps that are scored for, over those that are expected
FOOTPRINT = 4.0 + 2.0 + 2.0  # bytes a parameter: of the network that trains, of layers that score, that serve

Say = Callable[[str], None]


class Adaptation:
    """A run.

    Args:
        config: the options.
        work: its folder.
        show: called with the progress, for one line that changes.
        command: the command line, for the report.
    """

    def __init__(self, config: AdaptConfig, work: RunFolder, show: Say, command: str) -> None:
        self.config, self.work, self._show, self.command = config, work, show, command
        self.target = resolve_folder(config.model)
        self.shape = read_config(self.target)
        self.room = min(ROOM, self.shape.max_position - 8)
        self.answer = min(ANSWER, self.room // 3)
        self.tokenizer = load_tokenizer(self.target)
        self._llm: LLM | None = None

    @property
    def reserve_s(self) -> float:
        """Return the seconds that are kept for the verdict."""
        whole = 3600 * self.config.hours
        prompts = min(JUDGED, sum(len(question.judged) for question in self.questions))
        wished = min(self.judging_s(prompts), JUDGED_SHARE * whole)
        return max(self.judging_s(), wished, min(JUDGING_MOST_S, JUDGING * whole))

    def judging_s(self, prompts: int = 0) -> float:
        """Return the seconds that judging on so many prompts takes, from timed passes of one row and of many.

        There are at least as many prompts as a judgement needs.
        """
        prompts = max(prompts, verdict.LEAST_PAIRS * len(self.questions))
        (_, one_ms), *_, (rows, wide_ms) = self.work.done("costs")["chain"]
        read_ms = fmean(len(ids) for question in self.questions for ids in question.judged) * wide_ms / rows
        return JUDGING_LEAST_S + prompts * verdict.METHODS * (self.answer * one_ms + read_ms) / 1000

    @property
    def llm(self) -> LLM:
        """Return the model, loaded when it is first needed."""
        if self._llm is None:
            options: dict[str, Any] = {"dtype": self.config.dtype, "threads": self.config.threads}
            self._llm = LLM(self.config.model, max_model_len=self.room + 8, **options)
        return self._llm

    def show(self, what: str, text: str = "") -> None:
        """Show the progress."""
        self.work.tick()
        rest_s = max(0.0, self.work.left_s)
        self._show(f"{what}{': ' if text else ''}{text}, {_time(rest_s)} left")

    # -- survey

    @cached_property
    def questions(self) -> list[Questions]:
        """Return the prompts."""
        return collect(self.config.prompts, self.tokenizer, self.room, self.answer, self.config.seed)

    def survey(self) -> None:
        """Measure passes and the speed of answers, also where that takes longer than there is time."""
        learned = [ids for question in self.questions for ids in question.learned]  # errors of the prompts come first
        self.show("timing passes")
        self.work.once("costs", lambda: {"chain": quick_estimate(self.llm.decoder, 1).chain})
        files = {GIVEN: learned, **{f"{HELD}{question.name}": question.judged for question in self.questions}}
        for name, prompts in files.items():
            if not (file := self._file("prompts", f"{name}.jsonl")).is_file():
                write_prompts(file, prompts, self.tokenizer)
        self.work.once("answering", self._try_answers)

    def _file(self, *parts: str) -> Path:
        place = self.work.folder.joinpath(*parts)
        with writing(f"--out {self.work.folder}", FULL):
            place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _try_answers(self) -> dict[str, float]:
        """Answer a few prompts; how fast that goes, all at once."""
        spent, tokens, began = 0.0, 0, monotonic()

        def report(count: int) -> None:
            nonlocal tokens, spent
            tokens, spent = tokens + count, monotonic() - began
            self.show("answering", f"{tokens:,} tokens")

        self._answer(GIVEN, 0, lambda: not tokens, report, batch=SAMPLE)
        answered, both = answering.tokens_in(self._file("answers", f"{GIVEN}-0.jsonl"))
        return {"speed": tokens / spent if tokens else 1.0, "prompt_share": both / max(1, answered)}

    @property
    def speed(self) -> float:
        """Return the tokens a second that the model answers, many prompts at once."""
        return float(self.work.done("answering")["speed"])

    def answer_tokens(self) -> int:
        """Return how many tokens of answers to learn from fit into the time.

        Raises:
            ConfigError: the time is too short to learn anything.
        """
        fixed, spent = SLACK * self.held / self.speed, self.work.spent_s
        tokens = int(ANSWERING * (self.work.left_s - self.reserve_s - fixed) * self.speed)
        if tokens < LEAST_ANSWERS:
            learning = fixed + LEAST_ANSWERS / ANSWERING / self.speed
            needed_s = MARGIN * max(spent + learning + self.judging_s(), (spent + learning) / (1 - JUDGED_SHARE))
            parts = f"survey {_time(spent)}, learning {_time(learning)}, verdict {_time(self.judging_s())}"
            subject, wrong = f"--hours {self.config.hours:g}", f"a drafter takes longer than that ({parts})"
            raise ConfigError(subject, wrong, f"give --hours {math.ceil(needed_s / 36) / 100:g} or more")
        return min(tokens, MOST_ANSWERS)

    @property
    def checking_s(self) -> float:
        """Return the seconds that a check on held-out prompts takes: they are read faster than they are written."""
        return self.held * float(self.work.done("answering")["prompt_share"]) / self.speed

    @property
    def held(self) -> int:
        """Return the tokens of the answers to held-out prompts."""
        return self.answer * sum(len(question.judged) for question in self.questions)

    # -- answers

    def answers(self, target_tokens: int) -> dict[str, int]:
        """Generate them until there are as many as ``target_tokens``, or their time is over."""
        have, until = 0, monotonic() + 1.15 * target_tokens / self.speed

        def report(count: int) -> None:
            nonlocal have
            have += count
            self.show("answering", f"{have:,} of {target_tokens:,} tokens")

        def going(most: float) -> bool:
            return have < most and monotonic() < until and self.work.left_s > self.reserve_s

        batch = max(8, min(64, target_tokens // self.answer))
        answered = [file for file in (self.work.folder / "answers").glob("*.jsonl") if not file.name.startswith(HELD)]
        have = sum(answering.tokens_in(file)[0] for file in answered)
        for question in self.questions:
            self._answer(f"{HELD}{question.name}", 0, lambda: True, lambda count: None)
        self._answer(GIVEN, 0, lambda: going(target_tokens), report, batch)
        once = max(1, answering.tokens_in(self._file("answers", f"{GIVEN}-0.jsonl"))[0])
        rounds = min(ROUNDS, max(1, int((1 - OWN) * target_tokens / once)))
        drawn_tokens = max(0.0, target_tokens - rounds * once)
        self.show("drawing prompts")
        count, file = int(drawn_tokens / self.answer / 2) + 1, self._file("prompts", f"{DRAWN}.jsonl")
        with writing(f"--out {self.work.folder}", FULL):
            answering.draw_prompts(self.llm, file, count, self.config.seed, lambda: going(target_tokens))
        for heat in (0, 1, 2):  # greedy, and drawn twice
            self._answer(DRAWN, heat, lambda: going(target_tokens - (rounds - 1) * once), report, batch)
        for heat in range(1, rounds):
            self._answer(GIVEN, heat, lambda: going(target_tokens), report, batch)
        return {"tokens": have}

    def _answer(
        self, name: str, heat: int, going: Callable[[], bool], report: Callable[[int], None], batch: int = 64
    ) -> None:
        prompts, out = self._file("prompts", f"{name}.jsonl"), self._file("answers", f"{name}-{heat}.jsonl")
        if prompts.is_file():
            heated, seed = HEAT if heat else 0.0, self.config.seed + heat
            config = AnswerConfig(piece=self.room, temperature=heated, seed=seed)
            answering.answer_file(self.llm, prompts, out, config, self.answer, self.mark, going, report, batch)

    @cached_property
    def mark(self) -> str:
        """Return the model's fingerprint."""
        return fingerprint(self.target)

    # -- training

    def plan(self) -> TrainingPlan:
        """Return the plan of the drafter."""
        folder = self.work.folder / "answers"
        users = self.config.prompts is not None
        sources, held = [], []
        for file in sorted(folder.glob("*.jsonl")):
            answered, _ = answering.tokens_in(file)
            if file.name.startswith(HELD):
                name = file.stem.removeprefix(HELD).rpartition("-")[0]
                held.append(SourceSpec(file=str(file), domain=name, answer_tokens=self.answer))
            elif answered:
                weight = answered * (2.0 if users and not file.name.startswith(DRAWN) else 1.0)
                sources.append(SourceSpec(file=str(file), weight=weight, answer_tokens=self.answer))
        return TrainingPlan(
            kind=KIND,
            target=self.target,
            shape=self.shape,
            sources=sources,
            held_out=held,
            length=self.room,
            cache=self.work.folder / "states",
            seed=self.config.seed,
        )

    def train(self) -> dict[str, Any]:
        """Train the drafter."""
        self._llm = None  # its memory is the training's now
        gc.collect()
        plan = self.plan()
        both = sum(answering.tokens_in(Path(source.file))[1] for source in plan.sources)
        steps = self.work.once("steps", lambda: max(20, round(SPARE * EPOCHS * both / (ROWS * plan.length))))

        def tell(part: str, figures: Mapping[str, float]) -> None:
            self.show(part, f"{figures['tokens']:,.0f} tokens, loss {figures['loss']:.3f}")

        def log(text: str) -> None:
            if text.startswith("cache"):
                self.show("learning from the model's states", text)

        def remaining_s() -> float:  # until the last step may begin
            return self.work.left_s - self.reserve_s - self.checking_s

        checks = max(1, int(CHECKING * remaining_s() / max(self.checking_s, 1e-3)))
        return train(plan, self.work.folder / "training", steps, checks, remaining_s, tell, log, self.work.once)

    # -- verdict

    def judge(self, result: str) -> verdict.Verdict:
        """Measure what it is worth."""
        self._llm = None
        gc.collect()
        new = str((self.work.folder / result).absolute())
        methods = [f"{name}={text}" for name, text in verdict.drafters(self.config, new).items()]
        config = BenchConfig(
            model=self.config.model,
            methods=tuple(with_plain(parse_methods(methods, self.config.dtype))),
            workloads=tuple(question.workload for question in self.questions),
            prompts=max(len(question.judged) for question in self.questions),
            repeats=1,
            seed=self.config.seed,
            threads=self.config.threads,
            max_new_tokens=self.answer,
            time_limit_s=max(JUDGING_LEAST_S, self.work.left_s),
            title=f"{Path(self.config.model).name}: what the drafter that was made for it is worth",
        )

        command, progress = ["paceline", *shlex.split(self.command)], partial(self.show, "judging")
        run = Run(config, out=self.work.folder / REPORT, overwrite=True, command=command, progress=progress)
        if (report := run.execute()).interrupted:
            raise KeyboardInterrupt
        return verdict.decide(report)


# -- the whole


def adapt(config: AdaptConfig, say: Say, show: Say, command: str = "adapt") -> verdict.Verdict:
    """Make a drafter for a model, or continue an interrupted run.

    Args:
        config: the options.
        say: called with a line of progress.
        show: see `Adaptation`.
        command: the command line, for the report.

    Raises:
        ConfigError: a model that fits neither memory nor time, prompts that cannot be learned from, a folder of
            something else, a full disk. Results so far are kept.
        KeyboardInterrupt: it was interrupted. Results so far are kept.
    """
    target = resolve_folder(config.model)
    check_memory(config, target)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.prompts is not None and not config.prompts.is_file():
        raise ConfigError(f"--prompts {config.prompts}", "there is no such file", "check the path")
    facts = {"model": fingerprint(target), **{name: getattr(config, name) for name in ("dtype", "seed")}}
    facts["prompts"] = None if config.prompts is None else sha256(config.prompts)
    with closing(RunFolder(config.folder, facts, config.hours)) as work:
        try:
            run = Adaptation(config, work, show, command)
            run.survey()
            tokens = work.once("choice", run.answer_tokens)
            say(f"{tokens:,} tokens of answers, done in {_time(work.left_s)}")
            work.once("answers", lambda: run.answers(tokens))
            trained = work.once("training", run.train)
            judgement = verdict.Verdict(**work.once("verdict", lambda: asdict(run.judge(trained["result"]))))
            leave(config, work.folder, run.mark, trained, judgement)
            return judgement
        except StorageError as error:
            raise StorageError(f"--out {config.folder}", error.wrong, FULL) from error


def check_memory(config: AdaptConfig, target: Path) -> None:
    """Refuse a model that leaves too little memory for training.

    Raises:
        ConfigError: too little memory, with how much it takes.
    """
    needed = FOOTPRINT * sum(piece.numel for piece in weight_map(read_config(target)))
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        wrong = f"learning from it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        remedy = "free memory, take a machine with more, or draft with look-ups, which need none: --drafter suffix"
        raise ConfigError(f"model {config.model}", wrong, remedy)


def _time(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
