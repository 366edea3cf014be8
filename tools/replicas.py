"""Replicas behind HAProxy tried for real; each command starts its own Ray cluster on this host, and ends it.

    python tools/replicas.py speed --repeats 3       # two replicas of one core each beside one of one core
    python tools/replicas.py chunk --repeats 5       # of a stream: through HAProxy, from a replica, from a plain server
    python tools/replicas.py prefix --requests 1000  # prompts with shared beginnings: how much of them K/V has
    python tools/replicas.py kill --requests 400     # one replica is killed under load
    python tools/replicas.py engine --requests 400   # one replica's engine alone is
    python tools/replicas.py rolling --requests 800  # all are restarted one by one under load (SIGHUP)

Each prints its figures as JSON. Exit status 1: a request was lost, or heard of what happened to another's replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from replica_cluster import START_S, plain, replicas

WORDS = ["one", "two", "three", "the", "sea", "a", "ship", "of", "light", "and", "old", "stone", "tower", "north"]
PATH = "/v1/completions"


# -- load


@dataclass(slots=True)
class Outcome:
    """How a request ended, and who answered."""

    replica: str | None
    how: str
    tokens: int = 0


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    """One request; never raises for what a server does."""
    found = Outcome(None, "cut")
    try:
        async with client.stream("POST", PATH, json=body) as answer:
            found.replica = answer.headers.get("x-paceline-replica")
            if answer.status_code != 200:
                found.how = f"{answer.status_code} {(await answer.aread())[:80].decode()}"
            elif not body.get("stream"):
                found.tokens = json.loads(await answer.aread())["usage"]["completion_tokens"]
                found.how = "whole"
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        found.how = "error event" if "error" in json.loads(line[6:]) else found.how
                    elif line == "data: [DONE]" and found.how != "error event":
                        found.how = "stream"
    except httpx.HTTPError as error:
        found.how = type(error).__name__
    return found


async def load(
    url: str,
    bodies: list[dict[str, Any]],
    concurrency: int,
    beside: Callable[[], Any] | None = None,
    until: Callable[[], bool] = lambda: True,
) -> tuple[list[Outcome], float]:
    """All requests, so many at once; how each ended, and seconds.

    Args:
        beside: called once when a quarter has ended.
        until: whether there is load enough; else all come again.
    """

    def wanted() -> Iterator[dict[str, Any]]:
        yield from bodies
        while not until():
            yield from bodies

    left, found = wanted(), []
    limits = httpx.Limits(max_connections=2 * concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def work() -> None:
            for body in left:
                found.append(await ask(client, body))

        began, workers = time.monotonic(), [asyncio.ensure_future(work()) for _ in range(concurrency)]
        while beside is not None and len(found) < len(bodies) / 4:
            await asyncio.sleep(0.02)
        if beside is not None:
            beside()
        await asyncio.gather(*workers)
        return found, time.monotonic() - began


def bodies(asked: argparse.Namespace, count: int, tokens: int, mixed: bool) -> list[dict[str, Any]]:
    """Distinct requests; mixed: two of three are streams."""
    draw = random.Random(asked.seed)
    texts = [" ".join(draw.choices(WORDS, k=24)) for _ in range(count)]
    same = {"max_tokens": tokens, "ignore_eos": True}
    return [{"prompt": t, "seed": n, "stream": mixed and n % 3 != 0, **same} for n, t in enumerate(texts)]


# -- the parts


def speed(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of two replicas on two cores, and of one on one core, with all that serves and asks them; they
    start on all cores, which takes half as long."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: speed: two replicas of a core each need two cores, and this process may use one")
    rates: dict[int, list[float]] = {1: [], 2: []}
    wanted = bodies(asked, asked.requests, asked.tokens, mixed=False)
    for _ in range(asked.repeats):
        for count in (2, 1):
            with replicas(asked, count) as running, running.kept_on(cores[:count]):
                asyncio.run(load(running.url, wanted[:8], 8))
                ended, seconds = asyncio.run(load(running.url, wanted, asked.concurrency))
                if lost := [one.how for one in ended if one.how != "whole"]:
                    sys.exit(f"error: {len(lost)} of {len(ended)} requests were lost: {lost[0]}")
                rates[count].append(sum(one.tokens for one in ended) / seconds)
    ratios = [two / one for two, one in zip(rates[2], rates[1], strict=True)]
    return {"tokens_per_s": rates, "ratios": ratios, "ratio": statistics.median(ratios)}


def chunk(asked: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds between two chunks of a stream that is alone, in turns."""
    found: dict[str, list[float]] = {"haproxy": [], "replica": [], "plain": []}
    with plain(asked) as alone, replicas(asked, 1) as running:
        own = next(f"http://127.0.0.1:{port}" for port in range(running.first, running.first + 20) if _named(port))
        urls = {"haproxy": running.url, "replica": own, "plain": alone}
        for turn in range(asked.repeats + 1):
            for name, url in urls.items():
                if (ms := _between(url, asked.tokens)) and turn:
                    found[name].append(ms)
    ms = {name: statistics.median(values) for name, values in found.items()}
    pairs = [a / b for a, b in zip(found["haproxy"], found["replica"], strict=True)]
    return {"ms": ms, "haproxy_over_replica": statistics.median(pairs), "all": found}


