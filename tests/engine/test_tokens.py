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
from paceline.engine.tokens import TokenizerTexts, encode
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


@given(ids=BYTE_IDS, prompt=BYTE_IDS)
def test_broken_bytes_never_raise(ids: list[int], prompt: list[int]):
    text = said(byte_tokenizer(), ids, prompt)
    assert len(text) <= sum(len(piece) for piece in byte_tokenizer().convert_ids_to_tokens(ids))
    if BROKEN not in (whole := byte_tokenizer().decode([piece_id("a"), *ids], skip_special_tokens=True)):
        assert said(byte_tokenizer(), ids, [piece_id("a")]) == whole[1:]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_end_of_a_prompt_is_no_part_of_the_answer(cut: int):
    prompt = [piece_id("▁cat"), *EMOJI[:cut]]
    assert said(byte_tokenizer(), [piece_id("a"), piece_id("b")], prompt) == "ab"
    assert said(byte_tokenizer(), EMOJI[cut:] + [piece_id("a")], prompt) == "😀a"  # it completes the character


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


def test_what_a_tokenizer_raises_is_said_in_words():
    class Broken:
        def encode(self, text: str, **options: bool) -> list[int]:
            raise TypeError("no such text")

    with pytest.raises(ConfigError, match="TypeError: no such text"):
        encode("a", Broken())
