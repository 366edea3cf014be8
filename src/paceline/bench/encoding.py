"""Token ids of prompts: as the engine would render them, cut where they do not fit."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

from ..core.errors import ConfigError
from ..engine.tokens import chat_ids
from ..engine.tokens import encode as encode_text
from .records import PromptIds
from .workloads import Prompt, Workload


class Encoded:
    """The ids of a workload's prompts: those that ``LLM.chat`` or ``LLM.generate`` would compute.

    Of a conversation it is the first turn. A prompt that does not fit loses its oldest tokens after BOS and the
    beginning of the chat template; cuts are counted: `notes` reports them.

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
        first, second = (self.render(text)[0] for text in "01")
        self._head = len(commonprefix([first, second]))  # BOS and the beginning of the template
        tail = len(commonprefix([first[self._head + 1 :][::-1], second[self._head + 1 :][::-1]]))
        if self.most <= self._head + tail:
            subject = f"max_model_len={max_model_len} with max_new_tokens={max_new_tokens}"
            wrong = f"no room for a prompt, around which the chat template has {self._head + tail} tokens"
            raise ConfigError(subject, wrong, "raise max_model_len, or give fewer new tokens")
        self.cut: dict[str, int] = {}  # tokens taken away, by id of the prompt
        self.prompts = [PromptIds(id=prompt.id, ids=tuple(self.fit(prompt))) for prompt in workload.prompts]

    def notes(self) -> list[str]:
        """Return what was cut, in a sentence; empty where prompts are unchanged."""
        note = f"{len(self.cut)} of {len(self.prompts)} prompts cut to {self.most:,} tokens, the oldest first"
        return [f"{self.workload.name}: {note}"] if self.cut else []

    def render(self, text: str) -> tuple[list[int], str]:
        """Return ids and text of a prompt, in the chat template where there is one."""
        if self.uses_template:
            return chat_ids([{"role": "user", "content": text}], self.tokenizer, "this model")
        return encode_text(text, self.tokenizer)[0], text

    def fit(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt, brought to the length that it may have."""
        ids = self.render(prompt.turns[0])[0]
        gone = len(ids) - self.most
        if gone <= 0:
            return ids
        self.cut[prompt.id] = gone
        return ids[: self._head] + ids[self._head + gone :]
