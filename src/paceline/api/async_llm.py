"""``AsyncLLM``, the interface for event loops: it runs an engine in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ..core.errors import ConfigError
from ..core.outputs import Chunk, RequestOutput
from ..core.sampling import SamplingParams
from ..engine.engine import LiveRequest
from ..engine.tokens import Prompt
from .llm import LLM, Job, Message


class AsyncLLM:
    """`LLM` for event loops: requests of many tasks share the engine's batches.

    The engine runs in a thread of its own, a step for each part of an answer that is awaited; requests may come from
    the event loops of any threads. Call `close` (or use ``async with``) when done.

    Args:
        model, options: as for `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self.tokenizer, self.config = self._llm.tokenizer, self._llm.config
        self.default_sampling_params = self._llm.default_sampling_params
        self._thread = ThreadPoolExecutor(1, "paceline-engine")
        self._closed = False

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None, **options: Any
    ) -> RequestOutput:
        """Return the whole answer to one prompt.

        Raises:
            ConfigError: the prompt, the parameters or the application cannot be used.
            RequestError: the request's own rules failed.
        """
        output: RequestOutput | None = None
        async for chunk in self.stream(prompt, params, application, **options):
            output = chunk.output
        assert output is not None
        return output

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """Yield chunks of the answer, one after each step that brings text or tokens.

        Closing the iterator, or cancelling the task, ends the request.

        Args:
            prompt, params, application, options: as for `LLM.stream`.

        Raises:
            ConfigError: the prompt cannot be used, or there is no such application, or (on the first ``await``)
                the parameters cannot be used.
            RequestError: after the last chunk, if the request's own rules failed.
        """
        return self._stream(self._llm.job(prompt, params, application, **options))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        application: str | None = None,
        **options: Any,
    ) -> AsyncIterator[Chunk]:
        """Yield chunks of the answer to a conversation."""
        return self._stream(self._llm.chat_job(messages, params, application, **options))

    async def _stream(self, job: Job) -> AsyncIterator[Chunk]:
        if self._closed:
            raise ConfigError("a request to a closed AsyncLLM", "its engine has stopped", "make a new AsyncLLM")
        lives: list[LiveRequest] = []  # filled in the engine's thread, also where this task is cancelled meanwhile
        output: RequestOutput | None = None  # comes with the last chunk
        try:
            await self._run(lambda: lives.append(self._llm.begin(job)))
            while output is None:
                for chunk in await self._run(lambda: self._llm.advance(lives[0])):
                    output = chunk.output
                    yield chunk
            output.raise_failed()
        finally:
            with suppress(RuntimeError):  # it is closed, and all requests have ended
                self._thread.submit(self._llm.give_up, lives)

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Call a function in the engine's thread.

        Raises:
            ConfigError: the engine was closed meanwhile.
        """
        future: Future[Any] | None = None
        with suppress(RuntimeError):  # the thread takes nothing any more
            future = self._thread.submit(function)
        result = None if future is None else await asyncio.wrap_future(future)
        if not self._closed:
            return result
        raise ConfigError("a request in flight", "the AsyncLLM was closed", "close it after the answers")

    def close(self) -> None:
        """Stop the engine's thread. Requests in flight end with an error."""
        self._closed = True
        with suppress(RuntimeError):  # it is closed already
            self._thread.submit(lambda: self._llm.give_up([*self._llm.engine.live.values()]))
        self._thread.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
