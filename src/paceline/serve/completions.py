"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import ConfigError
from .acceptance import shown
from .chat import ends, finish, prompt_rows
from .generation import Answer, Asked, Delta, Server, begin, usage
from .http import DONE, APIError, EventStream, Write, event, json_response, read, unless_gone
from .schemas import CompletionRequest

DEFAULT_TOKENS = 16  # as OpenAI has it


def router(server: Server) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        body = await read(request, CompletionRequest, server.config.body_s)
        return await unless_gone(request.receive, _answer(server, body))

    return made


async def _answer(server: Server, body: CompletionRequest) -> Response:
    application = server.application(body.model)
    prompts = _prompts(server, body)
    if len(prompts) > server.config.max_n:
        raise APIError(400, f"at most {server.config.max_n} prompts", "prompt", "invalid_value")
    params = {"max_tokens": DEFAULT_TOKENS, **body.sampling()}
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
    answers: list[Answer] = []
    async with AsyncExitStack() as refused:  # one that is refused ends those before it
        for ids in prompts:
            asked = Asked(
                ids=ids,
                params=params,
                application=application,
                streams=bool(body.stream),
                priority=body.priority,
                speculation=body.drafting(),
                shows=body.shows(),
                store=body.store is not False,
            )
            answers.append(await refused.enter_async_context(await begin(server, asked)))
        refused.pop_all()
    reply = _CompletionReply(server, answers, body.model or server.model, body)
    return EventStream(reply.events, reply.abort) if body.stream else json_response(await reply.whole())


def _prompts(server: Server, body: CompletionRequest) -> list[list[int]]:
    prompt: Any = body.prompt
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    try:
        return [server.texts.encode(one) if isinstance(one, str) else one for one in many]
    except ConfigError as error:
        raise APIError(400, str(error), "prompt", "invalid_value") from error


class _CompletionReply:
    """The answers to all prompts in the form of this endpoint."""

    def __init__(self, server: Server, answers: list[Answer], model: str, body: CompletionRequest) -> None:
        self._server, self._answers, self._body = server, answers, body
        self._samples = body.n or 1
        self._offsets = [0] * (len(answers) * self._samples)  # characters so far, for ``text_offset``
        self._head = {
            "id": f"cmpl-{body.request_id or f'{answers[0].seed:x}{time.time_ns():x}'}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def abort(self) -> None:
        """End the requests that have not ended."""
        for answer in self._answers:
            answer.abort()

    def _echo(self, answer: Answer) -> str:
        return self._server.texts.decode(answer.asked.ids, skip_special=True) if self._body.echo else ""

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        choices: list[dict[str, Any]] = []
        async with AsyncExitStack() as all_of_them:
            for answer in self._answers:
                await all_of_them.enter_async_context(answer)
            for place, answer in enumerate(self._answers):
                choices += await self._choices(place * self._samples, answer)
        found = {**self._head, "choices": choices, "usage": usage(self._answers)}
        return found | (ends(self._answers[0]) if len(self._answers) == 1 else {})

    async def _choices(self, first: int, answer: Answer) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [self._choice(first + at) for at in range(self._samples)]
        for choice in made:
            choice["text"] = self._echo(answer)
            self._offsets[choice["index"]] = len(choice["text"])

        def take(deltas: list[Delta]) -> None:
            for delta in deltas:
                self._add(made[delta.index], delta)

        await answer.into(take)
        for choice in made:
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = answer.asked.ids
            if answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_rows(answer.prompt_logprobs)
        return made

    def _choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            choice["token_ids"] = []
        if self._body.logprobs is not None:
            choice["logprobs"] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        return choice

    def _add(self, choice: dict[str, Any], delta: Delta) -> None:
        choice["text"] += delta.text
        for name, items in shown(self._body, [delta]).items() if delta.shown is not None else ():
            choice[name] = choice.get(name, []) + items
        choice["finish_reason"] = finish(delta)
        choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] += delta.token_ids
        for row, token in zip(delta.logprobs or (), delta.token_ids if delta.logprobs else (), strict=True):
            chosen = next(entry for entry in row if entry[0] == token)
            into, text = choice["logprobs"], chosen[3] or ""
            into["tokens"].append(text)
            into["token_logprobs"].append(max(chosen[1], -9999.0))
            into["top_logprobs"].append({entry[3] or "": max(entry[1], -9999.0) for entry in row})
            into["text_offset"].append(self._offsets[choice["index"]])
            self._offsets[choice["index"]] += len(text)

    async def events(self, write: Write) -> None:
        """Streamed: what comes of any prompt, as it comes."""
        try:
            async with AsyncExitStack() as all_of_them:
                for answer in self._answers:
                    await all_of_them.enter_async_context(answer)
                await asyncio.gather(*(self._follow(*numbered, write) for numbered in enumerate(self._answers)))
        except APIError as error:
            write(event(error.body()))
        else:
            options = self._body.stream_options
            if options is not None and options.include_usage:
                last = {**self._head, "choices": [], "usage": usage(self._answers)}
                write(event(last | (ends(self._answers[0]) if len(self._answers) == 1 else {})))
        write(DONE)

    async def _follow(self, place: int, answer: Answer, write: Write) -> None:
        first, echo = place * self._samples, self._echo(answer)
        begun: set[int] = set()

        def chunk(delta: Delta) -> bytes:
            lead = None if delta.index in begun else echo
            begun.add(delta.index)
            return self._event(first + delta.index, lead, delta, answer)

        await answer.into(lambda deltas: write(b"".join(map(chunk, deltas))))

    def _event(self, index: int, lead: str | None, delta: Delta, answer: Answer) -> bytes:
        """A chunk; ``lead`` is what the first one of a sample has in front, and None later."""
        choice = self._choice(index)
        if lead is not None and self._body.return_token_ids:
            choice["prompt_token_ids"] = answer.asked.ids
        choice["text"] = lead or ""
        self._offsets[index] += len(choice["text"])
        self._add(choice, delta)
        found = {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            found["usage"] = answer.usage()
        return event(found)
