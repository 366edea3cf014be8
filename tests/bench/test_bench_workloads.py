"""Benchmark prompts: the packaged samples, files of one's own, and the ids that models are asked with."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.api.llm import LLM
from paceline.bench.encoding import Encoded
from paceline.bench.workloads import WORKLOADS, Prompt, Workload, choose, load
from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.weights import zoo

PACKAGED = sorted(name for name, entry in WORKLOADS.items() if entry.packaged)
LONG = 100_000  # a model length that nothing packaged reaches


@pytest.fixture(scope="module")
def small() -> Any:
    """The tokenizer of the embedded model: byte-level, a BOS in front, a chat template that trims."""
    return AutoTokenizer.from_pretrained(str(zoo.find("paceline-small")))


def write(path: Path, *records: Any) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def asked(*turns: str, name: str = "a", chat: bool = True) -> Workload:
    """A workload of one conversation."""
    return workload(Prompt(id=name, category="c", turns=turns), chat=chat)


def workload(*prompts: Prompt, chat: bool = True) -> Workload:
    return Workload(
        name="made",
        title="",
        description="",
        source="",
        licence="",
        origin="",
        prompts=prompts,
        total=len(prompts),
        chat=chat,
        max_new_tokens=8,
    )


def test_a_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    full = load("mmlu").prompts
    assert choose(full, 5, 1) == choose(full, 5, 1) == choose(full[::-1], 5, 1)
    assert choose(full, 5, 1) != choose(full, 5, 2)
    # A constant: what is asked must not change with the version of Python or of this package.
    first = [p.id for p in load("gsm8k", limit=3, seed=0).prompts]
    assert first == ["gsm8k-test-960", "gsm8k-test-784", "gsm8k-test-567"]


def test_a_file_of_either_form_and_compressed(tmp_path: Path) -> None:
    turns = {"id": 7, "category": "k", "turns": ["one", "two"], "reference": "r", "level": 3}
    pair = {"prompt": "p\u2028q", "completion": " c"}
    plain = load(write(tmp_path / "mine.jsonl", turns, "", pair))
    assert plain.prompts == (
        Prompt(id="7", category="k", turns=("one", "two"), reference=("r",), extra={"level": 3}),
        Prompt(id="mine-3", category="mine", turns=("p\u2028q",), reference=(" c",)),
    )
    assert (plain.name, plain.chat, plain.total) == ("mine", True, 2)
    packed = load(str(write(tmp_path / "mine.jsonl.gz", turns, "", pair)))
    assert (packed.prompts, packed.name) == (plain.prompts, "mine")
    assert packed.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ({"id": "1"}, "or neither"),
        ({"turns": ["a"], "prompt": "a"}, "both"),
        ({"turns": ["a", "  "]}, "'turns' cannot hold '  '"),
        ({"turns": ["a"], "id": 1.5}, "'id' cannot hold 1.5"),
        ({"turns": ["a"], "id": "first"}, "line 1, too"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: Any, wrong: str) -> None:
    path = write(tmp_path / "x.jsonl", {"id": "first", "turns": ["a"]}, "", line)
    with pytest.raises(ConfigError, match=re.escape(wrong)) as error:
        load(path)
    assert error.value.subject == f"{path}, line 3"


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'humaneval'"):
        load("humanevall")
    with pytest.raises(ConfigError, match="nown workloads: spec_bench, gsm8k") as error:
        load("zzz")
    assert "Did you mean" not in str(error.value)
    for path in (tmp_path / "no.jsonl", str(tmp_path / "no"), "no.jsonl"):
        with pytest.raises(ConfigError, match="no such file"):
            load(path)
    with pytest.raises(ConfigError, match="no such folder"):
        load("gsm8k", folder=tmp_path / "no")
    with pytest.raises(ConfigError, match="no such folder"):
        load("mmlu", folder=tmp_path / "no")


def test_ids_are_those_that_the_model_computes(small: Any) -> None:
    llm = LLM("paceline-small", max_sequences=4)
    once = SamplingParams(max_tokens=1, temperature=0)
    for name in PACKAGED:
        found = load(name, limit=2)
        ids = [list(p.ids) for p in Encoded(found, small, max_model_len=2048, max_new_tokens=64).prompts]
        texts = [p.turns[0] for p in found.prompts]
        if found.chat:
            seen = [llm.chat([{"role": "user", "content": text}], once)[0].prompt_token_ids for text in texts]
        else:
            seen = [output.prompt_token_ids for output in llm.generate(texts, once)]
        assert ids == seen, name
