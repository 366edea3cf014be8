"""What ranks on several hosts give each other: over a group of gloo, into memory that each has for itself.

A piece of every rank comes to every other one before it is summed or gathered, in the order of ranks as on one host, so
that the bits are those of one host (``native/kernels/ranks.h``). A group serves an epoch: it is joined with the epoch's
first piece, and left with the first fault.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from ..network.joins import CAPACITY, Joins, buffers_at, size_of
from .channels import ChannelClosed
from .groups import JOIN_S, Member, join

WAY = "group:"  # of a rank that is on another host, in place of a path of memory
_CARRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class HostRanks:
    """A group's members, and this host's address; in place of `RankMemory`."""

    members: Sequence[Member]
    address: str

    @property
    def count(self) -> int:
        """Of ranks."""
        return len(self.members)

    def path(self, rank: int) -> str:
        """What another rank is told."""
        return f"{WAY}{self.members[rank]}"

    def joins(self) -> HostJoins:
        """Rank 0's end."""
        return HostJoins(self.members[0], self.address)

    def close(self) -> None:
        """A group ends with its members."""


class _Group:
    """The present epoch's group, if it was joined."""

    def __init__(self, member: Member, address: str, memory: torch.Tensor) -> None:
        self._member, self._address, self._memory = member, address, memory
        self.epoch, self.seconds = 0, 3600.0
        self.interrupted: BaseException | None = None
        self._joined: Any = None

    def carry(self, which: int, size: int) -> int:
        """See `RankCarry`; an exception would not come through compiled code."""
        at, step = buffers_at(self._member.size) + which * CAPACITY, 2 * CAPACITY
        parts = [self._memory[at + rank * step :][:size] for rank in range(self._member.size)]
        try:
            if self._joined is None:
                own = replace(self._member, group=f"{self._member.group}/{self.epoch}")
                self._joined = join(own, self._address, JOIN_S)
            self._joined.allgather(parts, parts[self._member.rank], timedelta(seconds=self.seconds)).wait()
        except BaseException as error:
            if not isinstance(error, RuntimeError | ChannelClosed):
                self.interrupted = error
            self.leave()
            return 0
        return 1

    def leave(self) -> None:
        """Be no member any more: the others' waits end."""
        self._joined = None


class HostJoins(Joins):
    """One of several ranks on several hosts.

    Args:
        member: which, and where the others are met.
        address: of this host.
    """

    notice_s = 1.0  # Ray says so

    def __init__(self, member: Member, address: str) -> None:
        memory = mmap.mmap(-1, size_of(member.size))
        self._group = _Group(member, address, torch.frombuffer(memory, dtype=torch.uint8))
        super().__init__(member.rank, member.size, memory)
        self._carry = _CARRY(self._group.carry)
        self.struct.carry = ctypes.cast(self._carry, ctypes.c_void_p).value

    def watch(self, lives: Sequence[int]) -> None:
        """Nobody's process is on this host."""

    def wait(self, seconds: float) -> None:
        """See `Joins`."""
        self._group.seconds = seconds

    def begin(self, epoch: int = 0, lost: int = -1) -> None:
        """See `Joins`; what interrupted a join is raised here."""
        self._group.leave()
        self._group.epoch = epoch
        super().begin(epoch, lost)
        interrupted, self._group.interrupted = self._group.interrupted, None
        if interrupted is not None:
            raise interrupted

    def came(self, rank: int) -> bool:
        """Nobody knows: a piece comes of all ranks or of none."""
        return True


def opened(way: str) -> HostJoins:
    """Another rank's end, in a worker of a cluster, of what rank 0 calls ``way``."""
    import ray

    return HostJoins(Member.parse(way.removeprefix(WAY)), ray.util.get_node_ip_address())
