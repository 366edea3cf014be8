"""A live server in processes of its own, for tests."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx

START_S = 120.0


@dataclass(frozen=True)
class LiveServer:
    """``paceline serve``, ready."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, the older of the server's children: a spare one may wait behind it."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pids[0])

    def until_ready(self, log: Path | None = None, seconds: float = START_S) -> None:
        """Wait until it takes requests, and says so in a log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server has ended"
            try:
                said = log is None or re.search(r"paceline serves|\bready in", log.read_text())
                if said and httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server is not ready")


@contextmanager
def live_server(
    *options: str,
    environment: dict[str, str] | None = None,
    ready: bool = True,
    log: Path | None = None,
    start_s: float = START_S,
) -> Iterator[LiveServer]:
    """A server of the embedded model on a free port; it has ended when this ends.

    Args:
        options: of `paceline serve`.
        environment: added to this process's.
        ready: wait until it takes requests.
        log: what it says.
        start_s: for which it is waited for.
    """
    port = free_port()
    command = [sys.executable, "-m", "paceline", "serve", "paceline-small", "--port", str(port)]
    command += ["--threads", "1", "--kv-memory", "64MiB"]
    with log.open("wb") if log else nullcontext() as errors:
        process = subprocess.Popen([*command, *options], env=os.environ | (environment or {}), stderr=errors)
    server = LiveServer(process, f"http://127.0.0.1:{port}")
    try:
        if ready:
            server.until_ready(log, start_s)
        yield server
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
