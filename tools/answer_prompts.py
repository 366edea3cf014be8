"""Generate a target's answers to the prompts of a file: the best training data for drafts.

    .venv/bin/python tools/answer_prompts.py --target MODEL --data FILE --out FILE.jsonl [--limit N] [--length N]
        [--temperature T] [--seed N] [--batch N]

Prompts are rendered as training renders them; a text's prompt is the first part of each of its pieces. A line holds
text and token ids: text does not always encode to the ids that it came from. Next to the file lies `FILE.json`, which
records what made it: only the same target and settings may continue it. Ctrl-C keeps the answers, and the same command
continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.adapt.answering import answerer, write
from paceline.api.llm import LLM
from paceline.core.errors import ConfigError
from paceline.train.data import Encoder, SourceSpec, load_source, mark
from paceline.train.files import require_same
from paceline.weights.files import fingerprint
from paceline.weights.source import load_tokenizer, resolve_folder

TEXT_PROMPT = 64  # tokens of a text that are given
REPEAT = "name another --out, or repeat the first command's settings"


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """Which prompts are taken, and how they are answered."""

    limit: int | None = None
    piece: int = 384  # most tokens of prompt and answer together
    temperature: float = 0.0
    seed: int = 0  # of the choice of prompts, and of sampling


def choose(source: SourceSpec, encoder: Encoder, config: AnswerConfig) -> list[list[int]]:
    """Prompts as token ids, in the order of a draw by the seed: a higher limit only adds to its end."""
    prompts = []
    for one in load_source(source, encoder):  # a dialogue's own prompt; of a text its beginning, at most half of it
        count = one.prompt or max(1, min(TEXT_PROMPT, len(one.tokens) // 2))
        if min(count, len(one.tokens)) < config.piece:
            prompts.append([int(token) for token in one.tokens[:count]])
    if not prompts:
        raise ConfigError(f"data {source.file}", "it has no prompt that leaves room for an answer", "name another file")
    order = np.random.default_rng(config.seed).permutation(len(prompts))[: config.limit]
    return [prompts[i] for i in order.tolist()]


def making(source: SourceSpec, config: AnswerConfig, target: str) -> dict[str, Any]:
    """What a file of answers is a function of; the limit is left out, since a higher one only adds."""
    settings = {name: value for name, value in asdict(config).items() if name != "limit"}
    return {"target": target, "source": Path(source.file).name, "source_sha256": mark(source.file), **settings}


def sidecar(path: Path) -> Path:
    """The file next to ``path`` that states what made it."""
    return path.with_name(f"{path.name}.json")


def note_making(path: Path, facts: Mapping[str, Any]) -> None:
    """Write down what makes a file, or refuse one that was made otherwise."""
    beside = sidecar(path)
    if not path.is_file() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return
    try:
        stored = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError) as error:
        wrong = f"{beside.name}, which has their settings, cannot be read ({error})"
        raise ConfigError(f"answers {path}", wrong, "remove both files, or name another --out") from error
    wrong = "their {name} is {found!r}, this command's {own!r}"
    require_same(f"answers {path}", {name: stored.get(name) for name in facts}, facts, REPEAT, wrong)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="zoo name, folder or hub name")
    parser.add_argument("--data", required=True, help="file of prompts")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; answers that it has are kept")
    parser.add_argument("--limit", type=int, help="most prompts; default: all")
    parser.add_argument("--length", type=int, default=384, help="most tokens of prompt and answer together")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts, and of sampling")
    parser.add_argument("--batch", type=int, default=64, help="requests at a time")
    given = parser.parse_args()
    if given.out.suffix != ".jsonl":
        parser.error("answers are JSON lines: name a file that ends in .jsonl")
    config = AnswerConfig(limit=given.limit, piece=given.length, temperature=given.temperature, seed=given.seed)
    source = SourceSpec(file=given.data)
    try:
        folder = resolve_folder(given.target)
        encoder = Encoder(load_tokenizer(folder), config.piece)
        prompts = choose(source, encoder, config)
        note_making(given.out, making(source, config, fingerprint(folder)))
        llm = LLM(given.target, max_sequences=given.batch, max_model_len=config.piece + 8)
        answer = answerer(llm, config.piece, config.temperature)
        count = write(given.out, prompts, encoder.tokenizer, answer, config.seed, given.batch * 8)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; the answers in {given.out} are kept, and the same command continues")
    print(f"{count:,} answers in {given.out}")


if __name__ == "__main__":
    main()
