"""What the server costs beside the offline engine, and what its options bring: one table.

    python studies/serving.py --model paceline-small --out build/serving.md
    python studies/serving.py --model smollm2-135m --repeats 9 --tokens 96 --out build/serving-smollm2.md

An engine in this process and a server are asked in turns, each prompt once of each; ratios are geometric means over
the turns, with 95% intervals of a bootstrap. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.machine import line as machine
from paceline.bench.workloads import load

START_S = 300.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "member"],
    "additionalProperties": False,
}
MEMORY = """
import sys, time
began = time.monotonic()
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], drafter=sys.argv[2] or None, threads=int(sys.argv[3]))
llm.generate("Once", SamplingParams(temperature=0, max_tokens=8))
print(time.monotonic() - began, open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
"""


@dataclass
class Run:
    """What came of requests that were sent at once."""

    seconds: float = 0.0  # from the first request to the end of the last answer
    tokens: int = 0
    first_s: float = math.nan  # to the first token, of a single request
    gaps_s: list[float] = field(default_factory=list)  # between chunks, of a single request
    texts: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Offline:
    """The engine in this process."""

    def __init__(self, ask: argparse.Namespace) -> None:
        self._llm = LLM(ask.model, drafter=ask.drafter, threads=ask.threads)

    def run(self, prompts: Sequence[str], tokens: int) -> Run:
        """Answer prompts, a single one streamed."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        if len(prompts) > 1:
            began = time.perf_counter()
            found = self._llm.generate([*prompts], params)
            return Run(time.perf_counter() - began, sum(len(one.outputs[0].token_ids) for one in found))
        run, times = Run(), [time.perf_counter()]
        for chunk in self._llm.stream(prompts[0], params):
            times.append(time.perf_counter())
            run.tokens += len(chunk.token_ids)
        return timed(run, times)


class Server:
    """``paceline serve`` in processes of its own.

    Args:
        ask: the options of this study.
    """

    def __init__(self, ask: argparse.Namespace) -> None:
        self.port = ask.port
        command = [sys.executable, "-m", "paceline", "serve", ask.model, "--port", str(self.port)]
        command += ["--threads", str(ask.threads), *(["--drafter", ask.drafter] if ask.drafter else [])]
        began = time.monotonic()
        self.process = subprocess.Popen(command)
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

    def run(self, prompts: Sequence[str], tokens: int, **options: Any) -> Run:
        """Ask all prompts at once, each as a stream of its own."""
        bodies = [self.body(prompt, tokens, **options) for prompt in prompts]
        return asyncio.run(self._all(bodies))

    def body(self, prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
        """A request: of a chat where its options are those of one."""
        chat = {"prediction", "response_format"} & {*options}
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        asked |= {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return asked | options

    async def _all(self, bodies: list[dict[str, Any]]) -> Run:
        began = time.perf_counter()
        runs = await asyncio.gather(*map(self._stream, bodies))
        whole = Run(time.perf_counter() - began, sum(run.tokens for run in runs))
        whole.texts = [text for run in runs for text in run.texts]
        if len(runs) == 1:
            whole.first_s, whole.gaps_s = runs[0].first_s, runs[0].gaps_s
        return whole

    async def _stream(self, body: dict[str, Any]) -> Run:
        """A request over a connection of its own, read by hand: the client must cost little beside the server."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        data, times = json.dumps(body).encode(), [time.perf_counter()]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        came: list[tuple[float, bytes]] = []  # read when all is there: that would take its time from the server's
        async for line in reader:
            if line.startswith(b"data: {"):
                came.append((time.perf_counter(), line))
        writer.close()
        events: list[dict[str, Any]] = []
        for now, line in came:
            events.append(json.loads(line[6:]))
            if any(one.get("text") or one.get("delta", {}).get("content") for one in events[-1]["choices"]):
                times.append(now)
        if not events or "usage" not in events[-1]:
            raise SystemExit(f"the server did not answer: {events[-1:]}")
        run = Run(tokens=events[-1]["usage"]["completion_tokens"])
        choices = [choice for told in events for choice in told["choices"]]
        run.texts = ["".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)]
        return timed(run, times)


def timed(run: Run, times: list[float]) -> Run:
    """A run with what the times of its start and of each chunk say."""
    run.seconds, run.first_s = times[-1] - times[0], times[1] - times[0]
    run.gaps_s = [after - before for before, after in zip(times[1:], times[2:], strict=False)]
    return run


@contextmanager
def serving(ask: argparse.Namespace) -> Iterator[Server]:
    """A server that ends with this."""
    server = Server(ask)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


# -- what is measured


def in_turns(repeats: int, a: Callable[[int], Any], b: Callable[[int], Any]) -> Iterator[tuple[Any, Any]]:
    """Results of both, each turn the other one first."""
    for turn in range(repeats):
        if turn % 2:
            later = b(turn)
            yield a(turn), later
        else:
            yield a(turn), b(turn)


def interval(ratios: Sequence[float]) -> str:
    """Geometric mean, and the 95% interval of a bootstrap over the turns."""
    logs, draw = [math.log(ratio) for ratio in ratios], random.Random(0)
    means = sorted(statistics.mean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    return f"{math.exp(statistics.mean(logs)):.3f} ({math.exp(means[50]):.3f} to {math.exp(means[1949]):.3f})"


def beside_offline(
    ask: argparse.Namespace, offline: Offline, server: Server, prompts: list[str]
) -> Iterator[list[str]]:
    """Speed, first token and time between tokens beside the engine in this process."""
    for many, target in ((1, "0.97; 0.98 on SmolLM2"), (16, "0.93; 0.98 on SmolLM2")):
        some = [prompts[i * many : (i + 1) * many] for i in range(ask.repeats)]
        pairs = list(
            in_turns(
                ask.repeats,
                lambda turn, some=some: server.run(some[turn], ask.tokens, ignore_eos=True),  # type: ignore[misc]
                lambda turn, some=some: offline.run(some[turn], ask.tokens),  # type: ignore[misc]
            )
        )
        yield [
            f"speed over the offline engine, {many} at once",
            interval([s.speed / o.speed for s, o in pairs]),
            target,
        ]
        if many == 1:
            later = statistics.median(1e3 * (s.first_s - o.first_s) for s, o in pairs)
            yield ["first token later by, median", f"{later:.1f} ms", "at most 5 ms"]
            served, own = (p99([gap for run in side for gap in run.gaps_s]) for side in zip(*pairs, strict=True))
            yield ["p99 between chunks over the offline engine's", f"{served / own:.2f}", "at most 1.5"]


def p99(values: list[float]) -> float:
    """Their 99th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def options_of_requests(ask: argparse.Namespace, server: Server, prompts: list[str]) -> Iterator[list[str]]:
    """What a schema, and a prediction of an edited file, bring."""
    found = [json_beside_text(ask, server, prompt) for prompt in prompts[: ask.repeats]]
    yield ["constrained JSON over free text, tokens/s", interval([under / free for under, free, _ in found]), "1.2"]
    yield ["constrained JSON over plain decoding", interval([under / plain for under, _, plain in found]), ""]
    before = [
        server.run([prompts[turn]], ask.tokens, response_format={"type": "text"}, ignore_eos=True, speculation=False)
        for turn in range(ask.repeats)
    ]
    pairs = in_turns(
        ask.repeats,
        lambda turn: server.run([prompts[turn]], ask.tokens, ignore_eos=True, prediction=edited(before[turn].texts[0])),
        lambda turn: server.run(
            [prompts[turn]], ask.tokens, ignore_eos=True, response_format={"type": "text"}, speculation=False
        ),
    )
    yield ["`prediction` of an edited text over plain decoding", interval([a.speed / b.speed for a, b in pairs]), "2.0"]


def json_beside_text(ask: argparse.Namespace, server: Server, prompt: str) -> tuple[float, float, float]:
    """Tokens a second of an answer under a schema, and of free ones as long, drafted and plain. All find the prompt's
    keys and values, and the grammar compiled."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    text = {"response_format": {"type": "text"}, "ignore_eos": True}
    server.run([prompt], 1, response_format=schema)
    under = server.run([prompt], ask.tokens, response_format=schema)
    free = server.run([prompt], under.tokens, **text)
    plain = server.run([prompt], under.tokens, **text, speculation=False)
    return under.speed, free.speed, plain.speed


def edited(text: str) -> dict[str, str]:
    """A prediction that an answer is an edited version of: one word of 15 is another."""
    words = text.split(" ")
    words[7::15] = ["other"] * len(words[7::15])
    return {"type": "content", "content": " ".join(words)}


def resident_kb(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def at_rest(ask: argparse.Namespace, server: Server) -> Iterator[list[str]]:
    """Processor time of an idle server, and memory of both processes."""

    def used_s() -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in server.pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    before = used_s()
    time.sleep(ask.idle_s)
    yield ["idle, of a core", f"{100 * (used_s() - before) / ask.idle_s:.2f}%", "at most 0.5%"]
    http, engine = (resident_kb(pid) / 1024 for pid in server.pids)
    given = [ask.model, ask.drafter or "", str(ask.threads)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *given], capture_output=True, text=True, check=True)
    seconds, alone = (float(word) for word in done.stdout.split()[-2:])
    yield ["memory of the process that speaks HTTP", f"{http:.0f} MB", "at most 200 MB"]
    yield ["memory of the engine over `LLM`", f"{engine / (alone / 1024):.3f} ({engine:.0f} MB)", "within 2%"]
    yield ["ready later than `LLM` with its first answer", f"{server.ready_s - seconds:.2f} s", "at most 1 s"]


def main() -> None:
    """Measure all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--drafter", default="hybrid:grammar+prediction+suffix", help="of both sides")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9, help="turns of each comparison")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path, required=True, help="the table, in Markdown")
    ask = parser.parse_args()
    prompts = [prompt.turns[0][:400] for prompt in load("spec_bench").prompts]
    prompts *= -(-16 * ask.repeats // len(prompts))
    rows: list[list[str]] = []
    with serving(ask) as server:
        rows += at_rest(ask, server)
        offline = Offline(ask)
        for warm in (server, offline):
            warm.run(prompts[-1:], 8)
        rows += beside_offline(ask, offline, server, prompts)
        rows += options_of_requests(ask, server, prompts)
    what = f"{ask.model}, {ask.drafter}, {ask.threads} threads, {ask.repeats} turns of {ask.tokens} tokens"
    lines = [
        f"`{' '.join(['python', *sys.argv])}` ({what}); {machine()}",
        "",
        "| | measured | target |",
        "|:--|:--|:--|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    ask.out.parent.mkdir(parents=True, exist_ok=True)
    ask.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
