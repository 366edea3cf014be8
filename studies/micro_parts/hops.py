"""What it costs to pass something to another process: frames over channels, and a question with its answer.

A hop is half of a round trip of one frame between two processes that are pinned to a core each. A rendezvous is a round
trip of messages: encoded, sent, decoded and answered by a worker's main loop.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError
from paceline.runtime import shared
from paceline.runtime.channels import Channel, ChannelClosed
from paceline.runtime.groups import GroupChannel, Member, Store, join
from paceline.runtime.handshake import Facts
from paceline.runtime.placement import Placement, cores, pin
from paceline.runtime.sockets import SocketChannel
from paceline.runtime.worker import Patience, Worker, WorkerSpec

WARM_UP = 200  # round trips that are not counted
SPIN_US, PARKED_PAUSE_S = 100_000, 3e-4  # never parks; long enough for the other side to be asleep
PATIENCE_S = 60.0
LOOPBACK = "127.0.0.1"
CANDIDATES = 24  # of a rendezvous: tokens and log-probabilities of (gamma + 1) x kappa candidates, and as many drafted


@dataclass(frozen=True, kw_only=True)
class HopCost:
    """One kind of frame over one channel; microseconds of one way."""

    channel: str
    wait: str  # spinning, or parked
    size_bytes: int
    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile


@dataclass(frozen=True, slots=True)
class Ping:
    """What a rendezvous carries to the worker."""

    tokens: list[int]
    log_p: list[float]


@dataclass(frozen=True, slots=True)
class Pong:
    """What it carries back."""

    tokens: list[int]
    log_q: list[float]


KINDS = Ping, Pong


class Answering:
    """A worker that knows its answer at once."""

    kinds = KINDS
    facts = Facts()

    def handle(self, message: Ping) -> list[Pong]:
        """The question's own numbers."""
        return [Pong(message.tokens, message.log_p)]

    def work(self) -> None:
        """There is none."""


def answering(device: str) -> Answering:
    """The service of the rendezvous."""
    return Answering()


def measure(sizes: Sequence[int], repeats: int) -> list[HopCost]:
    """Time hops of frames of every size over every channel, and rendezvous.

    Args:
        sizes: bytes of a frame.
        repeats: round trips of each kind.

    Raises:
        ConfigError: this process may use fewer than two cores.
        CapabilityError: this system pins no process, or has no such memory.
    """
    if len(usable := cores()) < 2:
        raise ConfigError("hops between two cores", "this process may use one", "give it two")
    own, other = (Placement(cores=(core,)) for core in usable[:2])
    kinds = [("shared memory", "spinning"), ("shared memory", "parked"), ("sockets", "parked"), ("group", "parked")]
    found: list[HopCost] = []
    with _pinned(own):
        for channel, wait in kinds:
            with _echoed(channel, wait, other) as end:
                for size in sizes:
                    found.append(_cost(channel, wait, size, _hops(end, size, wait, repeats)))
        for wait in ("spinning", "parked"):
            found.append(_cost("rendezvous", wait, 16 * CANDIDATES, _meetings(other, wait, repeats)))
    return found


def _cost(channel: str, wait: str, size: int, times: list[float]) -> HopCost:
    low, median, high = (1e6 * float(np.quantile(times[WARM_UP:], q)) for q in (0.1, 0.5, 0.9))
    return HopCost(channel=channel, wait=wait, size_bytes=size, median_us=median, low_us=low, high_us=high)


@contextmanager
def _pinned(placement: Placement) -> Iterator[None]:
    """Keep this process on its core meanwhile."""
    before = cores()
    pin(placement.cores)
    try:
        yield
    finally:
        pin(before)


@contextmanager
def _echoed(channel: str, wait: str, placement: Placement) -> Iterator[Channel]:
    """An end of a channel to a process that sends every frame back."""
    spin = SPIN_US if wait == "spinning" else 0
    command = [sys.executable, __file__, str(spin), str(placement.cores[0])]
    if channel == "group":
        store = Store(LOOPBACK)
        member = store.member(channel, 0, 2)
        child = subprocess.Popen([*command, f"group:{replace(member, rank=1)}"])
        end: Channel = GroupChannel(join(member, LOOPBACK, PATIENCE_S), 1)
    elif channel == "sockets":
        mine, its = socket.socketpair()
        child = subprocess.Popen([*command, f"socket:{its.fileno()}"], pass_fds=[its.fileno()])
        its.close()
        end = SocketChannel(mine)
    else:
        own, theirs = shared.shared_pair()
        child = subprocess.Popen([*command, f"shared:{theirs}"], pass_fds=theirs.fds)
        theirs.drop()
        end = shared.SharedChannel(own, spin)
    try:
        yield end
    finally:
        end.close()
        child.wait(PATIENCE_S)


def _hops(end: Channel, size: int, wait: str, repeats: int) -> list[float]:
    """Seconds of one way."""
    frame, times = [bytes(size)], []
    for _ in range(repeats + WARM_UP):
        if wait == "parked":
            time.sleep(PARKED_PAUSE_S)
        began = time.perf_counter()
        end.send(frame)
        end.receive(PATIENCE_S)
        times.append((time.perf_counter() - began) / 2)
    return times


def _meetings(placement: Placement, wait: str, repeats: int) -> list[float]:
    """Seconds of both ways."""
    spin = SPIN_US if wait == "spinning" else 0
    spec = WorkerSpec(name="answering", service=f"{__name__}:answering", kinds=KINDS, placement=placement, spin_us=spin)
    question, times = Ping([50_000] * CANDIDATES, [-1.25] * CANDIDATES), []
    own = str(Path(__file__).parents[1])  # where the worker finds this module
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    worker = Worker(spec, Patience(silent_s=PATIENCE_S))
    try:
        line = worker.start()
        for _ in range(repeats + WARM_UP):
            if wait == "parked":
                time.sleep(PARKED_PAUSE_S)
            began = time.perf_counter()
            line.send(question)
            line.receive(PATIENCE_S)
            times.append(time.perf_counter() - began)
    finally:
        worker.stop()
    return times


def _echo(spin_us: int, core: int, way: str) -> None:
    """Send every frame back, until the other end is gone."""
    os.sched_setaffinity(0, {core})
    kind, _, where = way.partition(":")
    if kind == "group":
        channel: Channel = GroupChannel(join(Member.parse(where), LOOPBACK, PATIENCE_S), 0)
    elif kind == "socket":
        channel = SocketChannel(socket.socket(fileno=int(where)))
    else:
        channel = shared.SharedChannel(shared.SharedEnd.parse(where), spin_us)
    with suppress(ChannelClosed):
        while True:
            channel.send([channel.receive()])


if __name__ == "__main__":
    _echo(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
