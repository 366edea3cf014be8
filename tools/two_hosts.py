"""Two network namespaces as two hosts with a shaped link between them: a pipeline over it says what one process says.

    python tools/two_hosts.py --rate 100mbit --delay 2ms          # as root, on Linux, with iproute2

In one namespace `paceline stage` listens, in the other one `paceline generate --pipeline` connects, as on two hosts
(docs/specpipe.md). The link is a pair of virtual devices, shaped in both directions: by netem where the kernel has it,
else by a token bucket, which has a rate and no delay. Ids are compared with those of one process; exit status 1: they
differ. Both namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDRESS = {"paceline-a": "10.77.0.1", "paceline-b": "10.77.0.2"}  # namespaces and their ends of the link
PORT = 7710
PACELINE = [sys.executable, "-m", "paceline"]
PROMPT = "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:"
READY_S = 120.0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def shape(name: str, rate: str, delay: str) -> str:
    """Shape what leaves a namespace; how it is shaped, in words."""
    device = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", name, "root"]
    netem = [*device, "netem", "rate", rate, *(["delay", delay] if delay else [])]
    if subprocess.run(netem, capture_output=True, check=False).returncode == 0:
        return f"{rate}, {delay or 'no'} delay each way (netem)"
    run(*device, "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
    return f"{rate} (token bucket; this kernel has no netem, so there is no delay)"


@contextmanager
def two_hosts(rate: str, delay: str) -> Iterator[str]:
    """Both namespaces and the link; how it is shaped, in words."""
    made: list[str] = []
    try:
        for name in ADDRESS:
            run("ip", "netns", "add", name)
            made.append(name)
        a, b = ADDRESS
        run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, address in ADDRESS.items():
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            run("ip", "-n", name, "link", "set", name, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield [shape(name, rate, delay) for name in ADDRESS][0]
    finally:
        for name in made:
            run("ip", "netns", "del", name)


@contextmanager
def stage(name: str, model: str) -> Iterator[str]:
    """`paceline stage` in a namespace; its address."""
    listen = f"{ADDRESS[name]}:{PORT}"
    command = [*PACELINE, "stage", "--model", model, "--listen", listen]
    print(f"{name}: paceline {' '.join(command[3:])}")
    process = subprocess.Popen(["ip", "netns", "exec", name, *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while "listens at" not in (line := process.stderr.readline()):
            if process.poll() is not None:
                sys.exit(f"error: the stage ended: {line}")
        yield listen
    finally:
        process.terminate()
        process.wait()


def generate(asked: argparse.Namespace, prefix: Sequence[str] = (), *options: str) -> tuple[list[int], float]:
    """Token ids of an answer, and seconds of the whole command."""
    given = ["--model", asked.model, "--prompt", PROMPT, "--max-tokens", str(asked.max_tokens), "--ignore-eos"]
    command = [*PACELINE, "generate", *given, "--json", *options]
    if prefix:
        print(f"{prefix[-1]}: paceline generate {' '.join(options)} ..", flush=True)
    began = time.monotonic()
    done = run(*prefix, *command)
    answer = json.loads(done.stdout.splitlines()[-1])
    if prefix:
        print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "")
    return answer["outputs"][0]["token_ids"], time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--delay", default="", help="each way, as tc writes it; none: none")
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--drafter", default="ngram", help="of the second run; the first one has none")
    parser.add_argument("--max-tokens", type=int, default=48)
    asked = parser.parse_args(arguments)
    if os.geteuid():
        sys.exit("error: namespaces need root: run it with sudo")
    wanted, _ = generate(asked)
    here, there = ADDRESS
    same = True
    with two_hosts(asked.rate, asked.delay) as shaped, stage(here, asked.model) as listen:
        print(f"the link: {shaped}")
        for options in ([], ["--drafter", asked.drafter]):
            prefix = ["ip", "netns", "exec", there]
            said, seconds = generate(asked, prefix, "--pipeline", listen, *options)
            same &= said == wanted
            verdict = "the ids of one process" if said == wanted else "OTHER IDS THAN ONE PROCESS"
            print(f"{len(said)} tokens, {verdict}, {seconds:.1f} s with start-up", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
