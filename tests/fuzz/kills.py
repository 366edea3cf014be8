"""Requests whose processes are killed or stopped: no token may be lost or changed, and they continue soon.

    python tests/fuzz/kills.py --kills 30
    python tests/fuzz/kills.py --kills 30 --round mirror
    python tests/fuzz/kills.py --kills 10 --cluster

Requests of many kinds go through three stages in processes, with a source of drafts in a process of its own, or through
the mirror round, whose drafter is a process. At random
moments one of the processes gets SIGKILL or SIGSTOP. Taken are the seconds until its fault is named, and those until
the next token is said. Ids must be plain decoding's. What is wrong is said, and the exit status is 1. With `--cluster`
Ray has the processes, on four hosts that it is told this one is.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from kit.ticks import watch_ticks  # noqa: E402

from paceline import LLM, SamplingParams  # noqa: E402
from paceline.runtime.remote import Remote  # noqa: E402

MODEL = "paceline-small"
OPTIONS: dict[str, Any] = {
    "pipeline": "3,threads=1",
    "drafter": "draft_model:paceline-small-draft",
    "round": "pipeline,width=4,children=3,source=process,threads=1",
    "max_sequences": 4,
    "kv_memory": "64MiB",
}
MIRROR = {"pipeline": None, "drafter": "draft_model:paceline-small-draft,depth=3", "round": "mirror,rollout=process"}
BATCH = 3
LATEST_S = 2.0  # after the beginning of a batch the signal comes at the latest
NAMED_S, RECOVERED_S = 5.0, 15.0  # wanted
HOPELESS_S = 120.0  # then it is given up
PROMPTS = (
    "Once upon a time there was a little",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:",
    "The",
)


@dataclass
class Death:
    """One process that was killed or stopped."""

    who: str
    how: str
    named_s: float  # until its fault was noted
    recovered_s: float  # until the next token behind that; of a source: until a draft of its own was of use


@dataclass
class Found:
    """What a run saw."""

    requests: int = 0
    tokens: int = 0
    deaths: list[Death] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Killed:
    """A pipeline under fire, beside plain decoding.

    Args:
        draw: of requests, moments, processes and signals.
        options: of the pipeline, beside `OPTIONS` or in their place.
    """

    def __init__(self, draw: random.Random, **options: Any) -> None:
        self.draw, self.found = draw, Found()
        self.plain = LLM(MODEL, threads=1, kv_memory="64MiB", max_sequences=4)
        self.split = LLM(MODEL, **{**OPTIONS, **options})
        self.round: Any = self.split.engine.round
        if self.round.name == "pipeline":
            watch_ticks(self.round, self._note)
        self.said: list[float] = []  # when tokens were said ..
        self.hits: list[float] = []  # .. and when some of them were in flight

    def _note(self, ticked: Any) -> None:
        if ticked.count:
            self.said.append(monotonic())
        if ticked.hits:
            self.hits.append(monotonic())

    @property
    def workers(self) -> list[Remote]:
        """All processes but this one."""
        stages = self.round.stage_line.workers if hasattr(self.round, "stage_line") else ()
        return [*stages, (self.round.source if stages else self.round).sessions._worker]

    def params(self) -> SamplingParams:
        """Of one request."""
        draw = self.draw
        return SamplingParams(
            temperature=draw.choice([0, 0, 0.8]),
            top_p=draw.choice([1, 0.9]),
            seed=draw.randrange(10**6),
            max_tokens=draw.randint(16, 64),
            repetition_penalty=draw.choice([1, 1, 1.2]),
        )

    def prepared(self) -> tuple[list[str], list[SamplingParams], list[list[int]]]:
        """A batch and what plain decoding says to it."""
        prompts = [self.draw.choice(PROMPTS) * self.draw.choice([1, 1, 2]) for _ in range(BATCH)]
        params = [self.params() for _ in prompts]
        return prompts, params, [o.outputs[0].token_ids for o in self.plain.generate(prompts, params)]

    def batch(self, prepared: tuple[list[str], list[SamplingParams], list[list[int]]]) -> None:
        """Answer a batch in the pipeline, and compare."""
        prompts, params, wanted = prepared
        outputs = self.split.generate(prompts, params)
        if self.round.name != "pipeline" and sum(output.stats.accepted for output in outputs):
            self.hits.append(monotonic())
        for prompt, one, own, output in zip(prompts, params, wanted, outputs, strict=True):
            said = output.outputs[0]
            if own != said.token_ids:
                how = f"ended with {said.finish_reason}" if said.finish_reason == "error" else "other ids"
                self.found.problems.append(f"{prompt!r} with {one}: {how}, not plain decoding's")
            self.found.tokens += len(said.token_ids)
        self.found.requests += len(prompts)

    def strike(self) -> None:
        """Kill or stop a process within a batch, and go on until it is named, back, and of use again."""
        worker, chosen = self.draw.choice(self.workers), self.draw.choice([signal.SIGKILL, signal.SIGSTOP])
        who = "the source" if worker is self.workers[-1] else worker.spec.name
        useful = self.hits if worker is self.workers[-1] else self.said
        faults, starts = len(worker.faults), worker.starts
        moment, batches = self.draw.uniform(0.0, LATEST_S), [self.prepared() for _ in range(2)]
        sent: list[float] = []
        named: list[float] = []
        given_up = Event()

        def watch() -> None:
            sleep(moment)
            if worker.pid is not None:
                os.kill(worker.pid, chosen)
            sent.append(monotonic())
            while len(worker.faults) == faults and not given_up.wait(0.01):
                pass
            named.append(monotonic())

        watching = Thread(target=watch, daemon=True)
        watching.start()
        began, back = monotonic(), None
        while back is None and not self.found.problems:
            for prepared in batches:
                self.batch(prepared)
            if named and worker.starts > starts:
                back = next((at for at in useful if at > named[0]), None)
            if monotonic() - began > HOPELESS_S:
                self.found.problems.append(f"{who}, {chosen.name}: of no use after {HOPELESS_S:.0f} s")
        given_up.set()
        watching.join()
        if back is None:
            return
        if worker.spec.name not in worker.faults[faults]:
            self.found.problems.append(f"{who}, {chosen.name}: the fault {worker.faults[faults]!r} does not name it")
        self.found.deaths.append(Death(who, chosen.name, named[0] - sent[0], back - sent[0]))


@contextmanager
def hosts() -> Iterator[dict[str, Any]]:
    """A Ray cluster of four hosts of a core each, with a token; the options that name it."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(3):
        cluster.add_node(**node)
    try:
        yield {"cluster": f"{cluster.address},cores=1"}
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(kills: int, seed: int, **options: Any) -> Found:
    """Strike so often."""
    killed = Killed(random.Random(seed), **options)
    found = killed.found
    while len(found.deaths) < kills and not found.problems:
        killed.strike()
    for death in found.deaths:
        if death.named_s > NAMED_S or death.recovered_s > RECOVERED_S:
            found.problems.append(f"{death}: {NAMED_S:.0f} s and {RECOVERED_S:.0f} s are wanted")
    if not killed.hits:
        found.problems.append("no draft was accepted")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="signals to one of the processes")
    parser.add_argument("--seed", type=int, default=0, help="of requests, moments, processes and signals")
    parser.add_argument("--cluster", action="store_true", help="processes on a Ray cluster")
    parser.add_argument("--round", choices=("pipeline", "mirror"), default="pipeline", help="of the requests")
    asked = parser.parse_args(arguments)
    kind: dict[str, Any] = MIRROR if asked.round == "mirror" else {}
    logging.getLogger("paceline").setLevel(logging.CRITICAL)  # each death is told there
    with hosts() if asked.cluster else nullcontext({}) as options:
        found = run(asked.kills, asked.seed, **kind, **options)
    print(f"{found.requests:,} requests, {found.tokens:,} tokens, {len(found.deaths)} deaths")
    for kind in dict.fromkeys((death.who, death.how) for death in found.deaths):
        own = [death for death in found.deaths if (death.who, death.how) == kind]
        named, back = (max(getattr(death, name) for death in own) for name in ("named_s", "recovered_s"))
        print(
            f"{kind[0]}, {kind[1]}: {len(own)} times, named after {named:.1f} s, back after {back:.1f} s, at the latest"
        )
    for problem in found.problems:
        print(f"FAILED: {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
