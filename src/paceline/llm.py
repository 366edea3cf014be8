"""The Python entry: ``LLM`` for batches and streams, ``AsyncLLM`` for event loops."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch

from . import native
from .attention import BACKENDS, make_backend
from .core.errors import CapabilityError, ConfigError, RequestError
from .core.options import HIGHEST, check_fields, shown
from .core.request import FinishReason, Logprob, Origin, RequestOutput, SequenceState
from .core.sampling import SamplingParams
from .drafters import registry
from .drafters.base import Drafter
from .drafters.registry import DrafterConfig, DrafterContext
from .engine import calibration
from .engine.auto import AutoBudget
from .engine.budget import AUTO, DraftBudget, FixedBudget, parse_budget
from .engine.calibration import Fingerprint
from .engine.costs import draft_guess
from .engine.engine import Engine, EngineLimits, LiveRequest
from .engine.scheduler import SchedulerConfig
from .engine.tokens import Prompt, chat_ids, encode, texts_of
from .kv.pool import KVPool
from .rounds import AUTO as AUTO_ROUND
from .rounds import ROUNDS, make_round
from .rounds.verification import DEFAULT_VERIFIER, VERIFIERS
from .target.applications import Application, load_applications, locate
from .target.decoder import Decoder
from .target.families import DecoderConfig
from .target.files import free_bytes as _free_bytes
from .target.files import is_file
from .target.loader import (
    check_dtype,
    load_model,
    load_tokenizer,
    parse_device,
    parse_dtype,
    read_config,
    resolve_folder,
)
from .target.native import unsupported
from .target.streams import CONFIG_FILE

log = logging.getLogger(__name__)

Message = Mapping[str, str]  # {"role": .., "content": ..}
KERNELS = ("auto", "native", "torch")
DEFAULT_KV_BYTES = 512 * 2**20
MAX_SEQUENCES, MAX_BATCH_ROWS = 2**16, 2**20
# Far beyond use, and below the point where an OpenMP runtime ends the process for want of threads.
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """Everything that can be said about a model at start-up."""

    model: str = field(metadata={"help": "embedded model, folder or hub name"})
    drafter: str | DrafterConfig | None = _option(None, "who guesses: name, name:model, or name:model,option=value")
    round: str = _option(
        AUTO_ROUND,
        "when guessing and checking happen: serial, fused (streams), or auto: the drafter's",
        choices=(AUTO_ROUND, *ROUNDS),
    )
    verifier: str = _option(
        DEFAULT_VERIFIER,
        "sample_and_match, rejection or block (for drafts that carry q), or lossy_stream_rejection (for streams)",
        choices=VERIFIERS,
    )
    budget: int | str | Mapping[int | str, int] | None = _option(
        None, "drafted nodes a step: a number (0: plain decoding), by batch size (1:8,4:4,16:0), or auto, the default"
    )
    dtype: str = _option("auto", "auto (the checkpoint's), bfloat16, float32, float64 or int8")
    device: str = _option("cpu", "cpu or cuda")
    exact: bool = _option(False, "ids never depend on batch, chunking, prefix hits, preemption or the drafter")
    kernels: str = _option(
        "auto",
        "auto, native (compiled for this processor; CPU only) or torch",
        choices=KERNELS,
        unknown="there are no such kernels",
    )
    attention: str = _option(
        "auto",
        "where torch's kernels run: auto, sdpa or reference",
        choices=("auto", *BACKENDS),
        unknown="there is no such attention backend",
    )
    kv_memory: str | int | None = _option(None, "bytes for the K/V pool, such as 2GiB; default: 512MiB or less")
    max_model_len: int | None = _option(None, "most tokens of prompt and output; default: the model's context")
    max_sequences: int = _option(64, "sequences that run at once", minimum=1, maximum=MAX_SEQUENCES)
    max_batch_rows: int = _option(
        512, "rows of one target pass; longer prompts are computed in chunks", minimum=1, maximum=MAX_BATCH_ROWS
    )
    threads: int | None = _option(None, "CPU threads; default: torch's choice")
    applications: dict[str, str] | None = _option(
        None,
        "a trained set that requests may name; repeat it for several",
        flag="--application",
        metavar="NAME=FOLDER",
        takes='applications are folders by name, such as {"sql": "path/to/folder"}',
    )
    revision: str | None = _option(None, "branch, tag or commit on the hub")
    offline: bool = _option(False, "fetch nothing from the hub")
    trust_remote_code: bool = _option(False, "refused: Paceline never runs a checkpoint's code", cli=False)

    def __post_init__(self) -> None:
        check_fields(self, get_type_hints(LLMConfig))
        self._refuse_remote_code()
        self._check_threads()
        check_dtype(self.dtype)
        parse_device(self.device)
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        registry.parse(self.drafter)
        self._check_budget()
        self._check_exact()

    def _refuse_remote_code(self) -> None:
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code=True",
                "Paceline never runs code that comes with a checkpoint",
                "leave it out; the supported families need none",
            )

    def _check_threads(self) -> None:
        asked, remedy = f"threads={self.threads}", "leave it out for the default"
        if self.threads is not None and self.threads < 1:
            raise ConfigError(asked, "at least one thread is needed", remedy)
        if self.threads is not None and self.threads > MAX_THREADS:
            cores = f"{os.cpu_count()} processors"
            raise ConfigError(asked, f"{MAX_THREADS} threads are the most on these {cores}", remedy)

    def _check_budget(self) -> None:
        chosen = parse_budget(self.budget)
        off = self.budget is None or (isinstance(chosen, FixedBudget) and chosen.never_drafts)
        if not off and self.drafter is None:
            raise ConfigError(
                f"budget={shown(self.budget)} without a drafter", "nobody drafts", "name one: drafter='ngram'"
            )

    def _check_exact(self) -> None:
        if self.exact and VERIFIERS[self.verifier].ids_depend_on_drafter:
            raise CapabilityError(
                f"exact=True with verifier={self.verifier!r}",
                "its ids depend on the drafter by design",
                f"use verifier={DEFAULT_VERIFIER!r}",
            )


# Options on which the target itself depends: two `LLM` that agree in them can share its weights.
TARGET_OPTIONS = ("model", "dtype", "device", "exact", "kernels", "attention", "revision")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its tokenizer."""

    name: str
    decoder: Decoder
    tokenizer: Any  # None for a folder without one
    folder: Path


