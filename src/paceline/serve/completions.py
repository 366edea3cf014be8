"""``POST /v1/completions``."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response

from ..core.errors import ConfigError
from ..distributed.requests import LogprobRow
from .choices import Choice, Reply
from .generation import Answer, Delta, Server, begin
from .http import APIError, json_response
from .schemas import CompletionRequest

DEFAULT_TOKENS = 16  # as OpenAI has it


async def completions(server: Server, body: CompletionRequest) -> Response:
    """Continue one prompt or several."""
    prompts = _prompts(server, body)
    if len(prompts) > server.config.max_n:
        raise APIError(400, f"at most {server.config.max_n} prompts", "prompt", "invalid_value")
    params = {"max_tokens": DEFAULT_TOKENS, **body.sampling()}
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            if body.stream:
                message = "echo with logprobs is not streamed: leave one of the three out"
                raise APIError(400, message, "logprobs", "unsupported_value")
            params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    answers: list[Answer] = []
    async with AsyncExitStack() as refused:  # one that is refused ends those before it
        for ids in prompts:
            answers.append(await refused.enter_async_context(await begin(server, body, ids, params)))
        reply = _CompletionReply(server, answers, body)
        refused.pop_all()
    return reply.streamed() if body.stream else json_response(await reply.whole())


def _prompts(server: Server, body: CompletionRequest) -> list[list[int]]:
    prompt: Any = body.prompt
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    try:
        return [server.texts.encode(one) if isinstance(one, str) else one for one in many]
    except ConfigError as error:
        raise APIError(400, str(error), "prompt", "invalid_value") from error


class _CompletionReply:
    """The answers to all prompts in the form of this endpoint."""

    def __init__(self, server: Server, answers: list[Answer], body: CompletionRequest) -> None:
        self._body, self._reply, self._samples = body, Reply(answers, body, "cmpl"), answers[0].samples
        texts = [server.texts.decode(a.asked.ids, skip_special=True) if body.echo else "" for a in answers]
        self._echoes = [text for text in texts for _ in range(self._samples)]  # of each choice
        self._offsets = [*map(len, self._echoes)]  # characters so far, for ``text_offset``
        self._texts, self._special = server.texts, {*server.texts.special.values()}
        self._begun: set[int] = set()  # choices of which a chunk was sent

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        choices = [self._choice(index, echo) for index, echo in enumerate(self._echoes)]
        found = await self._reply.whole("text_completion", choices, self._add)
        for index, choice in enumerate(choices):
            choice |= self._reply.prompt(index // self._samples)
            if self._body.echo and choice["logprobs"] is not None:
                self._echo_logprobs(choice, self._reply.answers[index // self._samples])
        return found

    def _echo_logprobs(self, choice: Choice, answer: Answer) -> None:
        """Put those of the prompt's tokens in front of a choice's; nothing precedes the first, which has none."""
        own, self._offsets[choice["index"]] = choice["logprobs"], 0
        into = choice["logprobs"] = {name: list[Any]() for name in own}
        for token, row in zip(answer.asked.ids, answer.prompt_logprobs or (), strict=True):
            self._tell(choice, token, row or [(token, 0.0, 0, self._texts.decode([token]))])
            if row is None:
                into["token_logprobs"], into["top_logprobs"] = [None], [None]
        for name, values in own.items():
            into[name] += values

    def streamed(self) -> Response:
        """Its chunks, of any prompt as they come."""
        return self._reply.streamed("text_completion", self._chunks)

    def _chunks(self, place: int, delta: Delta) -> list[Choice]:
        index = place * self._samples + delta.index
        first = index not in self._begun
        self._begun.add(index)
        choice = self._choice(index, self._echoes[index] if first else "")
        self._add(choice, delta)
        return [choice | (self._reply.prompt(place) if first else {})]

    def _choice(self, index: int, text: str) -> Choice:
        choice: Choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        if self._body.logprobs is not None:
            choice["logprobs"] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        return choice

    def _add(self, choice: Choice, delta: Delta) -> None:
        choice["text"] += delta.text
        self._reply.add(choice, delta)
        for row, token in zip(delta.logprobs or (), delta.token_ids if delta.logprobs else (), strict=True):
            self._tell(choice, token, row)

    def _tell(self, choice: Choice, token: int, row: LogprobRow) -> None:
        """Append a token with its log-probability and those of the likeliest."""
        chosen = next(entry for entry in row if entry[0] == token)
        others = [entry for entry in row if entry is chosen or entry[2] <= (self._body.logprobs or 0)]
        into, text = choice["logprobs"], chosen[3] or ""
        into["tokens"].append(text)
        into["token_logprobs"].append(max(chosen[1], -9999.0))
        into["top_logprobs"].append({entry[3] or "": max(entry[1], -9999.0) for entry in others})
        into["text_offset"].append(self._offsets[choice["index"]])
        self._offsets[choice["index"]] += 0 if token in self._special else len(text)  # these have no text
