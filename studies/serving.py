"""What the server costs beside the offline engine, and what its options bring: one table.

    python studies/serving.py --model paceline-small --out build/serving.md
    python studies/serving.py --model smollm2-135m --repeats 9 --tokens 96 --out build/serving-smollm2.md
    python studies/serving.py --parts load --repeats 5 --tokens 64 --out build/load.md
    python studies/serving.py --parts chunks --beside OTHER_CHECKOUT --out build/chunks.md

``rest``: idle time, memory, start. ``offline``: speed beside the engine in this process. ``options``: a schema, a
prediction. ``load``: the server with its own drafter beside one without, by streams at once. ``chunks``: processor time
of a streamed chunk, where ``--beside`` names another checkout also of that one.

Both sides are asked in turns, each prompt once of each; ratios are geometric means over the turns, with 95% intervals
of a bootstrap. Needs a quiet machine, but for ``chunks``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from kit.served import Run, Server, serving, timed

from paceline import LLM, SamplingParams
from paceline.bench.machine import line as machine
from paceline.bench.workloads import load

WORKLOADS = ("spec_bench", "gsm8k", "humaneval", "humaneval_x", "mmlu", "wikisql")
PROMPT_CHARS = 400
LOADS = (1, 2, 4, 8, 16, 32, 64)  # streams at once
LEAST_ANSWERS = 8  # of a turn of ``load``
STREAMS = 16  # of ``chunks``
SETTLE_S = 3.0  # until a server that is ready has made all that it will need, its spare process, too
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


def beside_offline(ask: argparse.Namespace, offline: Offline, server: Server) -> Iterator[list[str]]:
    """Speed, first token and time between tokens beside the engine in this process."""
    numbers = count(1)
    for many, target in ((1, "0.97; 0.98 on SmolLM2"), (16, "0.93; 0.98 on SmolLM2")):
        some = [[*islice(prompts(numbers), many)] for _ in range(ask.repeats)]
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
        taken = statistics.median(s.client_s / s.seconds for s, _ in pairs)
        yield [f"of a core, taken by the client, {many} at once", f"{100 * taken:.1f}%", ""]
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
    text: dict[str, Any] = {"response_format": {"type": "text"}, "ignore_eos": True}
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
    time.sleep(SETTLE_S)
    before = sum(server.used_s())
    time.sleep(ask.idle_s)
    yield ["idle, of a core", f"{100 * (sum(server.used_s()) - before) / ask.idle_s:.2f}%", "at most 0.5%"]
    http, engine = (resident_kb(pid) / 1024 for pid in server.pids)
    given = [ask.model, ask.drafter or "", str(ask.threads)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *given], capture_output=True, text=True, check=True)
    seconds, alone = (float(word) for word in done.stdout.split()[-2:])
    yield ["memory of the process that speaks HTTP", f"{http:.0f} MB", "at most 200 MB"]
    yield ["memory of the engine over `LLM`", f"{engine / (alone / 1024):.3f} ({engine:.0f} MB)", "within 2%"]
    yield ["ready later than `LLM` with its first answer", f"{server.ready_s - seconds:.2f} s", "at most 1 s"]


def under_load(ask: argparse.Namespace, drafting: Server, plain: Server) -> Iterator[list[str]]:
    """The server with its own drafter beside one without, by streams at once, each of which asks anew when it is
    answered; a first turn of each number, from which the budget learns what that costs, is not counted.

    A turn has several answers a stream: drafts help some answers more than others, so that those which are asked at
    once end one after the other, and the last ones alone; without drafts all end together.
    """
    numbers = count(1)
    for at_once in ask.loads:
        asked = [[*islice(prompts(numbers), max(ask.waves * at_once, LEAST_ANSWERS))] for _ in range(ask.repeats + 1)]

        def run(server: Server, turn: int, at_once: int = at_once, asked: list[list[str]] = asked) -> Run:
            return server.run(asked[turn], ask.tokens, at_once, ignore_eos=True)

        _, *pairs = in_turns(ask.repeats + 1, partial(run, drafting), partial(run, plain))
        speeds = [statistics.median(side.speed for side in both) for both in zip(*pairs, strict=True)]
        found = f"{interval([a.speed / b.speed for a, b in pairs])}; {speeds[0]:.0f} and {speeds[1]:.0f} tokens/s"
        yield [f"own drafter over none, {at_once} at once", found, "0.97"]


def of_chunks(ask: argparse.Namespace, servers: dict[str, Server]) -> Iterator[list[str]]:
    """Processor time that a streamed chunk takes of each server, where every step streams one of each request: median
    and least of the turns, as other programs make all of them dearer."""
    numbers = count(1)
    asked = [[*islice(prompts(numbers), STREAMS)] for _ in range(ask.repeats)]
    spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
    for turn, some in enumerate(asked):
        for name in [*servers][:: -1 if turn % 2 else 1]:
            before = servers[name].used_s()
            run = servers[name].run(some, ask.tokens, ignore_eos=True, speculation=False)
            used = [b - a for a, b in zip(before, servers[name].used_s(), strict=True)]
            http, engine, client = (1e6 * seconds / run.chunks for seconds in (*used, run.client_s))
            spent[name].append((http, engine, client))
    for name, costs in spent.items():
        parts = zip(("HTTP's process", "the engine's", "the client's"), zip(*costs, strict=True), strict=True)
        found = [f"{statistics.median(column):.1f} ({min(column):.1f}) us of {part}" for part, column in parts]
        yield [f"a chunk of {STREAMS} streams, {name}", ", ".join(found), ""]
    both = zip(*spent.values(), strict=True)
    if len(spent) == 2:
        ratio = interval([here[0] / beside[0] for here, beside in both])
        yield ["a chunk in HTTP's process, here over beside", ratio, ""]


def prompts(numbers: Iterator[int]) -> Iterator[str]:
    """Prompts without end, none like another."""
    texts = [prompt.turns[0][:PROMPT_CHARS] for name in WORKLOADS for prompt in load(name).prompts]
    random.Random(0).shuffle(texts)
    for number in numbers:
        yield f"{number}. {texts[number % len(texts)]}"


def main() -> None:
    """Measure all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--drafter", default="hybrid:grammar+prediction+suffix", help="of both sides, but of load")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9, help="turns of each comparison")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--waves", type=int, default=4, help="answers of a turn of the part load for each stream")
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS, help="streams at once of the part load")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=8765, help="of the first server; another has the next one")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["rest", "offline", "options"])
    parser.add_argument("--beside", type=Path, help="another checkout, for the part chunks")
    parser.add_argument("--out", type=Path, required=True, help="the table, in Markdown")
    ask = parser.parse_args()
    rows: list[list[str]] = []
    if {*ask.parts} & {"rest", "offline", "options"}:
        with serving(ask.model, ask.port, options(ask, ask.drafter)) as server:
            rows += beside_one(ask, server)
    if "load" in ask.parts:
        with (
            serving(ask.model, ask.port, options(ask)) as own,
            serving(ask.model, ask.port + 1, options(ask, "none")) as no,
        ):
            warm(own, no)
            rows += under_load(ask, own, no)
    if "chunks" in ask.parts:
        with ExitStack() as stack:
            sides = {"here": None, **({} if ask.beside is None else {"beside": ask.beside})}
            given = options(ask, ask.drafter)
            servers = {
                name: stack.enter_context(serving(ask.model, ask.port + at, given, checkout=checkout))
                for at, (name, checkout) in enumerate(sides.items())
            }
            warm(*servers.values())
            rows += of_chunks(ask, servers)
    drafter = "" if ask.parts == ["load"] else f", {ask.drafter}"
    what = f"{ask.model}{drafter}, {ask.threads} threads, {ask.repeats} turns of {ask.tokens} tokens"
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


def options(ask: argparse.Namespace, drafter: str | None = None) -> list[str]:
    """Of a server's command line."""
    return ["--threads", str(ask.threads), *(["--drafter", drafter] if drafter else [])]


def warm(*sides: Server | Offline) -> None:
    """Ask each once, ahead of what is timed."""
    for side in sides:
        side.run(["A first prompt"], 8)


def beside_one(ask: argparse.Namespace, server: Server) -> Iterator[list[str]]:
    """The parts for which one server runs."""
    if "rest" in ask.parts:
        yield from at_rest(ask, server)
    if "offline" in ask.parts:
        offline = Offline(ask)
        warm(server, offline)
        yield from beside_offline(ask, offline, server)
    if "options" in ask.parts:
        yield from options_of_requests(ask, server, [*islice(prompts(count(1)), ask.repeats)])


if __name__ == "__main__":
    main()
