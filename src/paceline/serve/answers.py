"""The answer of every endpoint that generates: a stream of pieces, formatted by each API, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.responses import Response

from ..core.outputs import Chunk
from .generation import Answer, usage
from .http import APIError, EventStream, Write, event, json_response
from .schemas import Sampling, SpeculationChoice

Event = Mapping[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Reply:
    """The answers to the prompts of one request, in the form of one API; a subclass formats them.

    Args:
        answers: to each prompt.
    """

    last = b""  # after the events of a stream

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.answer, self.streams = answers, answers[0], False

    def begin(self) -> Iterable[Event]:
        """Return the events that precede all pieces."""
        return ()

    def take(self, place: int, chunk: Chunk) -> Iterable[Event]:
        """Add a piece of the answer at a place, and yield its events; each is written before the next is made."""
        raise NotImplementedError

    def end(self) -> Iterable[Event]:
        """Return the events that follow all pieces."""
        return ()

    def failed(self, error: APIError) -> Event:
        """Return the event that ends a stream in place of `end`."""
        return error.body()

    def whole(self) -> Event:
        """Return the answer after everything has come."""
        raise NotImplementedError

    async def respond(self, streams: bool | None) -> Response:
        """Return the response, which a stream's answers follow later."""
        if streams:
            self.streams = True
            return EventStream(self._events, self._abort)
        await self._follow(lambda place, chunks: [[*self.take(place, chunk)] for chunk in chunks])
        return json_response(self.whole())

    async def _follow(self, take: Callable[[int, list[Chunk]], object]) -> None:
        """Take the pieces of each answer, with its place; one that fails ends the others."""
        with ExitStack() as all_of_them:
            for answer in self.answers:
                all_of_them.callback(answer.abort)
            await asyncio.gather(*(one.into(partial(take, place)) for place, one in enumerate(self.answers)))

    async def _events(self, write: Write) -> None:
        def take(place: int, chunks: list[Chunk]) -> None:
            write(b"".join([event(one) for chunk in chunks for one in self.take(place, chunk)]))

        try:
            write(b"".join(map(event, self.begin())))
            await self._follow(take)
        except APIError as error:
            write(event(self.failed(error)) + self.last)
        else:
            write(b"".join(map(event, self.end())) + self.last)

    def _abort(self) -> None:
        for answer in self.answers:
            answer.abort()


def add_shown(into: dict[str, Any], choice: bool | SpeculationChoice | None, chunk: Chunk) -> None:
    """Add to an answer the sources of a chunk's tokens, where the request sets ``provenance`` or ``trace``.

    ``provenance``: of each token its text, who drafted it (null: it is the target's own choice) and how deep in the
    draft it was. ``trace``: of each step the tree, the accepted path, what the budget chose, and times.
    """
    if chunk.shown is None or not isinstance(choice, SpeculationChoice):
        return
    if choice.provenance:
        names = ("token", "source", "depth")
        origins = (dict(zip(names, one, strict=True)) for one in chunk.shown.origins)
        into.setdefault("provenance", []).extend(origins)
    if choice.trace:
        into.setdefault("trace", []).extend(chunk.shown.steps or ())


Choice = dict[str, Any]


class Choices(Reply):
    """Answers of chat and completions: a choice for each sample of each prompt.

    Args:
        answers: to each prompt.
        body: of the request.
        kind: in front of the answer's id.
        names: of object, whole and of a chunk.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, answers: list[Answer], body: Sampling, kind: str, names: tuple[str, str]) -> None:
        super().__init__(answers)
        self._body, self.samples, self._names = body, self.answer.samples, names
        self._head = {"id": f"{kind}-{body.request_id or self.answer.name}", "created": int(time.time())}
        self._head["model"] = self.answer.model
        self.choices: list[Choice] = [{"index": index} for index in range(len(answers) * self.samples)]  # whole ones

    def _parts(self, place: int, chunk: Chunk) -> list[Choice]:
        """Return the choices of a piece's chunks."""
        raise NotImplementedError

    def _chunk(self, choice: Choice, place: int) -> dict[str, Any]:
        """Return the chunk of a choice."""
        chunk_body = {**self._head, "object": self._names[1], "choices": [choice]}
        if self._body.stream_options is not None and self._body.stream_options.continuous_usage_stats:
            chunk_body["usage"] = usage([self.answers[place]])
        return chunk_body

    def take(self, place: int, chunk: Chunk) -> Iterable[Event]:
        """Add a piece, see `Reply`."""
        for part in self._parts(place, chunk):
            if self.streams:
                yield self._chunk(part, place)
            else:
                _merge(self.choices[part["index"]], part)

    def end(self) -> Iterable[Event]:
        """Yield the usage, where it is requested."""
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "object": self._names[1], "choices": [], **self._ends()}

    def whole(self) -> dict[str, Any]:
        """Return the answer, see `Reply`."""
        return {**self._head, "object": self._names[0], "choices": self.choices, **self._ends()}

    def _ends(self) -> dict[str, Any]:
        """Return what follows the choices; next to OpenAI's fields where there was one prompt."""
        return {"usage": usage(self.answers)} | ({"stats": self.answer.stats} if len(self.answers) == 1 else {})

    def _prompt(self, place: int) -> dict[str, Any]:
        """Return what the request needs of a prompt: its ids, and at the end its log-probabilities."""
        answer = self.answers[place]
        fields: dict[str, Any] = {"prompt_token_ids": answer.submission.ids} if self._body.return_token_ids else {}
        if answer.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = rows = list[dict[str, Any] | None]()
            for row in answer.prompt_logprobs:
                entries = {
                    str(token): {"logprob": max(p.logprob, LEAST_LOGPROB), "rank": p.rank, "decoded_token": p.decoded}
                    for token, p in (row or {}).items()
                }
                rows.append(entries if row is not None else None)
        return fields

    def _add(self, choice: Choice, chunk: Chunk) -> None:
        """Add to a choice what chat and completions have of a piece, next to its text."""
        if chunk.finish_reason is not None:
            reason = {"abort": "stop", "deadline": "length"}.get(chunk.finish_reason, chunk.finish_reason)
            choice["finish_reason"] = reason
            choice["stop_reason"] = "deadline" if chunk.finish_reason == "deadline" else chunk.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        add_shown(choice, self._body.speculation, chunk)


def _merge(whole: Choice, part: Choice) -> None:
    """Add a chunk's choice to the whole one: texts and lists grow, all else is replaced by what is there."""
    for name, value in part.items():
        if isinstance(value, list):
            whole.setdefault(name, []).extend(value)
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _merge(whole[name], value)
        elif name == "text":
            whole[name] = whole.get(name, "") + value
        elif value is not None or name not in whole:
            whole[name] = value