@dataclass(frozen=True, slots=True)
class _Job:
    """One request that is about to be submitted."""

    ids: list[int]
    text: str | None  # of the prompt, where text was given
    params: SamplingParams
    application: str | None

    def submit(self, engine: Engine, on_end: Callable[[LiveRequest], None] | None = None) -> LiveRequest:
        """Queue it."""
        request_id = engine.submit(self.ids, self.params, prompt=self.text, application=self.application, on_end=on_end)
        return engine.live[request_id]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new in a streamed answer."""

    index: int  # sample index
    text: str
    token_ids: list[int]
    origins: list[Origin]  # of each new token: drafted or target
    logprobs: list[dict[int, Logprob]] | None  # of each new token; None unless asked for
    finish_reason: FinishReason | None  # of this sample; None: it goes on
    request_id: str
    prompt_token_ids: tuple[int, ...]
    output: RequestOutput | None  # the whole answer, with the last chunk of all; None before

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last chunk."""
        return self.finish_reason is not None


def parse_bytes(value: str | int) -> int:
    """Bytes from a number or from text such as ``512MiB`` or ``2GB``.

    Raises:
        ConfigError: not a size.
    """
    remedy = "write bytes, or a number with MiB or GiB"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"kv_memory={shown(value)}", "not a size", remedy)
    size = value if isinstance(value, int) else _bytes_of(value)
    if size is None or not 0 <= size <= HIGHEST:
        raise ConfigError(f"kv_memory={shown(value)}", "not a size", remedy)
    return int(size)


def _bytes_of(text: str) -> float | None:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?\s*", text.lower())
    return None if match is None else float(match[1]) * _UNITS[match[2] or ""]


