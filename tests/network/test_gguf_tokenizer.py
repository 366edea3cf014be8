"""Tokenizers of GGUF files: ids as llama.cpp gives them, and vocabularies that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import weights
from kits.gguf_files import finish
from transformers import TokenizersBackend

from paceline.core.errors import ConfigError
from paceline.engine.tokens import chat_ids, texts_of
from paceline.weights.gguf import GGUF, read_gguf
from paceline.weights.gguf_tokenizer import _Builder, load_gguf_tokenizer

# Of each string the ids that llama.cpp's tokenizer gives with special tokens parsed, on both files.
KNOWN = json.loads((Path(__file__).parents[1] / "kits" / "llama_cpp_ids.json").read_text())
WRITTEN = json.loads((Path(__file__).parents[1] / "kits" / "llama_cpp_chats.json").read_text())
CHATS = WRITTEN["chats"]
BYTES = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]  # GPT-2's names of bytes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, metadata: dict[str, Any]) -> GGUF:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(metadata.pop("name", "tiny"))
    for key, value in metadata.items():
        if value is None or value == []:
            continue
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}", value)
    writer.add_tensor("x", np.ones(4, np.float32))
    finish(writer)
    return read_gguf(path)


def by_rank(path: Path, **changed: Any) -> GGUF:
    tokens = [*BYTES, "he", "ll", "hell", "hello", "\u0120w", "12", "<end>", "<turn>"]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "ggml.merges": ["h e", "l l", "he ll", "hell o", "\u0120 w", "1 2"],
        "ggml.eos_token_id": len(tokens) - 2,
        "ggml.bos_token_id": len(tokens) - 2,
    }
    return write(path, metadata | {key.replace("__", "."): value for key, value in changed.items()})


def _tokens(*tokens: str) -> dict[str, Any]:
    """Nothing but these."""
    nothing = {"ggml__token_type": None, "ggml__merges": [], "ggml__bos_token_id": None, "ggml__eos_token_id": None}
    return {"ggml__tokens": list(tokens), **nothing}


def by_score(path: Path, **changed: Any) -> GGUF:
    space = "\u2581"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = [space, "a", "b", "ab", "ba", f"{space}ab", "aba", "\n\n"]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": [*tokens, *words],
        "ggml.token_type": [*types, *[1] * (len(words) - 1), 4],
        "ggml.scores": [0.0] * len(tokens) + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, 0.0],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return write(path, metadata | {key.replace("__", "."): value for key, value in changed.items()})


def pieces(model: GGUF, text: str, **options: Any) -> list[str]:
    tokenizer = load_gguf_tokenizer(model)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "place"), [("smollm2", weights.smollm2), ("gemma3", weights.gemma)])
def test_ids_are_llama_cpps(name: str, place: Callable[[], Path]) -> None:
    tokenizer = load_gguf_tokenizer(read_gguf(place()))
    assert len(KNOWN["strings"]) == 200
    differ = [text for text, ids in zip(KNOWN["strings"], KNOWN[name], strict=True) if ids != tokenizer.encode(text)]
    assert differ == []


def test_special_tokens_are_matched_whole(tmp_path: Path) -> None:
    model = by_score(tmp_path / "m.gguf", ggml__add_bos_token=False, ggml__add_space_prefix=False)
    assert pieces(model, "a<unk>  b</s> a") == ["a", "<unk>", "\u2581", "\u2581", "b", "</s>", "\u2581", "a"]
    assert _Builder(model).tokenizer().encode("a<unk>").tokens == ["a", "<unk>"]
    phi = by_score(
        tmp_path / "p.gguf", name="Phi 3 mini", ggml__add_bos_token=False, ggml__add_space_prefix=False
    )  # not the name that the converter gives
    assert pieces(phi, "a</s> a") == ["a", "</s>", "\u2581", "a"]
    phi = by_score(tmp_path / "q.gguf", name="Phi-3-mini", ggml__add_bos_token=False, ggml__add_space_prefix=False)
    assert pieces(phi, "a</s> \na<s> a") == ["a", "</s>", "a", "<s>", "\u2581", "a"]


@settings(max_examples=40, deadline=None)
@given(text=st.text())
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-coder"])
def test_every_text_comes_back(text: str, pre: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if pre not in _MADE:
        _MADE[pre] = _Builder(by_rank(tmp_path_factory.mktemp(pre) / "m.gguf", ggml__pre=pre)).tokenizer()
    assert _MADE[pre].decode(_MADE[pre].encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


_MADE: dict[str, Any] = {}


def test_a_chat_begins_with_one_bos(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "ab"}]
    plain = "{{ messages[0].content }}"
    for name, template in (("a", "{{ bos_token }}" + plain), ("b", plain), ("e", "\ufeff" + plain)):
        tokenizer = load_gguf_tokenizer(by_score(tmp_path / f"{name}.gguf", chat_template=template))
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>ab"
    marked = by_score(
        tmp_path / "d.gguf", chat_template="{%- generation -%}{{ messages[0].content }}{%- endgeneration %}"
    )
    assert load_gguf_tokenizer(marked).apply_chat_template(chat, tokenize=False) == "<s>ab"
    bare = by_score(tmp_path / "c.gguf", chat_template="{{ messages[0].content }}", ggml__add_bos_token=False)
    assert load_gguf_tokenizer(bare).apply_chat_template(chat, tokenize=False) == "ab"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ggml__pre": "nonesuch"}, "pre-tokenizer 'nonesuch' is not known"),
        ({"ggml__model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"ggml__token_type": [1, 2]}, "tokens, and 2 entries in tokenizer.ggml.token_type"),
        ({"ggml__merges": ["h q"]}, "the merge 'h q' makes no token"),
        ({"ggml__merges": ["hel l"]}, "its merges cannot be used .*hel"),
        ({"ggml__merges": ["h e"] * 10_000}, "10,000 merges for"),
        ({"ggml__bos_token_id": 5000, "ggml__add_bos_token": True}, "bos_token_id is 5000"),
        ({"ggml__bos_token_id": None, "ggml__add_bos_token": True}, "add_bos_token is true, and .* is missing"),
        (_tokens("a", "a"), "token 'a' is there twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_gguf_tokenizer(by_rank(tmp_path / "m.gguf", **changed))


def test_chats_are_written_as_llama_cpp_writes_them() -> None:
    tokenizer = load_gguf_tokenizer(read_gguf(weights.smollm2()))
    written = [tokenizer.apply_chat_template(c["messages"], tokenize=False, add_generation_prompt=True) for c in CHATS]
    assert written == [chat["prompt"] for chat in CHATS] and len(CHATS) == 30
    plain = tokenizer.apply_chat_template(CHATS[0]["messages"], tokenize=False)
    assert plain != written[0]


def test_answers_of_tools_are_written_as_llama_cpp_writes_them() -> None:
    tokenizer = load_gguf_tokenizer(read_gguf(weights.smollm2()))
    for chat in WRITTEN["tool_chats"]:
        assert chat_ids(chat["messages"], tokenizer, "SmolLM2")[1] == chat["without"]


@pytest.mark.parametrize("eos", [261, 2])  # a control token; one that is text, and special by its role alone
def test_ids_and_texts_are_those_of_transformers_over_the_same_vocabulary(eos: int, tmp_path: Path) -> None:
    model = by_rank(tmp_path / "m.gguf", ggml__eos_token_id=eos, ggml__bos_token_id=None)
    tokenizer, backend, text = load_gguf_tokenizer(model), _Builder(model).tokenizer(), "hello #w12 <end> \u00c9 <turn>"
    token = backend.id_to_token(eos)
    theirs = TokenizersBackend(tokenizer_object=backend, eos_token=token, clean_up_tokenization_spaces=False)
    for options in ({}, {"add_special_tokens": False}):
        assert tokenizer.encode(text, **options) == theirs.encode(text, **options)
    ids = theirs.encode(text)
    said = [texts_of(tokenizer).prompt(ids, skip) for skip in (True, False)]
    assert said == [theirs.decode(ids, skip_special_tokens=skip) for skip in (True, False)] and said[0] != said[1]
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(theirs), theirs.get_vocab())
