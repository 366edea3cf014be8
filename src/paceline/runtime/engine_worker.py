"""An engine in a process of its own: from the options of an `LLM` to a worker that answers requests.

The text of answers is made here, not by the client: stop strings are found in text, so the engine needs it anyway, and
it costs about 2 us of a token, less than a second detokenizer and its agreement with this one would.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

from ..api.llm import LLM
from ..core.errors import CapabilityError, ConfigError
from ..core.inference import inference
from ..core.outputs import Chunk
from ..core.sampling import SamplingParams
from ..core.trace import Shown
from ..engine.live import LiveRequest
from ..weights import generation
from .requests import (
    Abort,
    Accepted,
    Describe,
    Description,
    Rejected,
    StatsReply,
    StatsRequest,
    Submit,
    Updates,
)
from .serving import Service
from .wire import decode, encode

SERVED = ("grammar", "prediction")  # drafters that a server has next to the model's own: they cost nothing unasked
IDLE_S = 0.001  # between two looks for a grammar that is being compiled
WARM_TOKENS = 8  # of an answer before the first request: kernels, buffers and the drafter are ready then


def service(device: str, options: Mapping[str, Any]) -> EngineService:
    """Make that worker's service, in its own process: loaded, and warm.

    Raises:
        ConfigError: an option, file or combination that cannot be used.
    """
    llm = LLM(**{**options, "device": device}, beside=SERVED)
    if llm.tokenizer is None:
        raise CapabilityError(
            f"model {llm.config.model}", "it has no tokenizer, so text means nothing to it", "add its files"
        )
    engine_service, limits = EngineService(llm), llm.engine.limits
    prompt = [min(3, limits.vocab_size - 1)] * min(4, limits.max_model_len - 1)
    params = SamplingParams(temperature=0, max_tokens=WARM_TOKENS, ignore_eos=True)
    for _ in engine_service.handle(decode(encode(Submit("warm", prompt, params, None, 0.0, store=False)))):
        while engine_service.work() is not None:  # the first request does not pay for what is made at first use
            pass
    llm.forget()
    gc.collect()
    gc.freeze()  # no later collection looks at what is there now: 150 ms in which no stream would continue
    return engine_service


@dataclass(slots=True)
class _Stream:
    """A request, and when its next chunk is sent."""

    live: LiveRequest
    shows: str  # see `Submit`
    interval_s: float
    due: float  # when the next chunk may be sent


class EngineService(Service):
    """Answers requests to one engine; see `runtime.requests`.

    Args:
        llm: with the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._engine = llm, llm.engine
        self._streams: dict[str, _Stream] = {}
        self._compiling: dict[str, tuple[Submit, Thread]] = {}  # requests whose grammar is on its way
        self._late: dict[str, _Stream] = {}  # those with tokens that are not streamed yet

    def handle(self, message: Any) -> Iterable[Any]:
        """Answer a message."""
        if isinstance(message, Submit):
            if not self._compiles(message):
                yield self._submit(message)
        elif isinstance(message, Abort):
            self._compiling.pop(message.id, None)
            self._streams.pop(message.id, None)
            self._late.pop(message.id, None)
            self._engine.abort(message.id)
        elif isinstance(message, StatsRequest):
            speculation = {**self._engine.describe_speculation(), "learning": self._llm.describe_learning()}
            yield StatsReply(message.id, {**self._engine.snapshot().as_dict(), "speculation": speculation})
        elif isinstance(message, Describe):
            yield description(self._llm)

    def _compiles(self, submission: Submit) -> bool:
        """Return whether a request waits for its grammar, which may take a second: steps continue meanwhile."""
        grammar, grammars = submission.params.grammar, self._engine.grammars
        if grammar is None or grammar in grammars:
            return False

        def compile_it() -> None:
            with suppress(ConfigError):  # `_submit` meets it again
                grammars.matcher(grammar)

        thread = Thread(target=compile_it, name="paceline-grammar", daemon=True)
        self._compiling[submission.id] = submission, thread
        thread.start()
        return True

    def _compiled(self) -> list[Accepted | Rejected]:
        """Return the answers to requests whose grammar is compiled."""
        done = [submission for submission, thread in self._compiling.values() if not thread.is_alive()]
        for submission in done:
            del self._compiling[submission.id]
        return [self._submit(submission) for submission in done]

    def _submit(self, submission: Submit) -> Accepted | Rejected:
        try:
            self._engine.submit(
                submission.ids,
                submission.params,
                request_id=submission.id,
                application=submission.application,
                resume_tokens=submission.resume_tokens,
                priority=submission.priority,
                deadline_s=submission.deadline_s,
                speculation=submission.speculation,
                store=submission.store,
            )
        except ConfigError as error:
            return Rejected(submission.id, error.subject, error.wrong, error.remedy)
        live = self._engine.live[submission.id]
        self._streams[submission.id] = _Stream(live, submission.shows, submission.interval_s, 0.0)
        return Accepted(submission.id)

    @inference
    def work(self) -> Iterable[Any] | None:
        """Run one step of the engine, and return what it brought."""
        answers: list[Any] = self._compiled() if self._compiling else []
        if not self._engine.busy:
            if self._compiling:
                time.sleep(IDLE_S)
            return answers if answers or self._compiling else None
        for live in self._engine.step():
            if (stream := self._streams.get(live.id)) is not None:
                self._late[live.id] = stream
        now = time.monotonic()
        due = [stream for stream in self._late.values() if stream.live.finished or now >= stream.due]
        chunks = [chunk for stream in due for chunk in self._chunks(stream, now)]
        return [*answers, Updates(chunks)] if chunks else answers

    def _chunks(self, stream: _Stream, now: float) -> list[Chunk]:
        live = stream.live
        del self._late[live.id]
        stream.due = now + stream.interval_s
        if live.finished:
            del self._streams[live.id]
        chunks = self._engine.chunks(live)
        for chunk in chunks:  # its tokens and their log-probabilities are all that the other process needs
            chunk.origins, chunk.prompt_token_ids = [], ()
            if chunk.output is not None:
                chunk.output = replace(chunk.output, prompt=None, prompt_token_ids=[], outputs=[])
            if stream.shows:
                chunk.shown = _shown(stream, chunk.index)
        return chunks


