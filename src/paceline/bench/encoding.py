"""Token ids of prompts: as the engine would render them, cut or filled to a context where that is asked for."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from ..core.errors import ConfigError
from ..engine.tokens import chat_ids
from ..engine.tokens import encode as encode_text
from .records import PromptIds
from .workloads import Prompt, Workload, load

SEPARATOR = "\n\n"  # between turns and answers of a conversation, for a model without a chat template


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a prompt's ids: text that may be shortened, or what must stay (template, BOS, separators)."""

    ids: list[int]
    is_text: bool


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
            raise ConfigError(
                f"workload {workload.name!r}",
                "this model has no tokenizer, so text means nothing to it",
                "add its files",
            )
        max_prompt = max_model_len - max_new_tokens
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}", "nothing would be generated", "give 1 or more")
        if max_prompt < 1:
            less = f"give {max_model_len - 1} or less" if max_model_len > 1 else "raise max_model_len"
            wrong = f"max_model_len={max_model_len} leaves no room for a prompt"
            raise ConfigError(f"max_new_tokens={max_new_tokens}", wrong, less)
        if context is not None and context < 1:
            raise ConfigError(f"context={context}", "a prompt has at least one token", "give 1 or more")
        if context is not None and context > max_prompt:
            raise ConfigError(
                f"context={context}",
                f"max_model_len={max_model_len} leaves {max_prompt} tokens for a prompt with {max_new_tokens} new ones",
                f"give {max_prompt} or less",
            )
        self.prompts: list[PromptIds] = []
        self.cut: dict[str, int] = {}  # tokens taken away, by id of the prompt
        self.filled: dict[str, int] = {}  # tokens put in front, by id of the prompt
        self.context = context
        self.max_prompt = max_prompt
        self._workload = workload
        self._tokenizer = tokenizer
        self._uses_template = workload.chat and bool(getattr(tokenizer, "chat_template", None))
        self._encoded: set[str] = set()  # ids of prompts, later turns included
        self._filler: list[tuple[Any, list[int]]] | None = None  # (book, ids) of each passage, once needed
        self.prompts = [self._fit(prompt, prompt.id, prompt.turns[:1], ()) for prompt in workload.prompts]

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
            ConfigError: no such turn, another number of answers, or it cannot be made to fit.
        """
        asked = f"turn {turn_index + 1} of {prompt.id}"
        if not 1 <= turn_index < len(prompt.turns):
            raise ConfigError(asked, f"the prompt has {len(prompt.turns)} turns", "ask for one of the later ones")
        if len(answers) != turn_index:
            raise ConfigError(asked, f"{len(answers)} answers were given", f"give those to the {turn_index} before")
        return self._fit(prompt, f"{prompt.id}/{turn_index + 1}", prompt.turns[: turn_index + 1], answers)

    def notes(self) -> list[str]:
        """What was cut and filled, in sentences; empty where prompts are as they were."""
        most, name, count = self.context or self.max_prompt, self._workload.name, len(self._encoded)
        said = []
        if self.cut:
            said.append(f"{name}: {len(self.cut)} of {count} prompts cut to {most:,} tokens, oldest text first")
        if self.filled:
            said.append(f"{name}: {len(self.filled)} of {count} prompts filled to {most:,} tokens with book text")
        return said

    def _fit(self, prompt: Prompt, name: str, turns: Sequence[str], answers: Sequence[str]) -> PromptIds:
        self._encoded.add(name)
        texts = [text for pair in zip_longest(turns, answers) for text in pair if text is not None]
        ids, rendered = self._ids(texts)
        most, own = self.context or self.max_prompt, len(ids)
        if own > most or (self.context and own < most):
            pieces = self._pieces(texts, ids, rendered)
            # Apart, the pieces may be a token or so longer or shorter than together.
            longer = sum(len(piece.ids) for piece in pieces) > most
            ids = _cut_oldest(pieces, most, name) if longer else self._fill(prompt, pieces)
            changed, by = (self.cut, own - len(ids)) if own > most else (self.filled, len(ids) - own)
            changed[name] = by
        return PromptIds(id=name, category=prompt.category, ids=tuple(ids))

    def _ids(self, texts: Sequence[str]) -> tuple[list[int], str]:
        """What ``LLM.chat`` or ``LLM.generate`` would compute."""
        if self._uses_template:
            return chat_ids(_messages(texts), self._tokenizer, "this model")
        text = SEPARATOR.join(texts)
        return encode_text(text, self._tokenizer)[0], text

    def _pieces(self, texts: Sequence[str], ids: list[int], rendered: str) -> list[_Piece]:
        """The prompt apart into texts and what is around them."""
        if not self._uses_template:
            before, after = _added(ids, self._plain(rendered), self._workload.name)
            around = [SEPARATOR] * (len(texts) - 1)
            inner = _interleave([""] + around + [""], texts, self._plain)
            return [_Piece(before, False), *inner, _Piece(after, False)]
        marks = [f"paceline{i:04d}mark" for i in range(len(texts))]
        template = _split(chat_ids(_messages(marks), self._tokenizer, "this model")[1], marks)
        for said in (list(texts), [text.strip() for text in texts]):  # most templates trim
            if template and "".join(a + t for a, t in zip(template, (*said, ""), strict=True)) == rendered:
                return _interleave(template, said, self._plain)
        raise ConfigError(
            f"prompts of {self._workload.name} at {self.context or self.max_prompt} tokens",
            "the model's chat template rewrites its messages, so that a text in it can be neither cut nor filled",
            "leave the context out, give fewer new tokens, or raise max_model_len",
        )

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _fill(self, prompt: Prompt, pieces: list[_Piece]) -> list[int]:
        """Book text in front of the first text, up to the context that was asked for, if one was."""
        ids = _flat(pieces)
        if self.context is None or len(ids) == self.context:
            return ids
        first = next(i for i, piece in enumerate(pieces) if piece.is_text)
        filler = _Piece(self._filler_ids(prompt, self.context - len(ids)), False)
        return _flat([*pieces[:first], filler, *pieces[first:]])

    def _filler_ids(self, prompt: Prompt, count: int) -> list[int]:
        """Exactly ``count`` ids that end where a passage ends.

        Never text of the prompt's own book: the answer might be in it. Prompts begin at different passages, so
        that a batch of them is not one long common prefix.
        """
        if self._filler is None:
            texts = [(p, " ".join((*p.turns, *p.reference)) + "\n\n") for p in load("books").prompts]
            self._filler = [(p.extra.get("book"), self._plain(text)) for p, text in texts]
        passages = [ids for book, ids in self._filler if book != prompt.extra.get("book")]
        start = zlib.crc32(prompt.id.encode()) % len(passages)
        ids: list[int] = []
        for passage in passages[start:] + passages[:start]:
            ids = passage + ids
            if len(ids) >= count:
                return ids[-count:]
        raise ConfigError(
            f"context={self.context}",
            f"the packaged books have {len(ids):,} tokens of text to put in front of a prompt",
            "give a smaller context, or a file of prompts that are long by themselves",
        )


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


def _added(ids: list[int], plain: list[int], name: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after plain text (BOS, say)."""
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start], ids[start + len(plain) :]
    raise ConfigError(
        f"prompts of {name}",
        "the tokenizer changes a text where it adds its special tokens, so that it can be neither cut nor filled",
        "leave the context out, or raise max_model_len",
    )


