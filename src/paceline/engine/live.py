"""What an engine holds of its requests, and what they must fit into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ..core.request import Request
from .base import RunningSequence


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What a request must fit into."""

    vocab_size: int
    max_model_len: int  # prompt and output together
    eos_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in flight: its samples and its times."""

    request: Request
    sequences: list[RunningSequence]
    submitted: float  # perf_counter seconds
    first_token: float | None = None
    ended: float | None = None
    deadline: float = inf  # perf_counter seconds
    # Tokens and characters of each sample that a stream does not tell again; empty: it tells all.
    said: Sequence[tuple[int, int]] = ()
    text_prefix: str = ""  # the prompt's text, where it is to be echoed
    store: bool = True  # whether it may be learned from
    on_end: Callable[[LiveRequest], None] | None = None  # called when its last sample has ended; twice after Ctrl-C

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(s.finished for s in self.sequences)
