"""Frames arrive whole and in order over every channel; what is broken is refused, and who is gone is known to be."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.distributed import channels, shared, tcp
from paceline.distributed.channels import Channel, ChannelClosed, Link, LinkedChannel, local_pair
from paceline.distributed.clock import Late, RealClock, VirtualClock
from paceline.distributed.frames import FrameError
from paceline.distributed.shared import SharedChannel, SharedEnd, shared_pair
from paceline.native import channels as native

LONG = 60.0  # seconds: an end of waiting that no test comes to
COMPILED = native.library() is not None
Pair = tuple[Channel, Channel]


def by_tcp() -> Pair:
    listener = tcp.Listener()
    one = tcp.connect(listener.host, listener.port, LONG)
    other = listener.accept(LONG)
    listener.close()
    return one, other


def by_memory(one: bool, other: bool, spin_us: int = 0) -> Pair:
    ends = shared_pair(shared.LEAST)
    return SharedChannel(ends[0], spin_us, one), SharedChannel(ends[1], spin_us, other)


KINDS: dict[str, Callable[[], Pair]] = {
    "local": lambda: local_pair(RealClock()),
    "tcp": by_tcp,
    "python": lambda: by_memory(False, False),
    "spinning python": lambda: by_memory(False, False, 500),
}
if COMPILED:
    KINDS |= {
        "compiled": lambda: by_memory(True, True),
        "spinning compiled": lambda: by_memory(True, True, 500),
        "compiled to python": lambda: by_memory(True, False),
        "python to compiled": lambda: by_memory(False, True),
    }
STREAMS = [kind for kind in KINDS if kind != "local"]


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


def test_many_frames_at_once(pair: Pair):
    sent = [bytes([number % 251]) * (number % 700) for number in range(300)]
    thread = threading.Thread(target=lambda: [pair[0].send([data], LONG) for data in sent])
    thread.start()
    assert [bytes(pair[1].receive(LONG)) for _ in sent] == sent
    thread.join()


def test_nothing_comes(pair: Pair):
    for timeout in (0, 0.01):
        with pytest.raises(Late):
            pair[0].receive(timeout)
    pair[1].send([b"late"])
    assert pair[0].receive(LONG) == b"late"


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


@pytest.mark.parametrize("kind", STREAMS)
def test_who_reads_nothing_is_not_waited_for(kind: str):
    one, other = KINDS[kind]()
    with pytest.raises(ChannelClosed, match="took nothing"):
        one.send([bytes(64 * 2**20)], 0.05)
    with pytest.raises(ChannelClosed, match="in the middle of a frame"):
        while True:
            other.receive(LONG)


@pytest.mark.parametrize("kind", ["python", "compiled"] if COMPILED else ["python"])
def test_a_frame_in_pieces_is_kept_over_a_late_wait(kind: str):
    one, other = KINDS[kind]()
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


def raw_write(end: SharedEnd, data: bytes) -> None:
    """Write to an end's ring what no channel would."""
    ring: Any = SharedChannel(end, 0, False)._out
    ring._ring.bytes[: len(data)] = data
    ring._ring.cells[shared.HEAD] = len(data)


@pytest.mark.parametrize("compiled", [False, True] if COMPILED else [False])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (struct.pack("<4sI", b"GET ", 3) + b"abc", "where a frame should begin"),
        (struct.pack("<4sI", channels.MARK, 2**32 - 1), "is announced"),
    ],
)
def test_garbage_in_shared_memory_is_refused(compiled: bool, bad: bytes, why: str):
    ends = shared_pair(shared.LEAST)
    channel = SharedChannel(ends[1], 0, compiled)
    raw_write(ends[0], bad)
    with pytest.raises(FrameError, match=why):
        channel.receive(LONG)
    with pytest.raises(ChannelClosed):
        channel.receive(LONG)


@pytest.mark.parametrize("compiled", [False, True] if COMPILED else [False])
@pytest.mark.parametrize("cell", [shared.HEAD, shared.TAIL])
def test_cells_that_lie_are_seen(compiled: bool, cell: int):
    """The other process may write anything there: nothing beyond the ring is read or written for it."""
    ends = shared_pair(shared.LEAST)
    channel, liar = SharedChannel(ends[1], 0, compiled), SharedChannel(ends[0], 0, False)
    ring: Any = (liar._out if cell == shared.HEAD else liar._into)._ring  # type: ignore[union-attr]
    ring.cells[cell] = 2**63
    with pytest.raises(FrameError, match="what no end writes"):
        if cell == shared.HEAD:
            channel.receive(LONG)
        else:
            channel.send([b"data"], LONG)


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<4sI", channels.MARK, 2**32 - 1)])
def test_garbage_on_a_port_is_refused(bad: bytes):
    listener = tcp.Listener()
    stranger = socket.create_connection((listener.host, listener.port))
    channel = listener.accept(LONG)
    stranger.sendall(bad)
    with pytest.raises(FrameError):
        channel.receive(LONG)
    with pytest.raises(ChannelClosed):
        channel.receive(LONG)
    stranger.close()
    listener.close()


