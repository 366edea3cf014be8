"""The loop: submit, step, collect, abort. It knows no drafter and no round by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from ..core.errors import CapabilityError, ConfigError
from ..core.request import CompletionOutput, Request, RequestOutput, SequenceState, StopChecker
from ..core.sampling import SamplingParams, SequenceSampler, derive_seed
from ..core.stats import SpecStats
from ..drafters.base import SequenceView
from ..kv.pool import KVPool
from ..rounds.base import Round, RunningSequence, StepResult, StreamingRound, Work
from ..target.applications import Application
from .budget import DraftBudget, StepRecord
from .scheduler import Scheduler, SchedulerConfig

DecodeStepFactory = Callable[[Sequence[int], bool], Callable[[int], str] | None]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What a request must fit into."""

    vocab_size: int
    max_model_len: int  # prompt and output together
    eos_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in flight: its samples and its clock."""

    request: Request
    sequences: list[RunningSequence]
    submitted: float  # perf_counter seconds
    first_token: float | None = None
    ended: float | None = None
    text_prefix: str = ""  # the prompt's text, where it is to be echoed
    announced: dict[int, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(s.finished for s in self.sequences)


class Engine:
    """Continuous batching over one target.

    Args:
        round_: when guessing and checking happen.
        pool: the target's K/V.
        limits: what requests must fit into.
        scheduler: limits of a step.
        budget: how many nodes to draft.
        make_decoder: prompt ids and skip_special_tokens -> a function from one token to its text; None for a
            model without a tokenizer.
        applications: what requests may name, by name.
    """

    def __init__(
        self,
        round_: Round,
        pool: KVPool,
        limits: EngineLimits,
        scheduler: SchedulerConfig,
        budget: DraftBudget,
        make_decoder: DecodeStepFactory | None = None,
        applications: Mapping[str, Application] | None = None,
    ) -> None:
        _check_streams(round_, applications or {})
        self.round = round_
        self.pool = pool
        self.limits = limits
        self.budget = budget
        self.applications = dict(applications or {})
        self.scheduler = Scheduler(pool, scheduler, budget)
        self.live: dict[str, LiveRequest] = {}
        self._make_decoder = make_decoder
        self._keys = count()
        self._arrivals = count()

    # -- requests

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        application: str | None = None,
    ) -> str:
        """Check a request and queue it.

        Args:
            prompt_ids, params: what is asked.
            request_id: to know it by; None: one is made up.
            prompt: its text, where text was given.
            application: whose adapters answer; None: the base model.

        Returns:
            Its id.

        Raises:
            ConfigError: the prompt is empty, too long, holds an unknown id, the parameters do not fit the
                vocabulary, or there is no such application. Nothing is queued.
        """
        self.check_application(application)
        arrival = next(self._arrivals)
        request_id = request_id if request_id is not None else f"request-{arrival}"
        self._check(prompt_ids, request_id)
        seed = params.seed if params.seed is not None else derive_seed()
        request = Request(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            arrival=arrival,
            seed=seed,
            prompt=prompt,
            application=application,
        )
        sequences = [self._sequence(request, index) for index in range(params.n)]
        self._check_pool(sequences[0])
        echo = prompt if params.echo and prompt is not None else ""
        self.live[request_id] = LiveRequest(request, sequences, perf_counter(), text_prefix=echo)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return request_id

    def check_application(self, name: str | None) -> None:
        """Raises ConfigError where a request cannot name this application."""
        if name is None or name in self.applications:
            return
        known = ", ".join(sorted(self.applications))
        raise ConfigError(
            f"application={name!r}",
            "there is no such application",
            f"name one of: {known}, or none for the base model" if known else "load it: LLM(..., applications={...})",
        )

    def _check(self, prompt_ids: Sequence[int], request_id: str) -> None:
        limits = self.limits
        if request_id in self.live:
            raise ConfigError(f"request id {request_id!r}", "it is in use", "choose another, or leave it out")
        if not prompt_ids:
            raise ConfigError("an empty prompt", "a model continues at least one token", "give text, or a BOS token")
        if len(prompt_ids) >= limits.max_model_len:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens",
                f"prompt and output together have room for {limits.max_model_len} tokens",
                "shorten the prompt, or raise max_model_len where model and kv_memory allow it",
            )
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= limits.vocab_size:
            raise ConfigError(
                f"prompt token id {low if low < 0 else high}",
                f"ids go from 0 to {limits.vocab_size - 1}",
                "encode the prompt with this model's tokenizer",
            )

    def _check_pool(self, sequence: RunningSequence) -> None:
        needed = sequence.max_len - 1  # the last token's K/V is never computed
        if needed > self.pool.num_tokens:
            raise ConfigError(
                f"a request of up to {sequence.max_len} tokens",
                f"the K/V pool holds {self.pool.num_tokens}",
                "raise kv_memory, or lower max_tokens",
            )

    def _sequence(self, request: Request, index: int) -> RunningSequence:
        limits, params = self.limits, request.params
        room = limits.max_model_len - len(request.prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sampler = SequenceSampler(
            params,
            request.prompt_ids,
            seed=request.seed,
            sample_index=index,
            vocab_size=limits.vocab_size,
            eos_ids=limits.eos_ids,
        )
        decode = self._make_decoder(request.prompt_ids, params.skip_special_tokens) if self._make_decoder else None
        checker = StopChecker(params, limits.eos_ids, max_tokens, decode)
        stats = SpecStats(prompt_tokens=len(request.prompt_ids) if index == 0 else 0, off_reason=self.budget.reason())
        state = SequenceState(request, index, sampler, checker, stats=stats)
        max_len = len(request.prompt_ids) + max_tokens
        application = None if request.application is None else self.applications[request.application]
        ids = request.prompt_ids
        view = SequenceView(next(self._keys), list(ids), len(ids), sampler, max_len, application)
        return RunningSequence(state, view, max_len)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns what it has so far; None if it is not in flight."""
        live = self.live.pop(request_id, None)
        if live is None:
            return None
        open_ones = [s for s in live.sequences if not s.finished]
        for sequence in open_ones:
            sequence.state.checker.abort()
        self._drop(open_ones)
        live.ended = perf_counter()
        return self.output(live)

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        return bool(self.live)

    # -- the loop

    def step(self) -> list[LiveRequest]:
        """One step of all running sequences. Returns the requests that got tokens; finished ones leave."""
        began = perf_counter()
        works = self.scheduler.schedule()
        if self.scheduler.preempted:
            self.round.release(self.scheduler.preempted)
            self.scheduler.preempted.clear()
        if not works:
            return []
        learns = self.budget.learns
        before = _counts(works) if learns else []
        scheduled = perf_counter()
        result = self.round.step(works)
        now = perf_counter()
        if learns:
            pure = all(w.rows == 1 for w in works)
            self.budget.observe(_record(before, pure, result, (now - began) * 1e3))
        host_ms = result.host_ms + (scheduled - began) * 1e3
        share = 1 / len(works)
        for work in works:
            stats = work.sequence.state.stats
            stats.draft_ms += result.draft_ms * share
            stats.verify_ms += result.verify_ms * share
            stats.host_ms += host_ms * share
        touched: dict[str, LiveRequest] = {}
        ended = []
        for sequence, _ in result.emitted:
            live = self.live[sequence.state.request.id]
            live.first_token = live.first_token or now
            touched[live.request.id] = live
            if sequence.finished:
                stats = sequence.state.stats
                stats.off_reason = stats.off_reason or self.budget.rested(sequence)
                ended.append(sequence)
        self._drop(ended)
        for live in touched.values():
            if live.finished:
                live.ended = now
                del self.live[live.request.id]
        if not self.live:
            self.pool.check_idle()
        return list(touched.values())

    def _drop(self, sequences: Sequence[RunningSequence]) -> None:
        self.scheduler.remove(sequences)
        self.round.release(sequences)
        self.budget.forget(sequences)

    # -- answers

    def output(self, live: LiveRequest) -> RequestOutput:
        """What a request has so far, or its whole answer."""
        stats = SpecStats()
        for sequence in live.sequences:
            stats = stats.merge(sequence.state.stats)
        reference = live.ended or perf_counter()
        stats.elapsed_ms = (reference - live.submitted) * 1e3
        stats.ttft_ms = (live.first_token - live.submitted) * 1e3 if live.first_token else None
        # A drafter that failed on the way must be heard of, whatever it had drafted before.
        rested = next((s.state.stats.off_reason for s in live.sequences if s.state.stats.off_reason), None)
        stats.off_reason = self.round.failure or stats.off_reason or rested
        outputs = [self._completion(live, s) for s in live.sequences]
        wants_prompt = live.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=live.request.id,
            prompt=live.request.prompt,
            prompt_token_ids=list(live.request.prompt_ids),
            prompt_logprobs=list(live.sequences[0].prompt_logprobs) if wants_prompt else None,
            outputs=outputs,
            stats=stats,
            finished=live.ended is not None,
            application=live.request.application,
        )

    def _completion(self, live: LiveRequest, sequence: RunningSequence) -> CompletionOutput:
        completion = sequence.state.output()
        completion.text = live.text_prefix + completion.text
        return completion


