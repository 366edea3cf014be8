"""Training data: records, tokens, packed rows, in an order that is a function of the seed alone.

Two forms are read, gzip-compressed or not: JSON lines with ``prompt`` and ``completion`` (or ``turns`` and
``reference``), and plain text whose documents are separated by a line ``<|endoftext|>``. A record becomes
an `Example`; examples of several sources are drawn by weight and packed into rows of one length.
"""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import ConfigError
from .files import read_lines, read_records

SEPARATOR = "<|endoftext|>"
STDLIB = "python-stdlib"  # the source of the running interpreter's standard library, as a corpus of its own
OPEN_ROWS = 16  # rows that are being filled at a time
FORMS = 'JSON lines with "prompt" and "completion", or text with documents separated by <|endoftext|> lines'


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one document, and from which one on they are to be learned."""

    tokens: np.ndarray  # [length] int32
    prompt: int = 0  # leading tokens that belong to the prompt; 0: all is text
    place: int = -1  # of its first token in the run's cache; -1: it lies in none


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source of a mixture."""

    file: str  # a path, or STDLIB
    weight: float = 1.0  # share of the documents' tokens, relative to the other sources
    max_tokens: int | None = None  # of it, no more than these are read
    # Of each answer, no more than these are learned: long greedy ones go in circles.
    answer_tokens: Annotated[int, Field(ge=1)] | None = None
    domain: str = ""  # what it counts as in reports; empty: the file's name

    @property
    def name(self) -> str:
        """The domain it is reported under."""
        return self.domain or Path(self.file).name.split(".")[0]

    def learned(self, examples: Sequence[Example]) -> list[Example]:
        """Return the part of its examples that is learned.

        Their places in a cache, which holds whole ones, stay.
        """
        most = self.answer_tokens
        if most is None:
            return list(examples)
        return [replace(e, tokens=e.tokens[: e.prompt + most]) if e.prompt else e for e in examples]


# --- files ----------------------------------------------------------------------------------------------------


