"""The prompts: the user's, or a mix by kind; those to learn from, and those to judge on.

The mix are the packaged samples of the bench (licences: bench/data/SOURCES.md). Those to judge on are the bench's own
choice by the same seed (`bench.workloads.choose`), so that its report is over prompts that nobody learned from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.encoding import Encoded
from ..bench.workloads import choose, load
from ..core.errors import ConfigError

MIX = {  # by kind, the packaged workload
    "chat": "spec_bench",
    "code": "humaneval",
    "extraction": "wikisql",
    "long documents": "books",
    "maths": "gsm8k",
}
LEAST = 20  # prompts
JUDGED_OF_MIX = 8  # of each kind
JUDGED_SHARE, JUDGED_MOST = 0.2, 48  # of a user's own


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The prompts of one file or kind."""

    workload: str  # as the bench takes it
    name: str
    learned: list[tuple[int, ...]]  # token ids of each prompt
    judged: list[tuple[int, ...]]


def collect(file: Path | None, tokenizer: Any, room: int, answer_tokens: int, seed: int) -> list[Questions]:
    """Read the prompts of each file or kind, and cut them to a length.

    Args:
        file: the user's; None: the mix.
        tokenizer: of the model.
        room: most tokens of prompt and answer.
        answer_tokens: of an answer.
        seed: of the choice.

    Raises:
        ConfigError: a file that cannot be read, or too few prompts.
    """
    names = [*MIX.values()] if file is None else [str(file)]
    try:
        loaded = [load(name, seed=seed) for name in names]
    except ConfigError as error:
        if file is None:
            raise
        remedy = 'give JSON lines, each {"prompt": "..."} or {"turns": ["...", ..]}'
        raise ConfigError(f"--prompts {file}", f"{error.subject}: {error.wrong}", remedy) from error
    judged = JUDGED_OF_MIX
    if file is not None:
        if len(loaded[0].prompts) < LEAST:
            wrong = f"it has {len(loaded[0].prompts)} prompts, and some are put aside to judge on"
            raise ConfigError(f"--prompts {file}", wrong, f"give {LEAST} or more, or leave --prompts out for a mix")
        judged = max(4, min(JUDGED_MOST, round(JUDGED_SHARE * len(loaded[0].prompts))))
    size = {"max_model_len": room, "max_new_tokens": answer_tokens}
    questions = []
    for name, whole in zip(names, loaded, strict=True):
        aside = {prompt.id for prompt in choose(whole.prompts, judged, seed, whole.strata)}
        learned, put_aside = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for prompt, tokenized in zip(whole.prompts, Encoded(whole, tokenizer, **size).prompts, strict=True):
            (put_aside if prompt.id in aside else learned).append(tokenized.ids)
        questions.append(Questions(workload=name, name=whole.name, learned=learned, judged=put_aside))
    return questions
