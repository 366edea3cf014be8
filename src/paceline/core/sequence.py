"""One sample of a request, from submission to its last token: `Sequence`."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .outputs import CompletionOutput, Logprob, TokenOrigin
from .request import DecodeToken, StopChecker
from .sampling import SamplingParams, SequenceSampler
from .stats import SpecStats
from .trace import StepTrace

if TYPE_CHECKING:
    from ..kv.pool import SequenceCache
    from ..model.applications import Application

Part = TypeVar("Part", bound=CompletionOutput)
_DRAFTED: tuple[TokenOrigin, ...] = ("drafted",)
_TARGET: tuple[TokenOrigin, ...] = ("target",)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's samples. Drafters read it and change nothing."""

    key: int  # unique while the sequence runs
    tokens: list[int]  # prompt and output; the last one is the root. Grows in place
    prompt_len: int
    sampler: SequenceSampler  # sampling rules and noise; has the same list of tokens
    max_len: int | None = None  # prompt and output together cannot grow beyond this
    application: Application | None = None  # whose adapters its rows have; None: the base model
    sources: frozenset[int] | None = None  # marks of the drafters that are called for it; None: all
    prediction: abc.Sequence[int] = ()  # text that the output is likely to repeat
    fault: Exception | None = None  # its sampling rules, text or stop rules failed: the step ends it with this
    request_id: str = ""
    priority: int = 0  # lower ones are served first and preempted last
    checker: StopChecker = field(init=False)  # stop rules; none in a draft session
    origins: list[TokenOrigin] = field(default_factory=list)  # one per output token
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per output token; empty unless requested
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)  # [0] is None: nothing precedes it
    stats: SpecStats = field(default_factory=SpecStats)
    token_text: DecodeToken | None = None  # for `Logprob.decoded`; None for a model without a tokenizer
    cache: SequenceCache | None = None  # its K/V; None while it waits
    max_nodes: int | None = None  # most drafted nodes a step that the request allows; None: any number
    trace: list[StepTrace] | None = None  # its steps, until they are taken out; None: not requested
    admitted: float | None = None  # when it was scheduled first, in perf_counter seconds

    @property
    def params(self) -> SamplingParams:
        """Return the request's parameters."""
        return self.sampler.params

    @property
    def output_ids(self) -> list[int]:
        """Return a copy of the output."""
        return self.tokens[self.prompt_len :]

    @property
    def identity(self) -> str | None:
        """Return what its K/V depends on next to its tokens (its application); None: nothing."""
        return None if self.application is None else self.application.identity

    @property
    def shareable(self) -> int | None:
        """Return how many leading tokens have K/V that depends on them and `identity` alone; None: all.

        Where rows attend to others next to them, generated rows (the last prompt row is the first of them) have
        other K/V than the same tokens have in a prompt.
        """
        application = self.application
        return None if application is None or application.beside is None else self.prompt_len - 1

    @property
    def pending(self) -> int:
        """Return how many tokens have K/V that no pass computes yet: the rest of the prompt, or the root alone."""
        return len(self.tokens) - (self.cache.front if self.cache else 0)

    @property
    def finished(self) -> bool:
        """Return whether the last token was emitted."""
        return self.checker.finished

    def emit(self, tokens: abc.Sequence[int], drafted: int, logprobs: list[dict[int, Logprob]] | None = None) -> int:
        """Append the tokens of one pass, cut by the stop rules.

        Args:
            tokens: accepted drafts, then the target's own next token.
            drafted: how many of them were drafted.
            logprobs: one a token, where the request includes them.

        Returns:
            How many tokens were kept. If text or stop rules fail at one, those before it are kept, and `fault` is set.
        """
        before = self.checker.num_tokens
        try:
            self.checker.feed(tokens)
        except Exception as error:
            self.fault = error
        emitted = self.checker.num_tokens - before
        if logprobs:
            self.logprobs += logprobs[:emitted]
        drafted = min(emitted, drafted)
        self.origins += _DRAFTED * drafted + _TARGET * (emitted - drafted)
        self.sampler.commit(tokens[:emitted])
        return emitted

    def emit_plain(self, tokens: abc.Sequence[int]) -> bool:
        """Append one token that was not drafted, as `emit` does; False: it needs more than that, nothing was done."""
        if self.params.logprobs is not None or not self.checker.pass_over(tokens):
            return False
        self.origins += _TARGET
        self.sampler.commit(tokens)
        return True

    @property
    def error(self) -> str | None:
        """Return what ended it, where its own sampling rules, text or stop rules failed."""
        return None if self.fault is None else f"{type(self.fault).__name__}: {self.fault}"

    def output(self, kind: type[Part], tokens: int = 0, chars: int = 0, **more: Any) -> Part:
        """Return the answer so far, or what follows so many of its tokens and characters.

        The text leaves out what a stop string may still remove.

        Args:
            kind: of the record.
            tokens, chars: to leave out at the beginning.
            more: further fields of the record.
        """
        ids, logprobs = self.tokens[self.prompt_len + tokens :], self.logprobs[tokens:]
        requested = self.params.logprobs is not None
        complete = requested and all(logprobs)  # those of tokens that another engine emitted are empty
        total = sum(row[t].logprob for row, t in zip(logprobs, ids, strict=True)) if complete else None
        return kind(
            index=self.sampler.sample_index,
            text=self.checker.stable_text(chars),
            token_ids=ids,
            finish_reason=self.checker.finish_reason,
            stop_reason=self.checker.stop_reason,
            logprobs=logprobs if requested else None,
            cumulative_logprob=total,
            origins=self.origins[tokens:],
            seed=self.sampler.seed,
            error=self.error,
            **more,
        )
