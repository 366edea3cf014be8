"""A grammar next to one output: which tokens may follow, anywhere in a draft tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")


class GrammarMatcher:
    """Grammar of one output; see `core.grammar.Matcher`.

    One parser follows the output and only moves forward; drafts are followed by copies of it. So grammars work that
    cannot be taken back (``max_tokens=``, ``stop=``), and whatever a draft runs into is thrown away with its copy.

    Args:
        parser: gives one at the beginning of an output; called again where the last one failed.
        vocab_size: V.
    """

    def __init__(self, parser: Callable[[], LLMatcher], vocab_size: int) -> None:
        self._begin, self._vocab_size = parser, vocab_size
        self.fault: Exception | None = None
        self._own: _Place  # after the output
        self._draft: _Place  # a copy, at the place of the last call
        self._restart()

    def copy(self) -> GrammarMatcher:
        """Implement `core.grammar.Matcher`."""
        other, (parser, read) = copy(self), self._own
        other._own, other._draft = (parser.deep_copy(), [*read]), (parser.deep_copy(), [*read])
        return other

    def __call__(self, output: Sequence[int]) -> Tensor:
        """Return [V] bool: the tokens that may follow. After a text that is not allowed, all: nobody gets there.

        Raises:
            ConfigError: the mask takes more work than a request is given.
        """
        words = torch.empty((self._vocab_size + 31) // 32, dtype=torch.int32)
        self.fill(output, words)
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits).view(torch.bool)

    def fill(self, output: Sequence[int], words: Tensor) -> None:
        """Implement `core.grammar.Matcher`.

        Raises:
            ConfigError: as for a call.
        """
        words.fill_(-1)
        self._ask(output, lambda parser: parser.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes))

    def within(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bool]:
        """Return which paths the grammar allows after an output; none where that takes too much work."""

        def allowed(parser: LLMatcher) -> list[bool]:
            return [parser.validate_tokens([*path]) == len(path) for path in paths]

        return self._of_draft(output, allowed) or [False for _ in paths]

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Return tokens of the text that follows whatever is chosen, split as the tokenizer would."""
        tokens = None if most <= 0 else self._of_draft(output, lambda parser: parser.compute_ff_tokens())
        return (tokens or [])[:most]

    def _of_draft(self, output: Sequence[int], question: Callable[[LLMatcher], T]) -> T | None:
        """Query the parser after the whole output.

        None also where the parser fails, since drafts must not raise errors.
        """
        try:
            self._own = self._led(self._own, output)
            return self._ask(output, question)
        except ConfigError:
            return None

    def _ask(self, ids: Sequence[int], question: Callable[[LLMatcher], T]) -> T | None:
        """Return the answer of a parser that has read these ids; None: the grammar does not allow them.

        A parser that fails, which may come from questions about other texts, is replaced and called once more.
        """
        for _ in range(2):
            parser, read = self._draft = self._led(self._draft, ids)
            answer = question(parser) if len(read) == len(ids) else None
            if not parser.is_error():
                return answer
            wrong = words_of(parser.get_error())
            self._restart()
        self.fault = ConfigError("the next token under a grammar", wrong, "use a simpler grammar")
        raise self.fault

    def _led(self, place: _Place, ids: Sequence[int]) -> _Place:
        """Return a parser that has read these ids, or as many as it accepts, and the ids that it has read."""
        parser, read = place
        if read != [*ids[: len(read)]]:
            parser, read = self._own if self._own[1] == [*ids[: len(self._own[1])]] else (self._begin(), [])
            parser, read = parser.deep_copy(), [*read]
        if new := [*ids[len(read) :]]:
            read += new[: parser.try_consume_tokens(new)]
        return parser, read

    def _restart(self) -> None:
        """Begin with a new parser."""
        parser = self._begin()
        self._own, self._draft = (parser, []), (parser.deep_copy(), [])


def words_of(error: str) -> str:
    """Return an error of llguidance without the traces of its insides."""
    return " ".join(re.split("<(?:backtrace|state|non-verbose/)>", error)[0].split())[:500]


_Place = tuple["LLMatcher", list[int]]  # a parser, and the ids that it has taken
