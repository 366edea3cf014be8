"""The errors that users see. Each has the request, the fault and the remedy."""

from __future__ import annotations

import copyreg
from typing import Any


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""

    def __reduce__(self) -> Any:
        """Made again from its words and fields, whatever it was made of."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(PacelineError, ValueError):
    """An option, a request, a file or a checkpoint that cannot be used as it is.

    Raised at start-up or at submission, never during a run. All bad input raises this one type, so that a caller needs
    one ``except`` clause.

    Args:
        asked: the request (``"temperature=-1"``).
        wrong: why it cannot be done (``"temperature must be 0 or more"``).
        remedy: what to do instead (``"use 0 for greedy decoding"``).
    """

    def __init__(self, subject: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{subject}: {wrong}. {remedy[:1].upper()}{remedy[1:]}.")
        self.subject = subject
        self.wrong = wrong
        self.remedy = remedy


class CapabilityError(ConfigError):
    """Parts that exist but do not fit together (a drafter and a round, a tokenizer and its draft)."""


class StorageError(ConfigError):
    """A disk without room for what is to be kept, or a file that cannot be written: not a fault of the request."""


class RequestError(PacelineError):
    """A request that ended early because its own sampling rules, text or stop rules failed.

    Args:
        request_id: which one.
        why: the error that ended it.
        output: its answer so far, a `RequestOutput`.
    """

    def __init__(self, request_id: str, why: str, output: Any) -> None:
        super().__init__(f"{request_id} ended with an error: {why}")
        self.request_id = request_id
        self.why = why
        self.output = output


class WorkerRestarted(PacelineError):
    """Raised when a worker was lost with its K/V and restarts: the engine computes all K/V again."""


class RankLost(PacelineError):
    """A rank of several that compute a pass together is gone, in the middle of it."""


class PoolFullError(PacelineError):
    """The K/V pool has no free block. The engine responds by dropping drafts or by preemption."""