def _shown(stream: _Stream, index: int) -> Shown:
    """Take out the steps since the last chunk; return those that the request includes."""
    sequence = stream.live.sequences[index]
    steps, sequence.trace = sequence.trace or [], []
    tokens, text = sequence.output_ids, sequence.token_text or str
    origins = [(text(tokens[step.first + at]), *origin) for step in steps for at, origin in enumerate(step.origins())]
    if stream.shows != "steps":
        return Shown(origins, None)
    return Shown(origins, [step.as_dict() | {"texts": [*map(text, step.tokens)]} for step in steps])


def description(llm: LLM) -> Description:
    """Describe what an `LLM` serves."""
    config, limits, tokenizer = llm.config, llm.engine.limits, llm.tokenizer
    backend, template = getattr(tokenizer, "_tokenizer", None), getattr(tokenizer, "chat_template", None)
    special = {} if tokenizer is None else tokenizer.special_tokens_map
    return Description(
        model=config.model,
        max_model_len=limits.max_model_len,
        applications=sorted(llm.engine.applications),
        tokenizer=None if backend is None else backend.to_str(),
        chat_templates=template if isinstance(template, dict) else {"default": template} if template else {},
        special_tokens={name: str(value) for name, value in special.items() if isinstance(value, str)},
        sampling=generation.recommended(llm.folder),
        speculation={
            "drafter": None if config.drafter is None else str(config.drafter),
            "round": llm.engine.round.name,
            "budget": None if config.budget is None else str(config.budget),
            "off_reason": llm.engine.budget.reason(),
            "max_nodes": llm.engine.budget.most_nodes,
        },
    )
