"""Requests in the mirror round while its drafter's process is killed or stopped: no id may change, drafting resumes.

    python tests/fuzz/kills.py --requests 1000 --kills 30

Requests of many kinds go through the round in small batches, and through plain decoding. Now and then, in the middle of
a batch, the drafter's process gets SIGKILL or SIGSTOP; batches go on, and the time until drafts are accepted again is
taken. What is wrong is said, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread, Timer
from time import monotonic, sleep
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from paceline import LLM, SamplingParams  # noqa: E402

MODEL = "paceline-small"
DRAFTER = "draft_model:paceline-small-draft,depth=3"
ROUND = "mirror,kappa=2,rollout=process"
BATCH = 8
LATEST_S = 0.4  # after the beginning of a batch the signal comes at the latest
RESUMED_S = 10.0  # drafting is to be back by then
HOPELESS_S = 120.0  # then it is given up
TICK_S, STOPPED_S = 0.05, 0.5  # a tick that comes so late: all of this was stopped, not the drafter alone
PROMPTS = (
    "Once upon a time there was a little",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:",
    "The",
)


@dataclass
class Found:
    """What a run saw."""

    requests: int = 0
    accepted: int = 0
    resumed: list[tuple[str, float]] = field(default_factory=list)  # signal, and seconds until drafts came again
    problems: list[str] = field(default_factory=list)
    stopped: float = 0.0  # seconds in which all of this was stopped


class Awake:
    """Seconds, but for those in which this process was stopped itself, as a machine that is shared may do."""

    def __init__(self) -> None:
        self.stopped, self._ticked = 0.0, monotonic()
        Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            sleep(TICK_S)
            late = monotonic() - self._ticked - TICK_S
            if late > STOPPED_S:
                self.stopped += late
            self._ticked = monotonic()

    def now(self) -> float:
        """From any beginning."""
        return monotonic() - self.stopped


class Killed:
    """The mirror round's process under fire, beside plain decoding.

    Args:
        draw: of requests, moments and signals.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.found, self.awake = draw, Found(), Awake()
        self.plain = LLM(MODEL, exact=True, kv_memory="64MiB")
        options: dict[str, Any] = {"drafter": DRAFTER, "round": ROUND, "share": self.plain}
        self.mirror = LLM(MODEL, exact=True, kv_memory="64MiB", **options)
        round_: Any = self.mirror.engine.round
        self.worker = round_.sessions._worker

    def params(self) -> SamplingParams:
        """Of one request."""
        draw = self.draw
        return SamplingParams(
            temperature=draw.choice([0, 0, 0.8, 1.2]),
            top_p=draw.choice([1, 0.9]),
            seed=draw.randrange(10**6),
            max_tokens=draw.randint(8, 40),
            repetition_penalty=draw.choice([1, 1, 1.2]),
        )

    def batch(self, count: int) -> int:
        """Answer some requests both ways; the drafts that were accepted."""
        prompts = [self.draw.choice(PROMPTS) * self.draw.choice([1, 1, 2]) for _ in range(count)]
        params = [self.params() for _ in prompts]
        wanted, said = (llm.generate(prompts, params) for llm in (self.plain, self.mirror))
        for prompt, one, own, other in zip(prompts, params, wanted, said, strict=True):
            if own.outputs[0].token_ids != other.outputs[0].token_ids:
                self.found.problems.append(f"{prompt!r} with {one}: other ids than plain decoding's")
        self.found.requests += count
        accepted = sum(output.stats.accepted for output in said)
        self.found.accepted += accepted
        return accepted

    def strike(self) -> None:
        """A batch in the middle of which the process gets a signal, and more until drafts come again."""
        chosen, before = self.draw.choice([signal.SIGKILL, signal.SIGSTOP]), self.worker.starts
        pid, sent = self.worker.pid, []

        def send() -> None:
            os.kill(pid, chosen)
            sent.append(self.awake.now())

        timer = Timer(self.draw.uniform(0.0, LATEST_S), send)
        timer.start()
        self.batch(BATCH)
        timer.join()
        while not (self.batch(1) and self.worker.starts > before):
            if self.awake.now() - sent[0] > HOPELESS_S:
                self.found.problems.append(f"{chosen.name}: no drafts for {HOPELESS_S:.0f} s")
                return
        self.found.resumed.append((chosen.name, self.awake.now() - sent[0]))
        found = self.found
        print(f"{found.requests} requests, {chosen.name}: {found.resumed[-1][1]:.1f} s", file=sys.stderr, flush=True)


def run(requests: int, kills: int, seed: int) -> Found:
    """Strike so often, evenly over so many requests at least."""
    killed = Killed(random.Random(seed))
    found = killed.found
    for strike in range(kills + 1):
        while found.requests < requests * strike // max(kills, 1) and not found.problems:
            killed.batch(BATCH)
        if strike < kills and not found.problems:
            killed.strike()
    found.stopped = killed.awake.stopped
    late = [f"{name} after {seconds:.1f} s" for name, seconds in found.resumed if seconds > RESUMED_S]
    if late:
        found.problems.append(f"drafting resumed late ({RESUMED_S:.0f} s wanted): {', '.join(late)}")
    if not found.accepted:
        found.problems.append("no draft was accepted")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="at least")
    parser.add_argument("--kills", type=int, default=30, help="signals to the drafter's process")
    parser.add_argument("--seed", type=int, default=0, help="of requests, moments and signals")
    asked = parser.parse_args(arguments)
    logging.getLogger("paceline").setLevel(logging.CRITICAL)  # each death is told there
    found = run(asked.requests, asked.kills, asked.seed)
    slowest = max((seconds for _, seconds in found.resumed), default=0.0)
    print(f"{found.requests:,} requests, {found.accepted:,} drafts accepted, {len(found.resumed)} deaths")
    usual = sorted(seconds for _, seconds in found.resumed)[len(found.resumed) // 2] if found.resumed else 0.0
    print(f"drafting resumed after {slowest:.1f} s at the latest, {usual:.1f} s in the middle")
    for name in sorted({name for name, _ in found.resumed}):
        print(f"  {name}: " + " ".join(f"{seconds:.1f}" for own, seconds in found.resumed if own == name))
    if found.stopped:
        print(f"without {found.stopped:.0f} s in which this process was stopped itself")
    for problem in found.problems:
        print(f"FAILED: {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
