"""Every backend against the dense reference, and the exact one against itself, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.model.attention.base import PADDING_SLOTS, Segment, key_mask
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.attention.sdpa import BUCKET, SdpaAttention

SLOTS = 512
DIM = 16
SCALE = DIM**-0.5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
WINDOWS = (None, 5, 40, 1)


def tree_mask(parents: list[int]) -> Tensor:
    """[nodes, nodes] bool: ancestors and the node itself."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def heads_first(cache: Tensor) -> Tensor:
    """[slots, kv_heads, dim], as the tests write it, in the pool's order: [kv_heads, slots, dim]."""
    return cache.transpose(0, 1).contiguous()


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    return [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes))]


class Pass:
    """The rows of one packed pass: segments, positions, queries and the cache they read."""

    def __init__(self, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.heads = dtype, heads
        shape = (SLOTS + PADDING_SLOTS, kv_heads, DIM)
        self.k, self.v = (self.normal(shape) for _ in range(2))
        self.segments: list[Segment] = []
        self.places: list[int] = []
        self.next_slot = 0

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def chain(self, keys: int, rows: int, gathered: bool = False) -> Pass:
        """The last ``rows`` of a sequence with ``keys`` keys."""
        return self._add(keys, rows, None, list(range(keys - rows, keys)), gathered, prefix=keys - rows)

    def tree(self, prefix: int, parents: list[int], gathered: bool = False) -> Pass:
        """A tree below ``prefix`` keys; its root is a row too."""
        places = [prefix + d for d in depths(parents)]
        return self._add(prefix + len(parents), len(parents), tree_mask(parents), places, gathered, prefix)

    def _add(
        self, keys: int, rows: int, visible: Tensor | None, places: list[int], gathered: bool, prefix: int
    ) -> Pass:
        start, first = len(self.places), self.next_slot
        self.next_slot += keys
        assert self.next_slot <= SLOTS
        slots: slice | Tensor = slice(first, first + keys)
        if gathered:
            slots = first + torch.randperm(keys, generator=self.generator)
        block = torch.tensor(places) if visible is not None else None
        self.segments.append(Segment(start, start + rows, slots, keys, prefix, visible, block))
        self.places += places
        return self

    def query(self) -> Tensor:
        return self.normal((len(self.places), self.heads, DIM))

    def run(self, backend: ReferenceAttention | SdpaAttention, query: Tensor, window: int | None) -> Tensor:
        plan = backend.plan(self.segments, torch.tensor(self.places), frozenset({None, window}))
        return backend.attend(plan, query, heads_first(self.k), heads_first(self.v), SCALE, window)


def mixed_pass(dtype: torch.dtype, heads: int, kv_heads: int, seed: int) -> Pass:
    """Fresh prompt, chunk, single rows, chains and trees; contiguous and scattered."""
    made = Pass(dtype, heads, kv_heads, seed)
    made.chain(9, 9).chain(40, 7).chain(33, 1).chain(21, 1, gathered=True).chain(30, 6, gathered=True)
    for gathered in (False, True):
        made.tree(50, random_parents(8, made.generator), gathered)
        made.tree(0, random_parents(5, made.generator), gathered)
    return made.chain(64, 3).chain(65, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("exact", [False, True])
def test_sdpa_is_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, window: int | None, exact: bool):
    for seed in range(2):
        made = mixed_pass(dtype, heads, kv_heads, seed)
        query = made.query()
        expected = made.run(ReferenceAttention(), query, window)
        actual = made.run(SdpaAttention(dtype, exact=exact), query, window)
        assert actual.shape == (len(made.places), heads * DIM) and actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_reference_is_the_definition_row_by_row():
    made = mixed_pass(torch.float64, 4, 2, 0)
    query = made.query()
    for window in WINDOWS:
        actual = made.run(ReferenceAttention(), query, window)
        for segment in made.segments:
            slots = torch.arange(SLOTS)[segment.keys]
            mask = key_mask(segment, torch.tensor(made.places)[segment.start : segment.stop], window)
            for row in range(segment.start, segment.stop):
                seen = slots[mask[row - segment.start]]
                for head in range(4):
                    k, v = made.k[seen, head // 2], made.v[seen, head // 2]
                    weights = (k @ query[row, head] * SCALE).softmax(0)
                    torch.testing.assert_close(actual[row, head * DIM : (head + 1) * DIM], weights @ v)


def test_a_row_sees_its_window_along_its_own_path():
    """Siblings share a position: a window counts positions, not keys."""
    parents = [-1, 0, 0, 1, 2, 3]
    segment = Segment(0, 6, slice(0, 10), 10, 4, tree_mask(parents), torch.tensor([4, 5, 5, 6, 6, 7]))
    mask = key_mask(segment, torch.tensor([4, 5, 5, 6, 6, 7]), 3)
    seen = [[i for i in range(10) if row[i]] for row in mask.tolist()]
    assert seen == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7], [4, 6, 8], [5, 7, 9]]


