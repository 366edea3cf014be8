"""Between text and token ids: tokenization of prompts, incremental detokenization of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from ..core.contents import as_read
from ..core.errors import ConfigError
from ..core.options import shown
from ..core.request import TextStream

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": ids}
CONTEXT_IDS = 8  # tokens in front of the next one that its text may depend on
_BROKEN = "\ufffd"  # replacement that decoders write for bytes that are not a character, or not one yet
_MOST_PARTS = 3  # tokens of a character that is incomplete: one of four bytes lacks its last
_LONGEST = 7  # tokens after the last complete character that are decoded again for each
_ANCHOR = "a"  # stands before a token whose own text is wanted
_KEPT_TEXTS = 65_536


def encode(prompt: Prompt, tokenizer: Any) -> tuple[list[int], str | None]:
    """Return token ids of a prompt, and its text where text was given.

    Raises:
        ConfigError: neither text nor ids, or text without a tokenizer.
    """
    text, ids = (
        (prompt.get("prompt"), prompt.get("prompt_token_ids")) if isinstance(prompt, Mapping) else (prompt, None)
    )
    if ids is not None:
        return _ids(ids), None if text is None else _checked_text(text)
    if not isinstance(text, str):
        type_name = type(prompt if text is None else text).__name__
        raise ConfigError(
            f"a prompt of type {type_name}", "a prompt is text or ids", 'give "..." or {"prompt_token_ids": [...]}'
        )
    if tokenizer is None:
        raise ConfigError("a text prompt", "this model has no tokenizer", 'give {"prompt_token_ids": [...]}')
    return _encode(tokenizer, _checked_text(text)), text


def _ids(ids: object) -> list[int]:
    remedy = "give a list of int"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ConfigError(f"prompt_token_ids of type {type(ids).__name__}", "not a list of token ids", remedy)
    bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
    if bad:
        raise ConfigError(f"prompt_token_ids with {bad[0]!r}", "token ids are integers", remedy)
    return list(ids)


def _checked_text(text: object) -> str:
    """Return text that can be written down: a lone surrogate is half of a character."""
    if not isinstance(text, str):
        raise ConfigError(f"a prompt of type {type(text).__name__}", "a prompt is text or ids", 'give "..."')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        wrong = f"character {error.start} ({text[error.start]!r}) is a lone surrogate, which no text holds"
        raise ConfigError("a text prompt", wrong, "decode the text with errors='replace'") from error
    return text


def _encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    try:
        # Not verbose: the engine itself states when a prompt is too long, transformers would warn next to that.
        return list(tokenizer.encode(text, verbose=False, **options))
    except Exception as error:  # tokenizers raise many kinds, plain Exception among them
        wrong = f"the tokenizer cannot encode it ({type(error).__name__}: {error})"
        raise ConfigError("a text prompt", wrong, "give other text, or token ids") from error


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any, model: str) -> tuple[list[int], str]:
    """Return ids and text of a conversation in the model's chat template.

    Args:
        messages: as OpenAI's: a role, and as content text or parts of text (see `core.contents`), or tool calls.
        tokenizer: with the template.
        model: its name, for messages.

    Raises:
        ConfigError: no template, or messages that it has no use for.
    """
    template = None if tokenizer is None else getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(f"chat with {model}", "the model has no chat template", "use generate with a plain prompt")
    if not messages:
        raise ConfigError("a chat without messages", "there is nothing to answer", "give at least one message")
    plain_messages = [_message(message, "developer" in str(template)) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            as_read(plain_messages, lambda probe: str(tokenizer.apply_chat_template(probe, tokenize=False))),
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:  # templates are programs of the checkpoint and raise what they like
        raise ConfigError(
            "these chat messages", f"the model's template refuses them ({error})", "check roles"
        ) from error
    return _encode(tokenizer, _checked_text(text), add_special_tokens=False), text


def _message(message: Any, knows_developers: bool) -> dict[str, Any]:
    """Return a message as templates read it: its content is text or parts, arguments of tool calls are values."""
    form = '{"role": "user", "content": "..."}'
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"chat message {shown(message)}", "a message has a role and a text", form)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [{"type": "text", "text": _part(part)} for part in content]
    if not isinstance(content, str | list) and not (content is None and calls):
        raise ConfigError(f"chat message {shown(message)}", "a message has a role and a text", form)
    role = message["role"]
    plain = {**message, "content": content or "", "role": role}
    if role == "developer" and not knows_developers:
        plain["role"] = "system"
    if calls:
        plain["tool_calls"] = [*map(_call, calls)]
    return plain


def _part(part: Any) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    wrong = "this model reads text alone"
    raise ConfigError(f"a content part {shown(kind)}", wrong, 'give {"type": "text", "text": "..."}')


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are not text any more: templates write them as JSON themselves."""
    remedy = 'give {"id": "..", "type": "function", "function": {"name": "..", "arguments": "{..}"}}'
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"tool call {shown(call)}", "it names no function", remedy)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            wrong = f"its arguments are not JSON ({error})"
            raise ConfigError(f"tool call {shown(function['name'])}", wrong, remedy) from error
    return {**call, "function": {**function, "arguments": arguments}}


