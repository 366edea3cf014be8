"""Records, tokens, and rows: whole documents, each token once, in an order that the seed alone decides."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit import CONTEXT, examples

from paceline.core.errors import ConfigError
from paceline.train.data import OPEN_ROWS, Encoder, Example, Mixture, SourceSpec, load_source, read_documents
from paceline.weights.source import load_tokenizer


@pytest.fixture(scope="module")
def encoder(target: Path) -> Encoder:
    return Encoder(load_tokenizer(target), CONTEXT)


def write(folder: Path, name: str, *lines: Any) -> Path:
    """A data file of JSON records or of lines as they are."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_both_forms_are_read(suffix: str, tmp_path: Path) -> None:
    turns = {"turns": ["a?", "more"], "reference": ["b"], "id": 3}
    records = write(tmp_path, f"r.jsonl{suffix}", {"prompt": "p", "completion": "c"}, turns, "", {"text": "t"})
    assert list(read_documents(records)) == [
        {"prompt": "p", "completion": "c"},
        {"prompt": "a?", "completion": "b"},
        {"text": "t"},
    ]
    texts = write(tmp_path, f"t.txt{suffix}", "<|endoftext|>", "one", "", "still one", "<|endoftext|>", " ", "two")
    assert [r["text"] for r in read_documents(texts)] == ["one\n\nstill one", " \ntwo"]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.jsonl", ['{"prompt": '], "line 1: it is not JSON"),
        ("x.jsonl", [{"text": "a"}, {"question": "b"}], "line 2: it has neither prompt and completion nor text"),
        ("x.jsonl", ['["a"]'], "line 1: it is a list, not an object"),
        ("x.csv", ["a,b"], "neither .jsonl nor .txt"),
        (
            "x.jsonl",
            [{"prompt": "p", "completion": "c", "prompt_tokens": "12", "completion_tokens": [1]}],
            "token ids are not lists of numbers",
        ),
    ],
)
def test_files_of_no_known_form_are_refused(name: str, lines: Sequence[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_documents(write(tmp_path, name, *lines)))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        list(read_documents(tmp_path / "none.txt"))
    whole = write(tmp_path, "cut.txt.gz", *[str(i) for i in range(5000)]).read_bytes()
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="it cannot be read"):
        list(read_documents(tmp_path / "cut.txt.gz"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="it cannot be read"):
        list(read_documents(tmp_path / "latin.txt"))


def test_a_dialogue_is_what_the_chat_template_says(encoder: Encoder) -> None:
    (made,) = encoder.encode([{"prompt": "Hello?", "completion": " Yes. "}])
    tokenizer = encoder.tokenizer
    text = tokenizer.decode(made.tokens.tolist())
    assert text == "<|bos|><|user|>Hello?<|assistant|>Yes.<|eos|>"
    assert tokenizer.decode(made.tokens[: made.prompt].tolist()) == "<|bos|><|user|>Hello?<|assistant|>"


def answered(encoder: Encoder, prompt: list[int], said: list[int]) -> dict[str, Any]:
    return {
        "prompt": encoder.tokenizer.decode(prompt),
        "completion": encoder.tokenizer.decode(said),
        "prompt_tokens": prompt,
        "completion_tokens": said,
    }


def test_records_with_token_ids_are_recognised_one_by_one(encoder: Encoder) -> None:
    """Among others, in any order: each becomes what it becomes alone."""
    ids = answered(encoder, [5, 70, 81, 90], [66, 67, 1])
    longer = answered(encoder, [5, 70], [66] * CONTEXT)
    talk, text = {"prompt": "Hello?", "completion": "Yes."}, {"text": "A text."}
    records = [talk, ids, text, longer, talk, text, ids]
    alone = [e for record in records for e in encoder.encode([record])]
    together = encoder.encode(records)
    assert [(e.tokens.tolist(), e.prompt) for e in together] == [(e.tokens.tolist(), e.prompt) for e in alone]
    assert together[1].tokens.tolist() == [5, 70, 81, 90, 66, 67, 1]
    assert (together[1].prompt, len(together[3].tokens)) == (4, CONTEXT)
    assert encoder.encode([ids | {"completion_tokens": []}]) == []


def test_token_ids_of_another_tokenizer_are_refused_wherever_they_are(encoder: Encoder) -> None:
    good = answered(encoder, [5, 70, 81], [66, 1])
    for bad in (good | {"prompt": "something else"}, good | {"prompt_tokens": [5, 4000]}):
        with pytest.raises(ConfigError, match="another tokenizer made them"):
            encoder.encode([good, {"text": "t"}, bad])


def test_a_source_without_a_usable_record_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    long = {"prompt": "p " * 300, "completion": "c"}
    with pytest.raises(ConfigError, match="it has no usable record"):
        load_source(
            SourceSpec(file=str(write(tmp_path, "long.jsonl", long, {"prompt": "p", "completion": ""}))), encoder
        )
    with pytest.raises(ConfigError, match="it has no usable record"):
        load_source(SourceSpec(file=str(write(tmp_path, "empty.txt"))), encoder)
    with pytest.raises(ConfigError, match="a source has no usable record"):
        Mixture([(1.0, examples(2)), (1.0, [])], 0)
    with pytest.raises(ConfigError, match="not shares"):
        Mixture([(0.0, examples(2))], 0)


def test_answers_are_learned_as_far_as_is_said(encoder: Encoder, data: Path) -> None:
    spec = SourceSpec(file=str(data), answer_tokens=3)
    whole = load_source(spec, encoder)
    whole = [replace(e, place=100 * i) for i, e in enumerate(whole)]
    cut = spec.learned(whole)
    assert any(e.prompt and len(e.tokens) > e.prompt + 3 for e in whole)
    for a, b in zip(whole, cut, strict=True):
        kept = min(len(a.tokens), a.prompt + 3) if a.prompt else len(a.tokens)
        assert np.array_equal(b.tokens, a.tokens[:kept]) and (b.prompt, b.place) == (a.prompt, a.place)
    assert SourceSpec(file="x").learned(whole) == whole


documents = st.lists(st.tuples(st.integers(2, 30), st.integers(0, 40)), min_size=1, max_size=30)


def numbered(shapes: Sequence[tuple[int, int]]) -> list[Example]:
    """Documents whose tokens are all different, with prompts as long as they may be."""
    ends = np.cumsum([length for length, _ in shapes])
    return [
        Example(np.arange(end - length, end, dtype=np.int32), min(prompt, length - 1))
        for end, (length, prompt) in zip(ends.tolist(), shapes, strict=True)
    ]


@given(documents, st.integers(30, 70), st.integers(0, 5))
def test_every_token_is_placed_once_and_no_document_is_split(
    shapes: list[tuple[int, int]], length: int, seed: int
) -> None:
    """What was drawn lies whole in a row that was given out, or waits in one of the open rows."""
    mixture = Mixture([(1.0, numbered(shapes))], seed)
    drawn: list[int] = []
    draw = mixture.draw
    mixture.draw = lambda: drawn.append((example := draw()).tokens[0]) or example  # type: ignore[method-assign, func-returns-value]
    rows = list(islice(mixture.rows(length), 25))
    placed = Counter(int(e.tokens[0]) for row in rows for e in row)
    waiting = Counter(map(int, drawn)) - placed
    assert not placed - Counter(map(int, drawn))
    sizes = {int(e.tokens[0]): len(e.tokens) for e in mixture.sources[0]}
    assert all(0 < sum(len(e.tokens) for e in row) <= length for row in rows)
    assert sum(sizes[first] * n for first, n in waiting.items()) <= (OPEN_ROWS + 1) * length
    assert all(
        np.array_equal(e.tokens, np.arange(e.tokens[0], e.tokens[0] + sizes[int(e.tokens[0])])) for r in rows for e in r
    )


def test_the_order_is_a_function_of_the_seed() -> None:
    def take(seed: int) -> list[torch.Tensor]:
        mixture = Mixture([(1.0, examples(12)), (2.0, examples(7, seed=1))], seed)
        return [batch.tokens for batch in islice(mixture.batches(2, 64), 12)]

    first, again, other = take(4), take(4), take(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
