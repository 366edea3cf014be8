"""Ranks in processes, as rank 0 sees them: what it runs is sent to all of them first.

A rank that is lost, or hangs, is named and started again. Its K and V are gone, and so `PassesLost` asks the engine to
compute those of all requests anew, from their tokens. Where the same rank is lost again before a run has come through,
they end (`WorkerFailed`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

from ..core.errors import PacelineError, PassesLost
from ..kv.ledger import SlotStore
from ..kv.pool import KVPool
from ..kv.store import KVStore
from ..network.adapters import AdapterRange, LowRank
from ..network.base import KVCache
from ..network.joins import Joins
from ..network.parallel import Run
from .channels import ChannelClosed
from .clock import Late
from .frames import FrameError
from .handshake import Fault
from .hanging import HangLimit
from .rank_service import Adapter, Clear, Cleared
from .worker import Patience, Worker, lost

LOOK_S = 0.05  # between two looks at ranks that are waited for
SEND_S = 3.0  # for which a rank may take nothing of what it is sent
CLEAR_S = 60.0  # for its answer to `Clear`, behind what it is still at
PATIENCE = Patience(start_s=600.0, stuck_s=3600.0)  # a rank's work is timed here, by its rows


class RankWorkers:
    """A `network.parallel.RankLine` to workers, each with a rank.

    Args:
        workers: of ranks 1, 2, .., started or about to be. They end with this object's `stop`.
        joins: rank 0's.
    """

    def __init__(self, workers: Sequence[Worker], joins: Joins) -> None:
        self.workers, self.joins = workers, joins
        self.faults: list[str] = []  # each names a rank and its process
        self.runs = 0  # that came through
        self._known = [len(worker.faults) for worker in workers]
        self._limit = HangLimit()
        self._epoch, self._clear = 0, True  # whether the ranks are to be told the epoch
        self._begun = False  # a run, which has not come through
        self._lost: set[int] = set()  # ranks, since a run has come through
        self._rows, self._began = 0, 0.0  # of the run under way
        self._numbers, self._dropped, self._moves = count(), list[int](), list[tuple[int, list[int], list[int]]]()
        self._caches: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._adapters: WeakKeyDictionary[LowRank, int] = WeakKeyDictionary()

    def start(self) -> None:
        """See `RankLine`; the first that cannot be had ends them all."""
        try:
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.stop()
            raise

    def back(self) -> None:
        """See `RankLine`."""
        while any(worker.line is None for worker in self.workers):
            time.sleep(LOOK_S / 10)
            with suppress(PassesLost):  # one that is lost meanwhile: what is in flight does not count anyway
                self._look()

    def send(self, run: Run, cache: KVCache | None, adapters: Sequence[AdapterRange]) -> None:
        """See `RankLine`; a run that was begun and broken off is lost, too."""
        if self._begun:
            self._begun, self._clear = False, True
            raise PassesLost("a pass of ranks was broken off")
        self._ready()
        number = -1 if cache is None else self._number(cache)
        ranges = [(self._sent(r.adapter), r.start, r.stop) for r in adapters]
        self._rows, self._began = run.rows, time.monotonic()
        whole = replace(
            run,
            epoch=self._epoch,
            cache=number,
            slots=0 if cache is None else cache.k[0].shape[1],
            adapters=ranges,
            moves=self._moves,
            dropped=self._dropped,
        )
        self._begun = True
        self._say(whole)
        self._moves, self._dropped = [], []
        self.joins.wait(self._limit.seconds(self._rows))

    def done(self) -> None:
        """See `RankLine`."""
        self._limit.note(self._rows, time.monotonic() - self._began)
        self._lost.clear()
        self._begun = False
        self.runs += 1

    def lost(self) -> PacelineError:
        """See `RankLine`."""
        waited, self._begun, self._clear = time.monotonic() - self._began, False, True
        late = [i for i in range(len(self.workers)) if not self.joins.came(i + 1)]
        self.joins.begin(lost=1)
        time.sleep(LOOK_S)  # as often a worker is looked at: one that has died is known as such then
        for worker in self.workers:
            worker.poll()
        for index in late or range(len(self.workers)):
            if len(self.workers[index].faults) == self._known[index] and self.workers[index].line is not None:
                self.workers[index].failed(f"hangs: at {self._rows} rows for {waited:.1f} s")
        try:
            self._look()
        except PacelineError as error:
            return error
        return PassesLost("a rank was lost")

    def follow(self, pool: KVPool) -> None:
        """See `RankLine`."""
        pool.store = self.followed(pool.tensors, pool)

    def followed(self, store: KVStore, cache: KVCache) -> SlotStore:
        """See `RankLine`."""
        return _Followed(store, self, self._number(cache))

    def stop(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.stop()

    # -- what a run names

    def _number(self, cache: Any) -> int:
        if cache not in self._caches:
            self._caches[cache] = number = next(self._numbers)
            finalize(cache, self._dropped_now, number)
        return self._caches[cache]

    def _dropped_now(self, number: int) -> None:
        self._dropped.append(number)

    def move(self, cache: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """K and V of these slots are copied before the next run."""
        self._moves.append((cache, [*sources], [*targets]))

    def _sent(self, adapter: LowRank) -> int:
        if adapter not in self._adapters:
            self._adapters[adapter] = number = next(self._numbers)
            self._say(Adapter.of(number, adapter))
        return self._adapters[adapter]

    def _say(self, message: Any) -> None:
        for index, worker in enumerate(self.workers):
            if worker.line is None:
                self._look()
                raise PassesLost(f"rank {index + 1} is not there")
            try:
                worker.line.send(message, SEND_S)
            except ChannelClosed:
                worker.lost()
                self._look()

    # -- faults

    def _look(self) -> None:
        """Look after all ranks.

        Raises:
            PassesLost: one was lost since the last look.
            WorkerFailed: a second time in a row.
        """
        for worker in self.workers:
            worker.poll()
        fallen = [i for i, worker in enumerate(self.workers) if len(worker.faults) > self._known[i]]
        if not fallen:
            return
        self._begun, self._clear = False, True
        for index in fallen:
            self._known[index] = len(self.workers[index].faults)
        raise lost(self.workers, fallen, self.faults, self._lost)

    def _ready(self) -> None:
        """Wait until all ranks are there, and have them begin an epoch where another one began."""
        self._look()
        if not self._clear:
            return
        self.joins.begin(lost=1)  # whoever is still at a run gives it up
        self.back()
        self._epoch += 1
        self._moves, self._dropped = [], []
        self._adapters.clear()
        self._say(Clear(self._epoch))
        for index in range(len(self.workers)):
            self._cleared(index)
        self.joins.watch([os.pidfd_open(worker.pid) for worker in self.workers if worker.pid is not None])
        self.joins.begin(lost=0)
        self._clear = False

    def _cleared(self, index: int) -> None:
        worker, began = self.workers[index], time.monotonic()
        while worker.line is not None:
            try:
                said = worker.line.receive(LOOK_S)
            except Late:
                if time.monotonic() - began > CLEAR_S:
                    worker.failed("does not answer any more")
            except ChannelClosed:
                worker.lost()
            except FrameError as error:
                worker.failed(f"says what is no message: {error}")
            else:
                if isinstance(said, Cleared) and said.epoch == self._epoch:
                    return
                if isinstance(said, Fault):
                    worker.failed(f"failed: {said.why}")
            self._look()
        self._look()
        raise PassesLost(f"rank {index + 1} is not there")


class _Followed:
    """A pool's store whose moves other ranks make, too."""

    def __init__(self, own: KVStore, line: RankWorkers, cache: int) -> None:
        self._own, self._line, self._cache = own, line, cache

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy K and V of slots of every layer."""
        self._line.move(self._cache, sources, targets)
        self._own.copy_slots(sources, targets)
