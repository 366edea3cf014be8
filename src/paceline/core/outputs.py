"""What the API returns: whole answers, and the parts of streamed ones. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import RequestError
from .stats import SpecStats
from .trace import Shown

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]  # "error": see `CompletionOutput.error`
StopReason = int | str | None  # the stop id or the stop string; None for EOS and "length"
TokenOrigin = Literal["drafted", "target"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability and its rank (1: the likeliest; equal ones share a rank)."""

    logprob: float
    rank: int
    decoded: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of the answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None: it continues
    stop_reason: StopReason
    logprobs: list[dict[int, Logprob]] | None  # one a token; None unless requested
    cumulative_logprob: float | None  # of the chosen tokens; None unless requested, and where some are not known
    origins: list[TokenOrigin]  # one a token: drafted and accepted, or the target's own choice
    seed: int  # with it, the same request gives the same tokens
    error: str | None = None  # what ended it, where finish_reason is "error"

    @property
    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class Chunk(CompletionOutput):
    """Describe what is new in a sample of a streamed answer."""

    request_id: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    output: RequestOutput | None = None  # the whole answer, with the last chunk of all
    shown: Shown | None = None  # None: the request does not include it, or nothing serves it


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # the first token's is None: nothing precedes it
    outputs: list[CompletionOutput]
    stats: SpecStats
    finished: bool
    application: str | None = None  # whose adapter answered; None: the base model

    @property
    def error(self) -> str | None:
        """Return the error that ended a sample early; None if there was none."""
        return next((sample.error for sample in self.outputs if sample.error is not None), None)

    def raise_failed(self) -> None:
        """Raise RequestError where an error ended a sample."""
        if self.error is not None:
            raise RequestError(self.request_id, self.error, self)
