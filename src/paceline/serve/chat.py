"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import ConfigError
from ..distributed.requests import LogprobRow
from .acceptance import shown
from .generation import Answer, Asked, Delta, Server, begin
from .http import DONE, APIError, EventStream, Write, event, json_response, read, unless_gone
from .schemas import ChatRequest
from .tools import CallReader, ToolUse, tool_use

TokenBytes = Callable[[int], bytes]  # see `texts.token_bytes`


def router(server: Server) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await read(request, ChatRequest, server.config.body_s)
        return await unless_gone(request.receive, _answer(server, body))

    return made


async def _answer(server: Server, body: ChatRequest) -> Response:
    use = tool_use(body, server.texts, server.config.tool_parser)
    answer = await begin(server, asked(server, body, use))
    reply = _ChatReply(answer, body.model or server.model, body, use)
    if body.stream:
        return EventStream(reply.events, answer.abort)
    return json_response(await reply.whole())


def asked(server: Server, body: ChatRequest, use: ToolUse | None) -> Asked:
    """What a conversation asks of the engine.

    Raises:
        APIError: messages that the template refuses, or options that do not go together.
    """
    application = server.application(body.model)
    try:
        text = server.texts.chat(
            [message.plain() for message in body.messages],
            tools=None if use is None else use.told,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
            options=body.chat_template_kwargs,
        )
        ids = server.texts.encode(text, special=False)
    except ConfigError as error:
        raise APIError(400, str(error), "messages", "invalid_value") from error
    params = body.sampling()
    if use is not None and use.grammar is not None:
        if "grammar" in params:
            message = "response_format or structured_outputs beside a tool choice that is a grammar, too; give one"
            raise APIError(400, message, "tool_choice", "invalid_value")
        params["grammar"] = use.grammar
    if use is not None and use.tag is not None:
        params["skip_special_tokens"] = False
    most = body.max_completion_tokens or body.max_tokens
    params["max_tokens"] = most
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    if (body.top_logprobs or 0) > server.config.max_logprobs:
        message = f"top_logprobs must be {server.config.max_logprobs} or less"
        raise APIError(400, message, "top_logprobs", "invalid_value")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    speculation = body.drafting() or {}
    if body.prediction is not None:
        speculation["prediction"] = server.texts.encode(body.prediction.text, special=False)
    return Asked(
        ids=ids,
        place="messages",
        params=params,
        application=application,
        streams=bool(body.stream),
        priority=body.priority,
        speculation=speculation or None,
        shows=body.shows(),
        store=body.store is not False,
    )


