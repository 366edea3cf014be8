"""Run one request: what every endpoint that generates stands on.

    answer = await begin(server, body, ids, params)  # APIError: refused, before a byte was sent
    await answer.into(take)                          # take(chunks): what came at once, of each text, token_ids, ...
    answer.abort()                                   # ends the request, if it has not ended
    answer.stats, usage([answer])                    # afterwards

Everything that may be refused is refused by `begin`, so that a stream's first byte comes after it.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError
from ..core.outputs import Chunk, Logprob
from ..core.params import SamplingParams
from ..core.speculation import Speculation
from ..runtime.requests import Description, Submit
from .client import STUCK_S, EngineClient, EngineDown, OpenRequest
from .config import ServeConfig
from .http import APIError
from .metrics import Metrics
from .schemas import Sampling
from .texts import ServedTexts, renderer

MOST_SAMPLES = 128  # of a request
MOST_LOGPROBS = 20  # of a token
WHOLE_INTERVAL_S = 0.5  # between chunks of an answer that is not streamed: so much is computed again after a failure


@dataclass(slots=True)
class Server:
    """State that all endpoints share."""

    config: ServeConfig
    client: EngineClient
    model: str  # its name for clients
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    replica: str | None = None  # its name among several
    all_metrics: Callable[[], Awaitable[str]] | None = None  # those of all replicas
    _texts: ServedTexts | None = None
    counts: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Metrics(self.model, self.config.metrics_names, self.replica)

    async def metrics(self) -> str:
        """Return the metrics of this server, in Prometheus' form."""
        try:
            self.counts.update(await self.client.look(), self.client.restarts)
        except EngineDown:
            self.counts.update(None, self.client.restarts)
        return self.counts.text()

    @property
    def described(self) -> Description:
        """Return the description of the served model.

        Raises:
            APIError: it is not known yet.
        """
        if self.client.description is None:
            raise APIError(503, "the engine is loading: try again in a few seconds", code="loading")
        return self.client.description

    @property
    def texts(self) -> ServedTexts:
        """Return its tokenizer and templates; errors as of `described`."""
        if self._texts is None:
            self._texts = ServedTexts(self.described, self.config.template())
        return self._texts

    async def prepare(self) -> None:
        """Import what the first chat needs while the engine loads, and keep later garbage collections short.

        Otherwise the import would hold up all streams for half a second, and a collection for 60 ms.
        """
        await asyncio.to_thread(renderer)
        await self.client.described.wait()
        if self.client.description is not None:
            await asyncio.to_thread(lambda: self.texts)
        gc.collect()
        gc.freeze()

    def application(self, model: str | None) -> str | None:
        """Return the application that a request's ``model`` names; None: the base model.

        Raises:
            APIError: there is no such model.
        """
        if model is None or model == self.model:
            return None
        if model not in self.described.applications:
            names = ", ".join([self.model, *self.described.applications])
            message = f"there is no model {model[:200]!r}; these are served: {names}"
            raise APIError(404, message, "model", "model_not_found")
        return model


ANSWERS: ContextVar[list[Answer]] = ContextVar("answers")  # to the request that is being handled, for the log