def _check_streams(round_: Round, applications: Mapping[str, Application]) -> None:
    """Refuse applications whose main rows attend to streams in a round that cannot give them any."""
    for application in applications.values():
        if application.streams is None:
            continue
        if not isinstance(round_, StreamingRound):
            raise CapabilityError(
                f"application {application.name!r} in round {round_.name!r}",
                "its answers depend on streams beside every generated token, and this round has none",
                "use drafter='streams'",
            )
        round_.admit(application.streams)


Counts = tuple[Work, int, int]  # a work and its sequence's drafted and accepted tokens before the step


def _counts(works: Sequence[Work]) -> list[Counts]:
    """Of the sequences that will get tokens; to be asked before the step, which changes what is pending."""
    stats = [(w, w.sequence.state.stats) for w in works if w.generates]
    return [(w, s.drafted, s.accepted) for w, s in stats]


def _record(before: Sequence[Counts], pure: bool, result: StepResult, total_ms: float) -> StepRecord:
    """What a step did, from the statistics before and after it."""
    return StepRecord(
        sequences=[w.sequence for w, _, _ in before],
        budgets=[w.budget for w, _, _ in before],
        drafted=[w.sequence.state.stats.drafted - drafted for w, drafted, _ in before],
        accepted=[w.sequence.state.stats.accepted - accepted for w, _, accepted in before],
        pure=pure,
        draft_ms=result.draft_ms,
        rest_ms=total_ms - result.draft_ms,
    )
