"""``LLM``, the interface for ordinary programs: batches, and answers token by token. `async_llm` is for event loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from .. import kernels as native
from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..core.outputs import Chunk, RequestOutput
from ..core.sampling import SamplingParams
from ..draft import adapted
from ..draft.hybrid import with_parts
from ..draft.registry import DrafterConfig
from ..engine.engine import LiveRequest
from ..engine.lock import ReentryError
from ..engine.tokens import Prompt, chat_ids, encode
from ..model.applications import locate, rows_beside
from ..model.decoder import Decoder
from ..weights import generation, zoo
from ..weights.source import Source, reader_of
from .assembly.engine import build_engine, load_target
from .assembly.models import LoadedModel, start
from .config import TARGET_OPTIONS, LLMConfig, config_of
from .options import AUTO_DRAFTER

Message = Mapping[str, Any]  # {"role": .., "content": ..}
log = logging.getLogger(__name__)
_LEARN = "paceline.adapt.learning.begin:begin"  # imported where it is needed
Job = Callable[..., str]  # `Engine.submit` of a request that is all but submitted


class LLM:
    """A target model with an engine, ready for requests.

    Every method may be called from any thread, and from the ``progress`` callback of `generate`. Requests of all
    threads share the engine's batches; waiting threads run one step each, in their order of arrival.

    Args:
        model: an embedded model's name, a local Hugging Face folder, or a hub name.
        share: an `LLM` of the same target, whose weights are used in place of loading them again; K/V, drafter and
            engine are not shared.
        beside: drafters that are called before the one that ``drafter="auto"`` stands for.
        options: the fields of `LLMConfig`.

    Raises:
        ConfigError: an option, file or combination that cannot be used; raised before any request.
    """

    def __init__(self, model: str, *, share: LLM | None = None, beside: Sequence[str] = (), **options: Any) -> None:
        self.config = config_of(model, options)
        source = self.config.resolve()
        hosts = None if self.config.cluster is None else start("ray_cluster:ClusterHosts", self.config)
        candidates = drafters_of(self.config, source, beside)
        self.config = replace(self.config, drafter=candidates[0])
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._target = load_target(self.config, source) if share is None else self._shared(share)
        self.tokenizer = self._target.tokenizer
        refusals: list[CapabilityError] = []
        for drafter in candidates:
            self.config = replace(self.config, drafter=drafter)
            try:
                self.engine = build_engine(self.config, self._target, hosts)
                break
            except CapabilityError as error:
                refusals.append(error)
        else:
            raise refusals[0]
        if refusals:
            words = "drafter %r, the default of this model, cannot be used here: %s. The drafter %r is used instead."
            log.warning(words, candidates[0], refusals[0].wrong, drafter)
        self.learning: Any = None
        if self.config.learn is not None:
            self.learning = resolve_name(_LEARN)(self.config, self._target, self.engine)

    def _shared(self, other: Any) -> LoadedModel:
        """Another one's target, if it is what this one's configuration requests."""
        if not isinstance(other, LLM):
            raise ConfigError(f"LLM(..., share={shown(other)})", "it is not an LLM", "give one of the same target")
        for name in TARGET_OPTIONS:
            mine, theirs = getattr(self.config, name), getattr(other.config, name)
            subject, remedy = f"LLM(..., share=..., {name}={shown(mine)})", "leave share out"
            if mine != theirs:
                raise ConfigError(subject, f"the shared target was loaded with {shown(theirs)}", remedy)
            if (name == "pipeline" and mine is not None) or (name == "tensor_parallel" and mine > 1):
                raise ConfigError(subject, "its layers lie in processes that serve one engine", remedy)
        return other._target

    @property
    def decoder(self) -> Decoder:
        """Return the target's network."""
        return self._target.decoder

    @property
    def folder(self) -> Path:
        """Return the target's local folder."""
        return self._target.folder

    @property
    def kernels(self) -> str:
        """Return the kernels of the layers: "native" with the instructions in use, or "torch"."""
        return "torch" if self.decoder.stack is None else f"native ({native.describe()})"

    def describe_learning(self) -> dict[str, Any]:
        """Return whether requests are learned from, and how that stands; ready for JSON."""
        if self.learning is None:
            return {"state": "off: nothing of any request is kept, and nothing is learned"}
        return self.learning.describe()

    # -- answers

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return how the model is sampled by ``paceline chat``, by its ``generation_config.json``.

        Of that file come temperature, top_p, top_k, min_p and repetition_penalty; with ``do_sample: false`` the
        temperature is 0.
        Where it has none of these but a penalty, or there is no file: temperature=0.7 and top_p=0.95. All else is as in
        `SamplingParams()`, which is also what requests without parameters get.

        Args:
            overrides: fields of `SamplingParams` that go before the file's, such as ``max_tokens=256``.

        Raises:
            ConfigError: the file is broken, or has a value that cannot be; a given one that cannot be.
        """
        return generation.sampling(self.folder, overrides)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int], None] | None = None,
        application: str | Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer prompts, batched as memory and limits allow.

        A request whose own sampling rules, text or stop rules fail ends alone, with
        ``finish_reason="error"``; see `RequestOutput.error`.

        Args:
            prompts: one or many; text, or ``{"prompt_token_ids": [...]}``.
            params: one for all, or one a prompt; default: `SamplingParams()`.
            progress: called with the number of finished answers.
            application: whose adapters answer, one for all or one a prompt; None: the base model.
            options: for all of them, as for `stream`.

        Returns:
            One output a prompt, in their order.

        Raises:
            ConfigError: a prompt, parameters or an application that cannot be used; no request was begun then.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = _one_each(params, SamplingParams, len(many), "SamplingParams")
        names = _one_each(application, str, len(many), "applications")
        return self._run([self.job(*row, **options) for row in zip(many, each, names, strict=True)], progress)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        stream: bool = False,
        application: str | None = None,
        **options: Any,
    ) -> Any:
        """Answer a conversation: a list with one output, or with ``stream=True`` an iterator of `Chunk`.

        ``options`` are as for `stream`.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the messages, or there is no such
                application.
        """
        job = self.chat_job(messages, params, application, **options)
        return self._stream(job) if stream else self._run([job], None)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, application: str | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Stream the answer to one prompt. Closing the iterator early ends the request.

        Args:
            prompt, params, application: as for `generate`.
            options: ``resume_tokens``, ``priority``, ``deadline_s``, ``speculation`` and ``store`` of `Engine.submit`.

        Raises:
            ConfigError: the prompt, the parameters or the application cannot be used.
            RequestError: after the last chunk, if the request's own rules failed.
        """
        return self._stream(self.job(prompt, params, application, **options))

    def job(self, prompt: Prompt, params: SamplingParams | None, application: str | None, **options: Any) -> Job:
        """Return a request for `stream` that is not submitted yet; errors as there."""
        return self._job(*encode(prompt, self.tokenizer), params, application, options)

    def chat_job(
        self, messages: Sequence[Message], params: SamplingParams | None, application: str | None, **options: Any
    ) -> Job:
        """Return a request for `chat` that is not submitted yet; errors as there."""
        ids, text = chat_ids(messages, self.tokenizer, self.config.model)
        return self._job(ids, text, params, application, options)

    def _job(
        self, ids: list[int], text: str | None, params: SamplingParams | None, application: str | None, options: Any
    ) -> Job:
        self.engine.check_application(application)
        arguments = {"prompt": text, "application": application, **options}
        return partial(self.engine.submit, ids, params or SamplingParams(), **arguments)

    def forget(self) -> None:
        """Drop what is kept of requests that ended: K/V of their texts, and what the drafter remembers of them.

        Call it before a prompt that is timed, or whose passes are counted: a drafter may have kept the answer
        to it. What the draft budget has learned of chances and costs stays.
        """
        with self.engine.lock:
            self.engine.forget()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in flight. Returns its output so far, or None if there is no such request."""
        with self.engine.lock:
            return self.engine.abort(request_id)

    def _run(self, jobs: Sequence[Job], progress: Callable[[int], None] | None) -> list[RequestOutput]:
        engine = self.engine
        lives: list[LiveRequest] = []
        ended: dict[str, LiveRequest] = {}
        reported = 0
        try:
            for job in jobs:
                with engine.lock:
                    lives.append(engine.live[job(on_end=lambda live: ended.update({live.id: live}))])
            while reported < len(lives):
                with torch.inference_mode(), engine.lock:
                    while reported == len(ended):  # another thread's steps, or an abort, may have ended one
                        engine.step()
                        if engine.lock.contended:
                            break
                while reported < len(ended):
                    reported += 1
                    if progress:
                        progress(reported)
            with engine.lock:
                return [engine.output(live) for live in lives]
        except BaseException as error:
            if not isinstance(error, ReentryError):  # else the lock belongs to the step that this was called from
                engine.lock.free_mine()
            self.give_up(lives)
            raise

    def begin(self, job: Job) -> LiveRequest:
        """Submit a request."""
        with self.engine.lock:
            return self.engine.live[job()]

    def advance(self, live: LiveRequest) -> list[Chunk]:
        """Return what is new of a request; where nothing is, after a step of the engine, which may bring nothing."""
        with self.engine.lock:
            fresh = self.engine.chunks(live)
            if not fresh and live.ended is None:  # another thread's steps, or an abort, may have ended it
                self.engine.step()
                fresh = self.engine.chunks(live)
            return fresh

    def give_up(self, lives: Sequence[LiveRequest]) -> None:
        """End requests; safe to call from anywhere, even from a garbage collector in the middle of a step."""
        for live in lives:
            self.engine.cancel(live.id)
        if self.engine.lock.take_if_free():  # else whoever holds it will see to it
            try:
                self.engine.settle()
            finally:
                self.engine.lock.__exit__()

    def _stream(self, job: Job) -> Iterator[Chunk]:
        live = self.begin(job)

        def chunks() -> Iterator[Any]:
            output: RequestOutput | None = None  # comes with the last chunk
            try:
                yield None  # taken below: a generator that was never entered would not run its end
                while output is None:
                    yield from (fresh := self.advance(live))
                    output = fresh[-1].output if fresh else None
                output.raise_failed()
            except ReentryError:  # the lock belongs to the step that this was called from
                raise
            except (Exception, KeyboardInterrupt):
                # Not where the generator is closed, which a collector may do in a step.
                self.engine.lock.free_mine()
                raise
            finally:
                self.give_up([live])

        answer = chunks()
        next(answer)
        return answer


def _one_each(value: Any, kind: type[Any], count: int, what: str) -> list[Any]:
    """Return what belongs to each prompt: one of ``kind`` (or None) for all, or one a prompt."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if len(value) != count:
        remedy = "give one for all or one a prompt"
        raise ConfigError(f"{len(value)} {what} for {count} prompts", "the counts differ", remedy)
    return list(value)


def drafters_of(config: LLMConfig, source: Source, beside: Sequence[str] = ()) -> list[str | DrafterConfig | None]:
    """List the drafters that a configuration allows, best first, each with ``beside`` before it.

    That is the one that it names, or for ``auto`` what `paceline adapt` made for the model's weights, the zoo's choice,
    and look-ups.
    Applications whose rows have others next to them leave no choice: their answers depend on these.

    Raises:
        ConfigError: a file of an adapted drafter is not the one that was made.
    """
    if config.drafter != AUTO_DRAFTER:
        return [config.drafter]
    if sets := [*filter(rows_beside, locate(config.applications or {}, config.offline).values())]:
        return [reader_of(sets[0])]
    dtype = "auto" if config.dtype == "stored" else config.dtype  # of a file's blocks, which `auto` computes with, too
    prior = adapted.find(source.folder, dtype) if adapted.any_made() else None
    stored = dtype == "auto" and source.folder.is_dir() and source.shape.checkpoint_dtype
    ours = [prior and adapted.named(prior), zoo.default_drafter(str(source.folder), stored or dtype)]
    names = dict.fromkeys([*filter(None, ours), zoo.LOOK_UP])
    return [with_parts(beside, name) if beside else name for name in names]
