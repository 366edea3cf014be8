"""Token ids of prompts: as the engine would render them, cut where they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

from ..api.llm import LLM
from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..engine.tokens import chat_ids
from ..engine.tokens import encode as encode_text
from .config import BenchConfig
from .records import Cell, PromptIds
from .workloads import Prompt, Workload

PREPARE_TOGETHER = 8  # conversations whose earlier turns are answered at once
SEPARATOR = "\n\n"  # between turns and answers of a conversation, for a model without a chat template


class Encoded:
    """The ids of a workload's prompts: those that ``LLM.chat`` or ``LLM.generate`` would compute.

    ``prompts`` holds the first turns. `next_turn` encodes later ones, under the same limits, once the answers
    before them are known. A prompt that does not fit loses its oldest tokens after BOS and the beginning of the chat
    template; cuts are counted: `notes` reports them.

    Args:
        max_model_len: most tokens of prompt and answer.
        max_new_tokens: of the answer.

    Raises:
        ConfigError: no tokenizer, or no room for a prompt.
    """

    def __init__(self, workload: Workload, tokenizer: Any, *, max_model_len: int, max_new_tokens: int) -> None:
        if tokenizer is None:
            wrong = "this model has no tokenizer, so text means nothing to it"
            raise ConfigError(f"workload {workload.name!r}", wrong, "add its files")
        self.workload, self.tokenizer = workload, tokenizer
        self.most = max_model_len - max_new_tokens  # tokens of a prompt
        self.uses_template = workload.chat and bool(getattr(tokenizer, "chat_template", None))
        first, second = (self.render([text])[0] for text in "01")
        self._head = len(commonprefix([first, second]))  # BOS and the beginning of the template
        tail = len(commonprefix([first[self._head + 1 :][::-1], second[self._head + 1 :][::-1]]))
        if self.most <= self._head + tail:
            subject = f"max_model_len={max_model_len} with max_new_tokens={max_new_tokens}"
            wrong = f"no room for a prompt, around which the chat template has {self._head + tail} tokens"
            raise ConfigError(subject, wrong, "raise max_model_len, or give fewer new tokens")
        self.cut: dict[str, int] = {}  # tokens taken away, by id of the prompt
        self.count = 0  # of prompts, later turns included
        self.prompts = [self._encoded(prompt, prompt.id, prompt.turns[:1]) for prompt in workload.prompts]

    def next_turn(self, prompt: Prompt, turn_index: int, answers: Sequence[str]) -> PromptIds:
        """Return a later turn, after the turns and answers before it; its id ends in ``/2`` for the second turn.

        Args:
            turn_index: of the turn to be answered, from 1 (the second turn) on.
            answers: text of the answers to the turns before it.
        """
        turns = zip_longest(prompt.turns[: turn_index + 1], answers)
        texts = [text for pair in turns for text in pair if text is not None]
        return self._encoded(prompt, f"{prompt.id}/{turn_index + 1}", texts)

    def notes(self) -> list[str]:
        """Return what was cut, in a sentence; empty where prompts are unchanged."""
        note = f"{len(self.cut)} of {self.count} prompts cut to {self.most:,} tokens, the oldest first"
        return [f"{self.workload.name}: {note}"] if self.cut else []

    def render(self, texts: Sequence[str]) -> tuple[list[int], str]:
        """Return ids and text of a conversation; without a chat template plain text with a blank line in between."""
        if self.uses_template:
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
            return chat_ids(messages, self.tokenizer, "this model")
        text = SEPARATOR.join(texts)
        return encode_text(text, self.tokenizer)[0], text

    def fit(self, prompt: Prompt, name: str, texts: Sequence[str]) -> list[int]:
        """Return the ids of a prompt called ``name``, brought to the length that it may have."""
        ids = self.render(texts)[0]
        gone = len(ids) - self.most
        if gone <= 0:
            return ids
        self.cut[name] = gone
        return ids[: self._head] + ids[self._head + gone :]

    def _encoded(self, prompt: Prompt, name: str, texts: Sequence[str]) -> PromptIds:
        self.count += 1
        return PromptIds(id=name, ids=tuple(self.fit(prompt, name, texts)))


def prompt_ids(
    config: BenchConfig,
    workload: Workload,
    engine: Callable[..., LLM],
    cell: Cell,
    encode: Callable[..., Encoded],
) -> tuple[list[PromptIds], list[str]]:
    """Return the prompts of a workload, first turns before later ones, and remarks on them.

    Later turns follow on answers of plain, greedy decoding.

    Args:
        engine: plain decoding, with room for sequences of such lengths (see `measure.Builder`).
        cell: its context, to which ``encode`` brings every prompt (None: prompts as they are), and new tokens.

    Raises:
        ConfigError: a prompt that does not fit.
    """
    shape, tokenizer = (llm := engine()).decoder.config, llm.tokenizer
    lengths = {"max_model_len": shape.max_position, "max_new_tokens": cell.max_new_tokens}
    encoded = encode(workload, tokenizer, **lengths, **({"context": cell.context} if cell.context is not None else {}))
    plain = next(m for m in config.methods if m.ours and m.plain)
    result, latest = [*encoded.prompts], {p.id: ids for p, ids in zip(workload.prompts, encoded.prompts, strict=True)}
    answers: dict[str, list[str]] = {name: [] for name in latest}
    params = SamplingParams(temperature=0, max_tokens=cell.max_new_tokens)
    for turn in range(1, max(len(p.turns) for p in workload.prompts)):
        llm = engine([[shape.max_position] * PREPARE_TOGETHER]) if turn == 1 else llm
        going_on = [p for p in workload.prompts if len(p.turns) > turn]
        texts = [{"prompt_token_ids": [*latest[p.id].ids]} for p in going_on]
        for prompt, output in zip(going_on, llm.generate(texts, params, application=plain.application), strict=True):
            answers[prompt.id].append(tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True))
            latest[prompt.id] = encoded.next_turn(prompt, turn, answers[prompt.id])
            result.append(latest[prompt.id])
    return result, encoded.notes()
