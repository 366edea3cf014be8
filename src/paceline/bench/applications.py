"""Shared mode beside plain fine-tuning with the same adapters: speed, task score, extra parameters.

For each application two trained sets: an adapter alone (gamma 0), and one whose streams were trained with it.
Everything is over the adapter's own plain decoding, on the same prompts in the same run; ids are compared with each
set's own plain decoding, since the two sets answer differently.

Source: Speculative Streaming, table 3 (section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..drafters.streams import StreamsConfig
from ..llm import LLM
from ..target.loader import resolve_folder
from ..target.streams import StreamSet, read_config
from .quality import TASK_WORKLOADS, evaluate
from .records import PLAIN, Cell, Method, Report
from .report import wording as say
from .report.markdown import table, text
from .run import BenchConfig
from .summary import Index, Interval, Row, ratio_interval, summarise

ADAPTER, STREAMS = "adapter", "streams"
BASELINE = ADAPTER  # the method that every speed-up is over
CUTS = (8, 16)  # nodes of the trees that are tried
CHILDREN = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sets for one application, which is named as its task."""

    task: str
    adapter: str  # folder of a set without streams
    streams: str  # folder of a set in shared mode with streams

    @staticmethod
    def read(task: str, adapter: str, streams: str) -> Pair:
        """Check that the sets are what they are taken for.

        Raises:
            ConfigError: an unknown task, or a set of another kind.
        """
        if task not in TASK_WORKLOADS:
            raise ConfigError(f"application {task}", "no task has that name", f"use {', '.join(TASK_WORKLOADS)}")
        for folder, streaming in ((adapter, False), (streams, True)):
            config = read_config(Path(resolve_folder(folder)))
            if config.mode != "shared" or bool(config.gamma) != streaming:
                wanted = "name a shared set with " + ("streams" if streaming else "adapters alone (gamma 0)")
                raise ConfigError(f"{task}={folder}", f"a {config.mode} set with {config.gamma} streams", wanted)
        return Pair(task=task, adapter=adapter, streams=streams)

    @property
    def folders(self) -> dict[str, str]:
        """By the names that requests use."""
        return {ADAPTER: self.adapter, STREAMS: self.streams}

    def methods(self) -> list[Method]:
        """The adapter without and with look-ups; the streams without drafts, as a chain, as trees, and left alone."""
        gamma = read_config(Path(resolve_folder(self.streams))).gamma
        shapes: list[tuple[str, dict[str, Any]]] = [("chain", {"chain": True})]
        shapes += [(f"best {nodes}", {"k": CHILDREN, "nodes": nodes}) for nodes in CUTS]
        drafts = []
        for name, options in shapes:
            size = StreamsConfig(**options).num_nodes(gamma)
            drafts.append(_streams(name, options, size))
        return [
            Method(name=BASELINE, application=ADAPTER),
            Method(name=f"{ADAPTER}, ngram", drafter="ngram", application=ADAPTER),
            Method(name=f"{STREAMS}, {PLAIN}", drafter="streams", settings={"budget": 0}, application=STREAMS),
            *drafts,
            _streams("auto budget", {"k": CHILDREN, "nodes": max(CUTS)}, "auto"),
        ]

    def bench_config(self, values: Mapping[str, Any]) -> BenchConfig:
        """The run of this application.

        Args:
            values: fields of `BenchConfig` that are the user's.
        """
        asked = {"title": f"Shared streams beside a plain adapter: {self.task}", **values}
        workload = (TASK_WORKLOADS[self.task],)
        return BenchConfig(methods=tuple(self.methods()), applications=self.folders, workloads=workload, **asked)


