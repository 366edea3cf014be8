"""What an engine holds of its requests, and what they must fit into."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from math import inf

from ..core.sampling import SamplingParams
from ..core.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Describe what a request must fit into."""

    vocab_size: int
    max_model_len: int  # prompt and output together
    eos_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in flight: its samples and its times."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # the request's own, or one drawn at submission
    submitted: float  # perf_counter seconds
    prompt: str | None = None  # text, where text was given
    application: str | None = None  # whose adapter answers; None: the base model
    priority: int = 0  # lower ones are served first and preempted last
    sequences: list[Sequence] = field(default_factory=list)
    first_token: float | None = None
    ended: float | None = None
    deadline: float = inf  # perf_counter seconds
    # Tokens and characters of each sample that were streamed, or came from another engine; None: all was streamed.
    sent: list[tuple[int, int] | None] = field(default_factory=list)
    text_prefix: str = ""  # the prompt's text, where it is to be echoed
    store: bool = True  # whether it may be learned from
    on_end: abc.Callable[[LiveRequest], None] | None = None  # called when its last sample has ended; twice after Ctrl-C

    @property
    def finished(self) -> bool:
        """Return whether every sample has ended."""
        return all(s.finished for s in self.sequences)
