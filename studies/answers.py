"""How well a model answers: task scores of greedy answers, loss per token on held-out texts.

    python studies/answers.py --tasks sql,gsm8k --out build/answers
    python studies/answers.py --application sql=paceline-small-sql --loss TEXT --out build/answers

Speculation changes no answer, so scores belong to a model, and to an application's adapters where there are any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.scores import DomainLoss, TaskQuality, domain_losses, evaluate, known_tasks, means
from kit.study import Options, Study, Table, asked

from paceline.api.llm import LLM
from paceline.bench import machine
from paceline.bench import report as say
from paceline.papers.streaming.model import read_config
from paceline.weights.source import resolve_folder


@dataclass(frozen=True, kw_only=True)
class AnswerFlags(Options):
    """What this study can be asked beside what all can."""

    tasks: str = asked("sql,e2e,gsm8k", "Of sql, e2e, gsm8k, dialogsum, humaneval (whose answers are run).", "NAME,..")
    prompts: int = asked(200, "Prompts of each task.", "N")
    application: dict[str, str] = asked({}, "A trained set that answers as well.", "NAME=FOLDER")
    loss: list[str] = asked([], "Text whose loss per token is measured.", "FILE")
    loss_tokens: int = asked(20_000, "Tokens of each such text, from its beginning.", "N")


study = Study(
    "How well a model answers.", AnswerFlags, quick={"tasks": "sql,gsm8k", "prompts": 4, "max_new_tokens": 16}
)


@study.table(takes=("application", "loss", "loss_tokens"))
def scores(ask: AnswerFlags) -> Iterator[Table | None]:
    """Exact match, ROUGE and accuracy of greedy answers, and losses, of the base model and of every application."""
    tasks, sets = known_tasks(ask.names), dict(ask.application)
    yield None
    drafts = any(read_config(Path(resolve_folder(folder))).gamma for folder in sets.values())
    drafter = "streams" if drafts else None  # such a set cannot answer without its streams
    llm = LLM(ask.model, drafter=drafter, applications=sets or None, **ask.llm)
    limits: dict[str, Any] = {"limit": ask.prompts, "seed": ask.seed, "max_new_tokens": ask.max_new_tokens}
    answering = (None, *sets)
    # Losses first: they take seconds, so a bad file is known before tasks take minutes.
    losses = [x for a in answering for x in domain_losses(llm, ask.loss, max_tokens=ask.loss_tokens, application=a)]
    scored = [x for a in answering for x in evaluate(llm, tasks, ask.data, application=a, **limits)]
    facts = {"model": ask.model, "options": {**ask.llm, "drafter": drafter, "applications": sets}, "seed": ask.seed}
    yield Table(
        title="Task scores and losses",
        head=("answers", "task or text", "score", "mean", "95% interval", "prompts or pieces", "ended", "tokens"),
        parts={"": [row for found in scored for row in score_rows(found)] + [loss_row(found) for found in losses]},
        values={
            **facts,
            "machine": machine.describe(ask.device),
            "tasks": [asdict(found) for found in scored],
            "losses": [asdict(found) for found in losses],
        },
        how=[[f"{ask.model}, {llm.config.dtype}: greedy answers", machine.line(ask.device)]],
    )


def score_rows(found: TaskQuality) -> list[list[str]]:
    """One row a score."""
    prompts, values = found.workload["prompts"], found.scores
    counts = [str(prompts), f"{found.finished / prompts:.0%}", str(found.output_tokens)]
    return [
        [found.application or "base", found.task, name, f"{value:.3f}"]
        + [f"{values[f'{name}_low']:.3f}-{values[f'{name}_high']:.3f}", *counts]
        for name, value in means(values).items()
    ]


def loss_row(found: DomainLoss) -> list[str]:
    """One row a text."""
    start = [found.application or "base", found.domain, "nats a token", f"{found.loss:.4f}", say.NOTHING]
    return [*start, str(found.documents), say.NOTHING, str(found.tokens)]


if __name__ == "__main__":
    study.main()
