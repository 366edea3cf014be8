"""An engine's counters, as they are now. They are summed from what is counted anyway when they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.stats import SpecStats
from .live import LiveRequest
from .scheduler import Scheduler


@dataclass(slots=True)
class Totals:
    """Counters of the requests that have ended."""

    ended: dict[str, int] = field(default_factory=dict)  # samples by finish reason
    stats: dict[str | None, SpecStats] = field(default_factory=dict)  # by application; None: the base model

    def add(self, live: LiveRequest) -> None:
        """Take in a request that has ended."""
        name = live.application
        for sequence in live.sequences:
            reason = sequence.checker.finish_reason or "abort"
            self.ended[reason] = self.ended.get(reason, 0) + 1
            self.stats[name] = self.stats.get(name, _NOTHING).merge(sequence.stats)


_NOTHING = SpecStats()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters since the engine's start, of requests that ended and of those in flight, and what it holds now."""

    running: int  # sequences
    waiting: int  # sequences
    ended: dict[str, int]  # samples by finish reason
    steps: int
    stats: SpecStats  # sums: prompt and emitted tokens, drafted and accepted by source and depth, times, preemptions
    by_application: dict[str, SpecStats]  # the same; "" is the base model
    kv_tokens: int  # slots of the K/V pool
    kv_used: int  # slots of blocks that running sequences hold

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens that were looked for in the K/V pool."""
        return self.stats.prompt_tokens

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that were found in the K/V pool."""
        return self.stats.cached_prompt_tokens

    def as_dict(self) -> dict[str, Any]:
        """All counters, ready for JSON."""
        prefix = {"prefix_queries": self.prefix_queries, "prefix_hits": self.prefix_hits}
        return asdict(self) | prefix


def take(lives: Iterable[LiveRequest], scheduler: Scheduler, totals: Totals, steps: int) -> Snapshot:
    """Return the counters of an engine with these requests in flight; its lock is held meanwhile."""
    by_application = dict(totals.stats)
    for live in lives:
        name = live.application
        for sequence in live.sequences:
            by_application[name] = by_application.get(name, _NOTHING).merge(sequence.stats)
    stats = SpecStats()
    for part in by_application.values():
        stats = stats.merge(part)
    pool = scheduler.pool
    return Snapshot(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        ended=dict(totals.ended),
        steps=steps,
        stats=stats,
        by_application={name or "": part for name, part in by_application.items()},
        kv_tokens=pool.num_tokens,
        kv_used=pool.num_tokens - pool.allocator.num_free * pool.block_size,
    )
