"""A target's own answers as training data: a draft is accepted where it agrees with the target.

The prompts are those of the data, rendered as training renders them; a text's prompt is the first part of each of its
pieces. A line holds text and token ids: text does not always encode to the ids that it came from. Next to the file
lies ``FILE.json``, which records what made it: only the same target and settings may continue it. Nothing here runs a
model: `write` is given a function that answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from ..core.options import check, option
from .data import Encoder, SourceSpec, load_source, mark
from .files import require_same, writing

# ids of prompts, and a seed of each -> ids of their answers
Answer = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Sequence[int]]]


TEXT_PROMPT = 64  # tokens of a text that are given
_REPEAT = "name another --out, or repeat the first command's settings"


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """Describe which prompts are taken, and how they are answered."""

    limit: int | None = option(None, help="most prompts of each file; default: all", minimum=1)
    piece: int = option(384, help="most tokens of prompt and answer together", minimum=8, flag="--length")
    temperature: float = option(0.0, help="temperature of the answers; 0: greedy", minimum=0)
    seed: int = field(default=0, metadata={"cli": False})  # of the choice of prompts, and of sampling

    def __post_init__(self) -> None:
        check(self)


def choose(source: SourceSpec, encoder: Encoder, config: AnswerConfig) -> list[list[int]]:
    """Return prompts of a source as token ids, in the order of a draw by the seed: a higher limit only adds to its end.

    Raises:
        ConfigError: the source has none.
    """
    prompts = []
    for one in load_source(source, encoder):  # a dialogue's own prompt; of a text its beginning, at most half of it
        count = one.prompt or max(1, min(TEXT_PROMPT, len(one.tokens) // 2))
        if min(count, len(one.tokens)) < config.piece:
            prompts.append([int(token) for token in one.tokens[:count]])
    if not prompts:
        raise ConfigError(f"data {source.file}", "it has no prompt that leaves room for an answer", "name another file")
    order = np.random.default_rng(config.seed).permutation(len(prompts))[: config.limit]
    return [prompts[i] for i in order.tolist()]


def write(
    path: Path,
    prompts: Sequence[Sequence[int]],
    facts: Mapping[str, Any],
    tokenizer: Any,
    answer: Answer,
    seed: int = 0,
    batch: int = 512,
    say: Callable[[str], None] = lambda text: None,
    going: Callable[[], bool] = lambda: True,
) -> int:
    """Answer prompts into a JSONL file, and return how many it holds; those that it holds already are kept.
    Whole lines are written batch by batch, so that it can be gone on with after any stop.

    Args:
        prompts: token ids of each.
        facts: what made the file; see `making`.
        answer: the target. A prompt's seed depends on the run's ``seed`` and its place in the file alone.
        batch: prompts handed over together: many more than are answered at a time, since the last ones wait for the
            longest answer.
        say: called from time to time with the progress.
        going: whether to answer another batch.

    Raises:
        ConfigError: another target or other settings made the file, or it cannot be written.
    """
    beside = sidecar(path)
    if not path.is_file() or not path.stat().st_size:
        with writing(f"answers {path}", "name another --out"):
            beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    else:
        try:
            stored = json.loads(beside.read_text("utf-8"))
        except (OSError, ValueError) as error:
            wrong = f"{beside.name}, which has their settings, cannot be read ({error})"
            raise ConfigError(f"answers {path}", wrong, "remove both files, or name another --out") from error
        wrong = "their {name} is {found!r}, this command's {own!r}"
        require_same(f"answers {path}", {name: stored.get(name) for name in facts}, facts, _REPEAT, wrong)
    data = path.read_bytes() if path.is_file() else b""
    if rest := len(data) - data.rfind(b"\n") - 1:  # half a line, of a killed process
        os.truncate(path, len(data) - rest)
    done = data.count(b"\n")
    if last := min(done, len(prompts)):
        try:
            same = json.loads(data.split(b"\n")[last - 1])["prompt_tokens"] == [*prompts[last - 1]]
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise ConfigError(f"answers {path}", f"line {last} does not answer prompt {last} of this command", _REPEAT)
    began, tokens_written = perf_counter(), 0
    while done < len(prompts) and going():
        part = prompts[done : done + batch]
        marks = (f"{seed} {done + i}".encode() for i in range(len(part)))  # no two prompts share their noise
        seeds = [int.from_bytes(hashlib.sha256(one).digest()[:6], "little") for one in marks]
        answers = answer(part, seeds)
        lines = [answer_line(tokenizer, ids, answer_ids) for ids, answer_ids in zip(part, answers, strict=True)]
        with writing(f"answers {path}", "free space there"), path.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))
        tokens_written += sum(map(len, answers))
        before, done = done, done + len(part)
        if done * 10 // len(prompts) > before * 10 // len(prompts):  # a tenth more
            speed = tokens_written / (perf_counter() - began)
            say(f"{done:,} of {len(prompts):,} answers in {path}, {speed:,.0f} tokens/s")
    return done


def making(source: SourceSpec, config: AnswerConfig, target: str) -> dict[str, Any]:
    """Return what a file of answers is a function of; the limit is left out, since a higher one only adds."""
    settings = {name: value for name, value in asdict(config).items() if name != "limit"}
    return {"target": target, "source": Path(source.file).name, "source_sha256": mark(source.file), **settings}


def sidecar(path: Path) -> Path:
    """Return the file next to ``path`` that states what made it."""
    return path.with_name(f"{path.name}.json")


def answer_line(tokenizer: Any, ids: Sequence[int], answer: Sequence[int]) -> str:
    """Return the line of one ``answer`` to the prompt ``ids``."""
    record = {
        "prompt": tokenizer.decode(list(ids)),
        "completion": tokenizer.decode(list(answer), skip_special_tokens=True),
        "prompt_tokens": list(ids),
        "completion_tokens": list(answer),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
