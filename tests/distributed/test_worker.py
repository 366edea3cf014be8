"""Workers: placed, greeted, watched, named where they fail, and back after a rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from distributed_services import About, Count, Say
from kit.clock import VirtualClock
from kits.channels import local_pair

from paceline.core.errors import CapabilityError, ConfigError
from paceline.runtime.handshake import Facts, Hello, Refused
from paceline.runtime.placement import Placement, cores
from paceline.runtime.remote import HOST_LEFT, Remote, Timeouts, WorkerFailed, WorkerSpec, receive
from paceline.runtime.wire import Line

LONG = 120.0  # seconds: an end of waiting that no test comes to
LAZY = Timeouts(start_s=LONG, silent_s=LONG, stuck_s=LONG, rest_s=0.01)
SPEC = WorkerSpec(name="echo", service="distributed_services:echo")


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where workers find the service of these tests."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def workers() -> Iterator[list[Remote]]:
    made: list[Remote] = []
    yield made
    for worker in made:
        worker.stop()


def say(line: Line, text: str) -> Any:
    line.send(Say(text))
    return line.receive(LONG)


def until_ready(worker: Remote) -> Line:
    """Poll as an engine does."""
    end = time.monotonic() + LONG
    while not worker.poll():
        assert time.monotonic() < end, worker.faults
        time.sleep(0.005)
    assert worker.line is not None
    return worker.line


def test_a_worker_serves_on_its_cores_until_it_is_stopped(workers: list[Remote]):
    core = cores()[-1]
    placed = replace(SPEC, placement=Placement(cores=(core,)))
    workers.append(worker := Remote(placed, LAZY))
    line = worker.start()
    assert say(line, "hello") == Say("HELLO")
    about = say(line, "about")
    assert about == About(worker.pid or 0, [core], "1", False)  # nothing loads torch that does not need it
    for parts in ([b"no message"], [b"distributed_services:Say", b'{"text": 1}', b""], [b"os:getcwd", b"{}", b""]):
        line.socket.send_multipart(parts)
        assert line.receive(LONG).why.startswith("a message cannot be read: ")
    line.send(Count(5))
    assert [line.receive(LONG) for _ in range(5)] == [Say(str(n)) for n in range(1, 6)]
    assert worker.faults == [] and worker.starts == 1
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(about.pid, 0)
    assert not worker.poll() and worker.line is None


def test_one_that_dies_is_named_and_comes_back(workers: list[Remote]):
    """By a signal from outside, by its own hand in an answer, by a fault of its service. No file stays open."""
    workers.append(worker := Remote(SPEC, LAZY))
    worker.start()
    open_files = len(os.listdir("/proc/self/fd"))
    orders = {"": "died: killed by SIGKILL", "die": "died: killed by SIGKILL", "fail": "failed: ValueError: no such"}
    pids = []
    for number, (order, words) in enumerate(orders.items()):
        line = until_ready(worker)
        pids.append(worker.pid)
        if order:
            line.send(Say(order))
        else:
            os.kill(worker.pid or 0, signal.SIGKILL)
        while len(worker.faults) == number:
            assert receive(worker, 0.01) is None
            worker.poll()
        assert worker.faults[-1].startswith(f"worker echo (pid {pids[-1]}) {words}")
    assert say(until_ready(worker), "back") == Say("BACK")
    assert len(set(pids)) == 3 and worker.starts == 4 and len(worker.faults) == 3
    assert len(os.listdir("/proc/self/fd")) <= open_files + 3


PARENT = """
import time
from paceline.runtime.remote import Remote, WorkerSpec
worker = Remote(WorkerSpec(name="echo", service="distributed_services:echo"))
worker.start()
print(worker.pid, flush=True)
time.sleep(1000)
"""


def test_a_worker_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + LONG
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_hangs_is_named(workers: list[Remote]):
    """Stopped as a whole, and at work without an end."""
    for timeouts, words in (
        (replace(LAZY, silent_s=1.0), "no heartbeat"),
        (replace(LAZY, stuck_s=0.3), "at one piece"),
    ):
        workers.append(worker := Remote(SPEC, replace(timeouts, silent_s=min(timeouts.silent_s, 6.0), rest_s=LONG)))
        line = worker.start()
        line.send(Say("hang"))
        if words == "no heartbeat":
            os.kill(worker.pid or 0, signal.SIGSTOP)
        while not worker.faults:
            worker.poll()
            time.sleep(0.005)
        assert words in worker.faults[0] and worker.faults[0].startswith("worker echo (pid ")
        assert worker.pid is None and worker.line is None


@pytest.mark.parametrize(
    ("options", "expected", "error", "why"),
    [
        ({"refuse": True}, Facts(), ConfigError, "device cpu: it is not liked. Use another."),
        ({"fail": True}, Facts(), WorkerFailed, r"failed at its start: RuntimeError: out of order"),
        ({"weights": "b"}, Facts(weights="a"), CapabilityError, "worker echo: its weights is b, and a is expected"),
    ],
)
def test_one_that_cannot_serve_says_why(
    workers: list[Remote], options: dict[str, Any], expected: Facts, error: type[Exception], why: str
):
    workers.append(worker := Remote(replace(SPEC, options=options, expected=expected), LAZY))
    with pytest.raises(error, match=why):
        worker.start()
    if error is not WorkerFailed:
        with pytest.raises(error):
            worker.poll()
    assert worker.pid is None


@dataclass
class Hand:
    """Starts workers that do what a test says."""

    clock: VirtualClock
    began: list[float] = field(default_factory=list)
    status: int | str | None = None
    pid: int | None = 7
    host: str = ""
    others: list[Any] = field(default_factory=list)  # the workers' ends
    busy_s: float | None = None  # of the next heartbeat
    broken: bool = False

    def launch(self, spec: WorkerSpec, beat_s: float) -> Any:
        if self.broken:
            raise OSError("no more processes")
        self.began.append(self.clock.now())
        self.status = None
        self.line, other = local_pair(self.clock)
        self.others.append(other)
        return self

    def beat(self) -> float | None:
        beat, self.busy_s = self.busy_s, None
        return beat

    def poll(self) -> int | str | None:
        return self.status

    def end(self) -> None:
        self.status = -signal.SIGKILL

    def hello(self, **facts: str) -> None:
        known = {"vocabulary": "v", "version": "1", **facts}
        self.others[-1].send(Hello(Facts(**known), 8, self.host, ""))

    def pass_time(self, worker: Remote, seconds: float, beats: bool = True, busy_s: float = 0.0) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.sleep_until(self.clock.now() + 0.1)
            if beats and worker.pid is not None:
                self.busy_s = busy_s
            worker.poll()


@pytest.fixture
def hand() -> Iterator[Hand]:
    with VirtualClock() as clock:
        yield Hand(clock)


def watched(hand: Hand, timeouts: Timeouts | None = None, **expected: str) -> Remote:
    spec = replace(SPEC, expected=Facts(version=expected.pop("version", ""), **expected))
    worker = Remote(spec, timeouts or Timeouts(start_s=20.0), hand.launch, hand.clock.now)
    worker.poll()
    return worker


def test_a_silent_worker_is_named_in_time_and_rests_grow(hand: Hand):
    worker = watched(hand)
    for number in range(8):
        while worker.pid is None:
            hand.pass_time(worker, 0.1)
        hand.hello()
        hand.pass_time(worker, 1.0)
        assert worker.line is not None and len(worker.faults) == number
        hand.pass_time(worker, 10.5, beats=False)
        assert len(worker.faults) == number + 1 and "no heartbeat for 10." in worker.faults[-1]
    rests = [b - a - 11.0 for a, b in zip(hand.began, hand.began[1:], strict=False)]
    assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0], abs=0.7)
    assert rests == sorted(rests)


def test_a_worker_that_says_no_hello_is_started_again(hand: Hand):
    worker = watched(hand)
    hand.pass_time(worker, 20.5)
    assert "is not ready 20." in worker.faults[0]
    hand.status, hand.broken = 1, True
    hand.pass_time(worker, 3.0)
    assert worker.faults[1].endswith("ended with status 1")
    assert "could not be started: no more processes" in worker.faults[2]
    hand.broken = False
    hand.pass_time(worker, 5.5)
    hand.hello()
    hand.pass_time(worker, 0.1)
    assert worker.line is not None
    hand.broken = True
    with pytest.raises(CapabilityError, match="its process or the line to it cannot be opened .no more processes"):
        watched(hand)  # the first start is for the client to know


def test_one_on_another_host_is_named_with_it(hand: Hand):
    hand.pid, hand.host = None, "10.0.0.2"
    worker = watched(hand)
    assert (worker.pid, worker.host) == (None, "")
    hand.hello()
    worker.poll()
    hand.clock.sleep_until(1.0)
    worker.poll()
    assert (worker.pid, worker.host) == (8, "10.0.0.2")
    hand.status = "died: its host has left the cluster"
    hand.clock.sleep_until(2.0)
    worker.poll()
    assert worker.faults == ["worker echo (pid 8 on 10.0.0.2) died: its host has left the cluster"]
    while worker.line is not None or len(hand.others) < 2:
        hand.clock.sleep_until(hand.clock.now() + 0.1)
        worker.poll()
    hand.others[-1].send(Refused("model x", "its folder is not there", "copy it", "10.0.0.3"))
    hand.clock.sleep_until(hand.clock.now() + 0.1)
    with pytest.raises(ConfigError, match="model x, for echo on 10.0.0.3: its folder is not there"):
        worker.poll()


def test_a_host_that_leaves_is_one_failure(hand: Hand):
    """A cut link is named first; that Ray then gives up the host, where it was to come back, is no second failure."""
    worker = watched(hand)
    hand.hello()
    hand.pass_time(worker, 1.0)
    hand.pass_time(worker, 11.0, beats=False)
    assert len(worker.faults) == 1 and "no heartbeat" in worker.faults[0] and len(hand.began) == 2
    hand.status = HOST_LEFT
    hand.pass_time(worker, 1.0)
    assert len(worker.faults) == 1 and len(hand.began) == 3
    hand.hello()
    hand.pass_time(worker, 1.0)
    assert worker.line is not None
    hand.status = HOST_LEFT
    hand.pass_time(worker, 0.2)
    assert worker.faults[1].endswith(HOST_LEFT)


def test_a_refusal_after_a_restart_is_final(hand: Hand):
    worker = watched(hand)
    hand.others[-1].send(Refused("draft x", "its file is gone", "put it back", ""))
    hand.status = 2
    for _ in range(2):
        with pytest.raises(ConfigError, match="its file is gone"):
            hand.pass_time(worker, 1.0)
    assert len(hand.began) == 1


def test_cores_that_are_not_there():
    usable = cores()
    for bad, why in (((4096,), "core 4096 is not one"), ((usable[0], usable[0]), "a core is there twice")):
        with pytest.raises(ConfigError, match=why):
            Placement(cores=bad)
    with pytest.raises(ConfigError, match="1 cores for 2 threads"):
        Placement(cores=(usable[0],), threads=2)
