"""Weights side by side: apart from each other, aligned, and alive as long as they are used."""

from __future__ import annotations

import gc

import torch

from paceline.kernels.memory import PAGE, Arena


def test_tensors_of_an_arena_do_not_overlap_and_begin_on_lines():
    arena = Arena()
    sizes = [1, 3, 64, 1000, PAGE // 2, 2 * PAGE, 5]
    made = [arena.empty(n, dtype) for n in sizes for dtype in (torch.int8, torch.bfloat16, torch.float32)]
    for value, tensor in enumerate(made):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(made))


def test_a_tensor_outlives_its_arena():
    arena = Arena()
    tensor = arena.empty(10, torch.float32)
    tensor.fill_(3)
    del arena
    gc.collect()
    others = [torch.zeros(PAGE) for _ in range(4)]
    assert bool((tensor == 3).all()) and len(others) == 4
