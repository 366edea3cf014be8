"""Text alone: ids drawn at random, torn characters among them, through what turns tokens into text. No model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from asks import TORN
from kits.byte_tokens import BYTES_VOCAB, PIECES, SPECIAL, byte_id
from oracle import byte_pattern
from worlds import WORLDS, texts

from paceline.engine.tokens import texts_of

CHARACTERS = ("a", "é", "€", "日", "😀", "👩", "\u200d", " ", "\n")
LEVEL_VOCAB = 500


def said(seed: int) -> str | None:
    """What is wrong with the text of answer ``seed``, with one tokenizer or the other; None where nothing is."""
    return (spoken, levelled)[seed % 2](seed)


def spoken(seed: int) -> str | None:
    """With byte fallback: a run of byte tokens that is no UTF-8 is broken as a whole."""
    draw = random.Random(seed)
    prompt, ids = _ids(draw, draw.randint(1, 20)), _ids(draw, draw.randint(0, 40))
    skip = draw.random() < 0.7
    stream = texts(WORLDS["bytes"]).stream(prompt, skip)
    text = "".join(map(stream.push, ids)) + stream.end()
    pattern = byte_pattern(prompt, ids, skip)
    if re.fullmatch(pattern, text, re.DOTALL):
        return None
    return f"text {seed}: {text!r} is not {pattern!r}; {prompt=} {ids=} {skip=}"


def _ids(draw: random.Random, size: int) -> list[int]:
    """Characters byte by byte, whole and torn, pieces, special tokens, and bytes at random."""
    ids: list[int] = []
    while len(ids) < size:
        kind = draw.random()
        if kind < 0.55:
            whole = [byte_id(b) for b in draw.choice(TORN)]
            ids += whole if draw.random() < 0.6 else whole[draw.randint(0, 1) : draw.randint(1, len(whole))]
        elif kind < 0.8:
            ids.append(len(SPECIAL) + 256 + draw.randrange(len(PIECES)))
        else:
            ids.append(draw.randrange(BYTES_VOCAB))
    return ids[:size]


def levelled(seed: int) -> str | None:
    """With a byte-level tokenizer: the text is what Python makes of the bytes, U+FFFD included."""
    draw = random.Random(seed)
    ids, whole = (_any_ids if draw.random() < 0.5 else _clean_ids)(draw)
    begin = draw.randint(1, len(ids))
    prompt, answer = ids[:begin], ids[begin:]
    stream = level_texts().stream(prompt, True)
    text = "".join(map(stream.push, answer)) + stream.end()
    before = _text_of(prompt).rstrip("\ufffd")
    expected = whole[len(before) :] if answer else ""
    # Whether broken characters at the border are the prompt's or the answer's is a matter of taste.
    if text.lstrip("\ufffd") == expected.lstrip("\ufffd"):
        return None
    return f"text {seed}: {text!r} should be {expected!r}; {prompt=} {answer=}"


def _any_ids(draw: random.Random) -> tuple[list[int], str]:
    """Tokens at random, whole characters among them; their text."""
    ids: list[int] = []
    while len(ids) < 40:
        pick: Callable[[], list[int]] = draw.choice([_character(draw), lambda: [draw.randrange(LEVEL_VOCAB)]])
        ids += pick()
    return ids, _text_of(ids)


def _character(draw: random.Random) -> Callable[[], list[int]]:
    return lambda: list(draw.choice(CHARACTERS).encode())


def _clean_ids(draw: random.Random) -> tuple[list[int], str]:
    """A text in tokens of any size."""
    text = "".join(draw.choices(CHARACTERS, k=20))
    data, ids = text.encode(), []
    while data:
        sizes = [n for n in range(1, 6) if n <= len(data) and data[:n] in level_tokens()]
        size = draw.choice(sizes)
        ids.append(level_tokens()[data[:size]])
        data = data[size:]
    return ids, text


def _text_of(ids: list[int]) -> str:
    tokens = list(level_tokens())
    return b"".join(tokens[i] for i in ids).decode("utf-8", "replace")


@cache
def level_tokens() -> dict[bytes, int]:
    """Every byte, then pieces out of a text, wherever they begin and end."""
    draw = random.Random(0)
    blob = "".join(draw.choices([*CHARACTERS, "\ufffd"], k=4000)).encode()
    tokens = {bytes([byte]): byte for byte in range(256)}
    while len(tokens) < LEVEL_VOCAB:
        start = draw.randrange(len(blob) - 5)
        tokens.setdefault(blob[start : start + draw.randint(2, 5)], len(tokens))
    return tokens


@cache
def level_texts() -> Any:
    """What turns those tokens into text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in token): i for token, i in level_tokens().items()}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    return texts_of(PreTrainedTokenizerFast(tokenizer_object=made))


def _byte_letters() -> dict[int, str]:
    """The printable stand-in of every byte, as GPT-2 chose them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
