"""Other people's load generators beside the server: ``vllm bench serve`` and AIPerf, and what both report of drafts.

    make peer-vllm peer-aiperf
    python studies/load_generators.py --tokenizer FOLDER --out build/load
    python studies/load_generators.py --tokenizer FOLDER --server paceline --server vllm --out build/load

Both tools send the same prompts as streamed chats, greedy. ``--server vllm`` is vLLM's for CPUs, whose n-grams draft
for the model folder; ``paceline-plain`` and ``vllm-plain`` draft nothing. FOLDER is a Hugging Face folder: the tools
count tokens by its tokenizer.
Each run's own report is in the folder ``--out``, a table of counts, acceptance and times (medians over requests) in
``load.md`` there. Times mean something on a quiet machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.peers import VLLM_NGRAM, WORKERS, peers_folder

from paceline.bench.machine import line as machine
from paceline.bench.workloads import load

START_S = 300.0
RUN_S = 900.0
SERVERS = ("paceline", "vllm", "paceline-plain", "vllm-plain")
NAME = "measured"  # of the model, for both servers
HEAD = ("server", "tool", "answered", "failed", "tokens", "accepted length", "acceptance", "drafted", "accepted",
        "tokens/s", "first token, ms", "a token, ms")  # fmt: skip


@contextmanager
def serving(command: list[str], log: Path, port: int) -> Iterator[None]:
    """A server, from its first answer to ``/health`` on; it has ended when this ends.

    Raises:
        RuntimeError: it ended, or did not answer within `START_S`.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(command[0]), process_group=0)
    try:
        until = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server is not ready: see {log}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _environment(python: str) -> dict[str, str]:
    """For a program of that environment, whose tools are found; AIPerf refuses folders where the hub is off."""
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    vllm = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
    }
    return {**os.environ, **({} if Path(python).name == "aiperf" else vllm), "PATH": path}


