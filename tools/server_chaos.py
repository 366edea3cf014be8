"""Many requests of all sorts at once, while the engine is killed and stopped: none may be lost, no token may change.

    python tools/server_chaos.py --requests 2000 --faults 20
    python tools/server_chaos.py --requests 1000000 --faults 0 --seconds 1800

Starts ``paceline serve`` itself. First every distinct request is answered once, undisturbed and without drafts; these
are the tokens that its answers must have. Then they are sent again in a random order, some streamed, some by clients
that leave, between bodies that are wrong, into a queue that is too short (a 429 is asked again), while the engine's
process is killed or stopped now and then. In the end nothing may be held. Ends with status 1 where any of this fails.
The second command is a soak: what it prints of the memory of both processes should stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

WORDS = ["one", "two", "three", "the", "sea", "a", "ship", "of", "light", "and", "old", "stone"]
WRONG = ({"prompt": 1}, {"prompt": "a", "n": 0}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "speculation": 7})
SPECULATION = (None, False, {"max_nodes": 2}, {"provenance": True}, {"trace": True})
START_S = 120.0


@dataclass
class Seen:
    """What came of all requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0  # between two chunks of a stream
    asked_again: int = 0
    memory: list[tuple[int, int]] = field(default_factory=list)  # MiB of HTTP's process and of the engine's


