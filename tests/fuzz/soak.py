"""Mixed requests through `AsyncLLM` on the embedded model, for minutes: nothing may be left, memory must stay flat.

    python tests/fuzz/soak.py --minutes 10
    python tests/fuzz/soak.py --minutes 10 --pipeline 2        # in two stages, each with a process of its own

Drafters take turns, each in an `AsyncLLM` that lives as long as the run, as a server does, with a pool so small that
requests are preempted. (A model that is loaded again and again leaves gaps in the allocator's memory.) Tasks ask,
stream, leave iterators early, are cancelled, and ask what must be refused. A probe comes again and again and must
always get the same answer, whoever drafts. What is wrong is said, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from paceline import AsyncLLM, ConfigError, SamplingParams  # noqa: E402
from paceline.engine import drafting  # noqa: E402

drafting.REST_S = float("inf")  # a drafter that fails is still put aside at the end, where it is looked for

MODEL, DRAFT = "paceline-small", "paceline-small-draft"
DRAFTERS = (None, "ngram", "suffix", f"draft_model:{DRAFT},depth=3", f"hybrid:{DRAFT}")
MAX_LEN = 256
POOL_TOKENS = MAX_LEN + 16  # for up to eight sequences at once
PIPED = (None, "ngram", f"draft_model:{DRAFT}")  # with --pipeline
TASKS = 10
ROUNDS = 3  # times at least that every drafter has its turn; a third of the run has each of them
SHORTEST_TURN_S, LONGEST_TURN_S = 1.0, 20.0
WARM_UP_S = 120.0  # until every drafter had its turn
JUDGED_S = 180.0  # least length behind the warm-up of which memory is judged
GROWTH_SHARE, GROWTH_BYTES = 0.02, 8 * 2**20  # memory may grow by the larger of them
PROMPTS = (
    "Once upon a time there was a little",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:",
    "The",
    "Ein 😀 und ein é, ",
)
PROBE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@dataclass
class Reading:
    """Memory at one moment."""

    second: float
    rss_bytes: int
    drafter: str


@dataclass
class Soak:
    """What a soak saw."""

    readings: list[Reading] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    probe: list[int] | None = None  # the ids that the probe must get


def rss_bytes(others: Sequence[int] = ()) -> int:
    """Resident memory of this process, and of others by their numbers."""
    try:
        pages = (int(Path(f"/proc/{who}/statm").read_text().split()[1]) for who in ("self", *others))
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the largest so far, which cannot show that memory fell, but shows that it grows
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def growth(readings: Sequence[Reading]) -> tuple[int, int]:
    """By how many bytes memory grew from the first third of the readings to the last one, and from how many.

    Each third is summed up by the mean of its drafters' medians, so that it does not matter which of them it has
    more readings of.
    """
    size = len(readings) // 3
    first, last = _typical(readings[:size]), _typical(readings[-size:])
    both = first.keys() & last.keys()
    if not both:
        return 0, 0
    base = sum(first[name] for name in both) / len(both)
    return round(sum(last[name] - first[name] for name in both) / len(both)), round(base)


def _typical(readings: Sequence[Reading]) -> dict[str, float]:
    """Median by drafter."""
    values: dict[str, list[int]] = {}
    for reading in readings:
        values.setdefault(reading.drafter, []).append(reading.rss_bytes)
    return {name: median(v) for name, v in values.items()}


def judge_memory(readings: Sequence[Reading], seconds: float) -> tuple[str | None, str]:
    """What is wrong with the curve, if anything, and a sentence about it."""
    if seconds < WARM_UP_S + JUDGED_S:
        return None, f"memory is judged from {WARM_UP_S + JUDGED_S:.0f} s on; this run had {seconds:.0f}"
    grown, base = growth([r for r in readings if r.second >= WARM_UP_S])
    allowed = max(GROWTH_SHARE * base, GROWTH_BYTES)
    said = f"memory grew by {grown / 2**20:.1f} MiB over {base / 2**20:.0f} MiB; {allowed / 2**20:.1f} are allowed"
    return (said if grown > allowed else None), said


async def guest(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """One task: request after request, each in another manner, until it is cancelled."""
    while not soak.problems:
        manner = draw.choice(MANNERS)
        try:
            await manner(llm, soak, draw)
            soak.met[manner.__name__] += 1
        except Exception as error:  # nothing but what is caught inside may come out
            soak.problems.append(f"{manner.__name__}: {type(error).__name__}: {error}")


def _params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice([0, 0, 0.8, 1.2]),
        top_p=draw.choice([1, 0.9]),
        seed=draw.randrange(10**6),
        n=draw.choice([1, 1, 1, 2, 3]),
        max_tokens=draw.randint(1, 80),
        ignore_eos=draw.random() < 0.5,
        stop=draw.choice([None, None, "the", ["\n\n", "."]]),
        repetition_penalty=draw.choice([1, 1, 1.2]),
        logprobs=draw.choice([None, None, 3]),
    )


def _prompt(draw: random.Random) -> str:
    return draw.choice(PROMPTS) * draw.choice([1, 1, 2, 4])


async def asks(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """The whole answer at once."""
    output = await llm.generate(_prompt(draw), _params(draw))
    soak.met["tokens"] += output.stats.emitted
    soak.met["preemptions"] += output.stats.preemptions
    soak.met["accepted tokens"] += output.stats.accepted
    if not output.finished or output.stats.accepted > output.stats.drafted:
        soak.problems.append(f"a whole answer contradicts itself: {output.stats}")


async def streams(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """Chunk by chunk to the end, slowly now and then."""
    said: dict[int, str] = {}
    output = None
    async for chunk in llm.stream(_prompt(draw), _params(draw)):
        said[chunk.index] = said.get(chunk.index, "") + chunk.text
        output = chunk.output
        if draw.random() < 0.1:
            await asyncio.sleep(0.005)
    if output is None or [said[o.index] for o in output.outputs] != [o.text for o in output.outputs]:
        soak.problems.append(f"the chunks {said} are not the answer")


async def leaves(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """Goes away after a few chunks."""
    stream: Any = llm.stream(_prompt(draw), _params(draw))
    left = draw.randint(0, 5)
    async for _ in stream:
        left -= 1
        if left < 0:
            break
    await stream.aclose()


async def is_cancelled(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """A task that is ended from outside, at any moment."""
    task = asyncio.create_task(llm.generate(_prompt(draw), _params(draw)))
    await asyncio.sleep(draw.choice([0, 0.001, 0.05, 0.3]))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_refused(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """What cannot be answered is refused, and disturbs nobody."""
    try:
        match draw.randrange(3):
            case 0:
                await llm.generate({"prompt_token_ids": [10**9]}, _params(draw))
            case 1:
                await llm.generate({"prompt_token_ids": [1] * (MAX_LEN + 1)}, _params(draw))
            case _:
                await llm.generate("x", SamplingParams(logprobs=10**6))
    except ConfigError:
        return
    soak.problems.append("a bad request was not refused")


async def probes(llm: AsyncLLM, soak: Soak, draw: random.Random) -> None:
    """The same request as ever, and the same answer."""
    ids = (await llm.generate(PROMPTS[0], PROBE)).outputs[0].token_ids
    soak.probe = soak.probe or ids
    if ids != soak.probe:
        soak.problems.append(f"the probe was answered {ids}, and {soak.probe} before")


MANNERS = (asks, asks, streams, streams, leaves, is_cancelled, is_refused, probes)


def start(drafter: str | None, stages: int = 0) -> AsyncLLM:
    """The engine of one drafter, in so many stages; 0: none."""
    if stages:
        return AsyncLLM(MODEL, drafter=drafter, pipeline=f"{stages},threads=1", exact=True, **_limits())
    return AsyncLLM(MODEL, drafter=drafter, budget=None if drafter is None else 3, exact=True, **_limits())


def workers(models: Sequence[AsyncLLM]) -> list[int]:
    """Numbers of the processes of all engines' stages."""
    belts: list[Any] = [getattr(llm._llm.engine.round, "stage_line", None) for llm in models]
    return [worker.pid for stage_line in belts for worker in getattr(stage_line, "workers", ())]


