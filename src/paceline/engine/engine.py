"""The loop: submit, step, collect, abort. It knows no drafter and no round by name.

An engine is driven by one thread at a time: callers in several threads hold `Engine.lock` meanwhile (`LLM` does). After
a call that was interrupted, by Ctrl-C for example, the next call restores a consistent state: see `Engine._recover`.
"""

from __future__ import annotations

import logging
from collections import abc, deque
from collections.abc import Callable, Mapping
from itertools import count
from time import perf_counter
from typing import Any, Literal

from ..core.errors import ConfigError, WorkerRestarted
from ..core.outputs import Chunk, CompletionOutput, RequestOutput
from ..core.request import StopChecker
from ..core.sampling import SamplingParams, SequenceSampler, derive_seed
from ..core.sequence import Sequence
from ..core.speculation import Speculation
from ..core.stats import SpecStats
from ..core.trace import StepTrace
from ..kv.pool import KVPool
from ..model.applications import Application
from . import checks
from .base import Round, StepResult
from .budget import DraftBudget, StepRecord
from .grammar import Grammars
from .live import EngineLimits, LiveRequest
from .lock import FairLock
from .scheduler import Scheduler, SchedulerConfig
from .snapshot import Snapshot, Totals, take
from .tokens import TokenizerTexts

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one target.

    Args:
        round_: drafting and verification of a step.
        pool: the target's K/V.
        limits: bounds of requests.
        scheduler: limits of a step.
        budget: how many nodes to draft.
        texts: detokenization; None for a model without a tokenizer.
        applications: those that requests may name, by name.
        grammars: compiles what outputs must be; None: those of a model without a tokenizer.
    """

    def __init__(
        self,
        round_: Round,
        pool: KVPool,
        limits: EngineLimits,
        scheduler: SchedulerConfig,
        budget: DraftBudget,
        texts: TokenizerTexts | None = None,
        applications: Mapping[str, Application] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        checks.check_rows_beside(round_, applications or {})
        self.round = round_
        self.pool = pool
        self.limits = limits
        self.budget = budget
        self.applications = dict(applications or {})
        self.scheduler = Scheduler(pool, scheduler, budget, lambda: round_.past)
        self.live: dict[str, LiveRequest] = {}
        self.lock = FairLock()
        self._texts = texts
        self.grammars = grammars or Grammars(None, limits.vocab_size, limits.eos_ids)
        # The learner: the engine reports each request that ended and calls it before each step. None: nothing learns.
        self.on_leave: Callable[[LiveRequest], None] | None = None
        self.between: Callable[[], None] | None = None
        self._torn = False  # whether a call is under way, or ended in its middle
        self._cancelled: deque[str] = deque()  # requests that are to be aborted
        # Requests that ended, or may have got tokens, in an interrupted step: the next step reports them.
        self._untold: list[LiveRequest] = []
        self._totals, self._steps = Totals(), 0
        self._keys = count()
        self._arrivals = count()
        self._timed: list[LiveRequest] = []  # requests with a deadline that had not ended when they were last checked

    # -- requests

    def submit(
        self,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        application: str | None = None,
        on_end: Callable[[LiveRequest], None] | None = None,
        resume_tokens: abc.Sequence[abc.Sequence[int]] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        speculation: Speculation | None = None,
        store: bool = True,
    ) -> str:
        """Check a request and queue it.

        Args:
            prompt_ids, params: the request.
            request_id: its id; None: one is generated.
            prompt: its text, where text was given.
            application: whose adapters answer; None: the base model.
            on_end: called when it has ended, in the thread that drives the engine then; must not call the engine.
            resume_tokens: by sample, the tokens that another engine emitted before it was lost; none: empty. Generation
                continues after them with the tokens that would have followed, where ``params.seed`` is what that engine
                had: `derive_seed` gives one to name ahead, and `Request.seed` is the one in use. They are part of the
                output, but a stream does not send them again; their log-probabilities are empty.
            priority: lower ones run first, and are preempted last; equal ones by arrival.
            deadline_s: seconds from now after which it ends between two steps with what it has, as "deadline".
            speculation: options of its drafts; None: as for any.
            store: whether it may be learned from, where a learner runs.

        Returns:
            Its id.

        Raises:
            ConfigError: the prompt is empty, too long, holds an unknown id, the parameters do not fit the
                vocabulary, there is no such application or source, what was emitted cannot have been, or a grammar
                cannot be read or met. Nothing is queued.
            CapabilityError: a choice of speculation that this round has not by request, or a grammar where there is
                none to be had. Nothing is queued.
        """
        self.check_application(application)
        arrival = next(self._arrivals)
        request_id = request_id if request_id is not None else f"request-{arrival}"
        if request_id in self.live:
            raise ConfigError(f"request id {request_id!r}", "it is in use", "choose another, or leave it out")
        checks.check_prompt(prompt_ids, self.limits)
        checks.check_said(resume_tokens, params.n, self.limits)
        checks.check_deadline(deadline_s)
        sources = None if speculation is None else speculation.chosen(self.round.sources)
        if speculation is not None and speculation.prediction:
            remedy = "encode the prediction with this model's tokenizer"
            checks.check_ids("predicted token id", speculation.prediction, self.limits, remedy)
        prefix = checks.echo(self._texts, prompt_ids, prompt, params)
        live = LiveRequest(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(),
            submitted=perf_counter(),
            prompt=prompt,
            application=application,
            priority=priority,
            text_prefix=prefix,
            store=store,
            on_end=on_end,
        )
        live.sequences = [self._sequence(live, index) for index in range(params.n)]
        checks.check_room(len(prompt_ids) + live.sequences[0].checker.max_tokens, self.pool.num_tokens)
        if speculation is not None:
            for sequence in live.sequences:
                sequence.max_nodes = speculation.max_nodes if speculation.enabled else 0
                sequence.sources, sequence.prediction = sources, speculation.prediction
                sequence.trace = [] if speculation.trace else None
        for sequence, tokens in zip(live.sequences, resume_tokens, strict=False):
            _say_again(sequence, tokens)
        self._begin()
        try:
            self.live[request_id] = live
            live.sent = [(len(s.output_ids), s.checker.stable_length) for s in live.sequences]
            if deadline_s is not None:
                live.deadline = live.submitted + deadline_s
                self._timed.append(live)
            for sequence in live.sequences:
                if sequence.finished:  # the request ends with its tokens so far, and the next step reports it
                    self._untold.append(live)
                else:
                    self.scheduler.add(sequence)
            self._end()
        except BaseException:  # the caller does not get its id
            self.cancel(request_id)
            raise
        return request_id

    def check_application(self, name: str | None) -> None:
        """Raise ConfigError where a request cannot name this application."""
        if name is None or name in self.applications:
            return
        names = ", ".join(sorted(self.applications))
        remedy = (
            f"name one of: {names}, or none for the base model" if names else "load it: LLM(..., applications={...})"
        )
        raise ConfigError(f"application={name!r}", "there is no such application", remedy)

    def _sequence(self, live: LiveRequest, index: int) -> Sequence:
        limits, params, prompt_len = self.limits, live.params, len(live.prompt_ids)
        room = limits.max_model_len - prompt_len
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sampler = SequenceSampler(
            params,
            live.prompt_ids,
            seed=live.seed,
            sample_index=index,
            vocab_size=limits.vocab_size,
            eos_ids=limits.eos_ids,
            matcher=None if params.grammar is None else self.grammars.matcher(params.grammar),
        )
        texts = self._texts
        stream = None if texts is None else texts.stream(live.prompt_ids, params.skip_special_tokens)
        sequence = Sequence(
            next(self._keys),
            sampler.tokens,
            prompt_len,
            sampler,
            max_len=prompt_len + max_tokens,
            application=None if live.application is None else self.applications[live.application],
            request_id=live.id,
            priority=live.priority,
            stats=SpecStats(prompt_tokens=prompt_len if index == 0 else 0, off_reason=self.budget.reason()),
            token_text=None if texts is None else texts.token,
        )
        sequence.checker = StopChecker(params, limits.eos_ids, max_tokens, stream)
        return sequence

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns its output so far; None if it is not in flight."""
        live = self.live.get(request_id)
        if live is None:
            return None
        self._begin()
        self._abort(live)
        self._end()
        return self.output(live)

    def cancel(self, request_id: str) -> None:
        """Have a request aborted by the next call that changes the engine.

        Safe from anywhere: another thread, or a garbage collector in the middle of a step.
        """
        self._cancelled.append(request_id)

    def settle(self) -> None:
        """Abort the cancelled requests now."""
        if self._cancelled:
            self._begin()
            self._end()

    def _abort(self, live: LiveRequest) -> None:
        self._stop(live, "abort")
        self._leave(live)

    def _stop(self, live: LiveRequest, reason: Literal["abort", "deadline"]) -> None:
        """End the samples of a request from outside."""
        open_ones = [s for s in live.sequences if not s.finished]
        for sequence in open_ones:
            sequence.checker.end(reason)
        self._drop(open_ones)

    def _expire(self) -> None:
        """End the requests whose deadline has passed; the step reports them."""
        now = perf_counter()
        self._timed = [live for live in self._timed if not live.finished]
        for live in self._timed:
            if live.deadline <= now:
                self._stop(live, "deadline")
                self._untold.append(live)

    def _leave(self, live: LiveRequest) -> None:
        """Take out a request whose last sample has ended."""
        if live.ended is None:
            live.ended = perf_counter()
            self._totals.add(live)
            if self.on_leave is not None:
                self.on_leave(live)
        if live.on_end is not None:
            live.on_end(live)
        if self.live.get(live.id) is live:  # another request may have been given the id since
            del self.live[live.id]

    @property
    def busy(self) -> bool:
        """Return whether any request is in flight, or rows of one that has ended."""
        return bool(self.live) or self.round.busy

    # -- the loop

    def step(self) -> list[LiveRequest]:
        """One step of all running sequences. Returns the requests that got tokens or ended; finished ones leave."""
        self._begin()
        if self.between is not None:
            self.between()
        if self._timed:
            self._expire()
        try:
            touched, ended = self._step()
        except WorkerRestarted as error:  # the next call begins with what was surely emitted
            log.warning("%s; K/V of all requests is computed again", error)
            return []
        updated = [*touched.values()]
        if self._untold:
            waits = [live for live in dict.fromkeys(self._untold) if self.live.get(live.id) is live]
            updated += [live for live in waits if touched.get(live.id) is not live]
        if ended or self._untold:
            for live in updated:
                if live.finished:
                    self._leave(live)
            self._untold = []
        self._end()
        if not self.live and not self.round.busy:
            self.pool.check_idle()
        return updated

    def _step(self) -> tuple[dict[str, LiveRequest], bool]:
        """Run a step; return the requests that got tokens or ended, and whether a sample of one ended."""
        began = perf_counter()
        self._steps += 1
        works = self.scheduler.schedule()
        if self.scheduler.preempted:
            self.round.release(self.scheduler.preempted)
            self.scheduler.preempted.clear()
        if not works and not self.round.busy:
            return {}, False
        learns = self.budget.learns
        scheduled = perf_counter()
        result = self.round.step(works, self.budget.rule)
        now = perf_counter()
        if self.scheduler.paced:
            self.scheduler.took((now - began) * 1e3)
        if learns and result.works:
            self.budget.observe(_record(result, (now - began) * 1e3))
        _share_times(result, result.host_ms + (scheduled - began) * 1e3)
        touched: dict[str, LiveRequest] = {}
        ended = []
        for sequence, tokens in result.emitted:
            request_id = sequence.request_id
            live = touched[request_id] = self.live[request_id]
            if tokens and live.first_token is None:
                live.first_token = now
            if tokens and sequence.trace:
                self._complete(sequence.trace, result)
            if sequence.finished:
                stats = sequence.stats
                drafter = self.round.drafter
                idle = None if drafter is None else drafter.idle_reason(sequence)
                stats.off_reason = stats.off_reason or idle or self.budget.idle_reason(sequence)
                ended.append(sequence)
        if ended:
            self._drop(ended)
        return touched, bool(ended)

    def _complete(self, trace: list[StepTrace], result: StepResult) -> None:
        """Add the figures of the whole step to the record of one sequence."""
        why = self.budget.explain()
        for step in reversed(trace):
            if step.why:  # an earlier step made these tokens
                break
            step.why, step.batch_size = why, len(result.works)
            step.draft_ms, step.verify_ms, step.host_ms = result.draft_ms, result.verify_ms, result.host_ms

    # -- calls that end in their middle

    def _begin(self) -> None:
        """Begin a change that must be completed by `_end`; first repairs what an interrupted one left."""
        if self._torn:
            self._recover()
        self._torn = True
        while self._cancelled:
            live = self.live.get(self._cancelled[0])
            if live is not None:
                self._abort(live)
            self._cancelled.popleft()

    def _end(self) -> None:
        """End a change that is complete; not reached if it was interrupted."""
        self._torn = False

    def _recover(self) -> None:
        """Reset every request in flight to the tokens that were surely emitted, and queue all of them again.

        Emitted tokens and the seed determine everything else, which is computed again with the same result. So no state
        that a step, an abort or a submission left half done (caches, queues, texts) is used.
        """
        old = [s for live in self.live.values() for s in live.sequences]
        self.round.release([*old, *self.scheduler.running])
        self.budget.forget(old)
        self.pool.reset()
        for live in self.live.values():
            live.sequences = [self._rebuild(live, sequence) for sequence in live.sequences]
        waiting = [s for live in self.live.values() for s in live.sequences if not s.finished]
        self.scheduler.reset(waiting)
        self._untold = list(self.live.values())

    def _rebuild(self, live: LiveRequest, old: Sequence) -> Sequence:
        """Return a new sequence with the emitted tokens of an old one; one that was ended from outside as it is."""
        old.cache = None
        if old.checker.finish_reason in ("abort", "deadline", "error"):
            return old
        fresh = self._sequence(live, old.sampler.sample_index)
        for name in ("max_nodes", "sources", "prediction", "trace", "admitted", "stats", "prompt_logprobs"):
            setattr(fresh, name, getattr(old, name))
        if ids := old.output_ids:  # the last thing that `Sequence.emit` appends to
            count = fresh.emit(ids, 0, old.logprobs[: len(ids)])
            fresh.origins[:] = old.origins[:count]
        if fresh.fault is not None:
            fresh.checker.end("error")
        return fresh

    def _drop(self, sequences: abc.Sequence[Sequence]) -> None:
        self.scheduler.remove(sequences)
        self.round.release(sequences)
        self.budget.forget(sequences)

    def forget(self) -> None:
        """Drop what is kept of requests that ended: see `LLM.forget`."""
        self.pool.forget()
        self.round.forget()

    def snapshot(self) -> Snapshot:
        """Counters of all requests so far, and what is held now."""
        return take(self.live.values(), self.scheduler, self._totals, self._steps)

    def describe_speculation(self) -> dict[str, Any]:
        """Return the sources that requests may choose among, what the budget chose and why; ready for JSON."""
        return {
            "round": self.round.name,
            "sources": list(self.round.sources),
            "failure": self.round.failure,
            "budget": {"nodes": self.budget.most_nodes, "why": self.budget.explain()},
        }

    # -- answers

    def chunks(self, live: LiveRequest) -> list[Chunk]:
        """Return a chunk of each sample with something new since the last call; the last one of all has the output.

        Its cost does not depend on what was streamed before.
        """
        chunks = []
        for index, (sequence, sent) in enumerate(zip(live.sequences, live.sent, strict=True)):
            if sent is None or not (sequence.finished or sequence.checker.num_tokens > sent[0]):
                continue
            chunk = sequence.output(Chunk, *sent, request_id=live.id, prompt_token_ids=live.prompt_ids)
            live.sent[index] = None if chunk.finished else (sequence.checker.num_tokens, sent[1] + len(chunk.text))
            if not sent[0]:
                chunk.text = live.text_prefix + chunk.text
            chunks.append(chunk)
        if chunks and not any(live.sent):
            chunks[-1].output = self.output(live)
        return chunks

    def output(self, live: LiveRequest) -> RequestOutput:
        """Return a request's output so far, or its whole answer."""
        stats = SpecStats()
        for sequence in live.sequences:
            stats = stats.merge(sequence.stats)
        reference = live.ended or perf_counter()
        stats.elapsed_ms = (reference - live.submitted) * 1e3
        stats.ttft_ms = (live.first_token - live.submitted) * 1e3 if live.first_token else None
        admitted = min((s.admitted for s in live.sequences if s.admitted is not None), default=None)
        stats.queue_ms = None if admitted is None else (admitted - live.submitted) * 1e3
        # The user must learn of a drafter that failed or ended on the way, whatever it had drafted before.
        reasons = {sequence.stats.off_reason for sequence in live.sequences}
        stats.off_reason = self.round.failure or stats.off_reason or (reasons.pop() if len(reasons) == 1 else None)
        outputs = [s.output(CompletionOutput) for s in live.sequences]
        for completion in outputs:
            completion.text = live.text_prefix + completion.text
        wants_prompt = live.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=live.id,
            prompt=live.prompt,
            prompt_token_ids=list(live.prompt_ids),
            prompt_logprobs=list(live.sequences[0].prompt_logprobs) if wants_prompt else None,
            outputs=outputs,
            stats=stats,
            finished=live.ended is not None,
            application=live.application,
        )


