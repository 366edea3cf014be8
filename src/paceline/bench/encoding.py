"""Token ids of prompts: as the engine would render them, cut or filled to a context where that is asked for."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from ..core.errors import ConfigError
from ..engine.tokens import chat_ids
from ..engine.tokens import encode as encode_text
from .records import PromptIds
from .workloads import Prompt, Workload, load

SEPARATOR = "\n\n"  # between turns and answers of a conversation, for a model without a chat template
Pieces = list[list[int]]  # a prompt's ids: in turns what must stay (template, BOS, separators), and text


class Encoded:
    """The ids of a workload's prompts: those that ``LLM.chat`` or ``LLM.generate`` would compute.

    ``prompts`` holds the first turns. `next_turn` encodes later ones, under the same limits, once the answers
    before them are known. Prompts that do not fit are cut, the oldest text first; what stays is BOS, the chat
    template, and the end of the text. Cuts and fills are counted: say them with `notes`.

    Args:
        context: bring every prompt to exactly this many tokens: longer ones are cut, shorter ones get text of
            books in the public domain in front; None: prompts as they are.
        max_model_len: most tokens of prompt and answer.
        max_new_tokens: of the answer.

    Raises:
        ConfigError: no tokenizer, no room for a prompt, a context that does not fit, or a chat template that
            leaves nothing to cut.
    """

    def __init__(
        self,
        workload: Workload,
        tokenizer: Any,
        *,
        context: int | None = None,
        max_model_len: int,
        max_new_tokens: int,
    ) -> None:
        if tokenizer is None:
            wrong = "this model has no tokenizer, so text means nothing to it"
            raise ConfigError(f"workload {workload.name!r}", wrong, "add its files")
        most = max_model_len - max_new_tokens
        if max_new_tokens < 1 or most < 1:
            wrong = f"max_model_len={max_model_len} leaves no room for a prompt and an answer"
            raise ConfigError(f"max_new_tokens={max_new_tokens}", wrong, "give 1 or more, or raise max_model_len")
        if context is not None and not 1 <= context <= most:
            wrong = f"max_model_len={max_model_len} leaves {most} tokens for a prompt with {max_new_tokens} new ones"
            raise ConfigError(f"context={context}", wrong, f"give 1 to {most}")
        self.cut: dict[str, int] = {}  # tokens taken away, by id of the prompt
        self.filled: dict[str, int] = {}  # tokens put in front, by id of the prompt
        self._context, self._length = context, context or most
        self._workload, self._tokenizer = workload, tokenizer
        self._uses_template = workload.chat and bool(getattr(tokenizer, "chat_template", None))
        self._count = 0  # of prompts, later turns included
        self._books: list[tuple[Any, list[int]]] = []  # (book, ids) of each passage, once needed
        self.prompts = [self._fit(prompt, prompt.id, prompt.turns[:1]) for prompt in workload.prompts]

    def next_turn(self, prompt: Prompt, turn_index: int, answers: Sequence[str]) -> PromptIds:
        """A later turn, with the conversation before it.

        With a chat template, user and assistant alternate in it; without one, turns and answers are plain
        text with a blank line in between.

        Args:
            prompt: one of the workload's.
            turn_index: of the turn to be answered, from 1 (the second turn) on.
            answers: text of the answers to the turns before it.

        Returns:
            Ids; the id of the prompt ends in ``/2`` for the second turn.

        Raises:
            ConfigError: it cannot be made to fit.
        """
        turns = zip_longest(prompt.turns[: turn_index + 1], answers)
        texts = [text for pair in turns for text in pair if text is not None]
        return self._fit(prompt, f"{prompt.id}/{turn_index + 1}", texts)

    def notes(self) -> list[str]:
        """What was cut and filled, in sentences; empty where prompts are as they were."""
        most, name = self._length, self._workload.name
        said = []
        if self.cut:
            said.append(f"{name}: {len(self.cut)} of {self._count} prompts cut to {most:,} tokens, oldest text first")
        if self.filled:
            said.append(f"{name}: {len(self.filled)} of {self._count} prompts filled to {most:,} tokens with book text")
        return said

    def _fit(self, prompt: Prompt, name: str, texts: Sequence[str]) -> PromptIds:
        self._count += 1
        if self._uses_template:
            ids, rendered = chat_ids(_messages(texts), self._tokenizer, "this model")
        else:
            rendered = SEPARATOR.join(texts)
            ids = encode_text(rendered, self._tokenizer)[0]
        most, own = self._length, len(ids)
        if own > most or (self._context and own < most):
            pieces = self._pieces(texts, ids, rendered)
            _cut_oldest(pieces, most, name)
            missing = most - sum(map(len, pieces)) if self._context else 0
            # Apart, the pieces may be a token or so longer or shorter than together.
            pieces[0] += self._book_ids(prompt, missing) if missing else []
            ids = [*chain.from_iterable(pieces)]
            changed, by = (self.cut, own - len(ids)) if own > most else (self.filled, len(ids) - own)
            changed[name] = by
        return PromptIds(id=name, category=prompt.category, ids=tuple(ids))

    def _pieces(self, texts: Sequence[str], ids: list[int], rendered: str) -> Pieces:
        """The prompt apart into texts and what is around them."""
        marks = [f"paceline{i:04d}mark" for i in range(len(texts))]
        shown = SEPARATOR.join(marks)
        if self._uses_template:
            shown = chat_ids(_messages(marks), self._tokenizer, "this model")[1]
        around = re.split("|".join(marks), shown)
        for said in (list(texts), [text.strip() for text in texts]):  # most templates trim
            parts = [part for pair in zip_longest(around, said, fillvalue="") for part in pair][:-1]
            if re.findall("|".join(marks), shown) == marks and "".join(parts) == rendered:
                pieces = [self._plain(part) for part in parts]
                if not self._uses_template:  # what the tokenizer puts before and after plain text (BOS, say)
                    plain = self._plain(rendered)
                    starts = range(len(ids) - len(plain) + 1)
                    start = next((i for i in starts if ids[i : i + len(plain)] == plain), 0)
                    pieces[0], pieces[-1] = ids[:start], ids[start + len(plain) :]
                return pieces
        raise ConfigError(
            f"prompts of {self._workload.name} at {self._length} tokens",
            "the model's chat template rewrites its messages, so that a text in it can be neither cut nor filled",
            "leave the context out, give fewer new tokens, or raise max_model_len",
        )

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

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
                f"context={self._context}",
                f"the packaged books have {len(ids):,} tokens of text to put in front of a prompt",
                "give a smaller context, or a file of prompts that are long by themselves",
            )
        return ids[-count:]


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[PromptIds]:
    """Prompts of random ids, for models without a tokenizer.

    Prompt i depends on i, ``length``, ``vocab_size`` and ``seed``, not on ``count``.
    """
    made = []
    for i in range(count):
        draw = random.Random(f"{seed}/{i}").random
        ids = tuple(int(draw() * vocab_size) for _ in range(length))
        made.append(PromptIds(id=f"random-{i}", category="random", ids=ids))
    return made


def _messages(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


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