def bench_serve(ask: argparse.Namespace, url: str, out: Path) -> dict[str, Any]:
    """Run ``vllm bench serve``; the row of its report."""
    command = [*_vllm(), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    command += ["--base-url", url, "--model", NAME, "--tokenizer", ask.tokenizer, "--temperature", "0"]
    command += ["--dataset-name", "custom", "--dataset-path", str(ask.out / "prompts.jsonl"), "--disable-shuffle"]
    command += ["--skip-chat-template"]  # the server applies it
    command += ["--custom-output-len", str(ask.tokens), "--num-prompts", str(ask.prompts)]
    command += ["--max-concurrency", str(ask.concurrency), "--save-result", "--result-dir", str(out)]
    command += ["--result-filename", "bench_serve.json"]
    _run(command, out / "bench_serve.log")
    found: Mapping[str, Any] = json.loads((out / "bench_serve.json").read_text())
    return {
        "answered": found["completed"],
        "failed": found["failed"],
        "tokens": found["total_output_tokens"],
        "accepted length": found.get("spec_decode_acceptance_length"),
        "acceptance": found.get("spec_decode_acceptance_rate", 0) / 100,
        "drafted": found.get("spec_decode_draft_tokens"),
        "accepted": found.get("spec_decode_accepted_tokens"),
        "tokens/s": found["output_throughput"],
        "first token, ms": found["median_ttft_ms"],
        "a token, ms": found["median_tpot_ms"],
    }


def aiperf(ask: argparse.Namespace, url: str, out: Path) -> dict[str, Any]:
    """Run ``aiperf profile``; the row of its report."""
    command = [str(peers_folder() / "aiperf/venv/bin/aiperf"), "profile", "--url", url, "--model", NAME, "--ui", "none"]
    command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--tokenizer", ask.tokenizer]
    command += ["--input-file", str(ask.out / "texts.jsonl"), "--custom-dataset-type", "single_turn"]
    command += ["--request-count", str(ask.prompts), "--concurrency", str(ask.concurrency)]
    command += ["--extra-inputs", "temperature:0", "--extra-inputs", f"max_tokens:{ask.tokens}"]
    command += ["--artifact-dir", str(out / "aiperf")]
    _run(command, out / "aiperf.log")
    found: Mapping[str, Any] = json.loads((out / "aiperf/profile_export_aiperf.json").read_text())
    mean = {name: value["avg"] for name, value in found.items() if isinstance(value, Mapping) and "avg" in value}
    return {
        "answered": round(mean["request_count"]),
        "failed": round(mean["completed_request_count"] - mean["request_count"]),
        "tokens": round(mean["total_usage_completion_tokens"]),
        "accepted length": mean.get("spec_decode_token_weighted_acceptance_length"),
        "acceptance": mean.get("spec_decode_overall_draft_acceptance_rate", 0) / 100,
        "drafted": round(mean.get("total_draft_tokens", 0)),
        "accepted": round(mean.get("total_accepted_draft_tokens", 0)),
        "tokens/s": mean["output_token_throughput"],
        "first token, ms": found["time_to_first_token"]["p50"],
        "a token, ms": found["inter_token_latency"]["p50"],
    }


def _run(command: list[str], log: Path) -> None:
    with log.open("wb") as out:
        subprocess.run(command, stdout=out, stderr=out, env=_environment(command[0]), check=True, timeout=RUN_S)


def _vllm() -> list[str]:
    return [str(peers_folder() / "vllm/venv/bin/python"), str(WORKERS / "vllm_command.py")]


def servers(ask: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """The command of each server that is asked for."""
    own = [sys.executable, "-m", "paceline", "serve", ask.model, "--port", str(port)]
    own += ["--served-model-name", NAME, "--metrics-names", "vllm", "--threads", str(ask.threads)]
    theirs = [*_vllm(), "serve", ask.tokenizer, "--served-model-name", NAME, "--port", str(port)]
    theirs += ["--max-model-len", "2048", "--max-num-seqs", "16"]
    ngrams = ["--speculative-config", json.dumps({"method": "ngram", **VLLM_NGRAM})]
    ngrams += ["--per-request-spec-decode-metrics", "summary"]  # refused by a server that drafts nothing
    commands = ([*own, "--drafter", ask.drafter], [*theirs, *ngrams], [*own, "--drafter", "none"], theirs)
    every = dict(zip(SERVERS, commands, strict=True))
    return {name: every[name] for name in ask.server or SERVERS[:1]}


def write_prompts(ask: argparse.Namespace) -> None:
    """The first turns of a workload, in the form of each tool; no prompt comes twice."""
    texts = [prompt.turns[0] for prompt in load(ask.task).prompts[: ask.prompts]]
    ask.prompts = len(texts)
    for file, key in (("prompts.jsonl", "prompt"), ("texts.jsonl", "text")):
        (ask.out / file).write_text("".join(json.dumps({key: text}) + "\n" for text in texts))


def main() -> None:
    """Run each tool against each server."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="Hugging Face folder of the model")
    parser.add_argument("--model", default="smollm2-135m", help="what paceline serves")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--task", default="spec_bench", help="the workload that prompts come from")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="most of an answer")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--server", action="append", choices=SERVERS, help="repeat it for several; default: paceline")
    parser.add_argument("--out", type=Path, default=Path("build/load"))
    ask = parser.parse_args()
    ask.out.mkdir(parents=True, exist_ok=True)
    write_prompts(ask)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    lines = [f"| {' | '.join(HEAD)} |", "|:--" * len(HEAD) + "|"]
    for server, command in servers(ask, port).items():
        for name, tool in (("bench serve", bench_serve), ("AIPerf", aiperf)):
            out = ask.out / server / name.replace(" ", "_")
            out.mkdir(parents=True, exist_ok=True)
            with serving(command, out / "server.log", port):  # anew for each tool: drafters remember answers
                row = {"server": server, "tool": name, **tool(ask, f"http://127.0.0.1:{port}", out)}
            cells = [row[key] for key in HEAD]
            lines.append(f"| {' | '.join(f'{c:.3f}' if isinstance(c, float) else str(c) for c in cells)} |")
            print(lines[-1], flush=True)
    text = f"{machine()}; {ask.prompts} prompts of {ask.task}, {ask.concurrency} at once\n\n" + "\n".join(lines)
    (ask.out / "load.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
