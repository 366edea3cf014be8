"""Frames arrive whole and in order over every channel; what is broken is refused, and who is gone is known to be."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from kits.channels import RealTime, local_pair

from paceline.core.errors import ConfigError
from paceline.runtime import channels, groups, shared
from paceline.runtime.channels import Channel, ChannelClosed
from paceline.runtime.clock import Late
from paceline.runtime.frames import FrameError
from paceline.runtime.groups import GroupChannel, Member, Store, join
from paceline.runtime.shared import SharedChannel, SharedEnd, shared_pair
from paceline.runtime.sockets import SocketChannel

LONG = 60.0  # seconds: an end of waiting that no test comes to
LOCALHOST = "127.0.0.1"
Pair = tuple[Channel, Channel]
numbers = itertools.count()


def by_sockets() -> Pair:
    one, other = socket.socketpair()
    return SocketChannel(one), SocketChannel(other)


def by_memory(spin_us: int = 0) -> Pair:
    ends = shared_pair(shared.LEAST)
    return SharedChannel(ends[0], spin_us), SharedChannel(ends[1], spin_us)


def by_group() -> Pair:
    """Two members in one process, each with an address of its own."""
    store, name, made = Store(LOCALHOST), f"test/{next(numbers)}", {}

    def one(rank: int) -> None:
        made[rank] = GroupChannel(join(store.member(name, rank, 2), f"127.0.0.{1 + rank}", LONG), 1 - rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


KINDS: dict[str, Callable[[], Pair]] = {
    "local": lambda: local_pair(RealTime()),
    "sockets": by_sockets,
    "parked": by_memory,
    "spinning": lambda: by_memory(500),
    "group": by_group,
}
IN_MEMORY = ("parked", "spinning")


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = KINDS[request.param]()
    yield made
    for end in made:
        end.close()


def test_frames_arrive_whole_and_in_order(pair: Pair):
    """Frames of all sizes, larger ones than a ring among them, while the other side sends as many back."""
    draw = random.Random(0)
    sizes = [0, 1, 7, 8, 9, 4087, 4088, 4096, 5000, 20_000, 70_000, *(draw.randrange(6000) for _ in range(60))]
    sent = [draw.randbytes(size) for size in sizes]

    def answer() -> None:
        for _ in sent:
            pair[1].send([pair[1].receive(LONG)[::-1]], LONG)

    thread = threading.Thread(target=answer)
    thread.start()
    for data in sent:
        pair[0].send([data[:3], data[3:]], LONG)
        assert pair[0].receive(LONG) == data[::-1]
    thread.join()


def test_what_was_sent_before_the_end_is_received(pair: Pair):
    pair[0].send([b"last"])
    pair[0].close()
    assert pair[1].receive(LONG) == b"last"
    with pytest.raises(ChannelClosed, match="is gone"):
        pair[1].receive(LONG)
    with pytest.raises(ChannelClosed):
        pair[0].send([b"more"])
    with pytest.raises(ChannelClosed):
        pair[0].receive(0)


@pytest.mark.parametrize("kind", ["sockets", *IN_MEMORY])
def test_who_reads_nothing_is_not_waited_for(kind: str):
    one, other = KINDS[kind]()
    with pytest.raises(ChannelClosed, match="took nothing"):
        one.send([bytes(64 * 2**20)], 0.05)
    with pytest.raises(ChannelClosed, match="in the middle of a frame"):
        while True:
            other.receive(LONG)


def test_a_frame_in_pieces_is_kept_over_a_late_wait():
    one, other = by_memory()
    data = random.Random(2).randbytes(100_000)  # the ring has 4096
    late, frame = 0, None
    thread = threading.Thread(target=lambda: one.send([data], LONG))
    with pytest.raises(Late):
        other.receive(0)
    thread.start()
    while frame is None:
        try:
            frame = other.receive(0)
        except Late:
            late += 1
    thread.join()
    assert frame == data


def raw(end: SharedEnd) -> tuple[memoryview, memoryview]:
    """The cells and the bytes of the ring that an end writes; cells are a cache line apart."""
    size = shared.CELLS + end.capacity
    whole = memoryview(mmap.mmap(end.memory, 2 * size))[end.own * size :]
    return whole[: shared.CELLS].cast("Q"), whole[shared.CELLS : size]


HEAD, TAIL = 0, 8  # places of cells

BAD = [
    (struct.pack("<4sI", b"GET ", 3) + b"abc", "where a frame should begin"),
    (struct.pack("<4sI", channels.MARK, 2**32 - 1), "is announced"),
]


@pytest.mark.parametrize(("bad", "why"), BAD)
def test_garbage_in_shared_memory_is_refused(bad: bytes, why: str):
    ends = shared_pair(shared.LEAST)
    channel, (cells, data) = SharedChannel(ends[1], 0), raw(ends[0])
    data[: len(bad)] = bad
    cells[HEAD] = len(bad)
    with pytest.raises(FrameError, match=why):
        channel.receive(LONG)
    with pytest.raises(ChannelClosed):
        channel.receive(LONG)


@pytest.mark.parametrize("cell", [HEAD, TAIL])
def test_cells_that_lie_are_seen(cell: int):
    """The other process may write anything there: nothing beyond the ring is read or written for it."""
    ends = shared_pair(shared.LEAST)
    channel = SharedChannel(ends[1], 0)
    raw(ends[0] if cell == HEAD else ends[1])[0][cell] = 2**63
    with pytest.raises(FrameError, match="what no end writes"):
        if cell == HEAD:
            channel.receive(LONG)
        else:
            channel.send([b"data"], LONG)


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", BAD[1][0]])
def test_garbage_over_a_socket_is_refused(bad: bytes):
    stranger, own = socket.socketpair()
    channel = SocketChannel(own)
    stranger.sendall(bad)
    with pytest.raises(FrameError):
        channel.receive(LONG)
    with pytest.raises(ChannelClosed):
        channel.receive(LONG)
    stranger.close()


# -- groups


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<4sI", channels.MARK, 2**31)])
def test_garbage_over_a_group_is_refused(bad: bytes):
    one, other = by_group()
    assert isinstance(one, GroupChannel)
    one._send(torch.frombuffer(bytearray(bad), dtype=torch.uint8), timedelta(seconds=LONG))
    with pytest.raises(FrameError):
        other.receive(LONG)
    with pytest.raises(ChannelClosed):
        other.receive(LONG)
    one.close()


MEMBER = """
import sys, time
from paceline.runtime.groups import GroupChannel, Member, join
channel = GroupChannel(join(Member.parse(sys.argv[1]), "127.0.0.2"), 0)
while True:
    channel.send([channel.receive()])
