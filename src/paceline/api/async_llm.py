"""``AsyncLLM``, the interface for event loops: it runs an engine in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ..core.errors import ConfigError
from ..core.inference import inference
from ..core.outputs import Chunk, RequestOutput
from ..core.sampling import SamplingParams
from ..engine.engine import LiveRequest
from ..engine.tokens import Prompt
from .llm import LLM, Job, Message

log = logging.getLogger(__name__)


class AsyncLLM:
    """`LLM` for event loops: requests of many tasks share the engine's batches.

    The engine runs in a thread of its own, which sleeps while nothing is in flight; requests may come from the event
    loops of any threads. Call `close` (or use ``async with``) when done; it is called automatically at the end of the
    program.

    Args:
        model, options: as for `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self.tokenizer, self.config = self._llm.tokenizer, self._llm.config
        self.default_sampling_params = self._llm.default_sampling_params
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[LiveRequest | Exception], None]] = {}
        self._closed = False
        self._gate = threading.Lock()  # nothing is ordered after the order to stop
        # A daemon, since the interpreter would wait for another kind before it runs what is registered to close it.
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in compiled code while the interpreter goes away would end in a crash

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
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[Chunk] | Exception] = asyncio.Queue()
        request_ids: list[str] = []

        def post(item: list[Chunk] | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to receive it
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        def tell(news: LiveRequest | Exception) -> None:  # in the engine's thread
            post(news if isinstance(news, Exception) else self._llm.engine.chunks(news))

        def submit() -> None:  # in the engine's thread
            try:
                request_id = job()
            except Exception as error:
                post(error)
                return
            request_ids.append(request_id)
            self._listeners[request_id] = tell

        def abort() -> None:  # in the engine's thread, after submit
            for request_id in request_ids:
                self._listeners.pop(request_id, None)
                self._llm.engine.abort(request_id)

        with self._gate:
            if self._closed:
                raise ConfigError("a request to a closed AsyncLLM", "its engine has stopped", "make a new AsyncLLM")
            self._orders.put(submit)
        output: RequestOutput | None = None  # comes with the last chunk
        try:
            while output is None:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                for chunk in item:
                    output = chunk.output
                    yield chunk
            output.raise_failed()
        finally:
            self._orders.put(abort)

    @inference
    def _loop(self) -> None:
        engine = self._llm.engine
        while True:
            # With work at hand, take what was ordered and continue; without, sleep until something is.
            while not engine.busy or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            try:
                touched = engine.step()
            except Exception as error:  # a fault of the engine itself: every request must learn of it
                log.exception("the engine failed; all requests in flight are ended")
                self._fail_all(error)
                continue
            for live in touched:
                listener = self._listeners.get(live.id)
                if listener is not None:
                    listener(live)
                if live.finished:
                    self._listeners.pop(live.id, None)

    def _fail_all(self, error: Exception) -> None:
        engine = self._llm.engine
        for request_id in list(engine.live):
            listener = self._listeners.pop(request_id, None)
            engine.abort(request_id)
            if listener is not None:
                listener(error)

    def close(self) -> None:
        """Stop the engine's thread. Requests in flight end with an error."""

        def end() -> None:
            self._fail_all(ConfigError("a request in flight", "the AsyncLLM was closed", "close it after the answers"))

        with self._gate:
            if not self._closed:
                self._orders.put(end)
                self._orders.put(None)
            self._closed = True
        self._thread.join()
        atexit.unregister(self.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