async def turn(llm: AsyncLLM, soak: Soak, seed: int, began: float, seconds: float, others: Sequence[int] = ()) -> None:
    """Guests at one engine, until all have left; ``others``: processes whose memory counts, too."""
    drafter = llm.config.drafter
    tasks = [asyncio.create_task(guest(llm, soak, random.Random(f"{seed} {i}"))) for i in range(TASKS)]
    tasks.append(asyncio.create_task(read_memory(soak, began, str(drafter), seconds, others)))
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)  # one that ends has a problem
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await _settle(llm)
    soak.problems += [f"{drafter}: {p}" for p in left_behind(llm)]
    soak.met[f"turns of {drafter}"] += 1


def _limits() -> dict[str, Any]:
    from paceline.kv.pool import KVPool
    from paceline.weights.source import parse_dtype, read_config, resolve_folder

    shape = read_config(resolve_folder(MODEL))
    per_token = KVPool.bytes_per_token(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, parse_dtype("auto", shape)[0]
    )
    return {"max_model_len": MAX_LEN, "max_sequences": 8, "max_batch_rows": 64, "kv_memory": POOL_TOKENS * per_token}


async def read_memory(soak: Soak, began: float, drafter: str, seconds: float, others: Sequence[int]) -> None:
    """A reading every two seconds, or more often in a short turn."""
    while True:
        await asyncio.sleep(min(2.0, seconds / 3))
        soak.readings.append(Reading(monotonic() - began, rss_bytes(others), drafter))


