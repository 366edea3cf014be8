"""Prompts brought to a context: longer ones are cut, shorter ones get book text in front."""

from __future__ import annotations

import zlib
from itertools import chain
from typing import Any

from paceline.bench.encoding import Encoded
from paceline.bench.workloads import Prompt, Workload, load
from paceline.core.errors import ConfigError

Pieces = list[list[int]]  # a prompt's ids: in turns what must stay (template, BOS, separators), and text


class Filled(Encoded):
    """The ids of a workload's prompts, each of exactly ``context`` tokens.

    Longer ones are cut, the oldest text first; shorter ones get text of books in the public domain in front. Cuts and
    fills are counted: say them with `notes`.

    Raises:
        ConfigError: what `Encoded` refuses, a context that does not fit, or a chat template that leaves nothing to cut.
    """

    def __init__(
        self, workload: Workload, tokenizer: Any, *, context: int, max_model_len: int, max_new_tokens: int
    ) -> None:
        most = max_model_len - max_new_tokens
        if not 1 <= context <= most:
            wrong = f"max_model_len={max_model_len} leaves {most} tokens for a prompt with {max_new_tokens} new ones"
            raise ConfigError(f"context={context}", wrong, f"give 1 to {most}")
        self.context = context
        self.filled: dict[str, int] = {}  # tokens put in front, by id of the prompt
        self._books: list[tuple[Any, list[int]]] = []  # (book, ids) of each passage, once needed
        super().__init__(workload, tokenizer, max_model_len=context + max_new_tokens, max_new_tokens=max_new_tokens)

    def notes(self) -> list[str]:
        """What was cut and filled, in sentences; empty where prompts are as they were."""
        said = (
            f"{self.workload.name}: {len(self.filled)} of {len(self.prompts)} prompts filled to {self.context:,} tokens"
        )
        return [*super().notes(), *([f"{said} tokens with book text"] if self.filled else [])]

    def fit(self, prompt: Prompt) -> list[int]:
        text, name = prompt.turns[0], prompt.id
        ids, rendered = self.render(text)
        own = len(ids)
        if own == self.context:
            return ids
        pieces = self._pieces(text, ids, rendered)
        _cut_oldest(pieces, self.context, name)
        missing = self.context - sum(map(len, pieces))
        # Apart, the pieces may be a token or so longer or shorter than together.
        pieces[0] += self._book_ids(prompt, missing) if missing else []
        changed, by = (self.cut, own - self.context) if own > self.context else (self.filled, self.context - own)
        changed[name] = by
        return [*chain.from_iterable(pieces)]

    def _pieces(self, text: str, ids: list[int], rendered: str) -> Pieces:
        """The prompt apart into its text and what is around it."""
        mark = "paceline0000mark"
        around = (self.render(mark)[1] if self.uses_template else mark).split(mark)
        for said in (text, text.strip()):  # most templates trim
            parts = [around[0], said, around[-1]]
            if len(around) == 2 and "".join(parts) == rendered:
                pieces = [self._plain(part) for part in parts]
                if not self.uses_template:  # what the tokenizer puts before and after plain text (BOS, say)
                    plain = self._plain(rendered)
                    starts = range(len(ids) - len(plain) + 1)
                    start = next((i for i in starts if ids[i : i + len(plain)] == plain), 0)
                    pieces[0], pieces[-1] = ids[:start], ids[start + len(plain) :]
                return pieces
        raise ConfigError(
            f"prompts of {self.workload.name} at {self.context} tokens",
            "the model's chat template rewrites its messages, so that a text in it can be neither cut nor filled",
            "leave the context out, give fewer new tokens, or raise max_model_len",
        )

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _book_ids(self, prompt: Prompt, count: int) -> list[int]:
        """Exactly ``count`` ids of book text that end where a passage ends.

        Never text of the prompt's own book: the answer might be in it. Prompts begin at different passages, so
        that a batch of them is not one long common prefix.
        """
        if not self._books:
            texts = [(p, " ".join((*p.turns, *p.reference)) + "\n\n") for p in load("books").prompts]
            self._books = [(p.extra.get("book"), self._plain(text)) for p, text in texts]
        passages = [ids for book, ids in self._books if book != prompt.extra.get("book")]
        start = zlib.crc32(prompt.id.encode()) % len(passages)
        ids = [*chain.from_iterable(reversed(passages[start:] + passages[:start]))]
        if len(ids) < count:
            raise ConfigError(
                f"context={self.context}",
                f"the packaged books have {len(ids):,} tokens of text to put in front of a prompt",
                "give a smaller context, or a file of prompts that are long by themselves",
            )
        return ids[-count:]


def encoded(workload: Workload, tokenizer: Any, context: int | None = None, **lengths: int) -> Encoded:
    """A workload's prompts, brought to a context if there is one."""
    if context is None:
        return Encoded(workload, tokenizer, **lengths)
    return Filled(workload, tokenizer, context=context, **lengths)


def _cut_oldest(pieces: Pieces, room: int, name: str) -> None:
    """Take text away from the front, at least one token of the last text stays.

    Raises:
        ConfigError: what must stay does not fit.
    """
    excess = sum(map(len, pieces)) - room
    last = len(pieces) - 2
    for i in range(1, len(pieces), 2):
        spare = len(pieces[i]) - (i == last)
        gone = max(0, min(spare, excess))
        pieces[i] = pieces[i][gone:]
        excess -= gone
    if excess > 0:
        raise ConfigError(
            f"prompt {name} in {room} tokens",
            f"the chat template alone takes {room + excess - 1}",
            f"leave room for {room + excess} tokens",
        )
