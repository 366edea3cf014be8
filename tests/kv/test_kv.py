"""The K/V pool against plain lists: what a sequence holds, what is found again, what is free."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kits.pools import cached_prefix

from paceline.core.errors import PoolFullError
from paceline.kv.pool import KVPool, SequenceCache

SIZE = 4  # slots a block


def make_pool(blocks: int, layers: int = 2) -> KVPool:
    return KVPool(layers, 2, 3, blocks * SIZE, torch.float64, torch.device("cpu"), SIZE)


def write(cache: SequenceCache, row: int, value: float) -> None:
    """Store ``value`` as K (and its negative as V) of one row of the speculative region, in every layer."""
    place = cache.committed + row
    for k, v in zip(cache.pool.k, cache.pool.v, strict=True):
        k[:, cache.slots(place, place + 1)] = value
        v[:, cache.slots(place, place + 1)] = -value


def contents(cache: SequenceCache) -> list[float]:
    """One number a committed token; every layer, head and element must agree on it."""
    slots = cache.slots(0, cache.committed)
    values = cache.pool.k[0][:, slots][0, :, 0]
    for k, v in zip(cache.pool.k, cache.pool.v, strict=True):
        assert torch.equal(k[:, slots], values[None, :, None].expand(2, -1, 3))
        assert torch.equal(v[:, slots], -values[None, :, None].expand(2, -1, 3))
    return values.tolist()


def grow(cache: SequenceCache, tokens: Sequence[int]) -> None:
    """Compute and commit tokens one after the other."""
    cache.reserve(len(tokens))
    for row, token in enumerate(tokens):
        write(cache, row, token)
    cache.pool.commit([(cache, range(len(tokens)))])


def opened(pool: KVPool, tokens: Sequence[int]) -> SequenceCache:
    """A sequence that computed and published ``tokens``."""
    cache = pool.open(tokens)
    grow(cache, tokens[cache.committed :])
    cache.publish(tokens)
    return cache


class PoolModel(RuleBasedStateMachine):
    """Random lives of sequences beside a model in plain lists. K of a token is the token itself."""

    @initialize(blocks=st.integers(4, 14))
    def start(self, blocks: int) -> None:
        self.pool = make_pool(blocks)
        self.blocks = blocks
        self.tokens: dict[SequenceCache, list[int]] = {}  # all known tokens of each open sequence
        self.published: set[tuple[int, ...]] = set()  # every prefix of whole blocks that was ever published

    def pick(self, data: st.DataObject) -> SequenceCache:
        caches = sorted(self.tokens, key=lambda cache: list(self.tokens).index(cache))
        return data.draw(st.sampled_from(caches))

    @rule(
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        reuse=st.none() | st.integers(0, 14),
        more=st.none() | st.integers(0, 40),
    )
    def open(self, tokens: list[int], reuse: int | None, more: int | None) -> None:
        found = cached_prefix(self.pool, tokens)
        if reuse is not None:
            found = min(found, reuse // SIZE * SIZE)
        cache = self.pool.open(tokens, reuse, None if more is None else len(tokens) + more)
        assert cache.committed == cache.reused == found
        assert cache.committed < len(tokens)  # one token is always left to compute
        assert cache.committed % SIZE == 0
        if cache.committed:
            assert tuple(tokens[: cache.committed]) in self.published
        self.tokens[cache] = list(tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), extra=st.integers(0, 6))
    def step(self, data: st.DataObject, extra: int) -> None:
        """A target pass: pending tokens, ``extra`` tree nodes behind them, an ascending path is kept."""
        cache = self.pick(data)
        tokens = self.tokens[cache]
        pending = len(tokens) - cache.committed
        short, free = cache.blocks_short(pending + extra), self.pool.allocator.num_free
        before = (list(cache.blocks), cache.committed, cache.reserved, free)
        if short > free:
            with pytest.raises(PoolFullError):
                cache.reserve(pending + extra)
            assert before == (cache.blocks, cache.committed, cache.reserved, self.pool.allocator.num_free)
            return
        cache.reserve(pending + extra)
        nodes = data.draw(st.lists(st.integers(1, 2), min_size=extra, max_size=extra))
        for row, token in enumerate([*tokens[cache.committed :], *nodes]):
            write(cache, row, token)
        path = data.draw(st.lists(st.integers(0, extra - 1), unique=True).map(sorted)) if extra else []
        if data.draw(st.integers(0, 9)) == 0:
            cache.rollback()
            assert cache.reserved == 0
            return
        self.pool.commit([(cache, [*range(pending), *(pending + node for node in path)])])
        tokens += [nodes[node] for node in path]
        assert contents(cache) == tokens
        tokens.append(data.draw(st.integers(1, 2)))  # the next token: known, not computed

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        cache = self.pick(data)
        cache.publish(self.tokens[cache])
        for stop in range(SIZE, cache.committed + 1, SIZE):
            self.published.add(tuple(self.tokens[cache][:stop]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        cache = self.pick(data)
        cache.trim()
        assert len(cache.blocks) == -(-(cache.committed + cache.reserved) // SIZE)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache = self.pick(data)
        cache.release()
        del self.tokens[cache]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.sequences == set(self.tokens)
        held = {block for cache in self.tokens for block in cache.blocks}
        assert self.pool.allocator.num_free == self.blocks - len(held)
        for cache, tokens in self.tokens.items():
            assert contents(cache) == tokens[: cache.committed]
            assert torch.arange(self.pool.num_tokens)[cache.slots(0, cache.capacity)].tolist() == [
                block * SIZE + i for block in cache.blocks for i in range(SIZE)
            ]


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_finds_exactly_the_longest_published_prefix():
    pool = make_pool(32)
    tokens = list(range(1, 12))  # two whole blocks and three tokens
    first = opened(pool, tokens)
    for kept in range(1, 12):
        other = tokens[:kept] + [99] * 4  # parts from it after `kept` tokens
        assert cached_prefix(pool, other) == min(kept, 8) // SIZE * SIZE
    assert cached_prefix(pool, tokens[:8]) == 4  # its last token must be left to compute
    assert cached_prefix(pool, tokens[:9]) == 8
    assert cached_prefix(pool, [2, *tokens]) == 0  # the same blocks elsewhere are other blocks
    first.release()
    again = pool.open(tokens)
    assert again.committed == again.reused == 8 and contents(again) == tokens[:8]
    assert pool.open(tokens, reuse=0).committed == 0
    assert [pool.open(tokens, reuse=most).committed for most in (3, 4, 7, 8, 99)] == [0, 4, 4, 8, 8]


def test_where_there_is_room_a_prefix_is_copied_so_that_it_can_grow_in_one_piece():
    pool = make_pool(32)
    tokens = list(range(1, 10))
    first, second = opened(pool, tokens), pool.open(tokens)
    assert not set(second.blocks) & set(first.blocks)
    assert second.reused == 8 and contents(second) == tokens[:8]
    grow(second, [50] * 20)
    assert isinstance(second.slots(0, 28), slice)
    assert contents(first) == tokens and contents(second) == [*tokens[:8], *[50] * 20]
    second.release()
    first.release()
    assert contents(pool.open(tokens)) == tokens[:8]
    pool.check_integrity()


def test_a_prefix_that_nobody_follows_is_shared_in_place():
    pool = make_pool(32)
    tokens = list(range(1, 10))
    first = opened(pool, tokens)
    blocks = first.blocks[:2]
    first.release()
    assert pool.open(tokens).blocks == blocks


def test_what_was_used_last_is_evicted_last_and_tails_go_before_heads():
    pool = make_pool(4)
    old, new = [1] * 9, [2] * 9
    for tokens in (old, new):
        opened(pool, tokens[:8]).release()
    assert cached_prefix(pool, old) == cached_prefix(pool, new) == 8  # the pool is full of them
    pool.open(old).release()  # used again: now the newest
    expected = [(8, 4), (8, 0), (4, 0), (0, 0)]
    cache = pool.open()
    for kept in expected:
        cache.reserve(cache.capacity + 1)
        assert (cached_prefix(pool, old), cached_prefix(pool, new)) == kept
        pool.check_integrity()
    with pytest.raises(PoolFullError):
        cache.reserve(cache.capacity + 1)


def test_a_growing_sequence_is_read_as_one_slice():
    pool = make_pool(32)
    caches = [pool.open() for _ in range(3)]
    for _ in range(5):
        for cache in caches:
            grow(cache, [7] * 3)
    for cache in caches:
        slots = cache.slots(0, cache.committed)
        assert isinstance(slots, slice) and slots.stop - slots.start == 15


def test_sequences_that_say_how_long_they_get_lie_in_one_piece():
    """Four that fill the pool together, whatever the order in which they grow."""
    pool = make_pool(16)
    caches = [pool.open(expected=16) for _ in range(4)]
    for size in (3, 9, 2, 2):
        for cache in caches:
            grow(cache, [7] * size)
    assert pool.allocator.num_free == 0
    assert all(isinstance(cache.slots(0, 16), slice) for cache in caches)


def test_the_integrity_check_sees_a_lost_block_and_a_doubled_one():
    pool = make_pool(4)
    cache = opened(pool, [1, 2, 3, 4, 5])
    cache.blocks.append(cache.blocks[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()
    cache.blocks[:] = cache.blocks[:1]
    with pytest.raises(AssertionError):
        pool.check_integrity()
