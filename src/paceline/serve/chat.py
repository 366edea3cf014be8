"""``POST /v1/chat/completions``, and conversations of any form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from ..core.errors import ConfigError
from ..distributed.requests import LogprobRow
from .choices import Choice, Reply
from .generation import Answer, Delta, Server, begin, field_of
from .http import APIError, json_response
from .schemas import ChatRequest
from .tools import CallReader, ToolUse, tool_use


async def chat(server: Server, body: ChatRequest) -> Response:
    """Answer a conversation."""
    answer, use = await begin_chat(server, body)
    reply = _ChatReply(answer, body, use)
    return reply.streamed() if body.stream else json_response(await reply.whole())


def prompt_of(server: Server, body: ChatRequest) -> tuple[list[int], ToolUse | None]:
    """The ids of a conversation, and what its tools mean.

    Raises:
        APIError: tools that cannot be used, or messages that the template refuses.
    """
    use = tool_use(body, server.texts, server.config.tool_parser)
    try:
        return server.texts.conversation(body, None if use is None else use.told), use
    except ConfigError as error:
        place = field_of("messages", error) or "messages"
        raise APIError(400, str(error), place, "invalid_value") from error


async def begin_chat(server: Server, body: ChatRequest) -> tuple[Answer, ToolUse | None]:
    """Have a conversation's answer begun; also what its tools mean for it.

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
    params["max_tokens"] = body.max_completion_tokens or body.max_tokens or server.config.default_max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    if (body.top_logprobs or 0) > server.config.max_logprobs:
        message = f"top_logprobs must be {server.config.max_logprobs} or less"
        raise APIError(400, message, "top_logprobs", "invalid_value")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    text = None if body.prediction is None else body.prediction.text
    prediction = None if text is None else server.texts.encode(text, special=False)
    return await begin(server, body, ids, params, "messages", prediction), use


class _ChatReply:
    """An answer in the form of this endpoint."""

    def __init__(self, answer: Answer, body: ChatRequest, use: ToolUse | None) -> None:
        self._reply, self._tools = Reply([answer], body, "chatcmpl"), use is not None
        self._functions = body.functions is not None  # in the form that OpenAI had before tools
        self._token_bytes, self._most = answer.token_bytes, body.top_logprobs or 0
        self._readers = [CallReader(use) for _ in range(answer.samples)]

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        heads: list[dict[str, Any]] = [{"role": "assistant", "refusal": None} for _ in self._readers]
        choices = [_choice(index, "message", head) for index, head in enumerate(heads)]

        def take(choice: Choice, delta: Delta) -> None:
            self._readers[delta.index].read(delta)
            self._add(choice, delta)

        found = await self._reply.whole("chat.completion", choices, take)
        for head, reader in zip(heads, self._readers, strict=True):
            head |= {"content": reader.content or (None if reader.calls else "")}
            head |= self._in_form({"tool_calls": reader.calls}) if reader.calls else {}
        return found | self._reply.prompt(0)

    def streamed(self) -> Response:
        """Its chunks."""
        first = [_choice(index, "delta", {"role": "assistant", "content": ""}) for index in range(len(self._readers))]
        return self._reply.streamed("chat.completion.chunk", self._chunks, first)

    def _chunks(self, place: int, delta: Delta) -> list[Choice]:
        parts = self._readers[delta.index].read(delta)
        if not parts:
            parts = [{"content": ""} if delta.token_ids and not self._tools else {}]
        found = [_choice(delta.index, "delta", self._in_form(part)) for part in parts]
        self._add(found[-1], delta)
        return found

    def _in_form(self, part: dict[str, Any]) -> dict[str, Any]:
        """A part of a message, with the first call alone where the request has functions."""
        if not self._functions or "tool_calls" not in part:
            return part
        first = part["tool_calls"][0]
        return {"function_call": first["function"]} if first.get("index", 0) == 0 else {}

    def _add(self, choice: Choice, delta: Delta) -> None:
        """Put a piece into a choice, but for its text and calls."""
        self._reply.add(choice, delta)
        if delta.finish_reason is not None:
            reason = self._readers[delta.index].finish(choice["finish_reason"])
            choice["finish_reason"] = "function_call" if self._functions and reason == "tool_calls" else reason
        if delta.logprobs is not None:
            if choice["logprobs"] is None:
                choice["logprobs"] = {"content": [], "refusal": None}
            for row, token in zip(delta.logprobs, delta.token_ids, strict=True):
                choice["logprobs"]["content"].append(_row(row, token, self._most, self._token_bytes))


def _choice(index: int, name: str, message: dict[str, Any]) -> Choice:
    return {"index": index, name: message, "logprobs": None, "finish_reason": None}


def _row(row: LogprobRow, token: int, most: int, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """Log-probabilities of a token, and of the ``most`` likeliest, in the form of chat."""
    chosen = next(entry for entry in row if entry[0] == token)
    likeliest = sorted(row, key=lambda entry: entry[2])[:most]

    def told(entry: tuple[int, float, int, str | None]) -> dict[str, Any]:
        token, value, _, text = entry
        return {"token": text or "", "logprob": max(value, -9999.0), "bytes": list(token_bytes(token))}

    return {**told(chosen), "top_logprobs": [told(entry) for entry in likeliest]}