async def _settle(llm: AsyncLLM) -> None:
    """Give what was cancelled last the time to be dropped."""
    for _ in range(200):
        if not llm._llm.engine.busy:
            return
        await asyncio.sleep(0.01)


def left_behind(llm: AsyncLLM) -> list[str]:
    """What an engine that nobody asks anything still holds."""
    engine = llm._llm.engine
    scheduler = engine.scheduler
    counts = {
        "requests": len(engine.live),
        "waiting sequences": len(scheduler.waiting),
        "running sequences": len(scheduler.running),
    }
    found = [f"{count} {what} are left" for what, count in counts.items() if count]
    pools = [engine.pool, getattr(engine.round.drafter, "_pool", None)]  # type: ignore[attr-defined]
    for pool in [p for p in pools if p is not None]:
        try:
            pool.check_idle()
            pool.check_integrity()
        except AssertionError as error:
            found.append(f"the pool: {error}")
    if engine.round.failure:
        found.append(engine.round.failure)
    return found


async def soak_for(seconds: float, seed: int, stages: int = 0) -> Soak:
    """Turn after turn; with ``seconds`` for all of them, and ``stages`` of `start`."""
    soak, index = Soak(), 0
    drafters = PIPED if stages else DRAFTERS
    each = min(LONGEST_TURN_S, max(SHORTEST_TURN_S, seconds / (ROUNDS * len(drafters))))
    threads = threading.active_count()
    async with AsyncExitStack() as engines:
        models = [await engines.enter_async_context(start(drafter, stages)) for drafter in drafters]
        others = workers(models)
        began = monotonic()
        while monotonic() - began < seconds and not soak.problems:
            await turn(models[index % len(models)], soak, seed + index, began, each, others)
            gc.collect()
            index += 1
    if any(thread.name == "paceline-engine" for thread in threading.enumerate()):
        soak.problems.append("an engine's thread outlives its end")
    # The loop's own pool of threads, in which an engine is closed, may have grown by a few.
    extra = [t.name for t in threading.enumerate() if not t.name.startswith("asyncio")][threads:]
    soak.problems += [f"threads are left: {extra}"] if extra else []
    problem, said = judge_memory(soak.readings, seconds)
    soak.problems += [problem] if problem else []
    print(said)
    return soak


def write(soak: Soak, folder: Path) -> None:
    """The curve."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "memory.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["second", "rss_bytes", "drafter"])
        rows.writerows([f"{r.second:.1f}", r.rss_bytes, r.drafter] for r in soak.readings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder of the curve")
    parser.add_argument("--pipeline", type=int, default=0, help="stages in processes; 0: none")
    asked = parser.parse_args(arguments)
    soak = asyncio.run(soak_for(60 * asked.minutes, asked.seed, asked.pipeline))
    write(soak, asked.out)
    print("\n".join(f"  {count:>9,} {name}" for name, count in sorted(soak.met.items())))
    for problem in soak.problems:
        print(f"FAILED: {problem}")
    print(f"the curve is in {asked.out}" + ("" if soak.problems else "; all conditions hold"))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
