"""Stop rules and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from .errors import ConfigError
from .outputs import FinishReason, Logprob, StopReason
from .sampling import SamplingParams

DecodeToken = Callable[[int], str]  # the text of one token by itself


class TextStream(Protocol):
    """Turns the tokens of one output into text."""

    @property
    def sure(self) -> bool:
        """Return whether `push` never fails, so that it may be called later than its token comes."""

    def push(self, token: int) -> str:
        """Return the text that the next token adds; "" while a character is incomplete."""

    def end(self) -> str:
        """Return the remaining text at the end of the output: U+FFFD for an incomplete character."""


# ---------------------------------------------------------------------------------------------------------------------
# Stop rules

_MOST_UNREAD = 64  # tokens that wait for their text: for many at once it takes a fraction of the time


def find_stop(stops: Sequence[str], text: str, new: int) -> tuple[int, str] | None:
    """Find the first of ``stops`` in ``text`` that ends in its last ``new`` characters: (start, string).

    First means the one that ends first, as if the text had come character by character, so the answer does not depend
    on where tokens begin; of two that end together, the longer.
    """
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, len(text) - new - len(stop) + 1))
        if start >= 0:
            matches.append((start + len(stop), start, stop))
    return min(matches)[1:] if matches else None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that is a beginning of stop, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class GrowingText:
    """Text that grows at its end: the cost of appending does not depend on its length."""

    __slots__ = ("_pieces", "length")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.length = 0  # characters

    def append(self, piece: str) -> None:
        """Append a piece."""
        if piece:
            self._pieces.append(piece)
            self.length += len(piece)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` characters."""
        self._pieces = [self.whole()[:length]]
        self.length = len(self._pieces[0])

    def whole(self) -> str:
        """Return all of it."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def slice(self, start: int, stop: int) -> str:
        """Return characters start .. stop - 1; cheap near the end."""
        at, last = self.length, len(self._pieces)
        while last and at > start:
            last -= 1
            at -= len(self._pieces[last])
        return "".join(self._pieces[last:])[max(0, start - at) : max(0, stop - at)]


class StopChecker:
    """Goes through the tokens of one output in order and finds where it ends.

    Ids and strings count only in tokens after the first ``min_tokens``.

    EOS and stop ids stay in the token ids and have no text. The text ends where a stop string begins
    (where it ends, with ``include_stop_str_in_output``), even in the middle of a token. A token that is
    both the last allowed and a stop ends the output as a stop.

    Args:
        params: the request's parameters.
        eos_ids: the model's end tokens.
        max_tokens: most tokens of output, at least 1.
        stream: turns tokens into text; None where no text is wanted. Where it is sure and no stop string is looked
            for, it is used when the text is read, or once many tokens wait.

    Raises:
        ConfigError: stop strings without a ``stream``.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Sequence[int],
        max_tokens: int,
        stream: TextStream | None,
    ) -> None:
        if params.stop_strings and stream is None:
            subject = f"stop={params.stop!r} without a tokenizer"
            raise ConfigError(subject, "stop strings are found in text", "use stop_token_ids, or load a tokenizer")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason = None
        self._min_tokens, self._keeps_stop_string = params.min_tokens, params.include_stop_str_in_output
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids, self._stops = frozenset(params.stop_token_ids or ()), params.stop_strings
        self.enders = self._eos_ids | self._stop_ids  # ids that end the output after ``min_tokens``
        self._longest = max(map(len, self._stops), default=0)
        self._said = GrowingText()
        self._unread: list[int] = []  # tokens whose text is not made yet
        self._waits = stream is None or (stream.sure and not self._stops)  # whether the text of tokens can wait
        self._stream = stream

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """Return all text so far, the possible beginning of a stop string included."""
        return self._text.whole()

    @property
    def _text(self) -> GrowingText:
        """Return the text of all tokens so far."""
        unread, self._unread = self._unread, []
        if self._stream is not None:
            for token in unread:
                self._said.append(self._stream.push(token))
        return self._said

    @property
    def stable_length(self) -> int:
        """Return how many characters will not change any more: all but the possible beginning of a stop string."""
        if self.finished or not self._longest:
            return self._text.length
        end = self._text.slice(self._text.length - self._longest, self._text.length)
        return self._text.length - max(_overlap(end, stop) for stop in self._stops)

    def stable_text(self, start: int = 0) -> str:
        """Return the text from character ``start`` on that will not change any more."""
        return self._text.slice(start, self.stable_length)

    def feed(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None, StopReason]:
        """Take newly accepted tokens in order, up to the first that ends the output.

        If detokenizing a token fails, that token is not taken and the error is raised; `num_tokens` is the number
        taken.

        Returns:
            How many of them belong to the output, the finish reason (None: not finished), and the stop id or stop
            string that ended it.

        Raises:
            RuntimeError: the output has already ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError("this output has ended: nothing can follow it")
        if self.pass_over(tokens):
            return len(tokens), None, None
        for count, token in enumerate(tokens, start=1):
            self._take(token)
            if self.finished:
                return count, self.finish_reason, self.stop_reason
        return len(tokens), None, None

    def pass_over(self, tokens: Sequence[int]) -> bool:
        """Take tokens as `feed` does, if they end nothing and their text can wait; False: nothing was done."""
        count = len(tokens)
        if not self._waits or self.num_tokens + count >= self.max_tokens or not self.enders.isdisjoint(tokens):
            return False
        if self.finished:
            return False
        self.num_tokens += count
        self._unread += tokens
        if len(self._unread) >= _MOST_UNREAD:
            _ = self._text
        return True

    def end(self, reason: Literal["abort", "deadline", "error"]) -> None:
        """End the output from outside; its text is unchanged."""
        self.finish_reason, self.stop_reason = reason, None

    def _take(self, token: int) -> None:
        armed = self.num_tokens >= self._min_tokens
        if armed and (token in self._eos_ids or token in self._stop_ids):
            self._finish("stop", None if token in self._eos_ids else token)
        else:
            self._append_text(token, armed)
            if not self.finished and self.num_tokens + 1 >= self.max_tokens:
                self._finish("length", None)
        self.num_tokens += 1

    def _append_text(self, token: int, armed: bool) -> None:
        text = self._text
        piece = self._stream.push(token) if self._stream else ""
        text.append(piece)
        if not (piece and armed and self._longest):
            return
        begin = max(0, self._text.length - len(piece) - self._longest)
        match = find_stop(self._stops, self._text.slice(begin, self._text.length), len(piece))
        if match:
            start, stop = match
            self._text.cut(begin + start + (len(stop) if self._keeps_stop_string else 0))
            self.finish_reason, self.stop_reason = "stop", stop

    def _finish(self, reason: FinishReason, stop_reason: StopReason) -> None:
        self._text.append(self._stream.end() if self._stream else "")
        self.finish_reason, self.stop_reason = reason, stop_reason


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


def token_logprobs(
    logits: Tensor, chosen: Tensor, k: int, decode: DecodeToken | None = None
) -> list[dict[int, Logprob]]:
    """Return log-probabilities of the chosen token and of the k likeliest, row by row.

    Args:
        logits: [n, V]; raw or processed, as the request wants it.
        chosen: [n] int64.
        k: likeliest tokens wanted next to the chosen one; 0: only that one.
        decode: turns one id into text for ``Logprob.decoded``.

    Returns:
        n dicts from token id, the chosen one first, then the likeliest downwards.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = wide.log_softmax(dim=-1)
    chosen = chosen.to(logprobs.device)
    of_chosen = logprobs.gather(-1, chosen[:, None])  # [n, 1]
    top = logprobs.topk(k, dim=-1)  # descending
    ids = torch.cat([chosen[:, None], top.indices], dim=-1)  # [n, 1 + k]
    values = torch.cat([of_chosen, top.values], dim=-1)
    above_chosen = (logprobs > of_chosen).sum(dim=-1, keepdim=True)
    # Whatever is above one of them is among them, so the first of its equals stands at its rank.
    above_top = torch.searchsorted(-top.values, -top.values)
    above = torch.cat([above_chosen, above_top], dim=-1)  # [n, 1 + k]
    result = []
    for row in zip(ids.tolist(), values.tolist(), above.tolist(), strict=True):
        entries: dict[int, Logprob] = {}
        for token, value, higher in zip(*row, strict=True):
            if token not in entries:
                entries[token] = Logprob(value, higher + 1, decode(token) if decode else None)
        result.append(entries)
    return result