def read_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield records of a file: ``{"prompt", "completion"}``, or ``{"text"}``; answers bring their token ids along, or
    are nothing else: ``{"prompt_tokens", "completion_tokens"}``.

    Raises:
        ConfigError: a file that is missing, broken, or of neither form.
    """
    if str(path) == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "turtledemo"}
        for module in sorted(root.rglob("*.py")):
            if not left_out & set(module.relative_to(root).parts):
                with suppress(OSError, UnicodeDecodeError):
                    yield {"text": module.read_text(encoding="utf-8")}
        return
    name, what = path.name.removesuffix(".gz"), f"data {path}"
    if name.endswith((".jsonl", ".json")):
        yield from (_fields(record, place) for place, record in read_records(path, what, f"give {FORMS}"))
    elif name.endswith(".txt"):
        yield from ({"text": text} for text in _split(read_lines(path, what, "get the file again")))
    else:
        raise ConfigError(what, "neither .jsonl nor .txt (.gz may follow)", f"give {FORMS}")


def _fields(record: dict[str, Any], place: str) -> dict[str, Any]:
    if record.keys() == {"prompt_tokens", "completion_tokens"}:
        record = {"prompt": "", "completion": "", **record}
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        ids: dict[str, Any] = {k: record[k] for k in ("prompt_tokens", "completion_tokens") if k in record}
        if not all(isinstance(v, list) and all(isinstance(i, int) for i in v) for v in ids.values()):
            raise ConfigError(place, "its token ids are not lists of numbers", "correct it")
        return {"prompt": record["prompt"], "completion": record["completion"], **ids}
    turns, reference = record.get("turns"), record.get("reference")
    if isinstance(turns, list) and turns and isinstance(reference, list) and reference:
        return {"prompt": str(turns[0]), "completion": str(reference[0])}
    if isinstance(record.get("text"), str):
        return {"text": record["text"]}
    raise ConfigError(place, "it has neither prompt and completion nor text", f"give {FORMS}")


def _split(lines: Iterator[str]) -> Iterator[str]:
    """Yield the documents between separators, those without text left out."""
    for separates, part in groupby(lines, lambda line: line.strip() == SEPARATOR):
        text = "".join(part)
        if not separates and text.strip():
            yield text.strip("\n")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def mark(file: str) -> str:
    """Return what distinguishes a source's content: a file's hash; of `STDLIB` the version of the interpreter."""
    return ".".join(map(str, sys.version_info[:3])) if file == STDLIB else sha256(Path(file))


# --- tokens ---------------------------------------------------------------------------------------------------


class Encoder:
    """Records to examples, by a Hugging Face tokenizer's chat template where it has one. Text is cut into pieces of
    ``max_length`` tokens, a longer dialogue is left out."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        # What every example begins and ends with: the tokenizer's marks, where it has any.
        self.start, self.end = ([] if i is None else [i] for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))

    def encode(self, records: Sequence[dict[str, Any]]) -> list[Example]:
        """Return [examples] in the records' order; a dialogue gives one or none, a text as many as it has pieces.

        Raises:
            ConfigError: token ids that another tokenizer made.
        """
        examples: list[Example] = []
        for record in records:
            if "prompt_tokens" in record and "completion_tokens" in record:
                examples += self._answered(record)
            elif "text" in record:
                tokens = [*self.start, *self._ids(record["text"]), *self.end]
                cut = range(0, len(tokens) - 1, self.max_length)
                examples += [Example(np.array(tokens[i : i + self.max_length], dtype=np.int32)) for i in cut]
            else:
                answer = record["completion"]
                head, tail = (
                    self._ids(self._prompt(record["prompt"])),
                    self._ids(answer.strip() if self.chat else answer),
                )
                tokens = [*self.start, *head, *tail, *self.end]
                if tail and len(tokens) <= self.max_length:
                    examples.append(Example(np.array(tokens, dtype=np.int32), len(self.start) + len(head)))
        return examples

    def _answered(self, record: dict[str, Any]) -> list[Example]:
        """Return ids as the target read and chose them; an answer that is too long is cut."""
        first, last = record["prompt_tokens"], record["completion_tokens"]
        text = record["prompt"]  # ids alone have none
        if max(first, default=0) >= len(self.tokenizer) or (text and self.tokenizer.decode(first) != text):
            remedy = "make them again, with this target"
            raise ConfigError("answers with token ids", "another tokenizer made them", remedy)
        if not last or len(first) >= self.max_length:
            return []
        return [Example(np.array([*first, *last][: self.max_length], dtype=np.int32), len(first))]

    def _prompt(self, prompt: str) -> str:
        if not self.chat:
            return prompt
        turn = [{"role": "user", "content": prompt}]
        text: str = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return text.removeprefix(self.tokenizer.bos_token or "")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def load_source(spec: SourceSpec, encoder: Encoder) -> list[Example]:
    """Return all examples of a source; with ``max_tokens`` a prefix with at most so many tokens (one example at least).

    Raises:
        ConfigError: no usable record in it.
    """
    most = math.inf if spec.max_tokens is None else spec.max_tokens
    examples: list[Example] = []
    total = 0
    for record in read_documents(Path(spec.file)):
        examples += (more := encoder.encode([record]))
        if (total := total + _size(more)) >= most:
            break
    if not examples:
        raise ConfigError(f"data {spec.file}", "it has no usable record", f"give {FORMS}, none over the context length")
    ends = accumulate(len(e.tokens) for e in examples)
    return examples[: max(1, sum(end <= most for end in ends))]


# --- rows -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenBatch:
    """Packed rows. Position 0 of a document sees nothing before it."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64  the next token of the same document; 0 where there is none
    weights: Tensor  # [B, T] float32  of the target's loss: 1 for answers and text, less for prompts, 0 for padding
    positions: Tensor  # [B, T] int64  within the document
    documents: Tensor  # [B, T] int64  index of the document in its row; -1 for padding
    prompts: Tensor  # [B, T] int64  prompt length of the token's document
    places: Tensor  # [B, T] int64  of the token in the run's cache; -1 where it lies in none

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on ``device``."""
        return self._each(lambda values: values.to(device))

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Return rows start .. stop - 1."""
        return self._each(lambda values: values[start:stop])

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        return TokenBatch(*(change(getattr(self, name)) for name in self.__dataclass_fields__))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without padding."""
        return int((self.documents >= 0).sum())


