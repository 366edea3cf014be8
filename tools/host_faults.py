"""Faults of hosts and processes under requests: no id may change, none may be lost, and it goes on soon.

    python tools/host_faults.py --faults 40 --requests 1000        # as root, on Linux, with iproute2
    python tools/host_faults.py --faults 0 --requests 0 --soak 10  # ten minutes without faults, memory of all processes

Network namespaces are the hosts of a Ray cluster (`two_hosts`), one of them spare. On the first one a pipeline has
its last stage, on others its first one and a source of drafts; beside it is a model in two ranks. At random moments
one process gets SIGKILL or SIGSTOP, a link is cut, a host is removed, or all but the first one are. Who was struck
joins again before the next fault. Printed is, by kind of fault, when it was named and when tokens came again, at the
latest. Exit status 1: something is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import two_hosts

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests/fuzz", "studies")]
import kills  # noqa: E402
import soak  # noqa: E402

from paceline.core.errors import PacelineError  # noqa: E402

NAMED_S, RECOVERED_S, ENDED_S = 5.0, 20.0, 60.0  # wanted; of requests without a host: until their error
HOPELESS_S, JOINED_S = 180.0, 120.0  # then it is given up
LATEST_S = 2.0  # after the beginning of a batch the fault comes at the latest
SAMPLE_S = 5.0  # between two looks at memory
STOPPED = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
RANKS = {"tensor_parallel": 2, "exact": True, "threads": 1, "kv_memory": "64MiB", "max_sequences": 4}
# Ray's own look at hosts: by default one that is frozen or cut off is given up after a minute.
HEALTH = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "2", "initial_delay_ms": "1000"}
KINDS = (
    *(f"{who} SIG{how}" for who in ("stage", "drafter", "rank", "raylet") for how in STOPPED),
    *("link cut", "host removed", "no host left"),
)


@dataclass
class Struck:
    """One fault."""

    kind: str
    named_s: float | None  # until it was noted; None: nobody noticed
    back_s: float  # until the next token behind that, or behind the fault
    said: str


class Hosts:
    """The hosts but the first, which asks, from inside of it."""

    def __init__(self, addresses: dict[str, str], head: str, folder: str) -> None:
        self.names, self.head, self.folder = {at: name for name, at in addresses.items()}, head, folder

    def pids(self, name: str, word: str = "") -> list[int]:
        """Processes of a host whose command line has a word."""
        found = [int(pid) for pid in two_hosts.run("ip", "netns", "pids", name).stdout.split()]
        return [pid for pid in found if word in _command(pid)]

    def remove(self, name: str) -> None:
        """All of its processes end."""
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def link(self, name: str, state: str) -> None:
        """Cut its link, or mend it."""
        two_hosts.run("ip", "-n", name, "link", "set", name, state)

    def join_again(self, name: str, address: str) -> None:
        """As a host that comes: with nothing of what it was."""
        import ray

        self.remove(name)
        self.link(name, "up")
        until(lambda: address not in alive(ray), f"Ray never gave {name} up")
        two_hosts.run(*two_hosts.joining(name, address, self.head, self.folder))
        until(lambda: address in alive(ray), f"{name} did not join again")


def alive(ray: Any) -> set[str]:
    """Addresses of the hosts that Ray takes to live."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def until(holds: Callable[[], bool], else_: str) -> None:
    """Wait for that."""
    end = monotonic() + JOINED_S
    while not holds():
        if monotonic() > end:
            raise SystemExit(f"error: {else_} in {JOINED_S:.0f} s")
        sleep(0.2)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


