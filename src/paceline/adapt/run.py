"""Run `paceline adapt` from beginning to end: answers, training, verdict, and the result.

OUT/adapted.json      how it is drafted with: `draft.adapted` reads it
OUT/drafter/          the drafter, with training.json and a card for a zoo
OUT/report/           the bench's report on prompts that nobody learned from
OUT/adapt.json        completed phases: the same command continues after them
OUT/answers           token ids; OUT/states the model's states of them; OUT/training checkpoints and logs
"""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..api.llm import LLM
from ..bench.config import BenchConfig
from ..bench.methods import parse_methods, with_plain
from ..bench.run import Run
from ..core.errors import ConfigError, StorageError
from ..train.data import SourceSpec, sha256
from ..train.files import writing
from ..weights.files import fingerprint, free_bytes
from ..weights.names import weight_map
from ..weights.source import load_tokenizer, read_config, resolve_folder
from . import answering, verdict
from .config import KIND, AdaptConfig
from .folder import REPORT, leave
from .prompts import Questions, collect
from .training import ROWS, job_of, train
from .work import FULL, RunFolder

ROOM, ANSWER = 512, 128  # tokens of prompt and answer, and of an answer: what people read of it
ANSWERING = 0.35  # share of the time in which the model answers; in the rest a drafter learns
JUDGING, JUDGING_LEAST_S, JUDGING_MOST_S = 0.2, 5.0, 1800.0  # share of the time for the verdict, and its bounds
EPOCHS = 5.0  # times that each answer is learned from, at most
LEAST_ANSWERS = 2_000  # tokens, below which nothing is learned
MOST_ANSWERS = 8_000_000  # tokens
BATCH = 64  # prompts that are answered together
ROUNDS, HEAT = 12, 0.8  # times that a prompt is answered, and the temperature of all but the first time
DRAWN_A_ROUND = 128  # prompts that the model draws after each of them, and after that alone
GIVEN, DRAWN, HELD = "given-", "own-", "held-"  # files of answers: to prompts given, drawn by the model, to judge on
MARGIN = 1.1  # on the hours that are advised
FOOTPRINT = 4.0 + 2.0 + 2.0  # bytes a parameter: of the network that trains, of layers that score, that serve

Say = Callable[[str], None]
Ids = tuple[int, ...] | list[int]  # of a prompt


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
        self.tokens = 0  # of answers
        self.folder = work.folder / "answers"
        with writing(f"--out {work.folder}", FULL):
            self.folder.mkdir(exist_ok=True)
        self._llm: LLM | None = None

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
        rest = timedelta(seconds=max(0, int(self.work.left_s)))
        self._show(f"{what}{': ' if text else ''}{text}, {rest} left")

    @cached_property
    def questions(self) -> list[Questions]:
        """Return the prompts."""
        return collect(self.config.prompts, self.tokenizer, self.room, self.answer, self.config.seed)

    # -- answers

    def answers(self) -> dict[str, int]:
        """Generate answers until their share of the time is over, or there are enough.

        Raises:
            ConfigError: the time is too short to learn anything.
        """
        for question in self.questions:
            self._answer(f"{HELD}{question.name}", question.judged, 0, lambda: True)
        held, work = self.tokens, self.work

        def going() -> bool:
            until_s = self.learning_until_s if self.tokens - held < LEAST_ANSWERS else ANSWERING * work.allowed_s
            return self.tokens - held < MOST_ANSWERS and work.spent_s < until_s

        learned = [ids for question in self.questions for ids in question.learned]
        Random(self.config.seed).shuffle(learned)
        number = 0
        while going():
            if number < ROUNDS:
                self._answer(f"{GIVEN}{number}", learned, number, going)
            drawn, file = list[Ids](), self.folder / f"{DRAWN}{number}.jsonl"
            if going() and not file.is_file():
                self.show("drawing prompts")
                drawn += answering.draw_prompts(self.llm, DRAWN_A_ROUND, self.config.seed + number * DRAWN_A_ROUND)
            self._answer(file.stem, drawn, 0, going)
            number += 1
        if self.tokens - held < LEAST_ANSWERS:
            needed_s = MARGIN * work.spent_s * (1 + LEAST_ANSWERS / max(1, self.tokens)) / ANSWERING
            wrong = f"{self.tokens - held:,} tokens of answers are too few to learn from"
            remedy = f"give --hours {math.ceil(needed_s / 36) / 100:g} or more"
            raise ConfigError(f"--hours {self.config.hours:g}", wrong, remedy)
        return {"tokens": self.tokens - held}

    def _answer(self, name: str, prompts: Sequence[Ids], number: int, going: Callable[[], bool]) -> None:
        """Answer prompts into a file of that name, which may hold some answers already; round 0 is greedy."""
        file, before = self.folder / f"{name}.jsonl", self.tokens
        answer = answering.answerer(self.llm, self.room, HEAT if number else 0.0, self.answer)

        def answer_and_show(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Sequence[int]]:
            answers = answer(prompts, seeds)
            self.tokens += sum(map(len, answers))
            self.show("answering", f"{self.tokens:,} tokens")
            return answers

        answering.write(file, prompts, self.tokenizer, answer_and_show, self.config.seed + number, BATCH, going)
        self.tokens = before + answering.tokens_in(file)[0]

    @property
    def learning_until_s(self) -> float:
        """Return the seconds after which the rest of the time is the verdict's."""
        return self.work.allowed_s - min(JUDGING_MOST_S, JUDGING * self.work.allowed_s)

    # -- training

    def train(self) -> dict[str, Any]:
        """Train the drafter."""
        self._llm = None  # its memory is the training's now
        gc.collect()
        sources, held, tokens = list[SourceSpec](), list[SourceSpec](), 0
        for file in sorted(self.folder.glob("*.jsonl")):
            answered, both = answering.tokens_in(file)
            if file.name.startswith(HELD):
                held.append(SourceSpec(file=str(file), domain=file.stem.removeprefix(HELD)))
            elif answered:
                users = self.config.prompts is not None and file.name.startswith(GIVEN)
                sources.append(SourceSpec(file=str(file), weight=answered * (2.0 if users else 1.0)))
                tokens += both
        plan = partial(
            job_of,
            kind=KIND,
            target=self.target,
            shape=self.shape,
            sources=sources,
            held_out=held,
            length=self.room,
            cache=self.work.folder / "states",
            seed=self.config.seed,
        )
        return train(
            plan,
            self.work.folder / "training",
            epoch := tokens / (ROWS * self.room),
            max(20, round(EPOCHS * epoch)),
            lambda: self.learning_until_s - self.work.spent_s,
            lambda figures: self.show("training", f"{figures['tokens']:,.0f} tokens, loss {figures['loss']:.3f}"),
            lambda text: self.show("learning", text),
            self.work.once,
        )

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
            tokens = work.once("answers", run.answers)["tokens"]
            say(f"{tokens:,} tokens of answers, with {work.left_s / 60:.0f} minutes left")
            trained = work.once("training", run.train)
            judgement = verdict.Verdict(**work.once("verdict", lambda: asdict(run.judge(trained["result"]))))
            leave(config, work.folder, facts["model"], trained, judgement)
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
