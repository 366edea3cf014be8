"""Which sequences run, and with how many rows: one rule for prefill, decoding and speculation.

Every sequence has known tokens, and a number of them whose K/V is computed. Each step computes known tokens that are
still pending, within a limit of rows: a prompt in chunks, one token for a decoding sequence, and its drafted nodes in
addition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..core.errors import ConfigError
from ..kv.pool import KVPool
from ..rounds.base import RunningSequence, Work
from .budget import DraftBudget

SPARE_TOKENS = 32  # room for drafts behind a sequence's last token, where its place in the pool is chosen


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_sequences: int = 64  # sequences that run at once
    max_batch_rows: int = 512  # rows of one target pass, drafts included

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_batch_rows"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value}", "it must be at least 1", f"leave {name} out for the default")


class Scheduler:
    """First come, first served; the youngest is preempted first.

    Args:
        pool: where K and V live.
        config: limits.
        budget: how many nodes to draft.
        past: last tokens of a text that are computed even if their K/V is at hand, since a drafter needs their states;
            None: all of them.
    """

    def __init__(
        self, pool: KVPool, config: SchedulerConfig, budget: DraftBudget, past: Callable[[], int | None] = lambda: 0
    ) -> None:
        self.pool = pool
        self.config = config
        self.budget = budget
        self._past = past
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self.preempted: list[RunningSequence] = []  # since the engine last looked

    def add(self, sequence: RunningSequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequences: Iterable[RunningSequence]) -> None:
        """Take sequences out, finished or aborted, and free what they hold."""
        gone = set(map(id, sequences))
        if not gone:
            return
        for sequence in self.running:
            if id(sequence) in gone and sequence.cache is not None:
                sequence.cache.release()
                sequence.cache = None
        self.running = [s for s in self.running if id(s) not in gone]
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def reset(self, sequences: Iterable[RunningSequence]) -> None:
        """Start over with these sequences waiting, in this order; none of them may hold a cache."""
        self.waiting = deque(sequences)
        self.running = []
        self.preempted = []

    def schedule(self) -> list[Work]:
        """The rows of the next step. Every work's cache has its rows reserved."""
        rows: dict[int, int] = {}
        left = self.config.max_batch_rows
        for sequence in list(self.running):
            cache = sequence.cache
            if cache is None:  # preempted a moment ago
                continue
            wanted = min(len(sequence.view.tokens) - cache.front, left)
            if wanted <= 0:  # all of it is under way, or no room in this step
                continue
            if not cache.reserve_here(wanted):
                if not self._make_room(sequence, wanted, rows):
                    continue
                cache.reserve(wanted)
            rows[id(sequence)] = wanted
            left -= wanted
        if self.waiting:
            left = self._admit(rows, left)
        return self._with_drafts([s for s in self.running if id(s) in rows], rows, left)

    def _make_room(self, sequence: RunningSequence, wanted: int, rows: dict[int, int]) -> bool:
        """Have blocks free for pending rows, preempting younger sequences, or this one, if the pool is full.

        Those of a sequence with passes in flight come free when these are through: False until then, too.
        """
        assert sequence.cache is not None
        if sequence.cache.blocks_short(wanted) > self.pool.allocator.num_free:
            for other in self.running:
                if other.cache is not None:
                    other.cache.trim()
        while sequence.cache.blocks_short(wanted) > self.pool.allocator.num_free:
            victim = self.running[-1]
            held = victim.cache is not None and victim.cache.held
            self._preempt(victim)
            rows.pop(id(victim), None)
            if victim is sequence or held:
                return False
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        """Free a sequence's blocks; it waits at the front of the queue and recomputes its K/V (or finds it in the
        prefix cache) later."""
        assert sequence.cache is not None
        self.running.remove(sequence)
        sequence.cache.release()
        sequence.cache = None
        sequence.state.stats.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preempted.append(sequence)

    def _admit(self, rows: dict[int, int], left: int) -> int:
        """Start waiting sequences in their order while there is room. Returns the rows left."""
        later: list[RunningSequence] = []
        # What was preempted in this step must not displace anything in the same step.
        while self.waiting and left > 0 and len(self.running) < self.config.max_sequences and not self.preempted:
            sequence = self.waiting.popleft()
            if self._sibling_computes(sequence):
                later.append(sequence)
                continue
            tokens = sequence.view.tokens
            reuse = self._reusable(sequence)
            identity, shareable = sequence.identity, sequence.shareable
            wanted, blocks = self.pool.cost(tokens, left, reuse, identity, shareable)
            # A block of headroom for each running sequence, lest the newcomer be preempted at once.
            if self.pool.allocator.num_free - blocks < len(self.running):
                self.waiting.appendleft(sequence)
                break
            expected = sequence.max_len + SPARE_TOKENS
            sequence.cache = self.pool.open(tokens, reuse, expected, identity, shareable)
            sequence.cache.reserve(wanted)
            stats = sequence.state.stats
            if not stats.passes:
                stats.cached_prompt_tokens = sequence.cache.reused
            self.running.append(sequence)
            rows[id(sequence)] = wanted
            left -= wanted
        self.waiting.extendleft(reversed(later))
        return left

    def _reusable(self, sequence: RunningSequence) -> int:
        """Leading tokens whose K/V may be taken from the cache, where it is there."""
        known = len(sequence.view.tokens)
        if sequence.params.prompt_logprobs is not None:
            return 0
        past = 0 if self.budget.never_drafts else self._past()
        return 0 if past is None else max(0, known - max(1, past))

    def _sibling_computes(self, sequence: RunningSequence) -> bool:
        """Whether another sample of the same request is still computing prompt blocks that both can share."""
        if sequence.state.index == 0:
            return False
        size = self.pool.block_size
        shared = min(self._reusable(sequence), sequence.view.prompt_len - 1) // size * size
        return any(
            other.state.request is sequence.state.request and other.cache is not None and other.cache.committed < shared
            for other in self.running
        )

    def _with_drafts(self, sequences: list[RunningSequence], rows: dict[int, int], left: int) -> list[Work]:
        works = []
        for sequence in sequences:
            count = rows[id(sequence)]
            works.append(Work(sequence, count, count == sequence.pending, 0, self._max_depth(sequence)))
        if self.budget.never_drafts:
            return works
        able = [w for w in works if w.max_depth > 0 and w.rows == 1 and w.generates]
        nodes = self.budget.plan([w.sequence for w in able], sum(w.generates for w in works)) if able else ()
        for work, wanted in zip(able, nodes, strict=True):
            if wanted > 0 and left > 0:
                work.budget = self._affordable(work.sequence, min(wanted, left))
                left -= work.budget
        for work in works:
            work.may_draft = work.max_depth > 1
        if able and self.budget.rests:
            for work in able:
                work.may_draft = False
        return works

    def _max_depth(self, sequence: RunningSequence) -> int:
        """Deepest node that can still be emitted, with one token of the target's own after it."""
        checker = sequence.state.checker
        room = min(sequence.max_len - len(sequence.view.tokens), checker.max_tokens - checker.num_tokens)
        return room - 1 if room > 1 else 0

    def _affordable(self, sequence: RunningSequence, budget: int) -> int:
        """Reserve as many drafted nodes as the pool has free blocks for. Drafts never preempt."""
        cache = sequence.cache
        assert cache is not None
        rows = cache.reserved
        room = cache.capacity - cache.front + self.pool.allocator.num_free * self.pool.block_size
        budget = max(0, min(budget, room - rows))
        cache.reserve(rows + budget)
        return budget
