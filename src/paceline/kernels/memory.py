"""Memory for weights, keys and values, which passes read from end to end: on huge pages where the system has them.

A pass over 50 MB looks up 12,000 pages of 4 KB, more than a processor remembers, or 25 of 2 MB.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a huge page
LARGEST = 32 << 20  # bytes that are taken from the system at once, where a tensor needs no more


class Arena:
    """Tensors side by side in a few large pieces of memory, which live as long as a tensor in them.

    Their pages are huge where the system grants that on request (Linux, transparent huge pages not "never").
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._next = PAGE

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] of ``dtype``, at an address that is a multiple of 64."""
        size = numel * dtype.itemsize
        if self._used + size > len(self._piece):
            self._piece, self._used = _piece(max(size, self._next)), 0
            self._next = min(2 * self._next, LARGEST)
        piece = self._piece[self._used : self._used + size]
        piece[::PAGE] = 0  # one thread has the pages made: two that write to new pages at once take three times as long
        self._used += -(-size // 64) * 64
        return piece.view(dtype)


def give_back() -> None:
    """Give the system what was freed and what the C library (glibc) keeps for later."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _piece(size: int) -> Tensor:
    """Return [at least size] bytes from the beginning of a huge page on."""
    whole = -(-size // PAGE) * PAGE
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, whole + PAGE, flags=private) if private else mmap.mmap(-1, whole + PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping
    begin = -piece.data_ptr() % PAGE
    return piece[begin : begin + whole]
