"""A grammar beside one output: which tokens may follow, wherever in a draft tree that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMatcher:
    """See `core.grammar.Matcher`. The parser stands behind the ids that were asked about last, and goes back no further
    than to what they have in common with the next ones.

    Args:
        parser: at the beginning of an output; of this matcher alone.
        vocab_size: V.
    """

    def __init__(self, parser: LLMatcher, vocab_size: int) -> None:
        self._parser, self._vocab_size = parser, vocab_size
        self._read: list[int] = []  # ids that the parser has taken

    def __call__(self, output: Sequence[int]) -> Tensor:
        """[V] bool: the tokens that may follow. Behind a text that is not allowed, all: nobody gets there.

        Raises:
            ConfigError: what follows takes more work to find out than a request is given.
        """
        words = torch.empty((self._vocab_size + 31) // 32, dtype=torch.int32)
        self.fill(output, words)
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits).view(torch.bool)

    def fill(self, output: Sequence[int], words: Tensor) -> None:
        """See `core.grammar.Matcher`.

        Raises:
            ConfigError: as for a call.
        """
        if not self._go(output):
            words.fill_(-1)
            return
        self._parser.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        self._check()

    def within(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bool]:
        """Of texts that go on behind an output, which the grammar allows."""
        if not self._go(output):
            return [False for _ in paths]
        counts = [self._parser.validate_tokens([*path]) for path in paths]
        self._check()
        return [count == len(path) for count, path in zip(counts, paths, strict=True)]

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Tokens of the text that follows whatever is chosen, split as the tokenizer would."""
        if most <= 0 or not self._go(output):
            return []
        found: list[int] = self._parser.compute_ff_tokens()
        self._check()
        return found[:most]

    def _go(self, ids: Sequence[int]) -> bool:
        """Stand behind these ids; whether the grammar allows them."""
        read = self._read
        if len(read) > len(ids) or read != ids[: len(read)]:
            same = min(len(read), len(ids))
            while read[:same] != ids[:same]:  # they part near the end, where drafts are
                same -= 1
            if not self._parser.rollback(len(read) - same):
                self._check()
            del read[same:]
        new = [*ids[len(read) :]]
        taken = self._parser.try_consume_tokens(new) if new else 0
        self._check()
        read += new[:taken]
        return taken == len(new)

    def _check(self) -> None:
        if self._parser.is_error():
            wrong = " ".join(self._parser.get_error().split())[:500]
            raise ConfigError("the next token under a grammar", wrong, "use a simpler grammar")
