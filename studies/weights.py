"""GGUF files beside llama.cpp on the same file: perplexity, plain decoding, prompts, 1 to 16 rows, load and memory.

    make peer-llama.cpp
    python studies/weights.py FILE.gguf --text TEXT
    python studies/weights.py FILE.gguf --kernels  # products of one thread by rows, and loading the tokenizer
    CXX="c++ -mno-amx-tile" python studies/weights.py FILE.gguf --kernels  # without tiles; -mno-avx512f: with AVX-VNNI

Perplexity is that of ``llama-perplexity``: pieces of 512 tokens, of which the second halves count. Speeds are taken in
turns, llama.cpp's by ``llama-bench``; medians of the rounds are shown. Both use 2 threads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from copy import copy
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from paceline import LLM, SamplingParams
from paceline import kernels as native
from paceline.kernels.linear import NativeLinear
from paceline.kv.pool import KVPool
from paceline.model.attention.base import Segment
from paceline.model.base import Batch
from paceline.weights.gguf import read_gguf
from paceline.weights.gguf_tokenizer import load_gguf_tokenizer

BUILD = Path(__file__).resolve().parents[1] / ".peers" / "llama.cpp" / "build" / "bin"
PIECE, NEW, PROMPT, THREADS = 512, 128, 512, 2
# What `--kernels` times: outputs of a weight, weights, rows.
PLACES = {"cache": (1024, 1, (1, 4, 8, 12, 16, 32, 64, 256)), "memory": (4096, 192, (1, 2, 4, 6, 8, 16))}
OURS = """
import json, re, sys, time
def kilobytes(of):
    return int(re.search(of + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
began = time.perf_counter()
from paceline import LLM, SamplingParams
imported = time.perf_counter()
base = kilobytes("VmRSS")
llm = LLM(sys.argv[1], dtype=sys.argv[2], threads=2, max_model_len=1024, max_sequences=1, drafter="none")
llm.generate([{"prompt_token_ids": [5] * 4}], SamplingParams(max_tokens=1, ignore_eos=True))
done = time.perf_counter()
peak = kilobytes("VmHWM")
print(json.dumps({"imports": imported - began, "first": done - imported, "mb": (peak - base) / 1024}))
"""


@torch.inference_mode()
def perplexity(llm: LLM, ids: list[int]) -> float:
    """Of the second halves of all whole pieces."""
    decoder, total, count = llm.decoder, 0.0, 0
    pool = KVPool(*decoder.cache_shape, PIECE, decoder.dtype, decoder.device)
    bos = llm.tokenizer.bos_token_id
    begins = ids[:1] == [bos]
    places = torch.arange(PIECE)
    for start in range(0, len(ids) - PIECE + 1, PIECE):
        piece = ids[start : start + PIECE]
        tokens = torch.tensor([bos, *piece[1:]] if begins else piece)
        plan = decoder.plan([Segment(0, PIECE, slice(0, PIECE), PIECE, 0, None, None)], places)
        batch = Batch(tokens, places, slice(0, PIECE), plan)
        state = decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, pool)
        rows = torch.arange(PIECE // 2, PIECE - 1)
        chances = decoder.logits(state, rows).log_softmax(-1)
        total -= float(chances.gather(1, tokens[rows + 1, None]).sum())
        count += len(rows)
    return math.exp(total / count)


def llama_perplexity(file: Path, text: Path, pieces: int) -> float:
    """llama.cpp's figure over the first pieces of the text."""
    command = [BUILD / "llama-perplexity", "-m", file, "-f", text, "-c", PIECE, "--chunks", pieces, "-t", THREADS]
    said = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    [found] = re.findall(r"Final estimate: PPL = ([\d.]+)", said.stdout + said.stderr)
    return float(found)


def llama_speed(file: Path) -> dict[str, float]:
    """Tokens a second of prompts and of decoding."""
    time.sleep(1)  # threads of ours are asleep then
    command = [BUILD / "llama-bench", "-m", file, "-p", PROMPT, "-n", NEW, "-t", THREADS, "-r", 1, "-o", "json"]
    said = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return {"decode" if row["n_gen"] else "prompt": row["avg_ts"] for row in json.loads(said.stdout)}


def our_speed(llm: LLM) -> dict[str, float]:
    """Likewise."""
    llm.forget()
    ids = [random.randrange(100, 4000) for _ in range(PROMPT)]
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, ignore_eos=True))
    prompt = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids[:1]}], SamplingParams(max_tokens=NEW, ignore_eos=True))
    return {"prompt": PROMPT / prompt, "decode": NEW / (time.perf_counter() - began)}


def load(model: str, dtype: str) -> dict[str, float]:
    """Seconds from the imports' end to the first token, and megabytes above what the process had by then."""
    said = subprocess.run([sys.executable, "-c", OURS, model, dtype], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def llama_load(file: Path) -> dict[str, float]:
    """llama.cpp's whole process: seconds to the end of the first token, and megabytes."""
    command = [BUILD / "llama-bench", "-m", file, "-p", 0, "-n", 1, "-t", THREADS, "-r", 1, "--no-warmup"]
    began = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"llama-bench failed with status {status}")
    return {"first": time.perf_counter() - began, "mb": used.ru_maxrss / 1024}