class _ChatReply:
    """An answer in the form of this endpoint."""

    def __init__(self, answer: Answer, model: str, body: ChatRequest, use: ToolUse | None) -> None:
        self._answer, self._body = answer, body
        samples = answer.asked.params.get("n", 1)
        self._readers = None if use is None else [CallReader(use) for _ in range(samples)]
        name = body.request_id or f"{answer.seed:x}{time.time_ns():x}"
        self._head = {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        samples = [_Sample() for _ in range(self._answer.asked.params.get("n", 1))]
        async with self._answer as answer:
            await answer.into(partial(self._add, samples))
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        found = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._answer.usage()}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._answer.asked.ids
        if self._answer.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_rows(self._answer.prompt_logprobs)
        return found | ends(self._answer)

    def _add(self, samples: list[_Sample], deltas: list[Delta]) -> None:
        for delta in deltas:
            samples[delta.index].add(delta, self._answer.token_bytes)
            if self._readers is not None:
                self._readers[delta.index].read(delta)

    def _choice(self, index: int, sample: _Sample) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        reason = sample.finish_reason
        if self._readers is not None:
            reader = self._readers[index]
            message["content"], reason = reader.content or (None if reader.calls else ""), reader.finish(reason)
            if reader.calls:
                message["tool_calls"] = reader.calls
        logprobs = {"content": sample.logprobs, "refusal": None} if self._body.logprobs else None
        said = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        said["stop_reason"] = sample.stop_reason
        said |= shown(self._body, sample.pieces)
        return said | ({"token_ids": sample.token_ids} if self._body.return_token_ids else {})

    async def events(self, write: Write) -> None:
        """Streamed."""
        options = self._body.stream_options
        try:
            async with self._answer as answer:
                first = {"role": "assistant", "content": ""}
                ids = {"prompt_token_ids": answer.asked.ids} if self._body.return_token_ids else {}
                write(b"".join(self._chunk(i, first, more=ids) for i in range(answer.asked.params.get("n", 1))))
                await answer.into(lambda deltas: write(b"".join(map(self._event, deltas))))
        except APIError as error:
            write(event(error.body()))
        else:
            if options is not None and options.include_usage:
                last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage()}
                write(event(last | ends(answer)))
        write(DONE)

    def _event(self, delta: Delta) -> bytes:
        if self._readers is None:
            found = {"content": delta.text} if delta.text or delta.token_ids else {}
            return self._chunk(delta.index, found, delta)
        *early, last = self._readers[delta.index].read(delta) or [{}]
        return b"".join([*(self._chunk(delta.index, part) for part in early), self._chunk(delta.index, last, delta)])

    def _chunk(
        self, index: int, message: dict[str, Any], delta: Delta | None = None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        rows = None if delta is None or not self._body.logprobs else openai_rows(delta, self._answer.token_bytes)
        choice: dict[str, Any] = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
        if rows is not None:
            choice["logprobs"] = {"content": rows, "refusal": None}
        if delta is not None:
            reason = finish(delta)
            choice["finish_reason"] = reason if self._readers is None else self._readers[index].finish(reason)
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if self._body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            if delta.shown is not None:
                choice |= shown(self._body, [delta])
        found = {**self._head, "object": "chat.completion.chunk", "choices": [choice], **(more or {})}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            found["usage"] = self._answer.usage()
        return event(found)


class _Sample:
    """What came of one sample."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.pieces: list[Delta] = []  # those that say where their tokens come from

    def add(self, delta: Delta, token_bytes: TokenBytes) -> None:
        """Take what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.shown is not None:
            self.pieces.append(delta)
        self.logprobs += openai_rows(delta, token_bytes) or []
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = finish(delta), delta.stop_reason


def finish(delta: Delta) -> str | None:
    """Why a sample ended, in OpenAI's words."""
    return {"abort": "stop", "deadline": "length"}.get(delta.finish_reason or "", delta.finish_reason)


def ends(answer: Answer) -> dict[str, Any]:
    """What an answer has beside OpenAI's fields when it has ended."""
    spec = answer.speculative_decoding()
    return {"metrics": {"speculative_decoding": spec}, "stats": answer.stats}


def openai_rows(delta: Delta, token_bytes: TokenBytes) -> list[dict[str, Any]] | None:
    """Log-probabilities in the form of chat; None: not asked for."""
    if delta.logprobs is None:
        return None
    return [_row(row, token, token_bytes) for row, token in zip(delta.logprobs, delta.token_ids, strict=True)]


def _row(row: LogprobRow, token: int, token_bytes: TokenBytes) -> dict[str, Any]:
    chosen = next(entry for entry in row if entry[0] == token)
    likeliest = sorted((entry for entry in row if entry is not chosen or len(row) > 1), key=lambda entry: entry[2])
    if len(row) > 1 and chosen[2] >= len(row):
        likeliest = [entry for entry in likeliest if entry is not chosen]

    def shown_as(entry: tuple[int, float, int, str | None]) -> dict[str, Any]:
        token, value, _, text = entry
        return {"token": text or "", "logprob": max(value, -9999.0), "bytes": list(token_bytes(token))}

    return {**shown_as(chosen), "top_logprobs": [shown_as(entry) for entry in likeliest if len(row) > 1]}


def prompt_rows(rows: list[LogprobRow | None]) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt in vLLM's form."""
    return [
        None
        if row is None
        else {str(t): {"logprob": max(p, -9999.0), "rank": r, "decoded_token": d} for t, p, r, d in row}
        for row in rows
    ]
