"""Sums and gathers of ranks through memory that their processes share; see ``kernels/cpp/kernels/ranks.h``."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.errors import CapabilityError
from ..kernels import abi, library, unavailable
from ..kernels.linear import require

CAPACITY = 2**21  # bytes of a buffer; more goes in pieces
LINE = 128  # bytes of the header, and of a cell
SPIN_US = 50


class RankMemory:
    """Memory for so many ranks. It has no name, and is gone with the last process that has it open.

    Raises:
        CapabilityError: this system has no such memory, or no compiler.
    """

    def __init__(self, count: int) -> None:
        subject = f"tensor_parallel={count}"
        if not sys.platform.startswith("linux"):
            raise CapabilityError(subject, f"ranks share memory as Linux has it, which {sys.platform} has not", "use 1")
        if library() is None:  # joins have no form but the compiled one
            raise CapabilityError(subject, f"there is no compiled code ({unavailable()})", "install a C++ compiler")
        self.count = count
        self._fd = os.memfd_create("paceline-ranks", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size_of(count))

    @property
    def path(self) -> str:
        """Return the file that another rank opens, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def joins(self) -> Collectives:
        """Rank 0's end."""
        return Collectives(0, self.count, mmap.mmap(self._fd, size_of(self.count)))

    def close(self) -> None:
        """Remove the file: no other rank opens it any more."""
        os.close(self._fd)


def size_of(count: int) -> int:
    """Return bytes of the memory of so many ranks: the header, a cell of each, and two buffers of each."""
    return LINE * (1 + count) + 2 * count * CAPACITY


class Collectives:
    """One rank's end of the shared memory.

    Args:
        rank, count: which of how many.
        memory: that they share.
    """

    def __init__(self, rank: int, count: int, memory: mmap.mmap) -> None:
        compiled = library()
        assert compiled is not None, "looked at before"
        self.rank, self.count, self._library, self._memory = rank, count, compiled, memory
        self._held = (ctypes.c_char * LINE).from_buffer(memory)
        self._lives: array[int] = array("q")
        self.struct = abi.CRanks(
            rank=rank, count=count, memory=ctypes.addressof(self._held), capacity=CAPACITY, spin_us=SPIN_US
        )
        self.wait(3600.0)

    @staticmethod
    def opened(path: str, rank: int, count: int) -> Collectives:
        """Return another rank's end of rank 0's memory; it ends with that process, which is its parent.

        Raises:
            OSError: it is not there.
        """
        fd = os.open(path, os.O_RDWR)
        try:
            joins = Collectives(rank, count, mmap.mmap(fd, size_of(count)))
        finally:
            os.close(fd)
        joins.watch([os.pidfd_open(os.getppid())])
        return joins

    def watch(self, lives: Sequence[int]) -> None:
        """Watch the processes that joins need, by their file descriptors (``os.pidfd_open``), which are taken over."""
        for fd in self._lives:
            os.close(fd)
        self._lives = array("q", lives)
        self.struct.lives, self.struct.num_lives = self._lives.buffer_info()[0], len(lives)

    def close(self) -> None:
        """End all joins."""
        self.watch(())

    def wait(self, seconds: float) -> None:
        """Set how long to wait for another rank."""
        self.struct.timeout_us = int(1e6 * seconds)

    def begin(self, lost: int = -1) -> None:
        """Count joins from 0 again; ``lost`` 1: ranks that wait for another one give up, 0: may wait again."""
        self._library.pl_rank_begin(self._at, lost)

    def came(self, rank: int) -> bool:
        """Return whether another rank came to the join for which this one waited last."""
        cell = ctypes.c_uint32.from_buffer(self._memory, LINE * (1 + rank))
        return (cell.value - self.struct.joins - 1) % 2**32 < 2**31

    @property
    def _at(self) -> int:
        return ctypes.addressof(self.struct)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in the order of ranks; in place where it is in one piece.

        Sums are float32 or float64.

        Raises:
            RankLost: another rank is gone.
        """
        x = x.contiguous()
        wide = {torch.float32: 0, torch.float64: 1}[x.dtype]
        require(self._library.pl_rank_sum(self._at, x.data_ptr(), x.numel(), wide))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return [rows, ranks * n] of all ranks' ``x`` [rows, n], rank after rank; errors as of `sum`."""
        rows, n = x.shape
        out = x.new_empty(rows, self.count * n)
        out[:, self.rank * n : (self.rank + 1) * n] = x
        require(self._library.pl_rank_gather(self._at, out.data_ptr(), rows, n * x.element_size()))
        return out
