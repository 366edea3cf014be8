"""Which sequences run, and with how many rows: one rule for prefill, decoding and speculation.

Every sequence has known tokens, and a number of them whose K/V is computed. Each step computes known tokens that are
still pending, within a limit of rows: a prompt in chunks, one token for a decoding sequence, and its drafted nodes in
addition.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.options import shown
from ..core.sequence import Sequence
from ..kv.pool import KVPool
from .base import Work
from .budget import DraftBudget

AUTO: Literal["auto"] = "auto"
START_PROMPT_ROWS = 64  # until a step with some was timed
LEAST_PROMPT_ROWS = 16  # fewer cost a pass as much as these: a tile of the matrix products
PROMPT_RATE = 1 / 4  # weight of a step in the running means
SPARE_TOKENS = 32  # room for drafts after a sequence's last token, where its place in the pool is chosen


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_sequences: int = 64  # sequences that run at once
    max_batch_rows: int = 512  # rows of one target pass, drafts included
    max_prompt_rows: int | Literal["auto"] | None = None  # rows of prompts while others decode; None: any number


class Scheduler:
    """Runs the most urgent sequences first, equally urgent ones by arrival; preempts the least urgent, youngest first.

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
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # since the engine last looked
        rows = config.max_prompt_rows
        self.paced = rows == AUTO  # whether `took` is to be called after each step
        # Most prompt rows of a step in which others decode; None: any number.
        self._prompt_rows = START_PROMPT_ROWS if rows == AUTO else rows
        self._granted: int | None = None  # prompt rows that this step took; None: nothing bounds them
        self._decode_ms = self._row_ms = 0.0  # running means: a step without prompts, and what a row of them adds

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence after those that are as urgent."""
        waiting = self.waiting
        if not waiting or _priority(waiting[-1]) <= _priority(sequence):
            waiting.append(sequence)
        else:
            waiting.insert(bisect_right(waiting, _priority(sequence), key=_priority), sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
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

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start over with these sequences waiting, equally urgent ones in this order; none of them may hold a cache."""
        self.waiting = deque(sorted(sequences, key=_priority))
        self.running = []
        self.preempted = []

    def schedule(self) -> list[Work]:
        """Return the rows of the next step. Every work's cache has its rows reserved."""
        rows: dict[int, int] = {}
        free_rows = self.config.max_batch_rows
        decodes = any(s.cache is not None and len(s.tokens) - s.cache.front <= 1 for s in self.running)
        self._granted = 0 if decodes and self._prompt_rows is not None else None  # else nothing bounds prompts' rows
        for sequence in list(self.running):
            cache = sequence.cache
            if cache is None:  # preempted a moment ago
                continue
            needed = min(len(sequence.tokens) - cache.front, free_rows)
            if self._granted is not None and needed > 1:
                needed = min(needed, self._room())
                self._granted += needed
            if needed <= 0:  # all its known tokens are under way, or this step has no room
                continue
            if not cache.reserve_here(needed):
                if not self._make_room(sequence, needed, rows):
                    continue
                cache.reserve(needed)
            rows[id(sequence)] = needed
            free_rows -= needed
        if self.waiting:
            free_rows = self._admit(rows, free_rows)
        return self._with_drafts([s for s in self.running if id(s) in rows], rows, free_rows)

    # -- a long prompt next to sequences that decode

    def _room(self) -> int:
        """Rows that prompts may still have in this step."""
        assert self._prompt_rows is not None and self._granted is not None
        return self._prompt_rows - self._granted

    def took(self, ms: float) -> None:
        """Learn from what the step took how many rows of prompts make it twice as long as one without them."""
        if self._granted is None:
            return
        if not self._granted:
            self._decode_ms += PROMPT_RATE * (ms - self._decode_ms) if self._decode_ms else ms
        elif self._decode_ms:
            row_ms = max(0.0, ms - self._decode_ms) / self._granted
            self._row_ms += PROMPT_RATE * (row_ms - self._row_ms) if self._row_ms else row_ms
            most = self._decode_ms / self._row_ms if self._row_ms > 0 else 2.0 * self._granted
            self._prompt_rows = int(min(max(LEAST_PROMPT_ROWS, most), self.config.max_batch_rows))

    # -- memory

    def _make_room(self, sequence: Sequence, needed: int, rows: dict[int, int]) -> bool:
        """Free blocks for pending rows; return whether the sequence may have them.

        Where the pool is full, less urgent or younger sequences are preempted, or this one.
        """
        assert sequence.cache is not None
        if sequence.cache.blocks_short(needed) > self.pool.allocator.num_free:
            for other in self.running:
                if other.cache is not None:
                    other.cache.trim()
        while sequence.cache.blocks_short(needed) > self.pool.allocator.num_free:
            victim = max(reversed(self.running), key=_priority)
            self._preempt(victim)
            rows.pop(id(victim), None)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks.

        It waits before those as urgent, and recomputes its K/V (or finds it in the prefix cache) later.
        """
        assert sequence.cache is not None
        self.running.remove(sequence)
        sequence.cache.release()
        sequence.cache = None
        sequence.stats.preemptions += 1
        self.waiting.insert(bisect_left(self.waiting, _priority(sequence), key=_priority), sequence)
        self.preempted.append(sequence)

    def _admit(self, rows: dict[int, int], free_rows: int) -> int:
        """Start waiting sequences in their order while there is room. Returns the rows left."""
        later: list[Sequence] = []
        # A sequence preempted in this step must not displace anything in the same step.
        while self.waiting and free_rows > 0 and len(self.running) < self.config.max_sequences and not self.preempted:
            sequence = self.waiting.popleft()
            if self._sibling_computes(sequence):
                later.append(sequence)
                continue
            tokens = sequence.tokens
            most = free_rows if self._granted is None else min(free_rows, self._room())
            if most <= 0:
                self.waiting.appendleft(sequence)
                break
            reuse = self._reusable(sequence)
            identity, shareable = sequence.identity, sequence.shareable
            needed, blocks = self.pool.cost(tokens, most, reuse, identity, shareable)
            # A block of headroom for each running sequence, or the newcomer would be preempted at once.
            if self.pool.allocator.num_free - blocks < len(self.running):
                self.waiting.appendleft(sequence)
                break
            expected = sequence.prompt_len + sequence.checker.max_tokens + SPARE_TOKENS
            sequence.cache = self.pool.open(tokens, reuse, expected, identity, shareable)
            sequence.cache.reserve(needed)
            stats = sequence.stats
            if not stats.passes:
                stats.cached_prompt_tokens = sequence.cache.reused
            if sequence.admitted is None:
                sequence.admitted = perf_counter()
            self.running.append(sequence)
            rows[id(sequence)] = needed
            free_rows -= needed
            if self._granted is not None:
                self._granted += needed
        self.waiting.extendleft(reversed(later))
        return free_rows

    def _reusable(self, sequence: Sequence) -> int:
        """Leading tokens whose K/V may be taken from the cache, where it is there."""
        length = len(sequence.tokens)
        if sequence.params.prompt_logprobs is not None:
            return 0
        past = self.budget.most_nodes and self._past()
        return 0 if past is None else max(0, length - max(1, past))

    def _sibling_computes(self, sequence: Sequence) -> bool:
        """Return whether another sample of the same request is still computing prompt blocks that both can share."""
        if sequence.sampler.sample_index == 0:
            return False
        size = self.pool.block_size
        shared = min(self._reusable(sequence), sequence.prompt_len - 1) // size * size
        return any(
            other.request_id == sequence.request_id and other.cache is not None and other.cache.committed < shared
            for other in self.running
        )

    def _with_drafts(self, sequences: list[Sequence], rows: dict[int, int], free_rows: int) -> list[Work]:
        works = []
        for sequence in sequences:
            count, checker = rows[id(sequence)], sequence.checker
            # The deepest node that can still be emitted has one token of the target's own after it.
            depth = max(0, checker.max_tokens - checker.num_tokens - 1) if sequence.max_nodes != 0 else 0
            works.append(Work(sequence, count, count == sequence.pending, 0, depth))
        if not self.budget.most_nodes:
            return works
        able = [w for w in works if w.max_depth > 0 and w.rows == 1 and w.generates]
        planned = self.budget.plan([w.sequence for w in able], sum(w.generates for w in works)) if able else ()
        for work, nodes_planned in zip(able, planned, strict=True):
            if nodes_planned > 0 and free_rows > 0:
                limit = work.sequence.max_nodes
                nodes = min(nodes_planned, free_rows) if limit is None else min(nodes_planned, free_rows, limit)
                work.budget = self._affordable(work.sequence, nodes)
                free_rows -= work.budget
        for work in works:
            work.may_draft = work.max_depth > 1
        if able and self.budget.rests:
            for work in able:
                work.may_draft = False
        return works

    def _affordable(self, sequence: Sequence, budget: int) -> int:
        """Reserve as many drafted nodes as the pool has free blocks for. Drafts never preempt."""
        cache = sequence.cache
        assert cache is not None
        rows = cache.reserved
        room = cache.capacity - cache.front + self.pool.allocator.num_free * self.pool.block_size
        budget = max(0, min(budget, room - rows))
        cache.reserve(rows + budget)
        return budget


def _priority(sequence: Sequence) -> int:
    """Return the priority of the sequence's request: lower is more urgent."""
    return sequence.priority


def parse_prompt_rows(value: Any) -> int | Literal["auto"] | None:
    """Rows of prompts next to sequences that decode: a number, also as text, ``auto``, or None.

    Raises:
        ConfigError: none of these.
    """
    if value is None:
        return None
    text = str(value) if type(value) is int else value
    if isinstance(text, str) and text == AUTO:
        return AUTO
    digits = isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 8
    if not digits or int(text) < 1:
        remedy = "give 1 or more, or auto; leave it out for no bound"
        raise ConfigError(f"max_prompt_rows={shown(value)}", "it is not a number of rows", remedy)
    return int(text)