class LLM:
    """A model ready to answer.

    Every method may be called from any thread, and from what `generate` calls: requests of all threads share the
    engine's batches, and each step is done by whichever thread's turn it is.

    Args:
        model: an embedded model's name, a local Hugging Face folder, or a hub name.
        share: one of the same target, whose weights are used in place of loading them again; K/V, drafter and
            engine stay apart.
        options: the fields of `LLMConfig`.

    Raises:
        ConfigError: an option, file or combination that cannot be used; raised before any request.
    """

    def __init__(self, model: str, *, share: LLM | None = None, **options: Any) -> None:
        self.config = _config(model, options)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._target = _load_target(self.config) if share is None else _shared(self.config, share)
        self.tokenizer = self._target.tokenizer
        self.engine = _build_engine(self.config, self._target)

    @property
    def decoder(self) -> Decoder:
        """The target's network."""
        return self._target.decoder

    @property
    def folder(self) -> Path:
        """The target's local folder."""
        return self._target.folder

    @property
    def fingerprint(self) -> Fingerprint:
        """What the target's speed depends on here: a calibration must have been made under the same conditions."""
        return _fingerprint(self.config, self.decoder)

    # -- answers

    @property
    def kernels(self) -> str:
        """What the layers run on: "native" and the instructions in use, or "torch"."""
        return "torch" if self.decoder.stack is None else f"native ({native.describe()})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int], None] | None = None,
        application: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, together where there is room.

        A request whose own sampling rules, text or stop rules fail on the way ends alone, with
        ``finish_reason="error"``; see `RequestOutput.error`.

        Args:
            prompts: one or many; text, or ``{"prompt_token_ids": [...]}``.
            params: one for all, or one a prompt; default: `SamplingParams()`.
            progress: called with the number of answers that are done.
            application: whose adapters answer, one for all or one a prompt; None: the base model.

        Returns:
            One output a prompt, in their order.

        Raises:
            ConfigError: a prompt, parameters or an application that cannot be used; no answer was begun then.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = _per_prompt(params, len(many))
        names = self._check_names(application, len(many))
        encoded = [encode(prompt, self.tokenizer) for prompt in many]
        parts = zip(encoded, each, names, strict=True)
        return self._run([_Job(ids, text, p, name) for (ids, text), p, name in parts], progress)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        stream: bool = False,
        application: str | None = None,
    ) -> Any:
        """Answer a conversation: a list with one output, or with ``stream=True`` an iterator of `Chunk`.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the messages, or there is no such
                application.
        """
        job = _Job(*chat_ids(messages, self.tokenizer, self.config.model), params or SamplingParams(), application)
        return self._stream(job) if stream else self._run([job], None)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece. Leaving the iterator early ends the request.

        Raises:
            ConfigError: the prompt, the parameters or the application cannot be used.
            RequestError: behind the last chunk, where its own rules failed on the way.
        """
        return self._stream(_Job(*encode(prompt, self.tokenizer), params or SamplingParams(), application))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request that is in flight; what it has so far, or None if there is no such request."""
        with self.engine.lock:
            return self.engine.abort(request_id)

    def _check_names(self, application: str | Sequence[str | None] | None, count: int) -> list[str | None]:
        """The application of each prompt, each one known."""
        names = [application] * count if application is None or isinstance(application, str) else list(application)
        if len(names) != count:
            raise ConfigError(
                f"{len(names)} applications for {count} prompts",
                "the counts differ",
                "give one for all or one a prompt",
            )
        for name in names:
            self.engine.check_application(name)
        return names

    def _run(self, jobs: Sequence[_Job], progress: Callable[[int], None] | None) -> list[RequestOutput]:
        engine = self.engine
        lives: list[LiveRequest] = []
        ended: dict[str, LiveRequest] = {}
        told = 0
        try:
            for job in jobs:
                with engine.lock:
                    lives.append(job.submit(engine, lambda live: ended.update({live.request.id: live})))
            while told < len(lives):
                with engine.lock:
                    if len(ended) < len(lives):  # another thread's steps, or an abort, may have ended the last one
                        engine.step()
                while told < len(ended):
                    told += 1
                    if progress:
                        progress(told)
            with engine.lock:
                return [engine.output(live) for live in lives]
        except BaseException:
            engine.lock.free_mine()
            self._give_up(lives)
            raise

    def _give_up(self, lives: Sequence[LiveRequest]) -> None:
        """End requests; from wherever, a garbage collector in the middle of a step included."""
        for live in lives:
            self.engine.cancel(live.request.id)
        if self.engine.lock.take_if_free():  # else whoever holds it will see to it
            try:
                self.engine.settle()
            finally:
                self.engine.lock.__exit__()

    def _stream(self, job: _Job) -> Iterator[Chunk]:
        engine = self.engine
        with engine.lock:
            live = job.submit(engine)
        sent = _Sent(job.params.n)

        def chunks() -> Iterator[Any]:
            try:
                yield None  # taken below: a generator that was never entered would not run its end
                while live.ended is None:
                    with engine.lock:
                        if live.ended is None:  # another thread's steps, or an abort, may have ended it
                            engine.step()
                        news = sent.news(engine, live)
                    yield from news
                with engine.lock:
                    news = sent.news(engine, live)
                yield from news
                _raise_failed(sent.output)
            except (
                Exception,
                KeyboardInterrupt,
            ):  # not where the generator is closed, which a collector may do in a step
                engine.lock.free_mine()
                raise
            finally:
                self._give_up([live])

        answer = chunks()
        next(answer)
        return answer


