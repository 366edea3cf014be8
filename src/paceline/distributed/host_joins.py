"""What ranks on several hosts give each other: over a connection of each pair, into memory that each has for itself.

A piece of every rank comes to every other one before it is summed or gathered, in the order of ranks as on one host, so
that the bits are those of one host; compiled code sends and receives, in the thread that computes
(``native/kernels/ranks.h``). Connections serve an epoch: they are made at the epoch's first piece, and end with the
first fault.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from socket import socket
from typing import Any

from ..network.joins import Joins, size_of
from .channels import ChannelClosed
from .groups import JOIN_S, Member, connect_all

WAY = "group:"  # of a rank that is on another host, in place of a path of memory
SPIN_US = 200  # what a piece takes between hosts, about
_CONNECT = ctypes.CFUNCTYPE(ctypes.c_int)


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


class _Connections:
    """The present epoch's, if they were made; compiled code has them made at a join."""

    def __init__(self, member: Member, address: str, ranks: Any) -> None:
        self._member, self._address, self._ranks = member, address, ranks
        self._made: dict[int, socket] = {}
        self._numbers: array[int] = array("q")
        self.interrupted: BaseException | None = None
        self.epoch = 0

    def make(self) -> int:
        """See `RankConnect`; an exception would not come through compiled code."""
        own = replace(self._member, group=f"{self._member.group}/{self.epoch}")
        try:
            self._made = connect_all(own, self._address, JOIN_S)
        except BaseException as error:
            if not isinstance(error, ChannelClosed):
                self.interrupted = error
            return 0
        self._numbers = array(
            "q", [self._made[rank].fileno() if rank in self._made else -1 for rank in range(own.size)]
        )
        self._ranks.sockets = self._numbers.buffer_info()[0]
        return 1

    def end(self) -> None:
        """Close them; the others' waits end, too."""
        self._ranks.sockets = None
        for connection in self._made.values():
            connection.close()
        self._made = {}


class HostJoins(Joins):
    """One of several ranks on several hosts.

    Args:
        member: which, and where the others are met.
        address: of this host.
    """

    notice_s = 1.0  # Ray says so

    def __init__(self, member: Member, address: str) -> None:
        super().__init__(member.rank, member.size, mmap.mmap(-1, size_of(member.size)))
        self._connections = _Connections(member, address, self.struct)
        self._connect = _CONNECT(self._connections.make)
        self.struct.connect = ctypes.cast(self._connect, ctypes.c_void_p).value
        self.struct.spin_us = SPIN_US

    def watch(self, lives: Sequence[int]) -> None:
        """Nobody's process is on this host."""

    def close(self) -> None:
        """See `Joins`; the others' waits end."""
        self._connections.end()

    def begin(self, epoch: int = 0, lost: int = -1) -> None:
        """See `Joins`; what interrupted a join is raised here."""
        self._connections.end()
        self._connections.epoch = epoch
        super().begin(epoch, lost)
        interrupted, self._connections.interrupted = self._connections.interrupted, None
        if interrupted is not None:
            raise interrupted

    def came(self, rank: int) -> bool:
        """Nobody knows: a piece comes of all ranks or of none."""
        return True


def opened(way: str) -> HostJoins:
    """Another rank's end, in a worker of a cluster, of what rank 0 calls ``way``."""
    import ray

    return HostJoins(Member.parse(way.removeprefix(WAY)), ray.util.get_node_ip_address())