def test_frames_that_are_too_large_are_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "MOST_BYTES", 1000)
    for one, other in (by_tcp(), by_memory(False, False)):
        with pytest.raises(FrameError, match="larger than"):
            one.send([bytes(1001)])
        one.send([bytes(1000)])
        assert len(other.receive(LONG)) == 1000


def test_a_port_that_is_taken_and_one_where_nobody_is():
    listener = tcp.Listener()
    with pytest.raises(ConfigError, match=r"cannot be had .* name a free one|cannot be had"):
        tcp.Listener(listener.host, listener.port)
    with pytest.raises(Late, match="nobody connected"):
        listener.accept(0.01)
    listener.close()
    with pytest.raises(ConfigError, match="start the other side first|Start the other side first"):
        tcp.connect(listener.host, listener.port, 0.01)
    with pytest.raises(ConfigError, match="cannot be had"):
        tcp.Listener("no.such.host.invalid")


@pytest.mark.parametrize("capacity", [0, 4095, 5000, 2**31])
def test_a_ring_of_no_such_size(capacity: int):
    with pytest.raises(ConfigError, match="a power of two"):
        shared_pair(capacity)


def test_memory_that_is_not_what_the_end_says():
    one, other = shared_pair(shared.LEAST)
    larger = SharedEnd(2**20, one.own, one.memory, one.events, one.life)
    with pytest.raises(ConfigError, match="open the end that was made|Open the end that was made"):
        SharedChannel(larger)
    for end in (one, other):
        end.drop()


CHILD = """
import sys
from paceline.distributed.shared import SharedChannel, SharedEnd
channel = SharedChannel(SharedEnd.parse(sys.argv[1]), compiled={compiled})
while True:
    frame = channel.receive()
    channel.send([b"have ", frame])
"""


@pytest.mark.parametrize("compiled", [False, True] if COMPILED else [False])
def test_another_process_answers_and_its_death_is_seen(compiled: bool):
    """Spinning and parked; it is killed while nobody waits, then while somebody does."""
    with ExitStack() as stack:
        children = []
        for _ in range(2):
            own, theirs = shared_pair()
            code = CHILD.format(compiled=compiled)
            child = subprocess.Popen([sys.executable, "-c", code, str(theirs)], pass_fds=theirs.fds)
            theirs.drop()
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append((child, SharedChannel(own, compiled=compiled)))
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
    one, other = by_memory(COMPILED, COMPILED)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: (seen.append(number), other.send([b"now"]))[0])
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        assert one.receive(LONG) == b"now" and seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def linked(clock: Any, link: Link) -> tuple[LinkedChannel, LinkedChannel]:
    one, other = local_pair(clock)
    return LinkedChannel(one, link, clock), LinkedChannel(other, link, clock)


def test_a_link_takes_its_time():
    """2 ms to travel, 1 Gbit/s: 1,000,000 bits occupy it for 1 ms, and a second frame waits for the first."""
    link = Link(latency_ms=2.0, gbit_per_s=1.0)
    with VirtualClock() as clock:
        one, other = linked(clock, link)
        for _ in range(2):
            one.send([bytes(125_000)])
        with pytest.raises(Late):
            other.receive(timeout=0.0025)
        assert clock.now() == pytest.approx(0.0025)
        assert len(other.receive()) == 125_000 and clock.now() == pytest.approx(0.003)
        assert len(other.receive(timeout=1.0)) == 125_000 and clock.now() == pytest.approx(0.004)
        one.send([b"x"])
        with pytest.raises(Late):
            other.receive(timeout=0)
        clock.sleep_until(1.0)
        assert other.receive(timeout=0) == b"x" and clock.now() == 1.0


def test_a_link_in_real_time_and_one_that_cannot_be():
    one, other = linked(RealClock(), Link(latency_ms=5.0))
    began = time.perf_counter()
    one.send([b"x"])
    assert other.receive(LONG) == b"x" and time.perf_counter() - began >= 0.005
    for bad in ({"latency_ms": -1.0}, {"gbit_per_s": 0.0}):
        with pytest.raises(ConfigError, match="link "):
            Link(**bad)
    ends = local_pair(RealClock())
    ends[0].send([b"bare"])
    with pytest.raises(FrameError, match="both ends must be linked"):
        LinkedChannel(ends[1], Link(), RealClock()).receive(0)
