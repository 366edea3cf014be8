"""What answers of chat and completions have alike: choices, one for each sample of each prompt, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from ..distributed.requests import LogprobRow
from .acceptance import add_shown
from .generation import Answer, Delta, usage
from .http import DONE, APIError, EventStream, Write, event
from .schemas import Sampling

Choice = dict[str, Any]


class Reply:
    """Answers to the prompts of one request.

    Args:
        answers: to each prompt.
        body: of the request.
        kind: in front of the answer's id.
    """

    def __init__(self, answers: list[Answer], body: Sampling, kind: str) -> None:
        self.answers, self._body, self.samples = answers, body, answers[0].samples
        self._head = {"id": f"{kind}-{body.request_id or answers[0].name}", "created": int(time.time())}
        self._head["model"] = answers[0].model
        options = body.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    async def _follow(self, take: Callable[[int, list[Delta]], object]) -> None:
        """Have what comes of each answer taken, with its place; one that fails ends the others."""
        async with AsyncExitStack() as all_of_them:
            for answer in self.answers:
                await all_of_them.enter_async_context(answer)
            follows = (answer.into(partial(take, place)) for place, answer in enumerate(self.answers))
            await asyncio.gather(*follows)

    async def whole(self, kind: str, choices: list[Choice], add: Callable[[Choice, Delta], object]) -> dict[str, Any]:
        """Not streamed.

        Args:
            kind: of object.
            choices: all of them, without what comes.
            add: puts a piece into its choice.
        """

        def take(place: int, deltas: list[Delta]) -> None:
            for delta in deltas:
                add(choices[place * self.samples + delta.index], delta)

        await self._follow(take)
        return {**self._head, "object": kind, "choices": choices, **self._ends()}

    def streamed(
        self, kind: str, chunks: Callable[[int, Delta], list[Choice]], first: Sequence[Choice] = ()
    ) -> EventStream:
        """The stream.

        Args:
            kind: of object.
            chunks: of a piece of the answer at a place.
            first: what is sent before anything comes.
        """
        head = {**self._head, "object": kind}

        def chunk(choice: Choice, place: int) -> dict[str, Any]:
            told = {**head, "choices": [choice]}
            if self._usage_always:
                told["usage"] = usage([self.answers[place]])
            return told

        async def events(write: Write) -> None:
            def take(place: int, deltas: list[Delta]) -> None:
                write(b"".join([event(chunk(choice, place)) for delta in deltas for choice in chunks(place, delta)]))

            try:
                write(b"".join([event(chunk(choice, 0) | self.prompt(0)) for choice in first]))
                await self._follow(take)
            except APIError as error:
                write(event(error.body()))
            else:
                if self._usage_last:
                    write(event({**head, "choices": [], **self._ends()}))
            write(DONE)

        return EventStream(events, self._abort)

    def _abort(self) -> None:
        """End what has not ended."""
        for answer in self.answers:
            answer.abort()

    def _ends(self) -> dict[str, Any]:
        """What stands behind the choices; beside OpenAI's fields where there was one prompt."""
        found: dict[str, Any] = {"usage": usage(self.answers)}
        if len(self.answers) == 1:
            found |= self.answers[0].ends()
        return found

    def prompt(self, place: int) -> dict[str, Any]:
        """What is told of a prompt when its answer has ended."""
        answer = self.answers[place]
        found: dict[str, Any] = {"prompt_token_ids": answer.asked.ids} if self._body.return_token_ids else {}
        if answer.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None if row is None else _ranked(row) for row in answer.prompt_logprobs]
        return found

    def add(self, choice: Choice, delta: Delta) -> None:
        """Put into a choice what both forms have of a piece, beside its text."""
        if delta.finish_reason is not None:
            choice["finish_reason"], choice["stop_reason"] = _finish(delta), delta.stop_reason
        if self._body.return_token_ids:
            choice.setdefault("token_ids", []).extend(delta.token_ids)
        add_shown(choice, self._body.speculation, delta)


def _finish(delta: Delta) -> str | None:
    """Why a sample ended, in OpenAI's words."""
    return {"abort": "stop", "deadline": "length"}.get(delta.finish_reason or "", delta.finish_reason)


def _ranked(row: LogprobRow) -> dict[str, Any]:
    """Log-probabilities at a place of a prompt, in vLLM's form."""
    return {str(t): {"logprob": max(p, -9999.0), "rank": r, "decoded_token": d} for t, p, r, d in row}
