"""Ways between two workers that know each other by an address alone, which a third, the coordinator, makes up.

    unix:NAME              on one host: whoever gives frames connects, and hands over an end of shared memory
    group:ADDRESS/MEMBER   between two hosts: both join a group of two (`groups`); the address is one's own

An address is good for one way, once. A way that broke is left, and another one is made.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial

from .channels import Channel, ChannelClosed
from .shared import SharedChannel, SharedEnd, shared_pair, usable
from .sockets import SocketChannel

RETRY_S = 0.001
OPEN_S = 60.0  # for both ends of a way to be there
FEW_BYTES, ENDS = 256, 6  # of a shared end's text, and its file descriptors
Open = Callable[[float], Channel]  # an end of a way, given how long the other one is waited for; raises ChannelClosed
Hop = Callable[[str, str], tuple[str, str]]  # between who gives on one host and who takes on another: an address each


def hop_here(giver: str, taker: str) -> tuple[str, str]:
    """Addresses of a new way between two processes of this host."""
    way = f"unix:{secrets.token_hex(16)}"
    return way, way


def possible() -> bool:
    """Whether processes of this host find each other so: by a name that is no file, and ends with them."""
    return sys.platform.startswith("linux")


def taking(way: str) -> Open:
    """The end where frames come in; from now on it can be connected to."""
    kind, _, where = way.partition(":")
    if kind == "group":
        return partial(_joined, where)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(_name(where))
    listening.listen(1)
    return partial(_accepted, listening)


def giving(way: str) -> Open:
    """The end where frames go out."""
    kind, _, where = way.partition(":")
    return partial(_joined if kind == "group" else _connected, where)


def _name(where: str) -> str:
    return f"\0paceline-{where}"


def _joined(where: str, seconds: float) -> Channel:
    from .groups import GroupChannel, Member, join  # which need torch.distributed

    address, _, text = where.partition("/")
    member = Member.parse(text)
    return GroupChannel(join(member, address, seconds), 1 - member.rank)


def _connected(where: str, seconds: float) -> Channel:
    end = time.monotonic() + seconds
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            connection.connect(_name(where))
            break
        except OSError as error:
            if time.monotonic() > end:
                connection.close()
                raise ChannelClosed(f"nobody takes frames at {where}: {error.strerror}") from error
            time.sleep(RETRY_S)
    if not usable():
        return SocketChannel(connection)
    own, theirs = shared_pair()
    with connection:
        socket.send_fds(connection, [str(theirs).encode()], theirs.fds)
    theirs.drop()
    return SharedChannel(own)


def _accepted(listening: socket.socket, seconds: float) -> Channel:
    with listening:
        listening.settimeout(seconds)
        try:
            connection, _ = listening.accept()
        except TimeoutError as error:
            raise ChannelClosed(f"nobody gives frames here within {seconds:g} s") from error
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", peer)
    if user != os.getuid():
        connection.close()
        raise ChannelClosed(f"user {user} of this host gave frames, who is another one")
    if not usable():
        return SocketChannel(connection)
    with connection:
        connection.settimeout(seconds)
        text, fds, _, _ = socket.recv_fds(connection, FEW_BYTES, ENDS, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != ENDS:
        raise ChannelClosed("who gives frames has gone")
    said, (memory, a, b, c, d, life) = SharedEnd.parse(text.decode()), fds
    return SharedChannel(SharedEnd(said.capacity, said.own, memory, (a, b, c, d), life))
