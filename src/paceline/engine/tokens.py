"""Between text and token ids: prompts in, pieces of text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import ConfigError

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": ids}
CONTEXT_IDS = 8  # prompt tokens that a decode stream is told, so that a leading space is not lost


def encode(prompt: Prompt, tokenizer: Any) -> tuple[list[int], str | None]:
    """Token ids of a prompt, and its text where text was given.

    Raises:
        ConfigError: neither text nor ids, or text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        if ids is not None:
            bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
            if bad:
                raise ConfigError(f"prompt_token_ids with {bad[0]!r}", "token ids are integers", "give a list of int")
            return list(ids), text
        prompt = text if text is not None else prompt
    if not isinstance(prompt, str):
        shown = type(prompt).__name__
        raise ConfigError(
            f"a prompt of type {shown}", "a prompt is text or ids", 'give "..." or {"prompt_token_ids": [...]}'
        )
    if tokenizer is None:
        raise ConfigError("a text prompt", "this model has no tokenizer", 'give {"prompt_token_ids": [...]}')
    return list(tokenizer.encode(prompt)), prompt


def chat_ids(messages: Sequence[Mapping[str, str]], tokenizer: Any, model: str) -> tuple[list[int], str]:
    """Ids and text of a conversation in the model's chat template.

    Raises:
        ConfigError: no template, or messages that it refuses.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat with {model}", "the model has no chat template", "use generate with a plain prompt")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ConfigError(
                f"chat message {message!r}", "a message has a role and a text", '{"role": "user", "content": "..."}'
            )
    if not messages:
        raise ConfigError("a chat without messages", "there is nothing to answer", "give at least one message")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs of the checkpoint and raise what they like
        raise ConfigError(
            "these chat messages", f"the model's template refuses them ({error})", "check roles"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False)), text


def decode_steps(tokenizer: Any) -> Callable[[Sequence[int], bool], Callable[[int], str] | None] | None:
    """What makes, for each sequence, a function from its next token to the new text ("" while incomplete)."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None:
        return lambda ids, skip: _DecodeByDifference(tokenizer, ids, skip)

    def stream(prompt_ids: Sequence[int], skip_special_tokens: bool) -> Callable[[int], str]:
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(ids=list(prompt_ids[-CONTEXT_IDS:]), skip_special_tokens=skip_special_tokens)
        return lambda token: decoder.step(backend, token) or ""

    return stream


class _DecodeByDifference:
    """For tokenizers without a fast backend: decode a window twice, and take what is new."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_IDS:])
        self._text = self._decode()

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip))

    def __call__(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode()
        if text.endswith("�"):
            return ""
        piece = text[len(self._text) :]
        self._ids = self._ids[-CONTEXT_IDS:]
        self._text = self._decode()
        return piece
