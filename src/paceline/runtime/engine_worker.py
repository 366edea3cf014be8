"""An engine in a process of its own: from the options of an `LLM` to a worker that answers requests.

The text of answers is made here, not by who asks: stop strings are found in text, so the engine needs it anyway, and it
costs about 2 us of a token, less than a second detokenizer and its agreement with this one would.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

from ..api.chunks import Chunk, StreamedChunks
from ..api.config import LLMConfig
from ..api.llm import LLM, drafters_of
from ..core.errors import CapabilityError, ConfigError, QueueFull
from ..core.grammar import Grammar
from ..core.inference import inference
from ..core.request import Logprob
from ..core.sampling import SamplingParams
from ..core.speculation import Speculation
from ..draft import registry
from ..engine.live import LiveRequest
from ..weights import generation
from ..weights.gguf import is_gguf
from .requests import (
    KINDS,
    Abort,
    Accepted,
    Describe,
    Description,
    Ended,
    LogprobRow,
    Look,
    Looked,
    News,
    Rejected,
    SampleUpdate,
    Shown,
    Submit,
)
from .serving import Service

SERVED = ("grammar", "prediction")  # drafters that a server has beside the model's own: they cost nothing unasked
IDLE_S = 0.001  # between two looks for a grammar that is being compiled
WARM_TOKENS = 8  # of an answer before the first request: kernels, buffers and the drafter are ready then


def service(device: str, options: Mapping[str, Any]) -> EngineService:
    """What that worker makes, in its own process: loaded, and warm.

    Raises:
        ConfigError: an option, file or combination that cannot be used.
    """
    llm = LLM(**{**options, "device": device}, beside=SERVED)
    if llm.tokenizer is None:
        raise CapabilityError(
            f"model {llm.config.model}", "it has no tokenizer, so text means nothing to it", "add its files"
        )
    warm(llm)
    made = EngineService(llm)
    gc.collect()
    gc.freeze()  # no later collection looks at what is there now: 150 ms in which no stream would go on
    return made


def prepare(device: str, options: Mapping[str, Any]) -> None:
    """Import what `service` will need with these options, ahead of it; errors are left to that."""
    config = LLMConfig(**{**options, "device": device})
    source = config.resolve()
    registry.parse(drafters_of(config, source, SERVED)[0])
    if not is_gguf(source.folder):
        source.tokenizer()  # transformers takes a second


def warm(llm: LLM) -> None:
    """Answer a short prompt, so that the first request does not pay for what is made at first use."""
    limits = llm.engine.limits
    prompt = [min(3, limits.vocab_size - 1)] * min(4, limits.max_model_len - 1)
    params = SamplingParams(temperature=0, max_tokens=WARM_TOKENS, ignore_eos=True)
    for _ in llm.stream({"prompt_token_ids": prompt}, params, store=False):
        pass
    llm.forget()


@dataclass(slots=True)
class _Stream:
    """A request, and how much of it was streamed."""

    live: LiveRequest
    sent: StreamedChunks
    shows: str  # see `Submit`
    interval_s: float
    due: float  # when the next piece may go


class EngineService(Service):
    """Answers requests to one engine; see `runtime.requests`.

    Args:
        llm: with the engine.
    """

    kinds = KINDS

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
        elif isinstance(message, Look):
            yield Looked(message.id, self._counters())
        elif isinstance(message, Describe):
            yield description(self._llm)

    def _compiles(self, asked: Submit) -> bool:
        """Whether a request waits for its grammar, which may take a second: steps go on beside it."""
        try:
            grammar, grammars = Grammar.read(asked.params.get("grammar")), self._engine.grammars
        except ConfigError:
            return False  # `_submit` says so
        if grammar is None or grammar in grammars:
            return False

        def compile_it() -> None:
            with suppress(ConfigError):  # `_submit` meets it again
                grammars.matcher(grammar)

        thread = Thread(target=compile_it, name="paceline-grammar", daemon=True)
        self._compiling[asked.id] = asked, thread
        thread.start()
        return True

    def _compiled(self) -> list[Accepted | Rejected]:
        """The answers to requests whose grammar is there."""
        done = [asked for asked, thread in self._compiling.values() if not thread.is_alive()]
        for asked in done:
            del self._compiling[asked.id]
        return [self._submit(asked) for asked in done]

    def _submit(self, asked: Submit) -> Accepted | Rejected:
        try:
            params = SamplingParams.from_json(asked.params)
            chosen = {**(asked.speculation or {}), **({"trace": True} if asked.shows else {})}
            self._engine.submit(
                asked.ids,
                params,
                request_id=asked.id,
                application=asked.application,
                said=asked.said,
                priority=asked.priority,
                deadline_s=asked.deadline_s,
                speculation=Speculation(**chosen) if chosen else None,
                taken=asked.taken,
                store=asked.store,
            )
        except QueueFull as error:
            return Rejected(asked.id, "a request", str(error), "ask again later", full=True)
        except ConfigError as error:
            return Rejected(asked.id, error.asked, error.wrong, error.remedy)
        live = self._engine.live[asked.id]
        self._streams[asked.id] = _Stream(live, StreamedChunks(), asked.shows, asked.interval_s, 0.0)
        return Accepted(asked.id)

    @inference
    def work(self) -> Iterable[Any] | None:
        """One step of the engine, and what it brought."""
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
        pieces = [piece for stream in due for piece in self._pieces(stream, now)]
        return [*answers, News(pieces)] if pieces else answers

    def _pieces(self, stream: _Stream, now: float) -> Iterator[SampleUpdate]:
        request_id = stream.live.id
        del self._late[request_id]
        stream.due = now + stream.interval_s
        if stream.live.finished:
            del self._streams[request_id]
        for chunk in stream.sent.new_chunks(self._engine, stream.live):
            piece = _piece(request_id, chunk, stream.live)
            yield replace(piece, shown=_shown(stream, chunk.index)) if stream.shows else piece

    def _counters(self) -> dict[str, Any]:
        counted = self._engine.snapshot()
        own = {**self._engine.describe_speculation(), "learning": self._llm.describe_learning()}
        return {**counted.as_dict(), "speculation": own}


def _piece(request_id: str, chunk: Chunk, live: LiveRequest) -> SampleUpdate:
    sequence = live.sequences[chunk.index]
    output = chunk.output
    return SampleUpdate(
        id=request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=None if chunk.logprobs is None else [_row(row) for row in chunk.logprobs],
        finish_reason=chunk.finish_reason,
        stop_reason="deadline" if chunk.finish_reason == "deadline" else sequence.checker.stop_reason,
        error=sequence.error,
        ended=None if output is None else Ended(_rows(output.prompt_logprobs), output.stats.as_dict()),
    )


def _shown(stream: _Stream, index: int) -> Shown:
    """What a sample's request asked to see of the steps since the last piece; they are taken out."""
    sequence = stream.live.sequences[index]
    steps, sequence.trace = sequence.trace or [], []
    tokens, text = sequence.output_ids, sequence.token_text or str
    origins = [(text(tokens[step.first + at]), *origin) for step in steps for at, origin in enumerate(step.origins())]
    counts = [(len(step.tokens) - 1, len(step.path)) for step in steps if len(step.tokens) > 1]
    if stream.shows != "steps":
        return Shown(origins, counts, None)
    return Shown(origins, counts, [step.as_dict() | {"texts": [*map(text, step.tokens)]} for step in steps])


