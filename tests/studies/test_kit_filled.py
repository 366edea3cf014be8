"""Prompts brought to a context: what is cut, what is put in front, what stays."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kit.filled import Filled
from transformers import AutoTokenizer

from paceline import zoo
from paceline.bench.encoding import Encoded
from paceline.bench.workloads import WORKLOADS, Prompt, Workload, load
from paceline.core.errors import ConfigError

PACKAGED = sorted(name for name, entry in WORKLOADS.items() if entry.packaged)
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


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("context", [64, 777])
def test_a_context_is_met_exactly_and_counted(small: Any, name: str, context: int) -> None:
    found = load(name)
    as_is = Encoded(found, small, max_model_len=LONG, max_new_tokens=8)
    brought = Filled(found, small, context=context, max_model_len=context + 8, max_new_tokens=8)
    assert {len(p.ids) for p in brought.prompts} == {context}
    for before, after in zip(as_is.prompts, brought.prompts, strict=True):
        assert before.id == after.id
        change = brought.filled.get(after.id, 0) - brought.cut.get(after.id, 0)
        assert len(before.ids) + change == context
        # The question's end, the template and BOS stay.
        same = min(16, len(before.ids) - 2)
        assert small.decode(before.ids[-same:]) == small.decode(after.ids[-same:])
        assert after.ids[0] == small.bos_token_id and small.bos_token_id not in after.ids[1:]
    said = " ".join(brought.notes())
    for count, verb in ((len(brought.cut), "cut"), (len(brought.filled), "filled")):
        assert (f"{count} of 40 prompts {verb} to {context}" in said) == (count > 0)
    assert as_is.notes() == []


def test_a_filled_prompt_never_holds_text_of_its_own_book(small: Any) -> None:
    found = load("books")
    for prompt, encoded in zip(
        found.prompts, Filled(found, small, context=4000, max_model_len=LONG, max_new_tokens=1).prompts, strict=True
    ):
        text = small.decode(encoded.ids, skip_special_tokens=True)
        assert prompt.turns[0] in text
        for other in found.prompts:
            if other.extra["book"] == prompt.extra["book"]:
                assert other.reference[0][-60:] not in text
        assert sum(p.turns[0][-60:] in text for p in found.prompts) > 3  # and it was filled with books


def test_filled_prompts_are_not_one_common_prefix(small: Any) -> None:
    encoded = Filled(load("gsm8k"), small, context=1000, max_model_len=LONG, max_new_tokens=1)
    assert len({p.ids[:32] for p in encoded.prompts}) >= 35


def test_there_is_so_much_book_text_and_no_more(small: Any) -> None:
    with pytest.raises(ConfigError, match="the packaged books have"):
        Filled(asked("x"), small, context=90_000, max_model_len=LONG, max_new_tokens=1)


def test_the_oldest_text_of_a_conversation_goes_first(small: Any) -> None:
    made = asked("alpha " * 40, "omega?")
    whole = Encoded(made, small, max_model_len=LONG, max_new_tokens=1).next_turn(made.prompts[0], 1, ["beta " * 40])
    text = small.decode(whole.ids)
    for room in (len(whole.ids) - 5, 60, 20):
        encoded = Filled(made, small, context=room, max_model_len=room + 1, max_new_tokens=1)
        turn = encoded.next_turn(made.prompts[0], 1, ["beta " * 40])
        left = small.decode(turn.ids)
        assert len(turn.ids) == room and encoded.cut["a/2"] == len(whole.ids) - room
        # What is around the messages stays, whatever is cut.
        assert re.sub(
            "(alpha|beta|lpha|eta|pha|ha|ta|a| )+(?=<)", "", left
        ) == "<|bos|><|user|><|assistant|><|eos|>" + ("<|user|>omega?<|assistant|>")
        assert left.count("alpha") == 0 or left.count("beta") == text.count("beta")


@pytest.mark.parametrize("trims", [True, False])
def test_any_template_that_quotes_its_messages_can_be_filled(tokenizer: Any, trims: bool) -> None:
    content = "m['content'] | trim" if trims else "m['content']"
    loop = "{% for m in messages %}[{{ m['role'] }}] {{ " + content + " }}\n{% endfor %}"
    tokenizer.chat_template = "{{ bos_token }}" + loop + ">"
    encoded = Filled(asked("  Why? \n"), tokenizer, context=100, max_model_len=LONG, max_new_tokens=1)
    text = tokenizer.decode(encoded.prompts[0].ids)
    assert len(encoded.prompts[0].ids) == 100
    assert text.startswith("<|bos|>[user] ") and text.endswith("\n\nWhy?\n>" if trims else "\n\n  Why? \n\n>")


def test_a_template_that_rewrites_its_messages_can_be_asked_but_not_cut(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    made = asked("why " * 50)
    whole = Encoded(made, tokenizer, max_model_len=LONG, max_new_tokens=1)
    assert list(whole.prompts[0].ids) == tokenizer.encode("WHY " * 50, add_special_tokens=False)
    with pytest.raises(ConfigError, match="rewrites its messages"):
        Filled(made, tokenizer, context=20, max_model_len=LONG, max_new_tokens=1)


def test_contexts_that_do_not_fit(small: Any) -> None:
    made = asked("A question of some length?")
    for context in (7, 0):
        with pytest.raises(ConfigError, match="Give 1 to 6"):
            Filled(made, small, context=context, max_model_len=10, max_new_tokens=4)
    with pytest.raises(ConfigError, match="the chat template has 3 tokens"):
        Filled(made, small, context=3, max_model_len=10, max_new_tokens=4)
