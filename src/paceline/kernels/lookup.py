"""Look-ups in token ids by compiled code: n-grams and suffixes of growing texts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from . import library


class NgramTexts:
    """Growing texts, and where their n-grams occurred before; one call looks up any number of them.

    Args:
        shortest, longest: tokens of an n-gram.
        most: tokens beyond which the length of a match is not distinguished.

    Raises:
        RuntimeError: nothing is compiled here (`kernels.library` is None), or these are not lengths.
    """

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        compiled = library()
        if compiled is None or not 1 <= shortest <= longest:
            raise RuntimeError(f"n-grams of {shortest} to {longest} tokens in compiled code")
        self._library, self._lengths, self._most = compiled, (shortest, longest), most
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
                handle = self._library.pl_ngrams_new(*self._lengths)
                text = self._texts[key] = _Text(handle, self._library.pl_ngrams_free)
            before, text.known = text.known, len(tokens)
            numbers += (text.handle, text.known - before, depth)
            fresh += tokens[before:]
            total += 1 + depth
        packed, out = array("q", numbers + fresh), array("q", bytes(8 * max(1, total)))
        if self._library.pl_ngrams(packed.buffer_info()[0], out.buffer_info()[0]):
            raise ValueError("look-ups of no token")
        drafts, at, results = [], 0, out.tolist()
        for _, _, depth in texts:
            end = at + 1 + depth
            drafts.append((results[at], results[at + 1 : end]) if results[at] else (0, []))
            at = end
        return drafts

    def drop(self, key: int) -> None:
        """Forget a text."""
        self._texts.pop(key, None)


class _Text:
    """One text, or several, in compiled code."""

    __slots__ = ("_free", "handle", "known")

    def __init__(self, handle: int, free: Callable[[int], None]) -> None:
        self.handle, self._free = handle, free
        self.known = 0  # tokens that are in it

    def __del__(self) -> None:
        self._free(self.handle)


class SuffixTexts:
    """Growing texts, and those that ended: how the longest run of last tokens that was seen before went on most often.

    What it drafts is what `draft.suffix` does the long way, chains alone.

    Args:
        shortest, longest: tokens of a run that counts, and that is distinguished.
        reach: tokens drafted at most for each matched one.
        least: chance of a path below which it ends.
        remembered: of ended texts, tokens that are kept, in two generations: when the younger has half, the older goes.

    Raises:
        RuntimeError: nothing is compiled here (`kernels.library` is None), or these are not lengths.
    """

    def __init__(self, shortest: int, longest: int, reach: float, least: float, remembered: int) -> None:
        compiled = library()
        if compiled is None or not 1 <= shortest <= longest:
            raise RuntimeError(f"runs of {shortest} to {longest} tokens in compiled code")
        self._library, self._shortest, self._longest = compiled, shortest, longest
        self._limits, self._half = array("d", (reach, least)), remembered // 2
        self._texts: dict[int, _Text] = {}
        self._ended: deque[tuple[int, _Text]] = deque(maxlen=2)  # numbered, younger first
        self._numbers = count()

    @property
    def size(self) -> int:
        """Return tokens of ended texts that are remembered."""
        return sum(runs.known for _, runs in self._ended)

    def draft(self, texts: Sequence[tuple[int, list[int], int, int]]) -> list[tuple[int, list[int], list[float]]]:
        """Continue each text.

        Args:
            texts: key, tokens (which only grow from call to call), tokens to draft at most, and depth; one or more.

        Returns:
            For each how many tokens match, those that may follow, and logs of the estimated chances of these paths.

        Raises:
            ValueError: nothing to draft for one of them.
        """
        numbers = [len(texts), self._shortest, len(self._ended)]
        for number, runs in self._ended:
            numbers += (number, runs.handle)
        fresh, total, places = list[int](), 0, []
        for key, tokens, nodes, depth in texts:
            text = self._texts.get(key)
            if text is None:
                out = self._library.pl_suffix_text_new(self._longest)
                text = self._texts[key] = _Text(out, self._library.pl_suffix_text_free)
            first, text.known = text.known, len(tokens)
            numbers += (text.handle, text.known - first, nodes, depth)
            fresh += tokens[first:]
            places.append(total)
            total += max(0, min(nodes, depth))
        packed, scores = array("q", numbers + fresh), array("d", bytes(8 * max(1, total)))
        out = array("q", bytes(8 * (total + 2 * len(texts))))
        limits = self._limits.buffer_info()[0]
        if self._library.pl_suffixes(packed.buffer_info()[0], limits, out.buffer_info()[0], scores.buffer_info()[0]):
            raise ValueError("look-ups of no token")
        drafts = []
        for i, at in enumerate(places):
            start = at + 2 * i
            size = out[start]
            drafts.append((out[start + 1], out[start + 2 : start + 2 + size].tolist(), scores[at : at + size].tolist()))
        return drafts

    def drop(self, key: int) -> None:
        """Forget a running text."""
        self._texts.pop(key, None)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep a text that has ended; of one longer than half of the limit its last part."""
        tokens = tokens[-self._half :] if self._half else ()
        if not tokens:
            return
        library = self._library
        if not self._ended or self._ended[0][1].known + len(tokens) > self._half:
            runs = _Text(library.pl_suffixes_new(self._longest), library.pl_suffixes_free)
            self._ended.appendleft((next(self._numbers), runs))
        runs, packed = self._ended[0][1], array("q", tokens)
        library.pl_suffixes_add(runs.handle, packed.buffer_info()[0], len(packed))
        runs.known += len(packed)

    def forget(self) -> None:
        """Forget all texts that have ended."""
        self._ended.clear()
