"""A target's own answers as training data: a draft is accepted where it agrees with the target.

The prompts are those of the data, rendered as training renders them; a text's prompt is the first part of each of its
pieces. A line holds text and token ids: text does not always encode to the ids that it came from. Next to the file
lies ``FILE.json``, which records what made it: only the same target and settings may continue it. Nothing here runs a
model: `write` is given a function that answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """Which prompts are taken, and how they are answered."""

    limit: int | None = option(None, help="most prompts of each file; default: all", minimum=1)
    piece: int = option(384, help="most tokens of prompt and answer together", minimum=8, flag="--length")
    temperature: float = option(0.0, help="temperature of the answers; 0: greedy", minimum=0)
    seed: int = option(0, help="seed of the choice of prompts, and of sampling")

    def __post_init__(self) -> None:
        check(self)


def choose(source: SourceSpec, encoder: Encoder, config: AnswerConfig) -> list[list[int]]:
    """Return prompts of a source as token ids, in the order of a draw by the seed: a higher limit only adds to its end.

    Raises:
        ConfigError: the source has none.
    """
    found = [ids for e in load_source(source, encoder) if len(ids := _prompt(e.tokens, e.prompt)) < config.piece]
    if not found:
        raise ConfigError(f"data {source.file}", "it has no prompt that leaves room for an answer", "name another file")
    order = np.random.default_rng(config.seed).permutation(len(found))[: config.limit]
    return [found[i] for i in order.tolist()]


def _prompt(tokens: np.ndarray, prompt: int) -> list[int]:
    """Return a dialogue's own prompt; of a text `TEXT_PROMPT` tokens, or half of a piece not twice as long."""
    return [int(i) for i in tokens[: prompt or max(1, min(TEXT_PROMPT, len(tokens) // 2))]]


def write(
    path: Path,
    source: SourceSpec,
    encoder: Encoder,
    config: AnswerConfig,
    answer: Answer,
    target: str,
    batch: int = 512,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Answer a source's prompts into a JSONL file, and return how many it holds; those that it holds already are kept.
    Whole lines are written batch by batch, so that it can be gone on with after any stop.

    Args:
        answer: the target. A prompt's seed depends on the run's seed and its place in the file alone.
        target: fingerprint of who answers.
        batch: prompts handed over together: many more than are answered at a time, since the last ones wait for the
            longest answer.
        say: told now and then how far it is.

    Raises:
        ConfigError: another target or other settings made the file, or it cannot be written.
    """
    prompts = choose(source, encoder, config)
    _same_making(path, making(source, config, target))
    done = count_answers(path, prompts)
    began, made = perf_counter(), 0
    for start in range(done, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = [prompt_seed(config.seed, start + i) for i in range(len(part))]
        found = answer(part, seeds)
        lines = [answer_line(encoder, ids, said) for ids, said in zip(part, found, strict=True)]
        with writing(f"answers {path}", "free space there"), path.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))
        made += sum(map(len, found))
        if (start + len(part)) * 10 // len(prompts) > start * 10 // len(prompts):  # a tenth more
            speed = made / (perf_counter() - began)
            say(f"{start + len(part):,} of {len(prompts):,} answers in {path}, {speed:,.0f} tokens/s")
    return max(done, len(prompts))


def prompt_seed(seed: int, index: int) -> int:
    """Return the seed of the answer to prompt ``index`` of a file: no two prompts share their noise."""
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def making(source: SourceSpec, config: AnswerConfig, target: str) -> dict[str, Any]:
    """Return what a file of answers is a function of; the limit is left out, since a higher one only adds."""
    settings = {name: value for name, value in asdict(config).items() if name != "limit"}
    return {"target": target, "source": Path(source.file).name, "source_sha256": mark(source.file), **settings}


def sidecar(path: Path) -> Path:
    """Return the file next to ``path`` that says what made it."""
    return path.with_name(f"{path.name}.json")


def answered_by(path: Path) -> str | None:
    """Return fingerprint of the target whose answers a file holds, compressed or not.

    None: nothing says that it holds any.
    """
    try:
        found = json.loads(sidecar(path.with_name(path.name.removesuffix(".gz"))).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    target = found.get("target") if isinstance(found, dict) else None
    return target if isinstance(target, str) else None


def _same_making(path: Path, own: Mapping[str, Any]) -> None:
    """Write down what makes the file, or check that the same made it so far."""
    beside = sidecar(path)
    if not path.is_file() or not path.stat().st_size:
        with writing(f"answers {path}", "name another --out"):
            beside.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        return
    try:
        found = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError) as error:
        wrong = f"{beside.name}, which says what made them, cannot be read ({error})"
        raise ConfigError(f"answers {path}", wrong, "remove both files, or name another --out") from error
    wrong = "their {name} is {found!r}, this command's {own!r}"
    require_same(f"answers {path}", {name: found.get(name) for name in own}, own, _REPEAT, wrong)


def answer_line(encoder: Encoder, ids: Sequence[int], said: Sequence[int]) -> str:
    """Return the line of one answer ``said`` to the prompt ``ids``."""
    record = {
        "prompt": encoder.tokenizer.decode(list(ids)),
        "completion": encoder.tokenizer.decode(list(said), skip_special_tokens=True),
        "prompt_tokens": list(ids),
        "completion_tokens": list(said),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def count_answers(path: Path, prompts: Sequence[Sequence[int]]) -> int:
    """Return answers that are there, each to its prompt; half a line at the end (a killed process) is dropped.

    Raises:
        ConfigError: a line that answers another prompt, or is not an answer.
    """
    if not path.is_file():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    count = 0
    for count, ids in enumerate(_prompts_in(whole, path), 1):
        if count <= len(prompts) and ids != list(prompts[count - 1]):
            wrong = f"its line {count} answers another prompt"
            raise ConfigError(f"answers {path}", wrong, _REPEAT)
    if len(whole) < len(data):
        with path.open("r+b") as handle:
            handle.truncate(len(whole))
    return count


def _prompts_in(data: bytes, path: Path) -> Iterator[list[int]]:
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            yield json.loads(line)["prompt_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}", "it is no answer", "name another --out") from error