def _split(rendered: str, marks: Sequence[str]) -> list[str]:
    """The template around its messages, one piece more than messages; empty where a message is not there once."""
    pattern = "|".join(marks)
    return re.split(pattern, rendered) if re.findall(pattern, rendered) == list(marks) else []


def _interleave(around: Sequence[str], texts: Sequence[str], ids_of: Callable[[str], list[int]]) -> list[_Piece]:
    inner = ((_Piece(ids_of(a), False), _Piece(ids_of(t), True)) for a, t in zip(around, texts, strict=False))
    return [*chain.from_iterable(inner), _Piece(ids_of(around[-1]), False)]


def _cut_oldest(pieces: Sequence[_Piece], room: int, name: str) -> list[int]:
    """Take text away from the front, at least one token of the last text stays.

    Raises:
        ConfigError: what must stay does not fit.
    """
    last = max(i for i, piece in enumerate(pieces) if piece.is_text)
    excess = sum(len(piece.ids) for piece in pieces) - room
    kept = []
    for i, piece in enumerate(pieces):
        spare = len(piece.ids) - (i == last) if piece.is_text else 0
        gone = max(0, min(spare, excess))
        kept.append(_Piece(piece.ids[gone:], piece.is_text))
        excess -= gone
    if excess > 0:
        raise ConfigError(
            f"prompt {name} in {room} tokens",
            f"the chat template alone takes {room + excess - 1}",
            f"leave room for {room + excess} tokens",
        )
    return _flat(kept)


def _flat(pieces: Sequence[_Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]
