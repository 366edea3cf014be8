"""Text from token ids, piece by piece: what is broken has U+FFFD, and nothing is lost, repeated or taken back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.byte_tokens import BYTES_VOCAB, SPECIAL, byte_id, byte_ids, byte_tokenizer, piece_id

from paceline.core.errors import ConfigError
from paceline.engine.tokens import TokenizerTexts, chat_ids, encode, texts_of
from paceline.weights.source import load_tokenizer

ZOO_MODEL = Path(__file__).parents[2] / "zoo" / "paceline-small"
EMOJI = byte_ids("😀")
BROKEN = "\ufffd"


@pytest.fixture(scope="module")
def zoo() -> Any:
    return load_tokenizer(ZOO_MODEL)


def said(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> str:
    """The text of an answer that came token by token."""
    stream = TokenizerTexts(tokenizer).stream(prompt, skip)
    return "".join(stream.push(i) for i in ids) + stream.end()


ZOO_IDS = st.lists(st.integers(0, 8191), max_size=40)
BYTE_IDS = st.lists(st.integers(0, BYTES_VOCAB - 1) | st.sampled_from([*EMOJI, *byte_ids("é€")]), max_size=40)


@given(ids=ZOO_IDS)
def test_byte_level_text_is_what_the_tokenizer_decodes(zoo: Any, ids: list[int]):
    assert said(zoo, ids) == zoo.decode(ids, skip_special_tokens=True)
    assert said(zoo, ids, skip=False) == zoo.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=30), ids=ZOO_IDS)
def test_an_answer_continues_its_prompt(zoo: Any, text: str, ids: list[int]):
    prompt = zoo.encode("x" + text)
    whole = zoo.decode([*prompt, *ids], skip_special_tokens=True)
    assert zoo.decode(prompt, skip_special_tokens=True) + said(zoo, ids, prompt) == whole


@given(text=st.text(alphabet="ab é€😀日本\n🙂", max_size=30))
def test_whole_characters_come_out_whole(text: str):
    ids = byte_tokenizer().encode("a" + text, add_special_tokens=False)
    assert said(byte_tokenizer(), ids) == "a" + text


@given(ids=BYTE_IDS, prompt=BYTE_IDS)
def test_broken_bytes_never_raise(ids: list[int], prompt: list[int]):
    text = said(byte_tokenizer(), ids, prompt)
    assert len(text) <= sum(len(piece) for piece in byte_tokenizer().convert_ids_to_tokens(ids))
    if BROKEN not in (whole := byte_tokenizer().decode([piece_id("a"), *ids], skip_special_tokens=True)):
        assert said(byte_tokenizer(), ids, [piece_id("a")]) == whole[1:]


def test_a_byte_behind_a_whole_character_breaks_alone():
    # The whole run of bytes is no UTF-8 now, and the tokenizer would call all five broken.
    ids = [*EMOJI, byte_id(0xF0), piece_id("a")]
    assert said(byte_tokenizer(), ids) == "😀" + BROKEN + "a"
    assert said(byte_tokenizer(), [piece_id("t"), *ids, *EMOJI, piece_id("b")]) == "t😀" + BROKEN + "a😀b"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_end_of_a_prompt_is_no_part_of_the_answer(cut: int):
    prompt = [piece_id("▁cat"), *EMOJI[:cut]]
    assert said(byte_tokenizer(), [piece_id("a"), piece_id("b")], prompt) == "ab"
    assert said(byte_tokenizer(), EMOJI[cut:] + [piece_id("a")], prompt) == "😀a"  # it completes the character


def test_the_end_of_a_prompt_is_no_part_of_the_answer_in_the_embedded_model(zoo: Any):
    prompt = zoo.encode("a stop sign 🙂")[:-1]
    assert zoo.decode(prompt).endswith(BROKEN)
    answer = zoo.encode(" and more", add_special_tokens=False)
    assert said(zoo, answer, prompt) == " and more"


def test_what_stays_incomplete_is_said_at_the_end():
    assert said(byte_tokenizer(), [piece_id("a"), *EMOJI[:2]]) == "a" + BROKEN * 2
    assert said(byte_tokenizer(), [piece_id("a")]) == "a"


def test_bytes_that_never_make_a_character_are_not_held_for_ever():
    stream = TokenizerTexts(byte_tokenizer()).stream([], True)
    pieces = [stream.push(byte_id(0xFF)) for _ in range(50)]
    assert pieces.count("") == 3 and "".join(pieces) + stream.end() == BROKEN * 50


def test_the_window_stays_small():
    """A token costs the same wherever it stands, also where nothing has any text."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_tokenizer().decode(ids, skip_special_tokens=True)

    from paceline.engine.tokens import AnswerText

    stream = AnswerText(decode, [])
    for token in [piece_id("a")] * 40 + [SPECIAL.index("<s>")] * 40 + [byte_id(0x80)] * 40 + [piece_id("▁the")] * 40:
        stream.push(token)
    assert longest <= 16


def test_special_tokens_do_not_swallow_a_space():
    ids = [piece_id("▁the"), *[SPECIAL.index("<s>")] * 20, piece_id("▁cat")]
    assert said(byte_tokenizer(), ids) == "the cat"


def test_the_text_of_single_tokens():
    text = TokenizerTexts(byte_tokenizer()).token
    assert [text(piece_id(p)) for p in ("▁the", "ing", "é", "▁")] == [" the", "ing", "é", " "]
    assert (text(byte_id(0xF0)), text(byte_id(0x41)), text(SPECIAL.index("</s>"))) == (BROKEN, "A", "</s>")


def test_slow_tokenizers_give_the_same(zoo: Any):
    class Slow:
        encode, decode = zoo.encode, zoo.decode

    ids = zoo.encode("Déjà vu 🙂, twice.")
    assert said(Slow(), ids) == said(zoo, ids) == "Déjà vu 🙂, twice."


def test_no_tokenizer_no_texts():
    assert texts_of(None) is None


# -- prompts that cannot be used


@pytest.mark.parametrize(
    "prompt",
    [
        "half \ud83d of a character",
        {"prompt": "\udfff"},
        {"prompt": 3},
        {"prompt_token_ids": [1], "prompt": "\ud800"},
        {"prompt_token_ids": 7},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": [1, 2.0]},
        {"prompt_token_ids": [True]},
        {},
        b"bytes",
        None,
    ],
)
def test_prompts_that_are_none(zoo: Any, prompt: Any):
    with pytest.raises(ConfigError):
        encode(prompt, zoo)


def test_a_lone_surrogate_in_a_conversation(zoo: Any):
    with pytest.raises(ConfigError, match="lone surrogate"):
        chat_ids([{"role": "user", "content": "a \ud800 b"}], zoo, "paceline-small")


def test_what_a_tokenizer_raises_is_said_in_words():
    class Broken:
        def encode(self, text: str, **options: bool) -> list[int]:
            raise TypeError("no such text")

    with pytest.raises(ConfigError, match="TypeError: no such text"):
        encode("a", Broken())


def test_a_window_that_begins_and_ends_inside_characters_finds_both():
    """Nine bytes: the window of eight begins in the first character, and the last one is the answer's to complete."""
    prompt = [piece_id("t"), *EMOJI, *byte_ids("€"), *byte_ids("🟲")[:2]]
    assert said(byte_tokenizer(), [*byte_ids("🟲")[2:], piece_id("a")], prompt) == "🟲a"
