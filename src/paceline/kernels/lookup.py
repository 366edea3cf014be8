"""Look-ups in token ids by compiled code: suffixes of growing texts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from . import library


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
        numbers = [len(texts), self._shortest, len(self._ended), *self._earlier()]
        fresh, total, places = list[int](), 0, []
        for key, tokens, nodes, depth in texts:
            handle, new = self._take(key, tokens)
            numbers += (handle, len(new), nodes, depth)
            fresh += new
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

    def followers(self, key: int, tokens: list[int], path: Sequence[int], width: int) -> tuple[int, dict[int, float]]:
        """Look up what follows a text, whose new tokens are taken in, and a path of tokens after it, which are not.

        Returns:
            How many tokens match, and the share of each of the ``width`` most frequent followers, in falling order.
        """
        handle, new = self._take(key, tokens)
        numbers = [self._shortest, width, len(self._ended), *self._earlier(), handle, len(new), len(path), *new, *path]
        packed, out, shares = array("q", numbers), array("q", bytes(8 * (2 + width))), array("d", bytes(8 * width))
        places = (each.buffer_info()[0] for each in (out, shares))
        if self._library.pl_suffix_followers(packed.buffer_info()[0], self._limits[1], *places):
            raise ValueError("look-ups of no token")
        return out[1], dict(zip(out[2 : 2 + out[0]], shares, strict=False))

    def _earlier(self) -> Iterator[int]:
        """Return the number and the address of each automaton of ended texts."""
        for number, runs in self._ended:
            yield from (number, runs.handle)

    def _take(self, key: int, tokens: list[int]) -> tuple[int, list[int]]:
        """Return a running text's address, and its tokens that are new."""
        text = self._texts.get(key)
        if text is None:
            handle = self._library.pl_suffix_text_new(self._longest)
            text = self._texts[key] = _Text(handle, self._library.pl_suffix_text_free)
        first, text.known = text.known, len(tokens)
        return text.handle, tokens[first:]

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
