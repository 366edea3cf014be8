"""Network namespaces as hosts of a Ray cluster with shaped links: what a model says over it, one process says.

    python tools/two_hosts.py --rate 1gbit --delay 1ms            # as root, on Linux, with iproute2
    python tools/two_hosts.py --hosts 3 --kill

Each namespace runs `ray start` with a token, as a host does (docs/cluster.md). On the first one `paceline generate`
runs a pipeline with a stage a host, then one whose drafter is on another host, then the mirror round with its drafter
there. `--kill` ends a worker in the middle of an answer.
Links are virtual devices at a bridge, shaped on their way out: by netem where the kernel has it, else by a token
bucket, which has a rate and no delay. Exit status 1: ids differ from those of one process. All namespaces are removed
at the end, with what runs there.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BRIDGE, PORT = "paceline-0", 6379
BIN = Path(sys.executable).parent
PROMPT = "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:"
DRAFTER = "draft_model:paceline-small-draft,depth=4"
STORE_BYTES = 80 * 2**20
RAY = str(BIN / "ray"), "start", "--num-cpus", "1", "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"
SMALL: dict[str, Any] = {"max_model_len": 512, "max_sequences": 1}
KILL_AT = 8  # ticks of the pipeline


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def inside(name: str, *command: str) -> list[str]:
    """A command in a namespace."""
    return ["ip", "netns", "exec", name, *command]


def shape(name: str, rate: str, delay: str) -> str:
    """Shape what leaves a namespace; how it is shaped, in words."""
    device = inside(name, "tc", "qdisc", "replace", "dev", name, "root")
    netem = [*device, "netem", "rate", rate, *(["delay", delay] if delay else [])]
    if subprocess.run(netem, capture_output=True, check=False).returncode == 0:
        return f"{rate}, {delay or 'no'} delay each way (netem)"
    run(*device, "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
    return f"{rate} (token bucket; this kernel has no netem, so there is no delay)"


@contextmanager
def namespaces(count: int, rate: str, delay: str) -> Iterator[dict[str, str]]:
    """So many hosts at a bridge: addresses by name."""
    hosts = {f"paceline-{number}": f"10.77.0.{number}" for number in range(1, count + 1)}
    made: list[str] = []
    try:
        for name in (BRIDGE, *hosts):
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", BRIDGE, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", BRIDGE, "link", "set", "bridge", "up")
        for name, address in hosts.items():
            run("ip", "link", "add", name, "netns", name, "type", "veth", "peer", "name", f"to-{name}", "netns", BRIDGE)
            run("ip", "-n", BRIDGE, "link", "set", f"to-{name}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            run("ip", "-n", name, "link", "set", name, "up")
        print(f"{count} hosts; each link: {[shape(name, rate, delay) for name in hosts][0]}", flush=True)
        yield hosts
    finally:
        for name in reversed(made):
            for pid in run("ip", "netns", "pids", name).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", name)


def start_ray(hosts: dict[str, str], folder: str, env: dict[str, str]) -> str:
    """A cluster of the hosts, of a core each; the address of its head."""
    (first, head), *others = hosts.items()
    head_only = "--head", "--port", str(PORT), "--include-dashboard", "false"
    began = time.monotonic()
    run(*inside(first, *RAY, *head_only, "--node-ip-address", head, "--temp-dir", f"{folder}/{first}"), env=env)
    for name, address in others:
        run(*joining(name, address, f"{head}:{PORT}", folder), env=env)
    print(f"ray is up after {time.monotonic() - began:.0f} s", flush=True)
    return f"{head}:{PORT}"


def joining(name: str, address: str, head: str, folder: str) -> list[str]:
    """The command by which a host joins the cluster of that head."""
    return inside(name, *RAY, "--address", head, "--node-ip-address", address, "--temp-dir", f"{folder}/{name}")


def generate(asked: argparse.Namespace, prefix: Sequence[str], env: dict[str, str], *options: str) -> list[int]:
    """Token ids of an answer by the command line."""
    given = ["--prompt", PROMPT, "--max-tokens", str(asked.max_tokens), "--ignore-eos"]
    began = time.monotonic()
    done = run(*prefix, sys.executable, "-m", "paceline", "generate", *options, *given, "--json", env=env)
    print(f"paceline generate {' '.join(options)}: {time.monotonic() - began:.1f} s with start-up", flush=True)
    found: list[int] = json.loads(done.stdout.splitlines()[-1])["outputs"][0]["token_ids"]
    return found


def killed(model: str, stages: int, cluster: str, max_tokens: int) -> None:
    """In a namespace: an answer, in whose middle the first stage's worker is killed; prints ids and what was said."""
    from paceline import LLM, SamplingParams

    llm = LLM(model, pipeline=stages, cluster=cluster, max_model_len=512, max_sequences=1)
    round_: Any = llm.engine.round
    stage_line, tick = round_.stage_line, round_.tick
    worker, ticks = stage_line.workers[0], iter(range(1_000_000))
    at: list[float] = []

    def killing() -> Any:
        if next(ticks) == KILL_AT:
            at.append(time.monotonic())
            os.kill(worker.pid, signal.SIGKILL)
        return tick()

    round_.tick = killing
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    said = {"faults": stage_line.faults, "seconds": time.monotonic() - at[0]}
    print(json.dumps({"token_ids": output.outputs[0].token_ids, **said}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it")
    parser.add_argument("--delay", default="", help="each way, as tc writes it; none: none")
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--kill", action="store_true", help="kill a worker in the middle of an answer, too")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.inside:
        killed(asked.model, asked.hosts, asked.inside, asked.max_tokens)
        return 0
    if os.geteuid():
        sys.exit("error: namespaces need root: run it with sudo")
    return compare(asked)


def compare(asked: argparse.Namespace) -> int:
    """Everything over the cluster beside one process; the exit status."""
    model = ["--model", asked.model]
    wanted, same = generate(asked, (), dict(os.environ), *model), True

    def check(said: list[int]) -> None:
        nonlocal same
        same &= said == wanted
        verdict = "the ids of one process" if said == wanted else "OTHER IDS THAN ONE PROCESS"
        print(f"    {len(said)} tokens, {verdict}", flush=True)

    with tempfile.TemporaryDirectory() as folder, namespaces(asked.hosts, asked.rate, asked.delay) as hosts:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head, prefix = start_ray(hosts, folder, env), inside(next(iter(hosts)))
        cluster, stages = ["--cluster", f"{head},cores=1"], ["--pipeline", str(asked.hosts)]
        cluster += model
        mirror = ["--round", "mirror,kappa=2,rollout=process"]
        apart = ["--pipeline", str(asked.hosts - 1), "--round", "pipeline,source=process"]
        check(generate(asked, prefix, env, *cluster, *stages))
        check(generate(asked, prefix, env, *cluster, *stages, "--drafter", "ngram"))
        check(generate(asked, prefix, env, *cluster, *apart, "--drafter", DRAFTER))
        check(generate(asked, prefix, env, *cluster, *mirror, "--drafter", DRAFTER))
        if asked.kill:
            given = "--hosts", str(asked.hosts), "--inside", cluster[1], "--max-tokens", str(asked.max_tokens)
            done = run(*prefix, sys.executable, __file__, *given, "--model", asked.model, env=env)
            said = json.loads(done.stdout.splitlines()[-1])
            print(f"{'; '.join(said['faults'])}: answered {said['seconds']:.1f} s after the kill", flush=True)
            check(said["token_ids"])
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