def requests(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Distinct ones, greedy and sampled, of one sample and of two."""
    found = []
    for number in range(count):
        body: dict[str, Any] = {"prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))}
        body |= {"max_tokens": draw.randint(4, 160), "ignore_eos": True, "seed": number, "return_token_ids": True}
        body["temperature"] = draw.choice((0, 0.8, 1.0))
        found.append(body | ({"n": 2} if number % 7 == 0 else {}))
    return found


class Server:
    """A server of the embedded model, whose queue is short.

    Args:
        options: of ``paceline serve``.
    """

    def __init__(self, *options: str) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        command = [sys.executable, "-m", "paceline", "serve", "paceline-small", "--port", str(port), *options]
        self.process, self.url = subprocess.Popen(command), f"http://127.0.0.1:{port}"

    @property
    def engine(self) -> int | None:
        """The number of the engine's process, the older child (a spare one may wait behind it); None: there is none."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pids[0]) if pids else None

    def memory(self) -> tuple[int, int]:
        """Resident MiB of HTTP's process and of the engine's; 0: there is none at the moment."""
        return _resident(self.process.pid), _resident(self.engine)

    async def until_ready(self, client: httpx.AsyncClient) -> None:
        """Wait until it takes requests."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError("the server is not ready")


class Chaos:
    """Sends requests and disturbs the engine.

    Args:
        server: the server.
        client: to it.
        seed: of everything that is drawn.
    """

    def __init__(self, server: Server, client: httpx.AsyncClient, seed: int) -> None:
        self.seen = Seen()
        self._server, self._client, self._draw = server, client, random.Random(seed)
        self._bodies: list[dict[str, Any]] = []
        self._expected: dict[int, list[list[int]]] = {}

    async def run(self, count: int, distinct: int, concurrency: int, faults: int, seconds: float) -> Seen:
        """All of it; after so many seconds no request is begun."""
        await self._server.until_ready(self._client)
        bodies = self._bodies = requests(distinct, self._draw)
        for number, body in enumerate(bodies):
            answer = await self._client.post("/v1/completions", json=body | {"speculation": False})
            self._expected[number] = [choice["token_ids"] for choice in answer.json()["choices"]]
        until = time.monotonic() + seconds
        left = itertools.takewhile(lambda _: time.monotonic() < until, range(count))
        disturbing, reading = asyncio.ensure_future(self._disturb(faults)), asyncio.ensure_future(self._read_memory())
        await asyncio.gather(*(self._work(left, bodies) for _ in range(concurrency)))
        reading.cancel()
        missing = faults - await self._stop(disturbing)
        if missing > 0:
            self.seen.kinds["faults that came too late"] = missing
        await self._check_idle()
        return self.seen

    async def _stop(self, disturbing: asyncio.Future[int]) -> int:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        return self.seen.kinds["kill"] + self.seen.kinds["stop"]

    async def _work(self, left: Any, bodies: list[dict[str, Any]]) -> None:
        for _ in left:
            number = self._draw.randrange(len(bodies))
            kind = self._draw.choices(("whole", "stream", "leave", "wrong"), (4, 5, 2, 1))[0]
            choice = self._draw.choice(SPECULATION)
            body = bodies[number] if choice is None else bodies[number] | {"speculation": choice}
            try:
                await getattr(self, f"_{kind}")(number, body)
            except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                self.seen.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            self.seen.kinds[kind] += 1

    async def _whole(self, number: int, body: dict[str, Any]) -> None:
        while (answer := await self._client.post("/v1/completions", json=body)).status_code in (429, 503):
            self.seen.asked_again += 1
            await asyncio.sleep(self._draw.uniform(0.3, 1.2))
        assert answer.status_code == 200, answer.text
        self._compare(number, [choice["token_ids"] for choice in answer.json()["choices"]])

    async def _stream(self, number: int, body: dict[str, Any]) -> None:
        found: list[list[int]] = [[] for _ in self._expected[number]]
        while not await self._follow(body, found):
            self.seen.asked_again += 1
            await asyncio.sleep(self._draw.uniform(0.3, 1.2))
        self._compare(number, found)

    async def _follow(self, body: dict[str, Any], found: list[list[int]]) -> bool:
        """Read a stream to its end; False: it was refused for now."""
        async with self._client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code in (429, 503):
                return False
            assert answer.status_code == 200, await answer.aread()
            last: float | None = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.seen.longest_gap_s = max(self.seen.longest_gap_s, now - (last or now))
                    last = now
                    said = json.loads(line.removeprefix("data: "))
                    assert "error" not in said, said
                    for choice in said["choices"]:
                        found[choice["index"]] += choice["token_ids"]
                if line == "data: [DONE]":
                    return True
        raise AssertionError("a stream that was cut")

    async def _leave(self, number: int, body: dict[str, Any]) -> None:
        """Ask, and go away after a moment."""
        try:
            asked = self._client.post("/v1/completions", json=body | {"stream": self._draw.random() < 0.5})
            await asyncio.wait_for(asked, self._draw.uniform(0.001, 0.3))
        except TimeoutError:
            pass

    async def _wrong(self, number: int, body: dict[str, Any]) -> None:
        answer = await self._client.post("/v1/completions", json=self._draw.choice(WRONG))
        assert answer.status_code in (400, 503), answer.text
        assert answer.json()["error"]["message"]

    def _compare(self, number: int, found: list[list[int]]) -> None:
        if found != self._expected[number]:
            self.seen.wrong.append(f"request {number}: other tokens")

    async def drain(self, streams: int) -> None:
        """Have the server end under load: no stream may be cut."""
        numbers = [self._draw.randrange(len(self._bodies)) for _ in range(streams)]
        follow = [asyncio.ensure_future(self._stream(number, self._bodies[number])) for number in numbers]
        while (await self._client.get("/load")).json()["server_load"] < streams:
            if all(task.done() for task in follow):
                break
            await asyncio.sleep(0.005)
        self._server.process.terminate()
        for error in await asyncio.gather(*follow, return_exceptions=True):
            if error is not None:
                self.seen.wrong.append(f"drain: {type(error).__name__}: {error}"[:300])
        self.seen.kinds["drained"] = streams

    async def _disturb(self, faults: int) -> int:
        for fault in range(faults):
            await asyncio.sleep(self._draw.uniform(3.0, 6.0))
            if (pid := self._server.engine) is None:
                continue
            name, number = (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP))[fault % 2]
            os.kill(pid, number)
            self.seen.kinds[name] += 1
            while self._server.engine in (pid, None):
                await asyncio.sleep(0.05)
            await self._server.until_ready(self._client)
        return faults

    async def _read_memory(self) -> None:
        while True:
            self.seen.memory.append(self._server.memory())
            await asyncio.sleep(10)

    async def _check_idle(self) -> None:
        """Nothing runs, nothing waits, and the K/V pool is whole."""
        await self._server.until_ready(self._client)
        until = time.monotonic() + 10
        while True:
            held = (await self._client.get("/v1/speculation")).json()["engine"]
            load = (await self._client.get("/load")).json()["server_load"]
            if not load and not any(held[name] for name in ("running", "waiting", "kv_used")):
                return
            if time.monotonic() > until:
                names = {name: held[name] for name in ("running", "waiting", "kv_used")}
                self.seen.wrong.append(f"held at the end: {load} requests, {names}")
                return
            await asyncio.sleep(0.05)


def _resident(pid: int | None) -> int:
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it has just been killed
        return 0
    return int(found[1]) // 1024 if found else 0


async def chaos(
    count: int, distinct: int, concurrency: int, faults: int, seed: int = 0, seconds: float = math.inf
) -> Seen:
    """Start a server, and do all of it; the server's own end is checked, too."""
    server = Server(
        "--threads", "1", "--drafter", "ngram", "--budget", "6", "--max-open", "48", "--max-sequences", "32"
    )
    limits = httpx.Limits(max_connections=2 * concurrency)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            made = Chaos(server, client, seed)
            seen = await made.run(count, distinct, concurrency, faults, seconds)
            await made.drain(min(concurrency, 16))
        if server.process.wait(30) not in (0, -signal.SIGTERM):
            seen.wrong.append("the server did not end as it should")
        return seen
    finally:
        server.process.kill()
        server.process.wait()


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no request is begun")
    asked = parser.parse_args()
    began = time.monotonic()
    counts = (asked.requests, asked.distinct, asked.concurrency, asked.faults)
    seen = asyncio.run(chaos(*counts, asked.seed, asked.seconds))
    print(f"{dict(seen.kinds)} in {time.monotonic() - began:.0f} s; {seen.asked_again} asked again")
    print(f"longest pause of a stream {seen.longest_gap_s:.1f} s; {len(seen.wrong)} wrong")
    print("MiB of HTTP's process and of the engine's, every 10 s:", *("{}+{}".format(*mib) for mib in seen.memory))
    for line, times in Counter(seen.wrong).most_common(20):
        print(f"wrong ({times}): {line}")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
