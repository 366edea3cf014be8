"""Workers that another host starts: paired by their key, one coordinator at a time, and back when they die."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed_services import KINDS, Say

from paceline.core.errors import ConfigError
from paceline.distributed.channels import ChannelClosed, Line
from paceline.distributed.clock import Late
from paceline.distributed.frames import Codec
from paceline.distributed.handshake import GREETINGS, LIFE, Begin, Facts, Hello
from paceline.distributed.hosts import Host, launch_at
from paceline.distributed.placement import Placement
from paceline.distributed.tcp import Listener, connect
from paceline.distributed.worker import Patience, Worker, WorkerSpec

LONG = 120.0
LAZY = Patience(start_s=LONG, silent_s=LONG, stuck_s=LONG, rest_s=0.01)


def echo(asked: Begin) -> Begin:
    """What this host serves, whatever it is asked for."""
    if asked.options.get("refuse"):
        raise ConfigError("a stage", "it is not liked", "ask for another")
    return replace(asked, service="distributed_services:echo", options={"weights": "here"})


class Served:
    """A host in a thread."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.host = Host(Listener(), echo, Placement(), self.notes.append)
        self.address = f"127.0.0.1:{self.host.listener.port}"
        self._going = True
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while self._going:
            self.host.turn(0.05)

    def stop(self) -> None:
        self._going = False
        self._thread.join()
        self.host.stop()
        self.host.listener.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    made = Served()
    yield made
    made.stop()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.stop()


def worker_of(served: Served, workers: list[Worker], patience: Patience = LAZY, **options: Any) -> Worker:
    spec = WorkerSpec(
        name=f"stage 0 at {served.address}", service="", options=options, kinds=KINDS, expected=Facts(weights="here")
    )
    workers.append(Worker(spec, patience, launch_at(served.address)))
    return workers[-1]


def until_ready(worker: Worker) -> Line:
    end = time.monotonic() + LONG
    while not worker.poll():
        assert time.monotonic() < end, worker.faults
        time.sleep(0.005)
    assert worker.line is not None
    return worker.line


def say(line: Line, text: str) -> Any:
    line.send(Say(text))
    return line.receive(LONG)


def test_one_that_dies_or_stands_still_there_is_named_and_comes_back(served: Served, workers: list[Worker]) -> None:
    worker = worker_of(served, workers, replace(LAZY, silent_s=2.0))
    assert say(worker.start(), "hello") == Say("HELLO")
    assert served.notes and served.notes[0].startswith("stage 0 at ")
    for order in (signal.SIGKILL, signal.SIGSTOP):
        pid, count = served.host.pid, len(worker.faults)
        os.kill(pid or 0, order)
        if order == signal.SIGKILL:
            assert worker.line is not None
            with pytest.raises(ChannelClosed):
                worker.line.receive(LONG)
            worker.lost()
        while len(worker.faults) == count:
            worker.poll()
        assert worker.faults[-1].startswith(f"worker stage 0 at {served.address} ")
        assert say(until_ready(worker), "back") == Say("BACK")
        assert served.host.pid not in (pid, None)
        assert not Path(f"/proc/{pid}").exists()  # the host ends what nobody waits for
    assert "closed its line" in worker.faults[0] and "no sign of life" in worker.faults[-1]


def test_one_coordinator_at_a_time(served: Served, workers: list[Worker]) -> None:
    first = worker_of(served, workers)
    line = first.start()
    with pytest.raises(ConfigError, match="it serves another coordinator"):
        worker_of(served, workers).start()
    assert say(line, "still") == Say("STILL")
    first.stop()
    assert say(worker_of(served, workers).start(), "next") == Say("NEXT")


def test_what_the_host_does_not_like_it_refuses(served: Served, workers: list[Worker]) -> None:
    with pytest.raises(ConfigError, match="stage 0 at .*: it is not liked. Ask for another"):
        worker_of(served, workers, refuse=True).start()
    spec = WorkerSpec(name="stage 0", service="", kinds=KINDS, expected=Facts(weights="other"))
    workers.append(Worker(spec, LAZY, launch_at(served.address)))
    with pytest.raises(ConfigError, match="its weights is here, and other is asked for"):
        workers[-1].start()


def test_strangers_are_not_served_and_change_nothing(served: Served, workers: list[Worker]) -> None:
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(LONG)
        with suppress(ConnectionResetError):  # closed with bytes that were not read
            assert stranger.recv(10) == b""
    lines = []
    for number in range(20):  # half a greeting each
        lines.append(Line(connect(host, int(port), LONG), Codec(**LIFE, **GREETINGS)))
        lines[-1].send(Hello(f"key {number}", {}))
    with pytest.raises(ChannelClosed):
        lines[0].receive(LONG)
    assert served.host.pid is None
    assert say(worker_of(served, workers).start(), "hello") == Say("HELLO")


def until_noted(served: Served) -> float:
    """Seconds until the host has paired both lines of somebody."""
    began = time.monotonic()
    while not served.notes:
        assert time.monotonic() < began + LONG
        time.sleep(0.001)
    return time.monotonic() - began


@pytest.mark.parametrize("said", [b"", b"PLf", b"PLf1\xff\0\0\0half"], ids=["nothing", "half a length", "half a frame"])
@pytest.mark.parametrize("count", [4, 40])
def test_silent_connections_delay_nobody(served: Served, workers: list[Worker], said: bytes, count: int) -> None:
    host, _, port = served.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(count)]
    for one in silent:
        one.sendall(said)
    worker = worker_of(served, workers)
    worker.poll()  # connects
    assert until_noted(served) < 0.5
    for one in silent:
        one.close()
    assert say(until_ready(worker), "hello") == Say("HELLO")


def test_who_says_nothing_is_let_go() -> None:
    listener = Listener(first_s=0.2)
    with socket.create_connection((listener.host, listener.port)) as silent:
        silent.settimeout(LONG)
        with pytest.raises(Late, match="nobody said anything"):
            listener.greeted(0.1)
        with pytest.raises(Late):
            listener.greeted(0.3)
        assert silent.recv(1) == b""
    listener.close()


def test_a_host_that_is_not_there(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.distributed.hosts.CONNECT_S", 0.2)
    listener = Listener()
    address = f"127.0.0.1:{listener.port}"
    listener.close()
    workers.append(Worker(WorkerSpec(name="stage 0", service="", kinds=KINDS), LAZY, launch_at(address)))
    with pytest.raises(ConfigError, match=f"a channel to {address}: nobody answers there"):
        workers[0].start()
