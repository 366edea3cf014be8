"""Look-ups in token ids by compiled code: n-grams of growing texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from . import library


class NgramTexts:
    """Growing texts, and where their n-grams occurred before; one call looks up any number of them.

    Args:
        shortest, longest: tokens of an n-gram.
        most: tokens beyond which the length of a match is not told apart.

    Raises:
        RuntimeError: nothing is compiled here (`native.library` is None), or these are no lengths.
    """

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        found = library()
        if found is None or not 1 <= shortest <= longest:
            raise RuntimeError(f"n-grams of {shortest} to {longest} tokens in compiled code")
        self._library, self._lengths, self._most = found, (shortest, longest), most
        self._texts: dict[int, _Text] = {}

    def draft(self, texts: Sequence[tuple[int, list[int], int]]) -> list[tuple[int, list[int]]]:
        """Continue each text as its last tokens were continued before.

        Args:
            texts: key, tokens (which only grow from call to call), and tokens to draft, one or more.

        Returns:
            For each how many tokens match, and the tokens that follow the match; (0, []) where nothing matches.

        Raises:
            ValueError: nothing to draft for one of them.
        """
        numbers, fresh, total = [len(texts), self._most], list[int](), 0
        for key, tokens, depth in texts:
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = _Text(self._library, self._lengths)
            known, text.known = text.known, len(tokens)
            numbers += (text.handle, text.known - known, depth)
            fresh += tokens[known:]
            total += 1 + depth
        given, made = array("q", numbers + fresh), array("q", bytes(8 * max(1, total)))
        if self._library.pl_ngrams(given.buffer_info()[0], made.buffer_info()[0]):
            raise ValueError("look-ups of no token")
        found, at, said = [], 0, made.tolist()
        for _, _, depth in texts:
            end = at + 1 + depth
            found.append((said[at], said[at + 1 : end]) if said[at] else (0, []))
            at = end
        return found

    def drop(self, key: int) -> None:
        """Forget a text."""
        self._texts.pop(key, None)


class _Text:
    """One text in compiled code."""

    __slots__ = ("_free", "handle", "known")

    def __init__(self, found: Any, lengths: tuple[int, int]) -> None:
        self.handle: int = found.pl_ngrams_new(*lengths)
        self.known = 0  # tokens that are in it
        self._free = found.pl_ngrams_free

    def __del__(self) -> None:
        self._free(self.handle)
