"""Benchmark prompts: the packaged samples, files of one's own, and the ids that models are asked with."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline import zoo
from paceline.bench.encoding import Encoded, random_prompts
from paceline.bench.workloads import WORKLOADS, Prompt, Workload, available, choose, load
from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.llm import LLM

DATA = resources.files("paceline.bench") / "data"
PACKAGED = sorted(name for name, entry in WORKLOADS.items() if entry.packaged)
FROM_FOLDER = sorted(set(WORKLOADS) - set(PACKAGED))
LONG = 100_000  # a model length that nothing packaged reaches


@pytest.fixture(scope="module")
def small() -> Any:
    """The tokenizer of the embedded model: byte-level, a BOS in front, a chat template that trims."""
    return AutoTokenizer.from_pretrained(str(zoo.find("paceline-small")))


@pytest.fixture
def tokenizer(small: Any) -> Any:
    """The same one, to be changed by a test."""
    template = small.chat_template
    yield small
    small.chat_template = template


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


def categories(found: Workload) -> Counter[str]:
    """Prompts a category."""
    return Counter(prompt.category for prompt in found.prompts)


# -- the packaged samples


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_sample_is_forty_distinct_prompts(name: str) -> None:
    found = load(name)
    assert len(found.prompts) == found.total == 40
    assert len({p.id for p in found.prompts}) == 40
    assert len({p.turns for p in found.prompts}) == 40
    assert found.origin == "packaged sample"
    assert found.fingerprint == load(name).fingerprint


def test_which_workloads_come_with_the_package() -> None:
    assert PACKAGED == ["books", "gsm8k", "humaneval", "humaneval_x", "mmlu", "spec_bench", "wikisql"]
    assert FROM_FOLDER == ["dialogsum", "drop", "e2e", "triviaqa"]
    files = {item.name for item in DATA.iterdir()} - {"SOURCES.md"}
    assert files == {f"{name}.jsonl" for name in PACKAGED}


@pytest.mark.parametrize("name", PACKAGED)
def test_source_and_licence_of_every_packaged_file_are_listed(name: str) -> None:
    rows = [line for line in (DATA / "SOURCES.md").read_text().splitlines() if line.startswith(f"| `{name}.jsonl` |")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[2] and re.search("MIT|Apache-2.0|BSD-3-Clause|public domain", cells[3])
    kind = re.match("MIT|Apache-2.0|BSD-3-Clause|public domain", WORKLOADS[name].licence)
    assert kind and kind[0] in cells[3]
    commit = re.search(r"@ (\w{12})", WORKLOADS[name].source)
    assert commit is None or commit[1] in cells[2]


def test_no_packaged_file_is_of_a_licence_that_asks_for_more() -> None:
    for name in FROM_FOLDER:
        assert re.search("SA|NC|unclear", WORKLOADS[name].licence)


def test_spec_bench_has_all_thirteen_categories_and_second_turns() -> None:
    found = load("spec_bench")
    assert len(categories(found)) == 13
    assert set(categories(found).values()) == {3, 4}
    assert Counter(len(p.turns) for p in found.prompts) == {1: 16, 2: 24}


def test_other_samples_are_spread_too() -> None:
    assert sorted(categories(load("humaneval_x")).values()) == [6, 6, 7, 7, 7, 7]
    assert len({p.extra["subject"] for p in load("mmlu").prompts}) == 40
    books = Counter(p.extra["book"] for p in load("books").prompts)
    assert sorted(books.values()) == [6, 6, 7, 7, 7, 7]
    assert "A Room with a View" not in books  # not in the public domain everywhere


def test_no_gsm8k_problem_is_in_spec_bench() -> None:
    def words(text: str) -> str:
        return " ".join(text.split())

    spec = {words(t) for p in load("spec_bench").prompts for t in p.turns}
    assert not spec & {words(p.turns[0]) for p in load("gsm8k").prompts}


# -- choosing


def test_a_limit_is_spread_over_categories_and_a_smaller_one_is_a_prefix() -> None:
    thirteen = load("spec_bench", limit=13, seed=5)
    assert set(categories(thirteen).values()) == {1} and thirteen.total == 40
    assert load("spec_bench", limit=4, seed=5).prompts == thirteen.prompts[:4]
    assert len({p.extra["book"] for p in load("books", limit=6).prompts}) == 6


def test_a_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    full = load("mmlu").prompts
    assert choose(full, 5, 1) == choose(full, 5, 1) == choose(full[::-1], 5, 1)
    assert choose(full, 5, 1) != choose(full, 5, 2)
    # A constant: what is asked must not change with the version of Python or of this package.
    first = [p.id for p in load("gsm8k", limit=3, seed=0).prompts]
    assert first == ["gsm8k-test-960", "gsm8k-test-784", "gsm8k-test-567"]


def test_more_than_there_are_is_all_of_them() -> None:
    found = load("gsm8k", limit=1000)
    assert len(found.prompts) == found.total == found.as_dict()["prompts"] == 40


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), limit=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_a_choice_is_as_even_as_can_be(sizes: list[int], limit: int, seed: int) -> None:
    prompts = [Prompt(id=f"{c}/{i}", category=str(c), turns=("x",)) for c, n in enumerate(sizes) for i in range(n)]
    chosen = choose(prompts, limit, seed)
    assert len(chosen) == len({p.id for p in chosen}) == min(limit, len(prompts))
    got = Counter(p.category for p in chosen)
    for c, n in enumerate(sizes):  # a category is behind another one only where it has no more
        assert got[str(c)] == n or got[str(c)] >= max(got.values()) - 1


# -- files and folders


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


def test_prompts_that_are_the_same_are_one_with_several_references(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "completion": c} for c in ("a", "b", "a")] + [{"prompt": "q", "completion": "c"}]
    found = load(write(tmp_path / "x.jsonl", *lines)).prompts
    assert [(p.id, p.turns, p.reference) for p in found] == [("x-1", ("p",), ("a", "b")), ("x-4", ("q",), ("c",))]


def test_references_of_every_form(tmp_path: Path) -> None:
    records = [
        {"turns": ["a"], "reference": [["x", "y"]]},
        {"turns": ["b"], "reference": None},
        {"prompt": "c", "completion": "x", "references": ["x", "y"]},
    ]
    found = load(write(tmp_path / "x.jsonl", *records)).prompts
    assert [p.reference for p in found] == [("x", "y"), (), ("x", "y")]


def test_a_folder_of_data_holds_full_versions(tmp_path: Path) -> None:
    write(tmp_path / "bench_drop.jsonl", {"id": "d", "turns": ["x"]})
    write(tmp_path / "bench_gsm8k_test.jsonl.gz", {"id": "g", "turns": ["x"]})
    assert [p.id for p in load("drop", folder=tmp_path).prompts] == ["d"]
    full = load("GSM8K", folder=tmp_path)
    assert ([p.id for p in full.prompts], full.name) == (["g"], "gsm8k")
    assert full.origin.endswith("bench_gsm8k_test.jsonl.gz")
    assert load("spec-bench", folder=tmp_path).origin == "packaged sample"
    rows = {row.name: origin for row, origin in available(tmp_path)}
    assert list(rows) == list(WORKLOADS)
    assert [name for name, origin in rows.items() if not origin] == ["triviaqa", "e2e", "dialogsum"]
    assert rows["gsm8k"] == full.origin and rows["books"] == "packaged sample"
    assert [row.name for row, origin in available() if origin] == [row.name for row, _ in available() if row.packaged]


# -- bad input


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ({"id": "1"}, "or neither"),
        ({"turns": ["a"], "prompt": "a"}, "both"),
        ({"turns": []}, "'turns'"),
        ({"turns": "a"}, "'turns'"),
        ({"turns": ["a", 1]}, "'turns'"),
        ({"turns": ["a", "  "]}, "'turns' cannot hold '  '"),
        ({"prompt": ""}, "'turns' cannot hold ''"),
        ({"prompt": None}, "'turns' cannot hold None"),
        ({"turns": ["a"], "id": 1.5}, "'id' cannot hold 1.5"),
        ({"turns": ["a"], "id": ""}, "'id'"),
        ({"turns": ["a"], "id": True}, "'id' cannot hold True"),
        ({"turns": ["a"], "category": 1}, "'category' cannot hold 1"),
        ({"turns": ["a"], "reference": [1]}, "'reference'"),
        ({"turns": ["a"], "id": "first"}, "line 1 too"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: Any, wrong: str) -> None:
    path = write(tmp_path / "x.jsonl", {"id": "first", "turns": ["a"]}, "", line)
    with pytest.raises(ConfigError, match=re.escape(wrong)) as error:
        load(path)
    assert error.value.asked == f"{path}, line 3"


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record"):
        load(write(tmp_path / "x.jsonl", "", " "))
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "x.jsonl")
    (tmp_path / "y.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "y.jsonl.gz")
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-12])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "y.jsonl.gz")


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
        available(tmp_path / "no")


@pytest.mark.parametrize("name", FROM_FOLDER)
def test_a_workload_that_is_not_packaged_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not come with the package") as error:
        load(name)
    entry = WORKLOADS[name]
    assert "--data" in error.value.remedy and entry.file in error.value.remedy and entry.source in error.value.remedy
    with pytest.raises(ConfigError, match=f"has no {re.escape(entry.file)}"):
        load(name, folder=tmp_path)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one(limit: int) -> None:
    with pytest.raises(ConfigError, match="nothing would be asked"):
        load("gsm8k", limit=limit)


# -- token ids


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


def test_ids_of_a_second_turn_are_those_of_the_chat(small: Any) -> None:
    made = asked("First?", " Second? \n")
    turn = Encoded(made, small, max_model_len=LONG, max_new_tokens=1).next_turn(made.prompts[0], 1, ["An answer."])
    talk = [("user", "First?"), ("assistant", "An answer."), ("user", " Second? \n")]
    messages = [{"role": role, "content": text} for role, text in talk]
    expected = small.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(turn.ids) == expected
    assert turn.id == "a/2"


@pytest.mark.parametrize("chat", [True, False])
def test_without_a_template_a_conversation_is_text_with_blank_lines(tokenizer: Any, chat: bool) -> None:
    if chat:  # a chat workload, and a model without a template; else a raw workload, and a model with one
        tokenizer.chat_template = None
    made = asked("One.", "Two.", "Three.", chat=chat)
    encoded = Encoded(made, tokenizer, max_model_len=LONG, max_new_tokens=1)
    assert list(encoded.prompts[0].ids) == tokenizer.encode("One.")
    third = encoded.next_turn(made.prompts[0], 2, ["A", "B"])
    assert list(third.ids) == tokenizer.encode("One.\n\nA\n\nTwo.\n\nB\n\nThree.")
    assert third.id == "a/3" and not encoded.notes()


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Encoded(asked("x"), None, max_model_len=9, max_new_tokens=1)


# -- cut


def test_a_prompt_that_the_model_has_no_room_for_is_cut_and_counted(small: Any) -> None:
    long, short = " ".join(f"word{i}" for i in range(500)), "A short one."
    made = workload(*(Prompt(id=t[:4], category="c", turns=(t,)) for t in (long, short)))
    whole = Encoded(made, small, max_model_len=LONG, max_new_tokens=1).prompts
    encoded = Encoded(made, small, max_model_len=100, max_new_tokens=20)
    first, second = encoded.prompts
    assert len(first.ids) == 80
    assert first.ids[:2] == whole[0].ids[:2] and first.ids[2:] == whole[0].ids[-78:]  # BOS and <|user|> stay
    assert second == whole[1]
    assert encoded.cut == {"word": len(whole[0].ids) - 80}
    assert encoded.notes() == ["made: 1 of 2 prompts cut to 80 tokens, the oldest first"]


def test_the_end_of_a_conversation_stays(small: Any) -> None:
    made = asked("alpha " * 40, "omega?")
    whole = Encoded(made, small, max_model_len=LONG, max_new_tokens=1).next_turn(made.prompts[0], 1, ["beta " * 40])
    encoded = Encoded(made, small, max_model_len=61, max_new_tokens=1)
    turn = encoded.next_turn(made.prompts[0], 1, ["beta " * 40])
    assert len(turn.ids) == 60 and encoded.cut["a/2"] == len(whole.ids) - 60
    assert turn.ids == whole.ids[:2] + whole.ids[-58:]  # BOS and <|user|> stay


@pytest.mark.parametrize(("max_model_len", "max_new_tokens"), [(10, 10), (10, 7)])
def test_limits_that_leave_no_room(small: Any, max_model_len: int, max_new_tokens: int) -> None:
    lengths = {"max_model_len": max_model_len, "max_new_tokens": max_new_tokens}
    with pytest.raises(ConfigError, match="no room for a prompt, around which the chat template has 3 tokens"):
        Encoded(asked("A question of some length?"), small, **lengths)
    smallest = Encoded(asked("A question of some length?"), small, max_model_len=5, max_new_tokens=1)
    assert small.decode(smallest.prompts[0].ids) == "<|bos|><|user|>?<|assistant|>"


# -- without a tokenizer


def test_random_prompts_repeat_and_do_not_depend_on_their_number() -> None:
    few, many = random_prompts(2, 50, 97, seed=3), random_prompts(5, 50, 97, seed=3)
    assert many[:2] == few
    assert len({p.ids for p in many}) == len({p.id for p in many}) == 5
    assert {len(p.ids) for p in many} == {50}
    assert all(0 <= token < 97 for p in many for token in p.ids) and len(set(many[0].ids)) > 20
    assert random_prompts(2, 50, 97, seed=4) != few


def test_what_a_report_keeps_is_json() -> None:
    kept = json.loads(json.dumps(load("spec_bench", limit=2).as_dict()))
    assert kept["prompts"] == 2 and kept["total"] == 40 and kept["licence"] and kept["source"]
    assert kept["fingerprint"] != load("spec_bench", limit=2, seed=1).fingerprint