def copied(linear: NativeLinear) -> NativeLinear:
    """The same weight elsewhere in memory."""
    other = copy(linear)
    other.packed = linear.packed.clone()
    other.struct = type(linear.struct).from_buffer_copy(linear.struct)
    other.struct.weight = other.packed.data_ptr()
    return other


def kernels(file: Path | None, rounds: int, clock: float) -> None:
    """Of one thread, for 32 inputs of 16 outputs. What others do disturbs the shortest tenth least."""
    torch.set_num_threads(1)
    print(f"ns (cycles at {clock:.2f} GHz), shortest tenth and median, {native.describe()}")
    names: tuple[Literal["q4_0", "q8_0"], ...] = ("q4_0", "q8_0")
    for name, (where, (outputs, copies, widths)) in product(names, PLACES.items()):
        linear = NativeLinear(torch.randn(outputs, 1024).bfloat16(), None, name)
        linears = [linear, *(copied(linear) for _ in range(copies - 1))]
        inputs = {rows: torch.randn(rows, 1024).bfloat16() for rows in widths}
        taken = {rows: list[float]() for rows in widths}
        for (rows, x), linear in product([*inputs.items()] * rounds * (192 // copies), linears):
            began = time.perf_counter()
            linear.wide(x)
            taken[rows].append((time.perf_counter() - began) / (outputs // 16 * 32) * 1e9)
        for rows, found in taken.items():
            low, usual = statistics.quantiles(found, n=10)[0], statistics.median(found)
            print(f"{name}, {rows} rows from the {where}: {low:.1f} and {usual:.1f} ns, {low * clock:.0f} cycles")
    if file is not None:
        model, began = read_gguf(file), time.perf_counter()
        load_gguf_tokenizer(model)
        print(f"the tokenizer: {time.perf_counter() - began:.2f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file; beside another model llama.cpp is not run")
    parser.add_argument("--text", type=Path, help="measure perplexity over it")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text")
    parser.add_argument("--rounds", type=int, default=5, help="of speed; 0: none")
    parser.add_argument("--dtype", default="auto", help="of ours")
    parser.add_argument("--kernels", action="store_true", help="products of one thread and the tokenizer, nothing else")
    parser.add_argument(
        "--clock", type=float, default=3.64, help="GHz, for cycles; that of docs/measured/weights.md's Zen 4"
    )
    asked = parser.parse_args()
    file = Path(asked.model) if asked.model.endswith(".gguf") else None
    if asked.kernels:
        return kernels(file, max(asked.rounds, 1), asked.clock)
    llm = LLM(asked.model, dtype=asked.dtype, threads=THREADS, max_model_len=1024, drafter="none")
    print(f"{asked.model}, dtype {asked.dtype}: {llm.decoder.pass_bytes / 1e6:.0f} MB of weights in a pass")
    if asked.text is not None:
        # Of words that are special tokens llama-perplexity makes text.
        text = asked.text.read_text(encoding="utf-8").replace("<unk>", "unk")
        ids = llm.tokenizer.encode(text)[: asked.tokens]
        pieces = len(ids) // PIECE
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as cleaned:
            cleaned.write(text)
            cleaned.flush()
            theirs = llama_perplexity(file, Path(cleaned.name), pieces) if file else None
        ours = perplexity(llm, ids)
        beside = "" if theirs is None else f", llama.cpp {theirs:.4f}: {ours / theirs - 1:+.2%}"
        print(f"perplexity of {pieces * PIECE} tokens: {ours:.4f}{beside}")
    if asked.rounds:
        our_speed(llm)  # what is made at first use
        speeds = [(our_speed(llm), llama_speed(file) if file else None) for _ in range(asked.rounds)]
        for what in ("decode", "prompt"):
            print(f"{what}: {compared(speeds, what)} tokens/s")
        loads = [(load(asked.model, asked.dtype), llama_load(file) if file else None) for _ in range(asked.rounds)]
        print(f"to the first token, {loads[0][0]['imports']:.2f} s of imports before: {compared(loads, 'first')} s")
        print(f"at most {compared(loads, 'mb')} MB")


def compared(pairs: list[tuple[dict[str, float], dict[str, float] | None]], what: str) -> str:
    """Medians of ours and theirs, and the median of their ratios."""
    ours = statistics.median(mine[what] for mine, _ in pairs)
    beside = [(mine[what], other[what]) for mine, other in pairs if other is not None]
    if not beside:
        return f"{ours:.2f}"
    theirs, ratio = statistics.median(b for _, b in beside), statistics.median(a / b for a, b in beside)
    return f"{ours:.2f}, llama.cpp {theirs:.2f} (ratio {ratio:.2f})"


if __name__ == "__main__":
    main()