def _raise_failed(output: RequestOutput | None) -> None:
    """Raises RequestError where a sample was ended by an error."""
    if output is not None and output.error is not None:
        raise RequestError(output.request_id, output.error, output)


class _Sent:
    """What of each sample was streamed already."""

    def __init__(self, samples: int) -> None:
        self.output: RequestOutput | None = None  # once all was sent
        self._tokens = [0] * samples
        self._chars = [0] * samples
        self._open = set(range(samples))

    def news(self, engine: Engine, live: LiveRequest) -> list[Chunk]:
        """One chunk for every sample with something new; what a chunk costs does not depend on what came before it."""
        fresh = [(i, live.sequences[i].state) for i in sorted(self._open)]
        fresh = [(i, state) for i, state in fresh if state.finished or len(state.token_ids) > self._tokens[i]]
        self._open -= {i for i, state in fresh if state.finished}
        if fresh and not self._open:
            self.output = engine.output(live)
        last = len(fresh) - 1
        return [self._chunk(live, i, state, self.output if at == last else None) for at, (i, state) in enumerate(fresh)]

    def _chunk(self, live: LiveRequest, index: int, state: SequenceState, output: RequestOutput | None) -> Chunk:
        tokens, chars = self._tokens[index], self._chars[index]
        text = state.checker.stable_text(chars)
        self._tokens[index], self._chars[index] = len(state.token_ids), chars + len(text)
        return Chunk(
            index=index,
            text=text if tokens else live.text_prefix + text,
            token_ids=state.token_ids[tokens:],
            origins=state.origins[tokens:],
            logprobs=state.logprobs[tokens:] if live.request.params.logprobs is not None else None,
            finish_reason=state.checker.finish_reason,
            request_id=live.request.id,
            prompt_token_ids=live.request.prompt_ids,
            output=output,
        )


class AsyncLLM:
    """`LLM` for event loops: requests of many tasks share the engine's batches.

    The engine runs in a thread of its own, which sleeps while nothing is in flight; requests may come from the event
    loops of any threads. Call `close` (or use ``async with``) when done; the end of the program does it, too.

    Args:
        model, options: as for `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[LiveRequest | Exception], None]] = {}
        self._closed = False
        self._gate = threading.Lock()  # nothing is ordered behind the order to stop
        # A daemon, since the interpreter would wait for another kind before it runs what is registered to close it.
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in compiled code while the interpreter goes away would end in a crash

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def config(self) -> LLMConfig:
        """What the model was started with."""
        return self._llm.config

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None
    ) -> RequestOutput:
        """The whole answer to one prompt.

        Raises:
            ConfigError: the prompt, the parameters or the application cannot be used.
            RequestError: its own rules failed on the way.
        """
        output: RequestOutput | None = None
        async for chunk in self.stream(prompt, params, application):
            output = chunk.output
        assert output is not None
        return output

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None
    ) -> AsyncIterator[Chunk]:
        """Chunks as they come. Leaving the iterator, or cancelling the task, ends the request.

        Raises:
            ConfigError: the prompt cannot be used, or there is no such application, or (on the first ``await``)
                the parameters cannot be used.
            RequestError: behind the last chunk, where its own rules failed on the way.
        """
        self._llm.engine.check_application(application)
        return self._stream(_Job(*encode(prompt, self.tokenizer), params or SamplingParams(), application))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, application: str | None = None
    ) -> AsyncIterator[Chunk]:
        """Chunks of the answer to a conversation."""
        self._llm.engine.check_application(application)
        ids, text = chat_ids(messages, self.tokenizer, self.config.model)
        return self._stream(_Job(ids, text, params or SamplingParams(), application))

    async def _stream(self, job: _Job) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[Chunk] | Exception] = asyncio.Queue()
        sent = _Sent(job.params.n)
        request_ids: list[str] = []

        def post(item: list[Chunk] | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        def tell(news: LiveRequest | Exception) -> None:  # in the engine's thread
            post(news if isinstance(news, Exception) else sent.news(self._llm.engine, news))

        def submit() -> None:  # in the engine's thread
            try:
                request_id = job.submit(self._llm.engine).request.id
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
        open_samples = job.params.n
        try:
            while open_samples:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                for chunk in item:
                    open_samples -= chunk.finished
                    yield chunk
            _raise_failed(sent.output)
        finally:
            self._orders.put(abort)

    def _loop(self) -> None:
        engine = self._llm.engine
        while True:
            # With work at hand, take what was ordered and go on; without, sleep until something is.
            while not engine.busy or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            try:
                touched = engine.step()
            except Exception as error:  # a fault of the engine itself: every request must hear of it
                log.exception("the engine failed; all requests in flight are ended")
                self._fail_all(error)
                continue
            for live in touched:
                listener = self._listeners.get(live.request.id)
                if listener is not None:
                    listener(live)
                if live.finished:
                    self._listeners.pop(live.request.id, None)

    def _fail_all(self, error: Exception) -> None:
        engine = self._llm.engine
        for request_id in list(engine.live):
            listener = self._listeners.pop(request_id, None)
            engine.abort(request_id)
            if listener is not None:
                listener(error)

    def close(self) -> None:
        """Stop the engine's thread. Requests in flight are ended with an error."""

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