class Answer:
    """An answer while it comes; see `begin`."""

    def __init__(self, server: Server, one: OpenRequest, streams: bool, begun: float) -> None:
        self.submission, self.prompt_tokens = one.submission, len(one.submission.ids)
        self.model = one.submission.application or server.model  # its name for clients
        self.samples = one.submission.params.n
        self.name = f"{one.submission.params.seed:x}{time.time_ns():x}"  # of the answer
        self.completion_tokens = 0
        self.stats: dict[str, Any] = {}  # `SpecStats.as_dict`, when it has ended
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._server, self._one, self._streams, self._begun = server, one, streams, begun
        self._last: dict[int, float] = {}  # when a sample's last chunk came
        ANSWERS.get([]).append(self)

    def abort(self) -> None:
        """End the request, if it has not ended."""
        self._server.client.abort(self._one.submission.id)

    async def into(self, take: Callable[[list[Chunk]], object]) -> None:
        """Have what comes taken, all that is there at once, until the end.

        Raises:
            APIError: the request failed, or took too long.
        """

        def take_chunks(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                self._took(chunk)
            take(chunks)

        # The engine keeps the deadline, and one that hangs is found out after `STUCK_S`.
        rest_s = max(0.0, self._begun + self._server.config.request_s + STUCK_S - time.monotonic())
        try:
            await asyncio.wait_for(self._server.client.follow(self._one, take_chunks), rest_s)
        except TimeoutError as error:
            raise APIError(504, f"the request took longer than {self._server.config.request_s:g} s") from error
        except (EngineDown, ConfigError) as error:
            raise APIError(503, str(error), code="engine_down") from error

    def _took(self, chunk: Chunk) -> None:
        now, counts = time.monotonic(), self._server.counts
        self.completion_tokens += len(chunk.token_ids)
        if chunk.token_ids:
            if not self._last:
                counts.times["time_to_first_token_seconds"].observe(now - self._begun)
            elif self._streams and chunk.index in self._last:
                counts.times["inter_token_latency_seconds"].observe(now - self._last[chunk.index])
            self._last[chunk.index] = now
        if chunk.finish_reason == "error":
            raise APIError(400, f"the request's own rules failed: {chunk.error}", code="request_failed")
        if (output := chunk.output) is not None:
            self.stats, self.prompt_logprobs = output.stats.as_dict(), output.prompt_logprobs
            counts.ended(self.stats, now - self._begun, self.prompt_tokens, self.completion_tokens, self.samples)

    def summary(self) -> str:
        """Return the main figures in a few words."""
        passes = f"{self.stats['mean_accepted_length']:.2f} a pass" if self.stats else "not finished"
        return f"{self.completion_tokens} tokens, {passes}"


def usage(answers: list[Answer]) -> dict[str, Any]:
    """Return the token counts of a request's answers so far, in OpenAI's form."""
    prompt, completion = sum(a.prompt_tokens for a in answers), sum(a.completion_tokens for a in answers)
    cached = sum(a.stats.get("cached_prompt_tokens", 0) for a in answers)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(a.submission.speculation is not None and a.submission.speculation.prediction for a in answers):
        read = [a.stats.get("sources", {}).get("prediction", {}) for a in answers]
        drafted, accepted = (sum(one.get(name, 0) for one in read) for name in ("drafted", "accepted"))
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        counts["completion_tokens_details"] = details
    return counts


async def begin(
    server: Server,
    body: Sampling,
    ids: list[int],
    params: dict[str, Any],
    place: str = "prompt",
    prediction: list[int] | None = None,
) -> Answer:
    """Have a request queued.

    Args:
        server: the server.
        body: the options that every form of request has.
        ids: of the prompt, which the field ``place`` has.
        params: fields of `SamplingParams` that were given.
        prediction: ids that the answer is likely to repeat.

    Raises:
        APIError: it is refused, or the server takes none at the moment.
    """
    begun, config, described = time.monotonic(), server.config, server.described
    if server.draining:
        raise APIError(503, "the server is shutting down: use another one", code="draining")
    if server.client.num_open >= config.max_open:
        raise APIError(429, f"{config.max_open} requests are in flight: try again later", code="queue_full")
    if len(ids) >= described.max_model_len:
        room = described.max_model_len
        message = f"this model's context is {room} tokens, and the prompt has {len(ids)}: shorten it"
        raise APIError(400, message, place, "context_length_exceeded")
    bounds = {"n": MOST_SAMPLES, "logprobs": MOST_LOGPROBS, "prompt_logprobs": MOST_LOGPROBS}
    for name, most in bounds.items():
        if params.get(name, 0) > most:
            raise APIError(400, f"{name} must be {most} or less", name, "invalid_value")
    speculation = body.drafting() | ({} if prediction is None else {"prediction": prediction})
    try:
        submit = Submit(
            secrets.token_hex(12),
            ids,
            SamplingParams(**{**described.sampling, **params}),
            server.application(body.model),
            0.0 if body.stream else WHOLE_INTERVAL_S,
            priority=body.priority,
            deadline_s=config.request_s,
            speculation=Speculation(**speculation) if speculation else None,
            store=body.store is not False,
            shows=body.shows(),
        )
        return Answer(server, await server.client.submit(submit), bool(body.stream), begun)
    except ConfigError as error:
        raise APIError(400, str(error), field_of(place, error), "invalid_value") from error
    except EngineDown as error:
        raise APIError(503, str(error), code="engine_down") from error


def field_of(place: str, error: ConfigError) -> str | None:
    """Return the field of a request that an error of the engine is about; None: it is not about a single field."""
    name, words = error.subject.partition("=")[0], error.subject.split()
    if name.isidentifier():
        return name
    return place if "prompt" in words else "speculation" if "speculation" in words else None