class UnderFire:
    """Requests to a pipeline over hosts and to ranks, beside plain decoding.

    Args:
        seed: of all that is drawn.
        hosts: that are struck.
    """

    def __init__(self, seed: int, hosts: Hosts) -> None:
        self.hosts, self.draw, self.struck = hosts, random.Random(seed), list[Struck]()
        cluster = {"cluster": f"{hosts.head},cores=1", "pipeline": "2,threads=1"}
        self.piped = kills.Killed(self.draw, **cluster, round="pipeline,width=4,children=3,source=process")
        self.ranks = kills.LLM(kills.MODEL, **RANKS)
        self.found = self.piped.found

    def batch(self, ranks: bool, prepared: Any) -> None:
        """Answer one."""
        before, piped = self.piped.split, self.piped
        piped.split = self.ranks if ranks else before
        try:
            piped.batch(prepared)
        finally:
            piped.split = before
        if ranks:
            piped.said.append(monotonic())

    def strike(self, kind: str, batches: int) -> None:
        """A fault within a batch; so many batches at least, and until tokens come again."""
        who, _, how = kind.partition(" SIG")
        ranks, round_ = who == "rank", self.piped.round
        stage, source = round_.stage_line.workers[0], round_.source.sessions._worker
        line = self.ranks.decoder.ranks.line if ranks else round_.stage_line
        worker = {"rank": line.workers[0], "drafter": source}.get(who, stage)
        if who == "no host left":
            self.ended()
            return
        name, faults, prepared = self.hosts.names.get(worker.host, ""), len(worker.faults), self.piped.prepared()
        sent, named, given_up = list[float](), list[float](), Event()

        def watch() -> None:
            sleep(self.draw.uniform(0.0, LATEST_S))
            self._hit(who, how, worker, name)
            sent.append(monotonic())
            while len(worker.faults) == faults and not given_up.wait(0.01):
                pass
            if len(worker.faults) > faults:
                named.append(monotonic())

        watching = Thread(target=watch, daemon=True)
        watching.start()
        began, done, back = monotonic(), 0, None
        useful = self.piped.hits if who == "drafter" else self.piped.said
        while (back is None or done < batches) and not self.found.problems:
            self.batch(ranks, prepared)
            done += 1
            if named:
                back = back or next((at for at in useful if at > named[0]), None)
            if monotonic() - began > HOPELESS_S:
                self.found.problems.append(f"{kind}: not named, or of no use, after {HOPELESS_S:.0f} s")
        given_up.set()
        watching.join()
        if back is not None:
            gap = longest_gap(useful, sent[0], back)
            said = worker.faults[faults]
            self.struck.append(Struck(kind, named[0] - sent[0], gap, said))
        if name and who in ("raylet", "link cut", "host removed"):
            self.hosts.join_again(name, worker_host(self.hosts, name))

    def _hit(self, who: str, how: str, worker: Any, name: str) -> None:
        if who == "link cut":
            self.hosts.link(name, "down")
        elif who == "host removed":
            self.hosts.remove(name)
        else:
            for pid in self.hosts.pids(name, "raylet/raylet") if who == "raylet" else filter(None, [worker.pid]):
                os.kill(pid, STOPPED[how])

    def ended(self) -> None:
        """Where no host is left: requests end with an error in words, and hosts that come serve again."""
        others = {name: at for at, name in self.hosts.names.items() if not self.hosts.head.startswith(f"{at}:")}
        prompts, params, _ = prepared = self.piped.prepared()
        for name in others:
            self.hosts.remove(name)
        began = monotonic()
        said = self._error(prompts, params)
        took = monotonic() - began
        if "none is left" not in said or took > ENDED_S:
            self.found.problems.append(f"no host left: {said!r} after {took:.0f} s")
        self.struck.append(Struck("no host left", None, took, said))
        for name, address in others.items():
            self.hosts.join_again(name, address)
        end = monotonic() + HOPELESS_S
        while not self.found.problems:
            if not self._error(prompts, params):
                break
            if monotonic() > end:
                self.found.problems.append(f"no host left: they came, and after {HOPELESS_S:.0f} s nothing is served")
        self.batch(False, prepared)

    def _error(self, prompts: Any, params: Any) -> str:
        """What requests end with; empty: they are answered."""
        try:
            self.piped.split.generate(prompts, params)
        except PacelineError as error:
            return str(error)
        return ""

    def soak(self, minutes: float) -> None:
        """Requests without faults; memory of all processes, of Ray's on all hosts, too."""
        end, samples, looked = monotonic() + 60 * minutes, list[int](), 0.0
        while monotonic() < end and not self.found.problems:
            self.batch(self.draw.random() < 0.3, self.piped.prepared())
            if monotonic() - looked > SAMPLE_S:
                looked = monotonic()
                pids = {pid for name in self.hosts.names.values() for pid in self.hosts.pids(name)} - {os.getpid()}
                samples.append(soak.rss_bytes(sorted(pid for pid in pids if "ip netns" not in _command(pid))))
        third = max(1, len(samples) // 3)
        first, last = (sorted(part)[len(part) // 2] / 2**20 for part in (samples[third : 2 * third], samples[-third:]))
        print(f"soak of {minutes:g} minutes: {first:,.0f} MiB in the second third, {last:,.0f} in the last")
        if last - first > soak.GROWTH_SHARE * first:
            self.found.problems.append(f"memory grew by {last - first:.0f} MiB")


def worker_host(hosts: Hosts, name: str) -> str:
    """A host's address."""
    return next(at for at, own in hosts.names.items() if own == name)


def longest_gap(said: Sequence[float], start: float, stop: float) -> float:
    """Between two tokens from a fault on until it is over."""
    times = [start, *(at for at in said if start < at < stop), stop]
    return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


def inside(asked: argparse.Namespace) -> int:
    """On the first host; the exit status."""
    logging.getLogger("paceline").setLevel(logging.CRITICAL)  # each fault is told there
    known = json.loads(asked.inside)
    fire = UnderFire(asked.seed, Hosts(known["hosts"], known["head"], known["folder"]))
    kinds = [asked.only or KINDS[number % len(KINDS)] for number in range(asked.faults)]
    fire.draw.shuffle(kinds)
    each = max(2, -(-asked.requests // max(1, len(kinds)) // kills.BATCH))
    for kind in kinds:
        fire.strike(kind, each)
        if fire.struck:
            print(f"  {fire.struck[-1]}", flush=True)
        if fire.found.problems:
            break
    while fire.found.requests < asked.requests and not fire.found.problems:
        fire.batch(False, fire.piped.prepared())
    if asked.soak:
        fire.soak(asked.soak)
    return tell(fire)


def tell(fire: UnderFire) -> int:
    """The table; the exit status."""
    found = fire.found
    print(f"{found.requests:,} requests, {found.tokens:,} tokens, {len(fire.struck)} faults")
    print(f"{'fault':<16}{'times':>6}{'named, s':>10}{'back, s':>9}  said")
    for kind in dict.fromkeys(one.kind for one in fire.struck):
        own = [one for one in fire.struck if one.kind == kind]
        named, back = max((one.named_s or 0.0) for one in own), max(one.back_s for one in own)
        print(f"{kind:<16}{len(own):>6}{named:>10.1f}{back:>9.1f}  {own[-1].said}")
        if kind != "no host left" and (named > NAMED_S or back > RECOVERED_S):
            found.problems.append(f"{kind}: {NAMED_S:.0f} s and {RECOVERED_S:.0f} s are wanted")
    for problem in found.problems:
        print(f"FAILED: {problem}")
    return 1 if found.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40, help="kinds in turn, in random order")
    parser.add_argument("--requests", type=int, default=1000, help="at least")
    parser.add_argument("--only", choices=KINDS, help="faults of this kind alone")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes without faults, behind them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=4, help="one asks, two work, the others are spare")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.inside:
        return inside(asked)
    if os.geteuid():
        sys.exit("error: namespaces need root: run it with sudo")
    with tempfile.TemporaryDirectory() as folder, two_hosts.namespaces(asked.hosts, asked.rate, "") as hosts:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        env |= {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
        head = two_hosts.start_ray(hosts, folder, env)
        known = json.dumps({"hosts": hosts, "head": head, "folder": folder})
        given = [*(arguments or sys.argv[1:]), "--inside", known]
        command = two_hosts.inside(next(iter(hosts)), sys.executable, __file__, *given)
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