def _rows(rows: Sequence[dict[int, Logprob] | None] | None) -> list[LogprobRow | None] | None:
    return None if rows is None else [None if row is None else _row(row) for row in rows]


def _row(row: Mapping[int, Logprob]) -> LogprobRow:
    return [(token, found.logprob, found.rank, found.decoded) for token, found in row.items()]


def description(llm: LLM) -> Description:
    """What an `LLM` serves."""
    config, limits, tokenizer = llm.config, llm.engine.limits, llm.tokenizer
    backend, template = getattr(tokenizer, "_tokenizer", None), getattr(tokenizer, "chat_template", None)
    return Description(
        model=config.model,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_ids=list(limits.eos_ids),
        applications=sorted(llm.engine.applications),
        tokenizer=None if backend is None else backend.to_str(),
        chat_templates=template if isinstance(template, dict) else {"default": template} if template else {},
        special_tokens={} if tokenizer is None else _special(tokenizer),
        sampling=generation.recommended(llm.folder),
        speculation={
            "drafter": None if config.drafter is None else str(config.drafter),
            "round": llm.engine.round.name,
            "budget": None if config.budget is None else str(config.budget),
            "off_reason": llm.engine.budget.reason(),
            "max_nodes": _most_nodes(llm.engine.budget.describe()),
        },
    )


def _most_nodes(budget: Mapping[str, Any]) -> int:
    """Most nodes that a budget, as it describes itself, allows a step."""
    if budget["kind"] == "table":
        return max(budget["table"].values())
    return int(budget["cap"] if budget["kind"] == "auto" else budget["nodes"])


def _special(tokenizer: Any) -> dict[str, str]:
    """Tokens that templates name, as text."""
    return {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
