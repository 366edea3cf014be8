"""``paceline serve`` in processes of its own, and a client that takes little of the cores that both share.

All streams of a client are read by one loop, which notes when bytes came and reads them when all have.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

START_S = 300.0
READ_BYTES = 2**16
EVENT = b"data: {"


@dataclass
class Run:
    """What came of requests."""

    seconds: float = 0.0  # from the first request to the end of the last answer
    tokens: int = 0
    chunks: int = 0
    first_s: float = math.nan  # to the first token, of a single request
    gaps_s: list[float] = field(default_factory=list)  # between chunks of a stream, of all of them
    texts: list[str] = field(default_factory=list)
    client_s: float = 0.0  # processor time of who asked

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Server:
    """A server that is ready.

    Args:
        model: as ``paceline serve`` takes it.
        port: that it listens at.
        options: further ones of its command line.
        checkout: whose code it runs; None: this one's.

    Raises:
        SystemExit: it did not start.
    """

    def __init__(self, model: str, port: int, options: Sequence[str] = (), checkout: Path | None = None) -> None:
        self.port = port
        env = {**os.environ, **({} if checkout is None else {"PYTHONPATH": str(checkout / "src")})}
        began = time.monotonic()
        command = [sys.executable, "-m", "paceline", "serve", model, "--port", str(port), *options]
        self.process = subprocess.Popen(command, env=env)
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit("the server does not start")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - began

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def pids(self) -> tuple[int, int]:
        """Of the process that speaks HTTP, and of its engine."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return pid, int(children[0])

    def used_s(self) -> tuple[float, float]:
        """Processor time of both so far."""
        http, engine = map(_used_s, self.pids)
        return http, engine

    def run(self, prompts: Sequence[str], tokens: int, at_once: int | None = None, **options: Any) -> Run:
        """Ask prompts, each as a stream of its own, ``at_once`` of them at any time, or all."""
        bodies = [body(prompt, tokens, **options) for prompt in prompts]
        began, used = time.perf_counter(), time.process_time()
        streams = ask(self.port, bodies, at_once or len(bodies))
        seconds, used = time.perf_counter() - began, time.process_time() - used
        runs = [stream.run() for stream in streams]
        return Run(
            seconds=runs[0].seconds if len(runs) == 1 else seconds,
            tokens=sum(run.tokens for run in runs),
            chunks=sum(run.chunks for run in runs),
            first_s=runs[0].first_s,
            gaps_s=[gap for run in runs for gap in run.gaps_s],
            texts=[text for run in runs for text in run.texts],
            client_s=used,
        )


@contextmanager
def serving(*given: Any, **options: Any) -> Iterator[Server]:
    """A `Server` that ends with this."""
    server = Server(*given, **options)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def _used_s(pid: int) -> float:
    """Processor time of the threads that a process has."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def body(prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
    """A request for a stream: of a chat where its options are those of one."""
    chat = {"prediction", "response_format"} & {*options}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    asked |= {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return asked | options


class Stream:
    """A request over a connection of its own, while it is answered."""

    def __init__(self, port: int, body: Mapping[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self._began, self._times, self._parts = time.perf_counter(), list[float](), list[bytes]()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def read(self) -> bool:
        """Take what has come; whether more may come."""
        data = self.socket.recv(READ_BYTES)
        self._times.append(time.perf_counter())
        self._parts.append(data)
        return bool(data)

    def run(self) -> Run:
        """What came.

        Raises:
            SystemExit: no whole answer.
        """
        whole, ends = b"".join(self._parts), [*accumulate(map(len, self._parts))]
        run, events, times, at = Run(), list[dict[str, Any]](), [self._began], whole.find(EVENT)
        while at >= 0:
            end = whole.index(b"\n", at)
            events.append(json.loads(whole[at + len(EVENT) - 1 : end]))
            if any(one.get("text") or one.get("delta", {}).get("content") for one in events[-1].get("choices", ())):
                times.append(self._times[bisect_left(ends, end + 1)])
            at = whole.find(EVENT, end)
        if not events or "usage" not in events[-1]:
            raise SystemExit(f"the server did not answer: {whole[-500:]!r}")
        run.tokens, run.chunks = events[-1]["usage"]["completion_tokens"], len(events)
        choices = [choice for told in events for choice in told["choices"]]
        run.texts = ["".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)]
        return timed(run, times)


def ask(port: int, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[Stream]:
    """Streams of all requests, when they have ended; so many are open at any time."""
    streams, left = list[Stream](), iter(bodies)
    with selectors.DefaultSelector() as looking:

        def begin() -> None:
            if (asked := next(left, None)) is not None:
                streams.append(Stream(port, asked))
                looking.register(streams[-1].socket, selectors.EVENT_READ, streams[-1])

        for _ in range(at_once):
            begin()
        while looking.get_map():
            for key, _ in looking.select():
                if not key.data.read():
                    looking.unregister(key.fileobj)
                    key.data.socket.close()
                    begin()
    return streams


def timed(run: Run, times: Sequence[float]) -> Run:
    """A run with what the times of its start and of each chunk say."""
    run.seconds, run.first_s = times[-1] - times[0], times[1] - times[0]
    run.gaps_s = [after - before for before, after in zip(times[1:], times[2:], strict=False)]
    return run