# -- putting the parts together


def _config(model: str, options: dict[str, Any]) -> LLMConfig:
    known = LLMConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            near = ", ".join(sorted(known))
            raise ConfigError(f"LLM(..., {name[:80]}=...)", "there is no such option", f"known options: {near}")
    return LLMConfig(model=_in_text(model), **{name: _in_text(value) for name, value in options.items()})


def _in_text(value: Any) -> Any:
    """Paths and torch's own words for a dtype or device, as the options spell them."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: str(part) if isinstance(part, Path) else part for name, part in value.items()}
    return value


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} SamplingParams for {count} prompts", "the counts differ", "give one a prompt")
    return list(params)


def _load_target(config: LLMConfig) -> LoadedModel:
    """The target. Whatever can be known to be wrong without its weights is said before they are read."""
    source = _open(config, config.model, config.dtype)
    _pool_tokens(config, source.shape, source.dtype, _max_model_len(config, source.shape))
    locate(config.applications or {}, config.offline)
    return _load(config, source, config.exact)


def _shared(config: LLMConfig, other: LLM) -> LoadedModel:
    if not isinstance(other, LLM):
        raise ConfigError(f"LLM(..., share={shown(other)})", "it is no LLM", "give one of the same target")
    for name in TARGET_OPTIONS:
        mine, theirs = getattr(config, name), getattr(other.config, name)
        if mine != theirs:
            raise ConfigError(
                f"LLM(..., share=...) with {name}={mine!r}",
                f"the shared target was loaded with {theirs!r}",
                "give the same, or leave share out",
            )
    return other._target


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint whose configuration was read, and nothing else."""

    name: str
    folder: Path
    shape: DecoderConfig
    dtype: torch.dtype  # of the activations
    quantised: bool


def _open(config: LLMConfig, name: str, dtype: str) -> _Source:
    revision = config.revision if name == config.model else None
    folder = resolve_folder(name, revision=revision, offline=config.offline)
    if is_file(folder / CONFIG_FILE):
        raise ConfigError(
            f"model {name!r}",
            "it is a set that was trained for a model, not a model",
            "give it as an application, or to drafter='streams:...'",
        )
    shape = read_config(folder)
    kind, quant = parse_dtype(dtype, shape)
    return _Source(name, folder, shape, kind, quant is not None)


