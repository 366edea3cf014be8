"""`paceline adapt` from beginning to end: survey, choice, answers, training, verdict, and what is left for use.

OUT/adapted.json      how it is drafted with: `draft.adapted` reads it
OUT/drafter/          the drafter, with training.json, a card for a zoo, and a page that describes it
OUT/report/           the bench's report on prompts that nobody learned from
OUT/adapt.json        completed phases: the same command continues after them
OUT/prompts, answers  token ids; OUT/states the model's states of them; OUT/training checkpoints and logs
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch

from ..api.llm import LLM
from ..bench.config import BenchConfig
from ..bench.methods import parse_methods, with_plain
from ..core.errors import CapabilityError, ConfigError, StorageError
from ..plan.models import shape_of
from ..train.answers import AnswerConfig
from ..train.data import SourceSpec, sha256
from ..train.files import writing
from ..train.trainer import precision_of, training_device
from ..weights.files import fingerprint, free_bytes
from ..weights.source import load_tokenizer, read_config, resolve_folder
from . import answering, survey, verdict
from .choice import EPOCHS, Forecast, Survey, answer_seconds, forecasts
from .config import KINDS, AdaptConfig
from .folder import REPORT, leave
from .prompts import Questions, collect, write_prompts
from .training import PROBED, ROWS, Making, starting_tokens, train
from .work import FULL, RunFolder

ROOM, ANSWER = 512, 128  # tokens of prompt and answer, and of an answer: what people read of it
JUDGING, JUDGING_LEAST_S, JUDGING_MOST_S = 0.12, 5.0, 900.0  # share of the time, and its bounds
JUDGED, JUDGED_SHARE = 30, 0.25  # prompts that a verdict is over, and the most of the time that is kept for them
LOOKING, TRYING = 0.02, 0.06  # shares of the time in which look-ups and kinds are tried
DRY_S, DRY_LOOKING_S, DRY_PARTS = 60.0, 10.0, 3  # of a dry run: seconds, those for look-ups, and how much less it tries
MARGIN, SLACK = 1.1, 1.5  # on the hours that are advised, and on what comes besides: the machine may become slower
NETWORK = 1.7  # times as long as the compiled layers that score the network that trains takes to read (AVX2, float32)
CHECKING = 0.1  # most share of the training's time that checks on held-out prompts take
LEAST_ANSWERS = 2_000  # tokens, below which nothing is learned
MOST_ANSWERS = 8_000_000  # tokens
SAMPLE = 48  # prompts that are answered for the survey
ROUNDS, HEAT = 12, 0.8  # times that a prompt is answered, and the temperature of all but the first time
GIVEN, DRAWN, HELD = "given", "own", "held-"  # files of prompts: to learn from, drawn by the model, to judge on
OWN = 0.4  # least share of the answers that are to prompts that the model draws
SPARE = 1.5  # steps that are scored for, over those that are expected
FOOTPRINT = 4.0 + 2.0 + 2.0  # bytes a parameter: of the network that trains, of layers that score, that serve

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    folder: Path
    verdict: verdict.Verdict | None  # None: nothing was trained
    words: str  # the verdict, or what was chosen
    spent_s: float


class Adaptation:
    """A run.

    Args:
        config: the options.
        work: its folder.
        show: called with the progress, for one line that changes.
        command: the command line, for the report.
        dry: survey for about a minute, to forecast the result.
    """

    def __init__(self, config: AdaptConfig, work: RunFolder, show: Say, command: str, dry: bool = False) -> None:
        self.config, self.work, self._show, self.command, self.dry = config, work, show, command, dry
        self.part = DRY_PARTS if dry else 1
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
        prompts = min(JUDGED, sum(len(question.judged) for question in self.asked))
        wished = min(self.judging_s(prompts), JUDGED_SHARE * whole)
        return max(self.judging_s(), wished, min(JUDGING_MOST_S, JUDGING * whole))

    def judging_s(self, prompts: int = 0) -> float:
        """Return the seconds that judging on so many prompts takes, from timed passes of one row and of many.

        There are at least as many prompts as a judgement needs.
        """
        prompts = max(prompts, verdict.LEAST_PAIRS * len(self.asked))
        (_, one_ms), *_, (rows, wide_ms) = self.work.done("costs")["chain"]
        read_ms = fmean(len(ids) for question in self.asked for ids in question.judged) * wide_ms / rows
        return JUDGING_LEAST_S + prompts * verdict.METHODS * (self.answer * one_ms + read_ms) / 1000

    @property
    def llm(self) -> LLM:
        """Return the model, loaded when it is first needed."""
        if self._llm is None:
            own: dict[str, Any] = {"dtype": self.config.dtype, "threads": self.config.threads}
            self._llm = LLM(self.config.model, max_model_len=self.room + 8, **own)
        return self._llm

    def show(self, what: str, text: str = "") -> None:
        """Show the progress."""
        self.work.tick()
        left = max(0.0, self.work.left_s)
        self._show(f"{what}{': ' if text else ''}{text}, {_time(left)} left")

    # -- survey

    @cached_property
    def asked(self) -> list[Questions]:
        """Return the prompts."""
        return collect(self.config.prompts, self.tokenizer, self.room, self.answer, self.config.seed)

    def survey(self) -> Survey:
        """Measure what the choice needs, also where that takes longer than there is time."""
        work, questions = self.work, self.asked  # errors of the prompts come first
        self.show("timing passes")
        parts = [work.once("costs", lambda: survey.costs(self.llm, survey.REPEATS // self.part))]
        learned = [ids for question in questions for ids in question.learned]
        few = Random(self.config.seed).sample(learned, min(survey.LOOKED, len(learned)))
        parts.append(work.once("look-ups", lambda: self._try_look_ups(few)))
        self._write_prompts()
        parts.append(work.once("answering", self._try_answers))
        parts.append(work.once("kinds", lambda: self._try_kinds(few)))
        return Survey.of(parts)

    def _file(self, *parts: str) -> Path:
        place = self.work.folder.joinpath(*parts)
        with writing(f"--out {self.work.folder}", FULL):
            place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _write_prompts(self) -> None:
        given = [ids for question in self.asked for ids in question.learned]
        files = {GIVEN: given, **{f"{HELD}{question.name}": question.judged for question in self.asked}}
        for name, prompts in files.items():
            if not (file := self._file("prompts", f"{name}.jsonl")).is_file():
                write_prompts(file, prompts, self.tokenizer)

    def _try_look_ups(self, few: list[tuple[int, ...]]) -> dict[str, float]:
        seconds = DRY_LOOKING_S if self.dry else LOOKING * self.work.allowed_s
        return survey.look_ups(self.llm, few, self.answer, seconds, lambda: self.show("trying look-ups"))

    def _try_answers(self) -> dict[str, float]:
        """Answer a few prompts; how fast that goes, all at once."""
        spent, tokens = 0.0, 0

        def told(count: int) -> None:
            nonlocal tokens, spent
            tokens, spent = tokens + count, monotonic() - began
            self.show("answering", f"{tokens:,} tokens")

        began = monotonic()
        self._answer(GIVEN, 0, lambda: not tokens, told, batch=SAMPLE // self.part)
        said, both = answering.tokens_in(self._file("answers", f"{GIVEN}-0.jsonl"))
        return {"answer": tokens / spent if tokens else 1.0, "prompt_share": both / max(1, said)}

    def _try_kinds(self, few: list[tuple[int, ...]]) -> dict[str, Any]:
        names = [self.config.kind] if self.config.kind else list(KINDS)
        file, enough = str(self._file("answers", f"{GIVEN}-0.jsonl")), PROBED * ROWS * self.room // self.part
        tried = SourceSpec(file=file, answer_tokens=self.answer, max_tokens=enough)
        making = replace(self.making(names[0]), sources=[tried], held_out=())
        seconds = self.work.left_s if self.dry else TRYING * self.work.allowed_s
        place, few = self.work.folder / "probe", few[: survey.TIMED // self.part + 1]
        return survey.kinds(self.llm, names, making, place, few, seconds, lambda name: self.show("trying", name))

    # -- choice

    def choose(self, known: Survey) -> list[Forecast]:
        """Return the kinds, the one that is made first.

        Raises:
            ConfigError: the time is too short to learn anything.
        """
        whole, spent = 3600 * self.config.hours, self.work.spent_s
        # Besides answers and steps: held-out answers, a start from the target's last layer, and in each of both parts
        # a beginning and a check at the end.
        parts_s = [
            2 * (speeds.start + self.checking_s(known, name))
            + NETWORK * starting_tokens(name, self.shape) / speeds.score
            for name, speeds in known.kinds.items()
        ]
        fixed = SLACK * (self.held / known.answer + max(parts_s, default=0.0))
        surveyed = max(spent, (LOOKING + TRYING) * whole) if self.dry else spent
        found = forecasts(known, max(0.0, whole - surveyed - fixed - self.reserve_s))
        if not found:
            wrong = "; ".join(f"{name}: {why}" for name, why in known.missing.items()) or "no kind was measured"
            raise CapabilityError(f"a drafter for {self.config.model}", wrong, "use look-ups: --drafter suffix")
        if found[0].answers < LEAST_ANSWERS:
            learning = fixed + LEAST_ANSWERS * answer_seconds(known, known.kinds[found[0].kind])
            most = (spent + learning) / (1 - JUDGED_SHARE - LOOKING - TRYING)
            wanted = MARGIN * max(spent + learning + self.judging_s(), most)
            parts = f"survey {_time(spent)}, learning {_time(learning)}, verdict {_time(self.judging_s())}"
            asked, wrong = f"--hours {self.config.hours:g}", f"a drafter takes longer than that ({parts})"
            raise ConfigError(asked, wrong, f"give {_hours(wanted)} or more")
        return found

    def checking_s(self, known: Survey, kind: str) -> float:
        """Return the seconds that a check on held-out prompts takes: the network that trains reads all of them."""
        return NETWORK * self.held * known.prompt_share / known.kinds[kind].score

    @property
    def held(self) -> int:
        """Return the tokens of the answers to held-out prompts."""
        return self.answer * sum(len(question.judged) for question in self.asked)

    # -- answers

    def answers(self, plan: Forecast, known: Survey) -> dict[str, int]:
        """Generate them until there are as many as planned, or their time is over."""
        wanted, until = min(plan.answers, MOST_ANSWERS), monotonic() + 1.15 * plan.answers / known.answer
        have = 0

        def told(count: int) -> None:
            nonlocal have
            have += count
            self.show("answering", f"{have:,} of {wanted:,} tokens")

        def going(most: float) -> bool:
            return have < most and monotonic() < until and self.work.left_s > self.reserve_s

        batch = max(8, min(64, wanted // self.answer))
        answered = [file for file in (self.work.folder / "answers").glob("*.jsonl") if not file.name.startswith(HELD)]
        have = sum(answering.tokens_in(file)[0] for file in answered)
        for question in self.asked:
            self._answer(f"{HELD}{question.name}", 0, lambda: True, lambda count: None)
        self._answer(GIVEN, 0, lambda: going(wanted), told, batch)
        once = max(1, answering.tokens_in(self._file("answers", f"{GIVEN}-0.jsonl"))[0])
        rounds = min(ROUNDS, max(1, int((1 - OWN) * wanted / once)))
        own = max(0.0, wanted - rounds * once)
        self.show("drawing prompts")
        count, file = int(own / self.answer / 2) + 1, self._file("prompts", f"{DRAWN}.jsonl")
        with writing(f"--out {self.work.folder}", FULL):
            answering.draw_prompts(self.llm, file, count, self.config.seed, lambda: going(wanted))
        for heat in (0, 1, 2):  # greedy, and drawn twice
            self._answer(DRAWN, heat, lambda: going(wanted - (rounds - 1) * once), told, batch)
        for heat in range(1, rounds):
            self._answer(GIVEN, heat, lambda: going(wanted), told, batch)
        return {"tokens": have}

    def _answer(
        self, name: str, heat: int, going: Callable[[], bool], told: Callable[[int], None], batch: int = 64
    ) -> None:
        prompts, out = self._file("prompts", f"{name}.jsonl"), self._file("answers", f"{name}-{heat}.jsonl")
        if prompts.is_file():
            heated, seed = HEAT if heat else 0.0, self.config.seed + heat
            config = AnswerConfig(piece=self.room, temperature=heated, seed=seed)
            answering.answer_file(self.llm, prompts, out, config, self.answer, self.mark, going, told, batch)

    @cached_property
    def mark(self) -> str:
        """Return the model's fingerprint."""
        return fingerprint(self.target)

    # -- training

    def making(self, kind: str) -> Making:
        """Return the plan of the drafter."""
        folder = self.work.folder / "answers"
        users = self.config.prompts is not None
        sources, held = [], []
        for file in sorted(folder.glob("*.jsonl")):
            said, _ = answering.tokens_in(file)
            if file.name.startswith(HELD):
                name = file.stem.removeprefix(HELD).rpartition("-")[0]
                held.append(SourceSpec(file=str(file), domain=name, answer_tokens=self.answer))
            elif said:
                weight = said * (2.0 if users and not file.name.startswith(DRAWN) else 1.0)
                sources.append(SourceSpec(file=str(file), weight=weight, answer_tokens=self.answer))
        return Making(
            kind=kind,
            target=self.target,
            shape=self.shape,
            sources=sources,
            held_out=held,
            length=self.room,
            cache=self.work.folder / "states",
            seed=self.config.seed,
        )

    def train(self, plan: Forecast, known: Survey) -> dict[str, Any]:
        """Train the drafter."""
        self._llm = None  # its memory is the training's now
        gc.collect()
        making = self.making(plan.kind)
        both = sum(answering.tokens_in(Path(source.file))[1] for source in making.sources)
        steps = self.work.once("steps", lambda: max(20, round(SPARE * EPOCHS * both / (ROWS * making.length))))

        def tell(part: str, figures: Mapping[str, float]) -> None:
            self.show(part, f"{figures['tokens']:,.0f} tokens, loss {figures['loss']:.3f}")

        def said(text: str) -> None:
            if text.startswith("cache"):
                self.show("learning from the model's states", text)

        check = self.checking_s(known, plan.kind)

        step_s = ROWS * making.length / known.kinds[plan.kind].train

        def left() -> float:  # until the last step may begin
            return self.work.left_s - self.reserve_s - check - step_s

        checks = max(1, int(CHECKING * left() / max(check, 1e-3)))
        return train(making, self.work.folder / "training", steps, checks, left, tell, said, self.work.once)

    # -- verdict

    def judge(self, kind: str, result: str) -> verdict.Verdict:
        """Measure what it is worth."""
        self._llm = None
        gc.collect()
        new = str((self.work.folder / result).absolute())
        methods = [f"{name}={text}" for name, text in verdict.drafters(kind, new).items()]
        config = BenchConfig(
            model=self.config.model,
            methods=tuple(with_plain(parse_methods(methods, self.config.dtype))),
            workloads=tuple(question.workload for question in self.asked),
            prompts=max(len(question.judged) for question in self.asked),
            repeats=1,
            seed=self.config.seed,
            threads=self.config.threads,
            max_new_tokens=self.answer,
            time_limit_s=max(JUDGING_LEAST_S, self.work.left_s),
            title=f"{Path(self.config.model).name}: what the drafter that was made for it is worth",
        )

        def tell(text: str, trials: tuple[int, int] | None) -> None:
            self.show("judging", text if trials is None else f"{trials[0]} of {trials[1]} trials")

        return verdict.judge(config, self.work.folder / REPORT, self.command, tell)