def _streams(name: str, options: Mapping[str, Any], budget: int | str) -> Method:
    written = ",".join(["streams", *(f"{k}={str(v).lower()}" for k, v in options.items())])
    return Method(name=f"{STREAMS}, {name}", drafter=written, settings={"budget": budget}, application=STREAMS)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of one application."""

    task: str
    method: str
    speedup: Interval | None  # over the adapter's plain decoding; None: of that itself
    tokens_per_s: float | None
    accepted: float | None  # mean accepted tokens: tokens a pass
    scores: dict[str, float]  # of the answers; NAME_low and NAME_high are ends of 95% intervals
    extra_parameters: int  # beside the adapter's
    exact: str  # ids equal the set's own plain decoding's

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def scores_of(
    pair: Pair, model: str, data: Path | None, limit: int, seed: int, options: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Task scores of both sets' answers, by application. Drafts change no answer, so each set is asked once.

    Args:
        model: the target.
        limit: prompts.
        options: of `LLM`.
    """
    llm = LLM(model, drafter="streams", applications=pair.folders, **options)
    found = {}
    for name in pair.folders:
        (quality,) = evaluate(llm, [pair.task], data, limit=limit, seed=seed, application=name)
        found[name] = quality.scores
    return found


def extra_parameters(pair: Pair) -> int:
    """What the set with streams holds beside as many parameters as the adapter alone."""
    return _parameters(pair.streams) - _parameters(pair.adapter)


def _parameters(folder: str) -> int:
    return sum(StreamSet.load(resolve_folder(folder)).parameters_by_part().values())


def lines_of(pair: Pair, report: Report, scores: Mapping[str, dict[str, float]], extra: int) -> list[Line]:
    """The table of one application."""
    summary, index = summarise(report), Index(report)
    return [_line(pair, row, row.cell, index, scores, extra) for row in summary.rows if row.cell is not None]


def _line(pair: Pair, row: Row, cell: Cell, index: Index, scores: Mapping[str, dict[str, float]], extra: int) -> Line:
    name, application = row.method.name, row.method.application or ""
    return Line(
        task=pair.task,
        method=name,
        speedup=None if name == BASELINE else ratio_interval(index, name, BASELINE, cell),
        tokens_per_s=row.speed,
        accepted=row.figures.call_reduction,
        scores=dict(scores.get(application, {})),
        extra_parameters=extra if application == STREAMS else 0,
        exact=say.exact_mark(row.exact) if not row.method.plain else say.NOTHING,
    )


HEAD = (
    "application",
    "method",
    "speed-up",
    "tokens/s",
    "mean accepted tokens",
    "score",
    "extra parameters",
    "ids exact",
)


def cells(line: Line) -> list[str]:
    """One row, under `HEAD`."""
    return [
        line.task,
        line.method,
        "1" if line.method == BASELINE else say.interval(line.speedup),
        say.number(line.tokens_per_s),
        say.length(line.accepted),
        _scores(line.scores),
        f"{line.extra_parameters:,}" if line.extra_parameters else say.NOTHING,
        line.exact,
    ]


def _scores(scores: Mapping[str, float]) -> str:
    shown = {name: value for name, value in scores.items() if not name.endswith(("_low", "_high"))}
    return ", ".join(f"{name} {100 * value:.1f}" for name, value in shown.items()) or say.NOTHING


def markdown(lines: Sequence[Line], reports: Sequence[Report], scored: int) -> str:
    """The table, and how it was made.

    Args:
        scored: prompts behind each score.
    """
    first = reports[0]
    facts = [say.model_line(first), say.machine_line(first), say.run_line(first)]
    facts += [f"{key}: {say.setting(value)}" for key, value in first.settings.items()]
    facts += [f"scores are of {scored} prompts of each task at most, greedy", *first.notes]
    methods = [f"{m.name}: {say.method_detail(m)}" for m in first.methods]
    return (
        "\n\n".join(
            [
                "# Shared streams beside plain adapters",
                table(HEAD, ([text(cell) for cell in cells(line)] for line in lines)),
                "\n".join(f"- {text(line)}" for line in (*facts, *methods)),
                f"To repeat it:\n\n```\n{say.command_line(first)}\n```",
            ]
        )
        + "\n"
    )