class TokenizerTexts:
    """The text of prompts, answers and single tokens, by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        anchor = list(tokenizer.encode(_ANCHOR, add_special_tokens=False))[-1:]
        self._sure = getattr(tokenizer, "_tokenizer", None) is not None  # Rust passes over ids that have no token
        self.token = lru_cache(maxsize=_KEPT_TEXTS)(partial(_alone, self._decoder(False), anchor))
        """The text of one token as it stands in running text, a leading space included."""

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """Return the detokenizer of an answer to this prompt."""
        return AnswerText(self._decoder(skip_special_tokens), prompt_ids, self._sure)

    def prompt(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of a prompt that was given as ids."""
        return self._decoder(skip_special_tokens)(ids)

    def _decoder(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        """Return ids to text, as the tokenizer has it."""
        backend = getattr(self._tokenizer, "_tokenizer", None)
        if backend is None:
            decode = self._tokenizer.decode
            return lambda ids: str(decode(list(ids), skip_special_tokens=skip_special_tokens))
        fast: Callable[..., str] = backend.decode
        return partial(fast, skip_special_tokens=skip_special_tokens)


def texts_of(tokenizer: Any) -> TokenizerTexts | None:
    """Return the texts of a tokenizer; None for a model without one."""
    return None if tokenizer is None else TokenizerTexts(tokenizer)


def _alone(decode: Callable[[Sequence[int]], str], anchor: list[int], token: int) -> str:
    """Return the text of a token after ``anchor``, since tokenizers drop what leads a text."""
    before, both = decode(anchor), decode([*anchor, token])
    return both[len(before) :] if both.startswith(before) else decode([token])


class AnswerText:
    """The text of an answer, token by token; no text of the prompt is part of it.

    A token's text depends on its neighbours (a leading space, the bytes of one character), so a window of a few tokens
    is decoded again for each. Text that was returned is never changed; U+FFFD at the end is held back, since the next
    token may complete the character. Where later tokens change the text of those before (a run of byte tokens turns out
    to be no UTF-8), what follows the last complete character is decoded by itself.

    Args:
        decode: ids to text.
        prompt_ids: the prompt's ids. A character that the prompt begins and the answer completes belongs to the answer.
        sure: whether ``decode`` never fails.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], sure: bool = False) -> None:
        self.sure = sure
        whole, torn = _context(decode, prompt_ids)
        self._decode = decode
        self._shown = self._settled = ""
        self._foreign = 0  # U+FFFD that waits and is the prompt's
        self._begin(whole)
        for token in torn:
            self.push(token)
        self._foreign = len(decode(self._ids)) - len(self._shown)

    def push(self, token: int) -> str:
        """Return the text that the next token adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._text()
        if not text.endswith(_BROKEN) and not self._foreign:  # the common case, in fewer steps
            new, self._shown = text[len(self._shown) :], text
            self._settle(text)
            return new
        broken = len(text) - len(text.rstrip(_BROKEN))
        new = self._advance(text, max(len(self._shown), len(text) - min(broken, _MOST_PARTS)))
        if not broken:
            self._settle(text)
        elif len(self._ids) - self._whole > _LONGEST:
            self._shorten(text)
        return new

    def end(self) -> str:
        """Return the remaining text at the end of the answer: U+FFFD for an incomplete character."""
        text = self._text()
        return self._advance(text, len(text))

    def _begin(self, ids: list[int]) -> None:
        """Continue after these tokens, whose text has been returned."""
        self._ids = ids  # the window
        self._whole = len(ids)  # tokens of the window after which no character is incomplete
        # The part of the window's text that was returned; the text of its whole tokens.
        self._shown = self._settled = self._decode(ids)

    def _text(self) -> str:
        """Return the window's text, which begins with what was returned."""
        text = self._decode(self._ids)
        if text.startswith(self._shown):
            return text
        rest, out = self._ids[self._whole :], len(self._shown) - len(self._settled)
        while out > 0 and rest:  # U+FFFD, one a token
            out -= len(self._decode(rest[:1]))
            rest = rest[1:]
        self._ids, self._whole = rest, 0
        self._shown = self._settled = ""
        return self._decode(rest)

    def _advance(self, text: str, stop: int) -> str:
        """Return the window's text up to ``stop``: the part that is new and belongs to the answer."""
        new, self._shown = text[len(self._shown) : stop], text[:stop]
        mine = new.lstrip(_BROKEN)
        foreign = min(self._foreign, len(new) - len(mine))
        self._foreign = 0 if mine else self._foreign - foreign
        return new[foreign:]

    def _settle(self, text: str) -> None:
        """No character is incomplete: forget tokens on which no later text depends."""
        if text == self._settled:  # tokens without text
            del self._ids[self._whole :]
        elif len(self._ids) > CONTEXT_IDS:
            self._begin(self._ids[self._whole :])
        else:
            self._whole, self._settled = len(self._ids), text

    def _shorten(self, text: str) -> None:
        """Broken characters without end: forget all but the last tokens, where they have a text of their own."""
        for parts in range(1, _MOST_PARTS + 1):
            rest = self._ids[-parts:]
            first = self._decode(self._ids[:-parts])
            if len(first) <= len(self._shown) and first + self._decode(rest) == text:
                self._ids, self._whole = rest, 0
                self._shown, self._settled = self._shown[len(first) :], ""
                return


def _context(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the last ids of a prompt, from where a character begins: whole ones, and those of an open one."""
    for torn in range(_MOST_PARTS + 1):
        end = len(ids) - torn
        for more in range(_MOST_PARTS + 1):
            whole = list(ids[max(0, end - CONTEXT_IDS - more) : max(0, end)])
            text = decode(whole)
            if not text.startswith(_BROKEN) and not text.endswith(_BROKEN):
                return whole, list(ids[max(0, end) :])
    return [], list(ids[-CONTEXT_IDS:])  # no character anywhere