def _say_again(sequence: Sequence, tokens: abc.Sequence[int]) -> None:
    """Put tokens that were emitted before into a new sequence, which ends where they end it.

    Raises:
        ConfigError: they continue after its end.
    """
    wants = sequence.params.logprobs is not None
    count = sequence.emit(tokens, 0, [{} for _ in tokens] if wants else None) if tokens else 0
    if sequence.fault is not None:
        sequence.checker.end("error")
    elif count < len(tokens):
        wrong = f"the output ends after {count} ({sequence.checker.finish_reason})"
        raise ConfigError(f"{len(tokens)} emitted tokens", wrong, "give the request's own parameters and tokens")


def _share_times(result: StepResult, host_ms: float) -> None:
    """Give each sequence its part of a step's time."""
    works = result.works
    count = len(works) or 1
    draft_ms, verify_ms, host_ms = result.draft_ms / count, result.verify_ms / count, host_ms / count
    for work in works:
        stats = work.sequence.stats
        stats.draft_ms += draft_ms
        stats.verify_ms += verify_ms
        stats.host_ms += host_ms


def _record(result: StepResult, total_ms: float) -> StepRecord:
    """Return the record of a step, for the draft budget."""
    generated = [(work, result.counts.get(i, (0, 0))) for i, work in enumerate(result.works) if work.generates]
    return StepRecord(
        sequences=[work.sequence for work, _ in generated],
        budgets=[work.budget for work, _ in generated],
        drafted=[drafted for _, (drafted, _) in generated],
        accepted=[accepted for _, (_, accepted) in generated],
        pure=all(work.rows == 1 for work in result.works),
        draft_ms=result.draft_ms,
        propose_ms=result.propose_ms,
        rest_ms=total_ms - result.draft_ms,
    )
