"""Requests to an engine in a process of its own: the messages.

    Describe   what the engine serves; is answered by `Description`
    Submit     a request; is answered by `Accepted` or `Rejected`, and then by its chunks in `Updates`
    Abort      the end of a request; has no answer
    StatsRequest  counters; is answered by `StatsReply`

A step's chunks of all requests are one message. Nothing here needs torch: the process that speaks HTTP has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.outputs import Chunk
from ..core.params import SamplingParams
from ..core.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Describe:
    """Request a description of what is served."""


@dataclass(frozen=True, slots=True)
class Description:
    """Describe what an engine serves, and all that is needed to make ids of text without its process."""

    model: str
    max_model_len: int
    applications: list[str]
    tokenizer: str | None  # the text of tokenizer.json; None: the model has no tokenizer of that kind
    chat_templates: dict[str, str]  # by name; "default" where there is only one
    special_tokens: dict[str, str]  # for templates: "eos_token" and so on
    sampling: dict[str, Any]  # contents of generation_config.json
    speculation: dict[str, Any]  # drafter, round, budget


@dataclass(frozen=True, slots=True)
class Submit:
    """A request."""

    id: str
    ids: list[int]  # of the prompt
    params: SamplingParams  # with a seed
    application: str | None
    interval_s: float  # least time between two chunks of a sample, but the last; 0: a chunk a step
    priority: int = 0
    deadline_s: float | None = None
    speculation: Speculation | None = None
    resume_tokens: list[list[int]] = field(default_factory=list)  # by sample, of a lost engine; not sent again
    shows: Literal["", "origins", "steps"] = ""  # fields of chunks in `Shown`
    store: bool = True  # whether it may be learned from, where a learner runs


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, if it is there."""

    id: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that is queued."""

    id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that cannot be answered: the three parts of the error."""

    id: str
    subject: str
    wrong: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Updates:
    """Describe what a step brought: chunks without origins and prompt; outputs have neither prompt nor samples."""

    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Request the engine's statistics."""

    id: str


@dataclass(frozen=True, slots=True)
class StatsReply:
    """Its counters."""

    id: str
    counters: dict[str, Any]