def _load(config: LLMConfig, source: _Source, exact: bool) -> LoadedModel:
    folder, kind = source.folder, source.dtype
    compiled = _native(config, source.shape, kind)
    backend = config.attention
    if backend == "auto":
        backend = "reference" if kind == torch.float64 else "sdpa"
    if exact and backend == "reference" and kind != torch.float64:
        raise CapabilityError(
            "exact=True with attention='reference'",
            "the dense reference does not keep a row's order of summation",
            "use attention='sdpa'",
        )
    files = [folder / n for n in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")]
    tokenizer = load_tokenizer(folder) if any(map(is_file, files)) else None
    decoder = load_model(
        folder,
        attention=make_backend(backend, kind, exact=exact),
        dtype="int8" if source.quantised else kind,
        device=config.device,
        exact=exact,
        native=compiled,
    )
    return LoadedModel(source.name, decoder, tokenizer, folder)


def _native(config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether the compiled layers run this model."""
    asked_for_torch = config.kernels == "torch" or config.attention != "auto"
    if config.kernels == "native" and config.attention != "auto":
        raise ConfigError(
            f"kernels='native' with attention={config.attention!r}",
            "the compiled layers have an attention of their own",
            "leave attention out, or use kernels='torch'",
        )
    if asked_for_torch:
        return False
    why = unsupported(shape, dtype, parse_device(config.device))
    if why and config.kernels == "native":
        raise CapabilityError("kernels='native'", why, "use kernels='auto' or 'torch'")
    return why is None


def _build_engine(config: LLMConfig, target: LoadedModel) -> Engine:
    decoder = target.decoder
    applications = _load_applications(config, target)
    streams = _most_streams(applications)
    drafter = _build_drafter(config, target, streams)
    max_model_len = _max_model_len(config, decoder.config)
    scheduler = SchedulerConfig(max_sequences=config.max_sequences, max_batch_rows=config.max_batch_rows)
    pool = _make_pool(config, decoder, max_model_len, _scratch_slots(config, drafter, streams))
    if drafter is not None:
        info = decoder.info(target.name, target.tokenizer)
        drafter.bind(info, config.max_sequences, pool.num_tokens, decoder.device)
    budget = _make_budget(config, drafter, target)
    round_ = make_round(config.round, target=decoder, pool=pool, drafter=drafter, verifier=config.verifier)
    limits = EngineLimits(
        vocab_size=decoder.config.vocab_size, max_model_len=max_model_len, eos_ids=decoder.config.eos_ids
    )
    return Engine(round_, pool, limits, scheduler, budget, texts_of(target.tokenizer), applications)


def _load_applications(config: LLMConfig, target: LoadedModel) -> dict[str, Application]:
    """The trained sets that requests may name."""
    folders = locate(config.applications or {}, config.offline)
    return load_applications(folders, target.decoder, target.name, target.folder)


def _build_drafter(config: LLMConfig, target: LoadedModel, streams: int) -> Drafter | None:
    chosen = registry.parse(config.drafter)
    if chosen is None:
        return None

    def load(name: str, dtype: str) -> LoadedModel:
        wanted = str(target.decoder.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        return _load(config, _open(config, name, wanted), exact=False)

    context = DrafterContext(
        load_model=load,
        dtype=target.decoder.dtype,
        device=parse_device(config.device),
        offline=config.offline,
        revision=config.revision,
        find=lambda name: resolve_folder(name, offline=config.offline),
        target=target.name,
        target_folder=target.folder,
        streams=streams,
    )
    return registry.build(chosen, context)


def _make_budget(config: LLMConfig, drafter: Drafter | None, target: LoadedModel) -> DraftBudget:
    if drafter is None:
        return FixedBudget(size=0, why="no drafter was named")
    chosen = parse_budget(config.budget)
    if chosen != AUTO:
        return chosen
    if drafter.spec.default_budget == 0:
        return FixedBudget(size=0, why=f"drafter {drafter.spec.name!r} drafts nothing by default")
    return _auto_budget(config, drafter, target)


def _auto_budget(config: LLMConfig, drafter: Drafter, target: LoadedModel) -> AutoBudget:
    """Costs from the model's calibration, where there is one for this machine; else estimated now."""
    decoder = target.decoder
    found, where = calibration.find(target.folder, _fingerprint(config, decoder))
    if found is not None:
        table, drafts = found.table, found.drafts
    else:
        table, drafts = calibration.quick_estimate(decoder, config.max_sequences, why=where), {}
    cap = drafter.spec.default_budget
    guess = draft_guess(table, drafts.get(_draft_name(config)), network=drafter.spec.cache is not None)
    prepares = drafter.spec.streams is not None
    return AutoBudget(table, cap=cap, tree=drafter.spec.tree, draft_guess=guess, prepares=prepares)


def _fingerprint(config: LLMConfig, decoder: Decoder) -> Fingerprint:
    kernels = "native" if _native(config, decoder.config, decoder.dtype) else "torch"
    return calibration.fingerprint(decoder, kernels)


def _draft_name(config: LLMConfig) -> str:
    """The calibration's name for the draft model that the drafter runs; empty where it runs none."""
    chosen = registry.parse(config.drafter)
    name = getattr(chosen, "model", None)
    return draft_key(str(name), str(getattr(chosen, "dtype", "auto"))) if name else ""


def draft_key(name: str, dtype: str) -> str:
    """What a calibration calls the passes of a draft model."""
    return f"{name},dtype={dtype}"


def _max_model_len(config: LLMConfig, shape: DecoderConfig) -> int:
    context = shape.max_position
    wanted = config.max_model_len
    if wanted is None:
        return context
    if wanted < 2:
        raise ConfigError(f"max_model_len={wanted}", "a prompt and an answer take two tokens", "give 2 or more")
    if wanted > context:
        note = f" ({shape.max_position_note})" if shape.max_position_note else ""
        raise ConfigError(
            f"max_model_len={wanted}", f"{config.model} has {context} positions{note}", f"give {context} or less"
        )
    return wanted


def _most_streams(applications: Mapping[str, Application]) -> int:
    """Most streams that a row of an application carries; 0: none has any."""
    return max((a.streams.config.gamma for a in applications.values() if a.streams is not None), default=0)


def _scratch_slots(config: LLMConfig, drafter: Drafter | None, streams: int) -> int:
    """K/V slots that the streams of one pass need; ``streams``: most of a row of an application."""
    rules = drafter.spec.streams if drafter is not None else None
    return 0 if rules is None else rules.scratch_slots(streams, config.max_batch_rows, config.max_sequences)


def _pool_tokens(
    config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype, max_model_len: int, scratch: int = 0
) -> int:
    """Tokens that the K/V pool is to hold, once it is known that there is memory for them."""
    per_token = _token_bytes(shape, dtype)
    # One sequence alone must always fit, with its last token's row.
    least = max_model_len + 1
    if config.kv_memory is None:
        most = (max_model_len + 1) * config.max_sequences
        tokens = max(least, min(most, DEFAULT_KV_BYTES // per_token))
    else:
        tokens = parse_bytes(config.kv_memory) // per_token
        if tokens < least:
            raise ConfigError(
                f"kv_memory={config.kv_memory}",
                f"it holds {tokens} tokens of {per_token} bytes, and one request may have {max_model_len}",
                f"give {least * per_token} bytes or more, or a smaller max_model_len",
            )
    wanted, free = (tokens + scratch) * per_token, _free_bytes(parse_device(config.device))
    if free is not None and wanted > free:
        raise _too_little_memory(config, max_model_len, per_token, wanted, f"{free / 2**30:.1f} GiB are free")
    return tokens


def _token_bytes(shape: DecoderConfig, dtype: torch.dtype) -> int:
    return KVPool.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)


def _make_pool(config: LLMConfig, decoder: Decoder, max_model_len: int, scratch: int) -> KVPool:
    shape = decoder.config
    tokens = _pool_tokens(config, shape, decoder.dtype, max_model_len, scratch)
    try:
        return KVPool(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            tokens,
            decoder.dtype,
            decoder.device,
            scratch_slots=scratch,
        )
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError, or its OutOfMemoryError
        per_token = _token_bytes(shape, decoder.dtype)
        wanted = (tokens + scratch) * per_token
        raise _too_little_memory(config, max_model_len, per_token, wanted, "there is not so much to give") from error


def _too_little_memory(config: LLMConfig, max_model_len: int, per_token: int, wanted: int, why: str) -> ConfigError:
    asked = f"kv_memory={config.kv_memory}" if config.kv_memory is not None else "the default kv_memory"
    return ConfigError(
        f"{asked} on {config.device}",
        f"K/V of {wanted // per_token:,} tokens takes {wanted / 2**30:.1f} GiB, and {why}",
        f"give max_model_len (now {max_model_len:,}; one request of 4,096 tokens takes "
        f"{4096 * per_token / 2**30:.2f} GiB) or a smaller kv_memory",
    )