# -- the whole


def adapt(config: AdaptConfig, say: Say, show: Say, dry_run: bool = False, command: str = "adapt") -> Outcome:
    """Make a drafter for a model, or continue an interrupted run.

    Args:
        config: the options.
        say: called with a line of progress.
        show: see `Adaptation`.
        dry_run: survey for about a minute, forecast the result, and keep nothing.
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
    names = ("kind", "dtype", "seed")
    facts = {"model": fingerprint(target), **{name: getattr(config, name) for name in names}}
    facts["prompts"] = None if config.prompts is None else _hash(config.prompts)
    if dry_run:
        with TemporaryDirectory() as place, closing(RunFolder(Path(place), facts, DRY_S / 3600)) as work:
            return _adapt(Adaptation(config, work, show, command, dry=True), say)
    with closing(RunFolder(config.folder, facts, config.hours)) as work:
        try:
            return _adapt(Adaptation(config, work, show, command), say)
        except StorageError as error:
            raise StorageError(f"--out {config.folder}", error.wrong, FULL) from error


def _adapt(run: Adaptation, say: Say) -> Outcome:
    work = run.work
    known = run.survey()
    made = work.done("choice") or [asdict(each) for each in run.choose(known)]
    ranked = [Forecast(**each) for each in made]
    plan = ranked[0]
    *lines, chosen = expectation(known, ranked, run)
    for line in lines:
        say(line)
    if run.dry or not _pays(known, plan, run.config):
        return Outcome(folder=run.config.folder, verdict=None, words=chosen, spent_s=work.spent_s)
    work.once("choice", lambda: made)
    say(chosen)
    work.once("answers", lambda: run.answers(plan, known))
    trained = work.once("training", lambda: run.train(plan, known))
    found = verdict.Verdict(**work.once("verdict", lambda: asdict(run.judge(plan.kind, trained["result"]))))
    leave(run.config, work.folder, run.mark, plan, trained, found)
    shutil.rmtree(work.folder / "probe", ignore_errors=True)
    return Outcome(folder=work.folder, verdict=found, words=found.words, spent_s=work.spent_s)


def _pays(known: Survey, plan: Forecast, config: AdaptConfig) -> bool:
    """Check whether to train: as requested, or since a drafter is expected to add to look-ups."""
    return config.kind is not None or plan.hybrid > max(1.0, known.lookup_speed)


def _hash(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"--prompts {file}", "there is no such file", "check the path")
    return sha256(file)


def check_memory(config: AdaptConfig, target: Path) -> None:
    """Refuse a model that leaves too little memory for training.

    Raises:
        ConfigError: too little memory, with how much it takes.
    """
    sizes = shape_of(read_config(target))
    needed = FOOTPRINT * (sizes.body_parameters + 2 * sizes.head_parameters)
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        wrong = f"learning from it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        remedy = "free memory, take a machine with more, or draft with look-ups, which need none: --drafter suffix"
        raise ConfigError(f"model {config.model}", wrong, remedy)


def expectation(known: Survey, ranked: list[Forecast], run: Adaptation) -> list[str]:
    """Return the measured and expected figures as lines; the last one names the choice."""
    table, plan = known.costs, ranked[0]
    precision = precision_of("auto", training_device())
    one, five = table.chain_ms(1), table.chain_ms(5)
    lines = [
        f"a pass of one row takes {one:.2f} ms, of five rows {five / one:.2f} times that; "
        f"{known.answer:,.0f} tokens/s are answered",
        f"look-ups on these prompts: {known.lookup_tokens:.2f} tokens a pass, "
        f"{known.lookup_speed:.2f} times plain decoding",
    ]
    for each in ranked:
        speeds = known.kinds[each.kind]
        lines.append(
            f"{each.kind}: {each.hybrid:.2f} times plain expected with look-ups ({each.alone:.2f} alone): about "
            f"{each.accepted:.2f} accepted of {each.nodes} drafted, in a step of {each.step:.2f} plain ones, "
            f"after {each.tokens:,} tokens at {speeds.train:,.0f} a second (products in {precision}), as reached on "
            f"{each.source}"
        )
    lines += [f"{name}: not considered ({why})" for name, why in known.missing.items()]
    why = "as asked" if run.config.kind else "it is expected to pay most, or as much, with more of its drafts accepted"
    if _pays(known, plan, run.config):
        ends = _time(3600 * run.config.hours - (0 if run.dry else run.work.spent_s))
        return [*lines, f"chosen: {plan.kind}, {why}; {plan.answers:,} tokens of answers, done in {ends}"]
    tried = ", ".join(known.kinds)
    return [*lines, f"do not train: in this time none of {tried} is expected to add to look-ups; take --drafter suffix"]


def _hours(seconds: float) -> str:
    return f"--hours {math.ceil(seconds / 36) / 100:g}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
