"""A tokenizer whose ids are pieces or single bytes, as those of Llama 2, Mistral and Phi-3 are."""

from __future__ import annotations

from functools import cache
from typing import Any

PIECES = ("▁", "a", "b", "e", "t", "é", "▁the", "▁cat", "ing", "€", "日本", "😀", ".", "\n", "\ufffd", "▁a▁")
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES_VOCAB = len(SPECIAL) + 256 + len(PIECES)


@cache
def byte_tokenizer(strip: bool = True) -> Any:
    """BPE without merges: a piece, a character, or the bytes of what has no piece.

    Args:
        strip: whether the space that leads a text is dropped, as most of these tokenizers do.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {name: i for i, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_id(byte: int) -> int:
    """The token of one byte."""
    return len(SPECIAL) + byte


def byte_ids(text: str) -> list[int]:
    """The tokens of the bytes of a text."""
    return [byte_id(byte) for byte in text.encode("utf-8")]


def piece_id(piece: str) -> int:
    """The token of a piece."""
    return len(SPECIAL) + 256 + PIECES.index(piece)