class Mixture:
    """Draws examples of several sources, (weight, examples) each, by weight, and packs them into rows;
    ``prompt_weight`` is that of prompt tokens in the loss. Never ends; repeats exactly."""

    def __init__(self, sources: Sequence[tuple[float, Sequence[Example]]], seed: int, prompt_weight: float = 0.0):
        if not sources or any(not examples for _, examples in sources):
            raise ConfigError("training data", "a source has no usable record", f"give {FORMS}")
        self.sources = [list(examples) for _, examples in sources]
        weights = np.array([weight for weight, _ in sources], dtype=np.float64)
        if (weights < 0).any() or weights.sum() <= 0:
            raise ConfigError(f"mixture weights {weights.tolist()}", "not shares", "give weights above 0")
        self.shares = weights / weights.sum()
        self.prompt_weight = prompt_weight
        self.seed = seed
        self._drawn = np.zeros(len(sources))  # tokens by source
        self._next = [0] * len(sources)
        self._orders: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sources)

    def draw(self) -> Example:
        """Return the next example: of the source that is furthest below its share."""
        total = self._drawn.sum() + 1.0
        source = int(np.argmax(self.shares - self._drawn / total))
        example = self.sources[source][self._index(source)]
        self._drawn[source] += len(example.tokens)
        return example

    def _index(self, source: int) -> int:
        """Return the next index of a source, by a permutation of its own in every epoch."""
        size = len(self.sources[source])
        epoch, place = divmod(self._next[source], size)
        if place == 0:
            self._orders[source] = np.random.default_rng([self.seed, source, epoch]).permutation(size)
        self._next[source] += 1
        return int(self._orders[source][place])

    def rows(self, length: int) -> Iterator[list[Example]]:
        """Yield rows of at most ``length`` tokens: first fit over the rows that are open."""
        opened: list[list[Example]] = []
        while True:
            example = self.draw()
            if len(example.tokens) > length:  # a phase of shorter rows sees its first tokens
                example = replace(example, tokens=example.tokens[:length])
            row = next((r for r in opened if _size(r) + len(example.tokens) <= length), None)
            if row is None:
                if len(opened) == OPEN_ROWS:
                    yield opened.pop(max(range(len(opened)), key=lambda i: _size(opened[i])))
                opened.append(row := [])
            row.append(example)

    def batches(self, rows: int, length: int) -> Iterator[TokenBatch]:
        """Yield batches of ``rows`` rows of ``length`` tokens."""
        source = self.rows(length)
        while True:
            yield collate([next(source) for _ in range(rows)], length, self.prompt_weight)


def _size(examples: Sequence[Example]) -> int:
    return sum(len(e.tokens) for e in examples)


def collate(rows: Sequence[Sequence[Example]], length: int, prompt_weight: float = 0.0) -> TokenBatch:
    """Return rows of examples as tensors [B, length]."""
    shape = (len(rows), length)
    tokens, targets, positions, prompts = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    documents, places = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    for b, row in enumerate(rows):
        start = 0
        for index, example in enumerate(row):
            stop = start + len(example.tokens)
            tokens[b, start:stop] = example.tokens
            targets[b, start : stop - 1] = example.tokens[1:]
            positions[b, start:stop] = np.arange(stop - start)
            documents[b, start:stop] = index
            prompts[b, start:stop] = example.prompt
            if example.place >= 0:
                places[b, start:stop] = np.arange(example.place, example.place + stop - start)
            answer = start + max(example.prompt - 1, 0)
            weights[b, start : stop - 1] = prompt_weight if example.prompt else 1.0
            weights[b, answer : stop - 1] = 1.0
            start = stop
    arrays = (tokens, targets, weights, positions, documents, prompts, places)
    return TokenBatch(*(torch.from_numpy(a) for a in arrays))