def alone(made: Pass, keys: Tensor, query: Tensor, window: int | None) -> Tensor:
    """[heads * DIM]: the row as plain decoding has it: one row, in a cache that holds its keys in order."""
    shape = (len(keys) + PADDING_SLOTS, *made.k.shape[1:])
    k, v = (torch.zeros(shape, dtype=made.dtype) for _ in range(2))
    k[: len(keys)], v[: len(keys)] = made.k[keys], made.v[keys]
    backend = SdpaAttention(made.dtype, exact=True)
    segment = Segment(0, 1, slice(0, len(keys)), len(keys), len(keys) - 1, None, None)
    plan = backend.plan([segment], torch.tensor([len(keys) - 1]), frozenset({window}))
    return backend.attend(plan, query[None], heads_first(k), heads_first(v), SCALE, window)[0]


def assert_exact(made: Pass, window: int | None) -> None:
    query = made.query()
    together = made.run(SdpaAttention(made.dtype, exact=True), query, window)
    for segment in made.segments:
        slots = torch.arange(SLOTS)[segment.keys]
        mask = key_mask(segment, torch.tensor(made.places)[segment.start : segment.stop], None)
        for row in range(segment.start, segment.stop):
            own = alone(made, slots[mask[row - segment.start]], query[row], window)
            assert torch.equal(together[row], own), f"row {row} of {segment}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_rows_of_trees_across_a_bucket_edge(dtype: torch.dtype):
    for prefix in (0, BUCKET - 3, BUCKET - 1, BUCKET, 2 * BUCKET - 2):
        for gathered in (False, True):
            made = Pass(dtype, 4, 2, seed=prefix)
            assert_exact(made.tree(prefix, random_parents(24, made.generator), gathered), None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_tree_path_is_the_chain(dtype: torch.dtype):
    """A tree whose branches are all pruned but one gives the bits of that path alone."""
    parents = [-1, 0, 0, 1, 2, 4, 3, 5]
    made = Pass(dtype, seed=4).tree(70, parents)
    query = made.query()
    together = made.run(SdpaAttention(dtype, exact=True), query, None)
    path = [0, 2, 4, 5, 7]
    chain = Pass(dtype, seed=4).chain(75, 5)
    own = torch.tensor([70 + node for node in path])
    chain.k[70:75], chain.v[70:75] = made.k[own], made.v[own]
    backend = SdpaAttention(dtype, exact=True)
    assert torch.equal(chain.run(backend, query[path], None), together[path])


def test_exact_gathers_of_many_rows_are_cut_to_bound_memory(monkeypatch: pytest.MonkeyPatch):
    made = Pass(torch.float32).tree(100, [-1, *range(19)])
    query = made.query()
    whole = made.run(SdpaAttention(torch.float32, exact=True), query, None)
    monkeypatch.setattr("paceline.model.attention.sdpa.MAX_GATHERED_KEYS", 3 * 2 * BUCKET)
    backend = SdpaAttention(torch.float32, exact=True)
    calls = backend.plan(made.segments, torch.tensor(made.places), frozenset({None})).prepared[None]
    assert max(call.rows.stop - call.rows.start for call in calls) == 3
    assert torch.equal(made.run(backend, query, None), whole)


def test_the_exactness_test_can_fail():
    """Without exact, some row's bits depend on its width: what the tests above look for exists."""
    made = Pass(torch.float32, seed=1).chain(100, 33)
    query = made.query()
    backend = SdpaAttention(torch.float32)
    wide = made.run(backend, query, None)
    narrow = []
    for row, segment in enumerate(made.segments * 33):
        keys = segment.num_keys - 32 + row
        one = replace(segment, start=0, stop=1, keys=slice(0, keys), num_keys=keys, prefix=keys - 1)
        plan = backend.plan([one], torch.tensor([keys - 1]), frozenset({None}))
        narrow.append(
            backend.attend(plan, query[row : row + 1], heads_first(made.k), heads_first(made.v), SCALE, None)[0]
        )
    torch.testing.assert_close(torch.stack(narrow), wide, atol=2e-5, rtol=2e-5)
    assert any(not torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