def _named(port: int) -> bool:
    try:
        return "x-paceline-replica" in httpx.get(f"http://127.0.0.1:{port}/health").headers
    except httpx.TransportError:
        return False


def _between(url: str, tokens: int) -> float:
    """Mean of a stream's chunks behind the first, without drafts: one token each."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "seed": 1, "stream": True}
    times: list[float] = []
    with httpx.stream("POST", f"{url}{PATH}", json=body | {"speculation": False}, timeout=60) as answer:
        times += [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def prefix(asked: argparse.Namespace) -> dict[str, Any]:
    """Share of prompt tokens that K/V has, by two replicas and by one."""
    draw = random.Random(asked.seed)
    shared = [" ".join(draw.choices(WORDS, k=150)) for _ in range(20)]
    wanted = [
        {"prompt": f"{draw.choice(shared)} {' '.join(draw.choices(WORDS, k=20))}", "max_tokens": 4, "seed": n}
        for n in range(asked.requests)
    ]
    shares = {}
    for count in (2, 1):
        with replicas(asked, count) as running:
            asyncio.run(load(running.url, wanted, asked.concurrency))
            text = httpx.get(f"{running.url}/metrics").text
            hits, queries = (_total(text, f"paceline:prefix_cache_{name}_total") for name in ("hits", "queries"))
            shares[count] = hits / queries
    return {"hit_rate": shares, "two_over_one": shares[2] / shares[1]}


def _total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"(?m)^{name}\{{.*\}} (\S+)$", text))


def fault(asked: argparse.Namespace) -> dict[str, Any]:
    """What became of requests while a replica, or its engine, is killed, or all are restarted."""
    with replicas(asked, 2) as running:

        def disturb() -> None:
            if asked.part == "rolling":
                running.process.send_signal(signal.SIGHUP)
            else:
                os.kill(running.replicas(asked.part)[0], signal.SIGKILL)

        def restarted() -> bool:
            return b"has restarted all replicas" in running.log.read_bytes()

        def enough() -> bool:
            return (
                asked.part != "rolling" or restarted() or time.monotonic() > last or running.process.poll() is not None
            )

        last = time.monotonic() + START_S
        wanted = bodies(asked, asked.requests, asked.tokens, mixed=True)
        ended, _ = asyncio.run(load(running.url, wanted, asked.concurrency, disturb, enough))
        all_restarted = restarted()
    hurt = {one.replica for one in ended if one.how not in ("whole", "stream")}
    named = {one.replica for one in ended}
    lost = [one.how for one in ended if one.how not in ("whole", "stream", "error event")]
    errors = sum(one.how == "error event" for one in ended)
    wrong = bool(lost) or len(hurt) > (asked.part == "kill")
    said: dict[str, Any] = {"ended": Counter(one.how for one in ended), "replicas": len(named), "hurt": len(hurt)}
    if asked.part == "rolling":
        said |= {"all_restarted_under_load": all_restarted}
        wrong |= errors > 0 or not all_restarted
    return said | {"wrong": wrong}


PARTS = {"speed": speed, "chunk": chunk, "prefix": prefix, "kill": fault, "engine": fault, "rolling": fault}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="another one of `paceline serve`, as --option=--drafter=ngram"
    )
    asked = parser.parse_args()
    said = PARTS[asked.part](asked)
    print(json.dumps({"part": asked.part, **said}))
    return int(said.get("wrong", False))


if __name__ == "__main__":
    sys.exit(main())
