"""``POST /v1/chat/completions``, and conversations of any form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from ..core.errors import ConfigError
from ..core.outputs import Chunk, Logprob
from .answers import LEAST_LOGPROB, Choice, Choices, Event
from .generation import MOST_LOGPROBS, Answer, Server, begin, field_of
from .http import APIError
from .schemas import ChatRequest
from .tools import CallReader, ToolUse, tool_use

MOST_TOKENS = 2048  # of an answer where the request names no number


async def chat(server: Server, body: ChatRequest) -> Response:
    """Answer a conversation."""
    return await _ChatReply(*await begin_chat(server, body), body).respond(body.stream)


def prompt_of(server: Server, body: ChatRequest) -> tuple[list[int], ToolUse | None]:
    """Return the ids of a conversation, and what its tools mean.

    Raises:
        APIError: tools that cannot be used, or messages that the template refuses.
    """
    use = tool_use(body, server.texts, server.config.tool_parser)
    try:
        return server.texts.conversation(body, None if use is None else use.definitions), use
    except ConfigError as error:
        place = field_of("messages", error) or "messages"
        raise APIError(400, str(error), place, "invalid_value") from error


async def begin_chat(server: Server, body: ChatRequest) -> tuple[Answer, ToolUse | None]:
    """Have a conversation's answer begun; also return what its tools mean for it.

    Raises:
        APIError: as of `prompt_of` and `begin`, or options that do not go together.
    """
    ids, use = prompt_of(server, body)
    params = body.sampling()
    if use is not None and use.grammar is not None:
        if "grammar" in params:
            message = "the answer cannot both have a format and be a tool call: give one of them"
            raise APIError(400, message, "tool_choice", "invalid_value")
        params["grammar"] = use.grammar
    if use is not None and use.tag is not None:
        params["skip_special_tokens"] = False
    params["max_tokens"] = body.max_completion_tokens or body.max_tokens or MOST_TOKENS
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    if (body.top_logprobs or 0) > MOST_LOGPROBS:
        raise APIError(400, f"top_logprobs must be {MOST_LOGPROBS} or less", "top_logprobs", "invalid_value")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    prediction = None if body.prediction is None else server.texts.encode(body.prediction.text, special=False)
    return await begin(server, body, ids, params, "messages", prediction), use


class _ChatReply(Choices):
    """An answer to a conversation."""

    def __init__(self, answer: Answer, use: ToolUse | None, body: ChatRequest) -> None:
        super().__init__([answer], body, "chatcmpl", ("chat.completion", "chat.completion.chunk"))
        self._tools, self._most = use is not None, body.top_logprobs or 0
        self._readers = [CallReader(use) for _ in range(answer.samples)]

    def begin(self) -> Iterable[Event]:
        """Yield the role of each choice, see `Reply`."""
        for index in range(self.samples):
            yield self._chunk(_choice(index, {"role": "assistant", "content": ""}), 0) | self._prompt(0)

    def _parts(self, place: int, chunk: Chunk) -> list[Choice]:
        """Return the choices of a piece, see `Choices`."""
        reader, choices = self._readers[chunk.index], list[Choice]()
        for text in reader.read(chunk):
            delta: dict[str, Any] = {"content": text}
            if text is None:
                delta = {"tool_calls": [{"index": len(reader.calls) - 1, **_call(reader.calls[-1])}]}
            choices.append(_choice(chunk.index, delta))
        if not choices:
            choices.append(_choice(chunk.index, {"content": ""} if chunk.token_ids and not self._tools else {}))
        choice = choices[-1]
        self._add(choice, chunk)
        if choice["finish_reason"] == "stop" and reader.calls and not reader.named:  # it called of its own will
            choice["finish_reason"] = "tool_calls"
        if chunk.logprobs is not None:
            rows = [self._row(row, token) for row, token in zip(chunk.logprobs, chunk.token_ids, strict=True)]
            choice["logprobs"] = {"content": rows, "refusal": None}
        return choices

    def whole(self) -> dict[str, Any]:
        """Return the answer, see `Reply`."""
        for choice, reader in zip(self.choices, self._readers, strict=True):
            del choice["delta"]
            content = reader.content or (None if reader.calls else "")
            message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": content}
            calls = [_call(call) for call in reader.calls]
            choice["message"] = message | ({"tool_calls": calls} if calls else {})
        return super().whole() | self._prompt(0)

    def _row(self, row: dict[int, Logprob], token: int) -> dict[str, Any]:
        """Return the log-probabilities of a token and of the likeliest; a part of a character has no bytes."""
        likeliest = sorted(row, key=lambda number: row[number].rank)[: self._most]
        texts = [(row[number], row[number].decoded or "") for number in [token, *likeliest]]
        chosen, *others = (
            {
                "token": text,
                "logprob": max(one.logprob, LEAST_LOGPROB),
                "bytes": None if "\ufffd" in text else [*text.encode()],
            }
            for one, text in texts
        )
        return {**chosen, "top_logprobs": others}


def _call(call: dict[str, str]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}


def _choice(index: int, delta: dict[str, Any]) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
