"""The ledger against plain lists: rows that stay while fewer are committed, passes in flight, moves in their order."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.errors import PoolFullError
from paceline.kv.ledger import Ledger, SequenceCache
from paceline.kv.pool import KVPool

SIZE = 4  # slots a block
CPU = torch.device("cpu")


class ListStore:
    """One value a slot, in the place of K and V."""

    def __init__(self, slots: int) -> None:
        self.values: list[int] = [0] * slots

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read = [self.values[slot] for slot in sources]
        for slot, value in zip(targets, read, strict=True):
            self.values[slot] = value


class LateStore(ListStore):
    """A store elsewhere: passes and moves reach it in the order in which they were sent, some steps late."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.inbox: list[tuple[str, list[int], list[int]]] = []

    def write(self, slots: list[int], values: list[int]) -> None:
        self.inbox.append(("write", slots, values))

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.inbox.append(("move", list(sources), list(targets)))

    def deliver(self, count: int) -> None:
        for kind, slots, others in self.inbox[:count]:
            if kind == "move":
                super().copy_slots(slots, others)
            else:
                for slot, value in zip(slots, others, strict=True):
                    self.values[slot] = value
        del self.inbox[:count]


def places(cache: SequenceCache, start: int, stop: int) -> list[int]:
    return torch.arange(cache.pool.num_tokens)[cache.slots(start, stop)].tolist()


class LedgerModel(RuleBasedStateMachine):
    """Passes enter, are settled in part or dropped; every row has a value of its own that must stay with it."""

    @initialize(blocks=st.integers(6, 20))
    def start(self, blocks: int) -> None:
        self.store = LateStore(blocks * SIZE)
        self.ledger = Ledger(blocks * SIZE, self.store, CPU, SIZE)
        self.rows: dict[SequenceCache, tuple[list[int], list[int]]] = {}  # committed and entered rows, by value
        self.fresh = 1
        self.stayed = 0  # rows that were kept without being committed

    def pick(self, data: st.DataObject) -> SequenceCache:
        return data.draw(st.sampled_from([*self.rows]))

    @rule()
    def open(self) -> None:
        if len(self.rows) < 3:
            self.rows[self.ledger.open()] = ([], [])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 6))
    def enter(self, data: st.DataObject, count: int) -> None:
        cache = self.pick(data)
        committed, ahead = self.rows[cache]
        if cache.blocks_short(count) > self.ledger.allocator.num_free:
            with pytest.raises(PoolFullError):
                cache.reserve(count)
            return
        cache.reserve(count)
        first = cache.enter()
        assert first == len(committed) + len(ahead)
        values = [*range(self.fresh, self.fresh + count)]
        self.fresh += count
        self.store.write(places(cache, first, first + count), values)
        ahead += values

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from([*self.rows]), unique_by=id, min_size=1))
        kept = []
        for cache in chosen:
            committed, ahead = self.rows[cache]
            most = range(len(ahead))
            keep = data.draw(st.lists(st.sampled_from(most), unique=True).map(sorted)) if ahead else []
            commit = data.draw(st.integers(0, len(keep)))
            kept.append((cache, keep, commit))
            values = [ahead[row] for row in keep]
            self.rows[cache] = ([*committed, *values[:commit]], values[commit:])
            self.stayed += len(keep) - commit
        self.ledger.settle(kept)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        cache = self.pick(data)
        cache.rollback()
        self.rows[cache] = (self.rows[cache][0], [])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache = self.pick(data)
        del self.rows[cache]
        cache.release()
        assert cache not in self.ledger.sequences and not cache.blocks

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        self.store.deliver(count)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        assert self.ledger.sequences == {*self.rows}
        late = ListStore(0)  # what the store will hold once everything has arrived
        late.values = [*self.store.values]
        for kind, slots, others in self.store.inbox:
            if kind == "move":
                late.copy_slots(slots, others)
            else:
                for slot, value in zip(slots, others, strict=True):
                    late.values[slot] = value
        for cache, (committed, ahead) in self.rows.items():
            assert (cache.committed, cache.ahead) == (len(committed), len(ahead))
            found = [late.values[slot] for slot in places(cache, 0, cache.committed + cache.ahead)]
            assert found == committed + ahead


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_a_subtree_that_was_computed_ahead_stays() -> None:
    """Of two branches below the root one is right: its first token is committed, what hangs below it stays."""
    pool = KVPool(1, 1, 1, 8 * SIZE, torch.float64, CPU, SIZE)
    cache = pool.open()
    cache.reserve(6)  # the root, then two chains: rows 1, 3, 5 and rows 2, 4
    assert cache.enter() == 0
    pool.k[0][0, cache.slots(0, 6), 0] = torch.arange(6, dtype=torch.float64)
    pool.settle([(cache, [0, 1, 3, 5], 2)])
    assert (cache.committed, cache.ahead, cache.reserved) == (2, 2, 0)
    assert pool.k[0][0, cache.slots(0, 4), 0].tolist() == [0, 1, 3, 5]
    cache.reserve(2)
    assert cache.reserved == 2 and cache.enter() == 4
    pool.settle([(cache, [0, 1, 3], 3)])
    assert (cache.committed, cache.ahead, cache.reserved) == (5, 0, 0)
    cache.release()
    pool.check_idle()
