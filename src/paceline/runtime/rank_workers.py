"""Ranks in processes, as rank 0 sees them: what it runs is sent to all of them first."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

from ..core.errors import PacelineError, WorkerRestarted
from ..kv.ledger import SlotStore
from ..kv.pool import KVPool
from ..kv.store import KVStore
from ..model.adapters import AdapterRange, LowRank
from ..model.base import KVCache
from ..model.joins import Collectives
from ..model.parallel import Run
from .messages import Clear
from .rank_service import Adapter
from .remote import LOOK_S, Remote
from .workers import Workers

NOTICE_S = 0.05  # after which a rank that has died is known as such
CLEAR_S = 60.0  # for its answer to `Clear`, after what it is still at


class RankWorkers(Workers):
    """Workers, each with a rank.

    Args:
        workers: of ranks 1, 2, ..
        joins: rank 0's.
    """

    def __init__(self, workers: Sequence[Remote], joins: Collectives) -> None:
        super().__init__(workers)
        self.joins, self._all = joins, range(len(workers))
        self.runs = 0  # that came through
        self._epoch, self._clear = 0, True  # whether the ranks are to be sent the epoch
        self._begun = False  # a run, which has not come through
        self._rows, self._began = 0, 0.0  # of the run under way
        self._numbers, self._dropped, self._moves = count(), list[int](), list[tuple[int, list[int], list[int]]]()
        self._caches: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._adapters: WeakKeyDictionary[LowRank, int] = WeakKeyDictionary()

    def send(self, run: Run, cache: KVCache | None, adapters: Sequence[AdapterRange]) -> None:
        """Have the ranks do a run.

        Raises:
            WorkerRestarted, WorkerFailed: one is not there, or an earlier run was begun and broken off.
        """
        if self._begun:
            self._begun, self._clear = False, True
            raise WorkerRestarted("a pass of ranks was broken off")
        self._ready()
        number = -1 if cache is None else self._number(cache)
        ranges = [(self._sent(r.adapter), r.start, r.stop) for r in adapters]
        self._rows, self._began = run.rows, time.monotonic()
        whole = replace(
            run,
            epoch=self._epoch,
            cache=number,
            pool_slots=0 if cache is None else cache.k[0].shape[1],
            adapters=ranges,
            moves=self._moves,
            dropped=[*self._dropped],
        )
        self._begun = True
        self.send_to(self._all, whole)
        self._moves = []
        self._dropped.clear()
        self.joins.wait(self.limit_s(self._rows))

    def done(self) -> None:
        """Note that the ranks have completed the run."""
        self.came_through()
        self._begun = False
        self.runs += 1

    def lost(self) -> PacelineError:
        """Find the ranks that were lost and have them started again; return the error to raise."""
        waited, self._begun, self._clear = time.monotonic() - self._began, False, True
        late = [i for i in self._all if not self.joins.came(i + 1)]
        self.joins.begin(lost=1)
        end = time.monotonic() + NOTICE_S
        while not self.newly_lost() and time.monotonic() < end:
            time.sleep(LOOK_S)
        for index in late or ([] if self.newly_lost() else self._all):
            if len(self.workers[index].faults) == self._known[index] and self.workers[index].line is not None:
                self.workers[index].failed(f"hangs: at {self._rows} rows for {waited:.1f} s")
        try:
            self.look()
        except PacelineError as error:
            return error
        return WorkerRestarted("a rank was lost")

    def follow(self, pool: KVPool) -> None:
        """Have the ranks move what a pool of K and V moves."""
        pool.store = self.followed(pool.tensors, pool)

    def followed(self, store: KVStore, cache: KVCache) -> SlotStore:
        """Return a store whose moves the ranks make, too, in what runs name as ``cache``."""
        return _Followed(store, self, self._number(cache))

    # -- what a run names

    def _number(self, cache: Any) -> int:
        if cache not in self._caches:
            self._caches[cache] = number = next(self._numbers)
            finalize(cache, self._dropped.append, number)
        return self._caches[cache]

    def move(self, cache: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """K and V of these slots are copied before the next run."""
        self._moves.append((cache, [*sources], [*targets]))

    def _sent(self, adapter: LowRank) -> int:
        if adapter not in self._adapters:
            self._adapters[adapter] = number = next(self._numbers)
            self.send_to(self._all, Adapter(number, adapter.config, [part.data for part in adapter.parameters()]))
        return self._adapters[adapter]

    # -- faults

    def on_lost(self) -> None:
        """Implement `Workers`."""
        self._begun, self._clear = False, True

    def _ready(self) -> None:
        """Wait until all ranks are there, and have them begin an epoch where another one began."""
        self.look()
        if not self._clear:
            return
        self.joins.begin(lost=1)  # whoever is still at a run gives it up
        self.wait_ready()
        self._epoch += 1
        self._moves = []
        self._dropped.clear()
        self._adapters.clear()
        self.begin([Clear(self._epoch)] * len(self.workers), CLEAR_S)
        self.joins.watch([os.pidfd_open(worker.pid) for worker in self.workers if worker.pid is not None])
        self.joins.begin(lost=0)
        self._clear = False


class _Followed:
    """A pool's store whose moves other ranks make, too."""

    def __init__(self, store: KVStore, line: RankWorkers, cache: int) -> None:
        self._own, self._line, self._cache = store, line, cache

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy K and V of slots of every layer."""
        self._line.move(self._cache, sources, targets)
        self._own.copy_slots(sources, targets)