"""


def test_a_member_that_is_killed_or_stopped():
    """Its death ends a wait; what it does not take while it is stopped ends the channel, in time."""
    store = Store(LOCALHOST)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        name = f"killed/{number}"
        member = store.member(name, 0, 2)
        assert Member.parse(str(member)) == member and not store.waits(name)
        child = subprocess.Popen([sys.executable, "-c", MEMBER, str(replace(member, rank=1))])
        channel = GroupChannel(join(member, LOCALHOST, LONG), 1)
        assert store.waits(name)
        channel.send([b"hello"], LONG)
        assert channel.receive(LONG) == b"hello"
        os.kill(child.pid, number)
        with pytest.raises(ChannelClosed, match="is gone" if number == signal.SIGKILL else "took nothing for 0.2 s"):
            while number == signal.SIGSTOP:
                channel.send([bytes(2**20)], 0.2)
            channel.receive(LONG)
        child.kill()
        child.wait()
        channel.close()
        assert channel.ended(LONG)


def test_a_group_that_does_not_come_together(monkeypatch):
    """Both ends are named, whoever says it."""
    store = Store(LOCALHOST)
    with pytest.raises(
        ChannelClosed, match=r"127\.0\.0\.1 waits in group alone at 127\.0\.0\.1:\d+, and the others have not"
    ):
        join(store.member("alone", 0, 2), LOCALHOST, 0.5)
    behind = store.member("behind a firewall", 0, 2)
    groups.dist.PrefixStore(behind.group, store._store).set("here/1", "10.0.0.2")
    with pytest.raises(ChannelClosed, match=r"127\.0\.0\.1 and 10\.0\.0\.2 do not reach each other: are ports closed"):
        join(behind, LOCALHOST, 0.5)
    monkeypatch.setattr(groups, "JOIN_S", 0.2)
    with socket.create_server((LOCALHOST, 0)) as taken:
        closed = replace(behind, port=taken.getsockname()[1])
    with pytest.raises(
        ChannelClosed, match=rf"127\.0\.0\.2 does not reach the store at 127\.0\.0\.1:{closed.port}: is that"
    ):
        join(closed, "127.0.0.2", 0.2)
    with pytest.raises(ConfigError, match="this host cannot listen at it"):
        Store("192.0.2.250")


def test_frames_that_are_too_large_are_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "MOST_BYTES", 1000)
    for one, other in (by_sockets(), by_memory(), by_group()):
        with pytest.raises(FrameError, match="larger than"):
            one.send([bytes(1001)])
        one.send([bytes(1000)])
        assert len(other.receive(LONG)) == 1000
        one.close()
        other.close()


CHILD = """
import sys
from paceline.runtime.shared import SharedChannel, SharedEnd
channel = SharedChannel(SharedEnd.parse(sys.argv[1]))
while True:
    frame = channel.receive()
    channel.send([b"have ", frame])
"""


def test_another_process_answers_and_its_death_is_seen():
    """Spinning and parked; it is killed while nobody waits, then while somebody does."""
    with ExitStack() as stack:
        children = []
        for _ in range(2):
            own, theirs = shared_pair()
            child = subprocess.Popen([sys.executable, "-c", CHILD, str(theirs)], pass_fds=theirs.fds)
            theirs.drop()
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append((child, SharedChannel(own)))
        for _, channel in children:
            for size in (5, 300_000):
                channel.send([bytes(size)], LONG)
                assert channel.receive(LONG) == b"have " + bytes(size)
        (first, early), (second, late) = children
        first.kill()
        first.wait()
        with pytest.raises(ChannelClosed):
            early.receive(LONG)
        threading.Timer(0.05, lambda: os.kill(second.pid, signal.SIGKILL)).start()
        with pytest.raises(ChannelClosed):
            late.receive(LONG)


def test_a_signal_is_handled_while_a_channel_is_waited_for():
    one, other = by_memory()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: (seen.append(number), other.send([b"now"]))[0])
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        assert one.receive(LONG) == b"now" and seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
