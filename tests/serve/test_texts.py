"""The bytes of a token, as log-probabilities name them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from kits.byte_tokens import byte_tokenizer
from tokenizers import Tokenizer

from paceline.serve.texts import token_bytes

ZOO = Tokenizer.from_file(str(Path(__file__).parents[2] / "zoo" / "paceline-small" / "tokenizer.json"))
BY_PIECES = byte_tokenizer(strip=False)
LEVELS, PIECES = token_bytes(ZOO), token_bytes(BY_PIECES._tokenizer)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_bytes_of_tokens_are_those_of_the_text(said: str):
    ids = ZOO.encode(said, add_special_tokens=False).ids
    assert b"".join(map(LEVELS, ids)).decode() == ZOO.decode(ids, skip_special_tokens=False)
    pieces = BY_PIECES.encode(said.replace("\u2581", ""), add_special_tokens=False)
    assert b"".join(map(PIECES, pieces)).decode() == said.replace("\u2581", "")


def test_the_bytes_of_special_tokens():
    assert LEVELS(1) == b"<|eos|>" and LEVELS(ZOO.get_vocab_size() + 10**6) == b""
