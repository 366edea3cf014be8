"""Peaks of a process's memory, as studies read them."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from kit.memory import Memory


def test_a_peak_is_above_what_is_held() -> None:
    memory = Memory(torch.device("cpu"))
    gc.collect()  # what other tests left behind must not go while this one looks
    if not memory.reset_peak():
        pytest.skip("the peak cannot be reset here")
    before = memory.held()
    block = mmap.mmap(-1, 64 * 2**20)  # pages of its own: an allocator might have free ones of other tests
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    block.close()
    peak = memory.peak()
    assert before is not None and peak is not None and peak - before > 60e6
