"""Rows of K and V that are copied from slot to slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.native import needs_kernels

from paceline import kernels
from paceline.kv.store import KVStore

SLOTS = 12
slot = st.integers(0, SLOTS - 1)


def filled(dtype: torch.dtype) -> KVStore:
    store = KVStore(4, 2, 3, SLOTS, dtype, torch.device("cpu"))
    for cache in (store.all_k, store.all_v):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(7)).to(dtype))
    return store


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(slot, slot), max_size=SLOTS, unique_by=lambda move: move[1]), st.booleans())
def test_compiled_copies_are_torchs(moves: list[tuple[int, int]], part: bool) -> None:
    """Also where ranges overlap, and in a part of the layers."""
    assert kernels.library() is not None
    sources, targets = [a for a, _ in moves], [b for _, b in moves]
    for dtype in (torch.bfloat16, torch.float64):
        store = filled(dtype)
        wanted = [cache.clone() for cache in (store.all_k, store.all_v)]
        for cache in wanted:
            within = cache[1:3] if part else cache
            within[:, :, targets] = within[:, :, sources].clone()
        (store.part(1, 3) if part else store).copy_slots(sources, targets)
        assert torch.equal(store.all_k, wanted[0]) and torch.equal(store.all_v, wanted[1])


@needs_kernels
@pytest.mark.parametrize("moves", [([0, SLOTS], [1, 2]), ([0], [-1]), ([-1], [0])])
def test_slots_that_are_not_there_are_refused(moves: tuple[list[int], list[int]]) -> None:
    kernels.library()
    store = filled(torch.float32)
    before = store.all_k.clone()
    with pytest.raises(IndexError, match="of a cache of 12"):
        store.copy_slots(*moves)
    with pytest.raises(ValueError, match="2 slots to copy to 1"):
        store.copy_slots([0, 1], [2])
    assert torch.equal(store.all_k, before)
