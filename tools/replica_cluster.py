"""A Ray cluster of this host with a server of replicas on it, for `replicas.py`: started and ended."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

START_S = 600.0  # a busy host takes minutes: a dozen processes of Python import Ray
STORE_BYTES = 80 * 2**20


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Running:
    """A server, ready: its process and its address; `first` is the port from which replicas take theirs."""

    process: subprocess.Popen[bytes]
    url: str
    first: int
    log: Path

    def replicas(self, kind: str) -> list[int]:
        """Processes of Ray that serve, or their engines."""
        pids = [pid for pid in self._all() if "ray::ServeReplica:paceline:server" in _command(pid)]
        if kind == "kill":
            return pids
        listed = ",".join(map(str, pids))
        children = subprocess.run(["pgrep", "-P", listed], capture_output=True, text=True).stdout.split()
        return [int(child) for child in children if "last_words" not in _command(int(child))]

    @contextmanager
    def kept_on(self, cores: Collection[int]) -> Iterator[None]:
        """Within it the server and its cluster run on these cores alone, and so does this process, which asks them."""
        before = os.sched_getaffinity(0)
        for pid in (0, *self._all()):
            for task in Path(f"/proc/{pid or 'self'}/task").glob("*"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def _all(self) -> list[int]:
        """Processes of the server and of its cluster."""
        port = f"RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT={self.first}\0"
        return [int(one.name) for one in Path("/proc").glob("[0-9]*") if port in _read(one / "environ")]


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _read(file: Path) -> str:
    """Of a process's file; empty: it has ended."""
    try:
        return file.read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


@contextmanager
def plain(asked: argparse.Namespace) -> Iterator[str]:
    """``paceline serve`` without Ray; its address."""
    port = free_port()
    command = [sys.executable, "-m", "paceline", "serve", asked.model, "--port", str(port), "--threads", "1"]
    process = subprocess.Popen([*command, "--no-spare"])
    try:
        wait(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def replicas(asked: argparse.Namespace, count: int) -> Iterator[Running]:
    """So many of one core each, on a cluster of their own."""
    head, port, began = free_port(), free_port(), time.monotonic()
    first = random.Random().randrange(20000, 28000, 100)
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first)}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--include-dashboard=false"]
    ray += ["--port", str(head), "--num-cpus", str(count), "--object-store-memory", str(STORE_BYTES)]
    serve = [sys.executable, "-m", "paceline", "serve", asked.model, "--port", str(port), "--no-spare"]
    serve += ["--replicas", str(count), "--cluster", f"127.0.0.1:{head},cores=1", *asked.option]
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        with log.open("wb") as out:
            quiet: dict[str, Any] = {"env": environment, "stdout": out, "stderr": out, "start_new_session": True}
            cluster = subprocess.Popen([*ray, "--temp-dir", f"{folder}/ray"], **quiet)
            server = None
            try:
                answering(head, cluster)
                server = subprocess.Popen(serve, **quiet)
                wait(f"http://127.0.0.1:{port}", server, log)
                print(f"{count} replicas are up after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                yield Running(server, f"http://127.0.0.1:{port}", first, log)
            finally:
                for process in (server, cluster):
                    end(process)


def end(process: subprocess.Popen[bytes] | None) -> None:
    """End a process and all that it started."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        print("a process did not end by itself", file=sys.stderr)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answering(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for a cluster's head."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(3.0)  # its raylet joins behind it
                return
        time.sleep(0.2)
    sys.exit("error: the cluster did not start")


def wait(url: str, process: subprocess.Popen[bytes], log: Path | None = None) -> None:
    """Wait until a server takes requests."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200 and (
                log is None or b"paceline serves" in log.read_bytes()
            ):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"error: the server is not ready; {log.read_text() if log else ''}")
