"""Single operations, timed: plain decoding beside transformers, the parts of a step, linear layers, messages.

python studies/micro.py decode --model random:12x768x2048x8192 --dtype bfloat16 --batch 1,16 --out build/micro
python studies/micro.py parts --drafter none --drafter ngram --batch 1,8 --out build/micro
python studies/micro.py linear --model random:12x768x2048x8192 --out build/micro
python studies/micro.py hops --out build/micro
python studies/micro.py joins --rows 8 --out build/micro
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from kit.random_model import materialised
from kit.study import Options, Study, Table, asked, numbers
from micro_parts import decode as decoding
from micro_parts import hops as hopping
from micro_parts import joins as joining
from micro_parts import step_parts

from paceline.api.llm import LLM
from paceline.bench import encoding, machine, workloads
from paceline.core.sampling import SamplingParams
from paceline.model.decoder import Decoder
from paceline.model.families import linear_shapes
from paceline.model.linear import LinearOp
from paceline.weights.source import resolve_folder

JOINED = 768  # floats of a row that `joins` sums
MOST_PROMPT = 512  # tokens of what `parts` asks


@dataclass(frozen=True, kw_only=True)
class MicroFlags(Options):
    """What this study can be asked beside what all can."""

    batch: str = asked("1", "Requests at once.", "N,N,..")
    prompt_tokens: int = asked(64, "Tokens of each (random) prompt.", "N")
    transformers: bool = asked(False, "Run transformers' generate in turns with it.")
    exact: bool = asked(False, "Run the exact mode (`decode`: beside the other).")
    torch: bool = asked(False, "Run on torch's kernels beside the compiled ones.")
    drafter: list[str] = asked([], "As `--drafter` of the command line, or none.", "NAME,..")
    budget: str | None = asked(None, "Drafted nodes a step; the drafter's own where none is given.")
    temperature: float = asked(0.0, "Of sampling.", "T")
    rows: str = asked("1,2,4,8,16,32,64", "Rows of a pass.", "N,N,..")
    sizes: str = asked("64,4096,65536", "Bytes of a frame.", "N,N,..")


study = Study("Single operations, timed.", MicroFlags, quick={"prompts": 2, "max_new_tokens": 16, "prompt_tokens": 16})


@study.table(takes=("batch", "prompt_tokens", "transformers", "exact", "torch"), batch="1,16", repeats=5)
def decode(ask: MicroFlags) -> Iterator[Table | None]:
    """Plain decoding, one request and many at once; repeats in turns with transformers on the same weights."""
    batches, label = numbers("--batch", ask.batch), ask.model
    new_tokens = ask.max_new_tokens or 128
    yield None
    with materialised(ask.model) as folder:
        options: dict[str, Any] = {**ask.llm, "max_sequences": max(batches)}
        llm = LLM(folder, **options)
        engines = {"paceline": decoding.paceline_runner(llm)}
        if ask.exact:
            engines["paceline exact"] = decoding.paceline_runner(LLM(folder, exact=True, **options))
        if ask.torch:
            engines["paceline on torch"] = decoding.paceline_runner(LLM(folder, kernels="torch", **options))
        if ask.transformers:
            resolved = str(resolve_folder(folder))
            engines["transformers"] = decoding.transformers_runner(resolved, llm.decoder.dtype, ask.device)
        vocab = llm.decoder.config.vocab_size
        rates, ratios = decoding.measure(engines, batches, ask.prompt_tokens, new_tokens, vocab, ask.repeats)
    rows = [_decode_row(rate, ratios, {r.engine: r for r in reversed(rates)}[rate.engine]) for rate in rates]
    yield Table(
        title=f"Plain decoding of {label}, {llm.decoder.dtype}".replace("torch.", ""),
        head=("engine", "batch", "tokens/s", "low-high", "over transformers", f"over batch {batches[0]}"),
        parts={"": rows},
        values=_facts(ask, label)
        | {"rates": [asdict(r) for r in rates]}
        | {"ratios": [{"of": a, "over": c, "batch": b, "ratio": v} for (a, c, b), v in ratios.items()]},
        how=[[f"{ask.prompt_tokens} prompt tokens, {new_tokens} new ones, {ask.repeats} repeats", _machine(ask)]],
    )


def _decode_row(
    rate: decoding.DecodeRate, ratios: Mapping[tuple[str, str, int], float], first: decoding.DecodeRate
) -> list[str]:
    ratio = ratios.get((rate.engine, "transformers", rate.batch))
    speeds = [f"{rate.tokens_per_s:.1f}", f"{rate.low:.1f}-{rate.high:.1f}"]
    over = f"{rate.tokens_per_s / first.tokens_per_s:.2f}"
    return [rate.engine, str(rate.batch), *speeds, f"{ratio:.2f}" if ratio else "", over]


@study.table(
    takes=("batch", "drafter", "budget", "temperature", "exact"), tasks="wikisql,humaneval,gsm8k", max_new_tokens=64
)
def parts(ask: MicroFlags) -> Iterator[Table | None]:
    """Where the time of a step goes: every part of it, host and compiled, by drafter; `--prompts` requests at least."""
    batches = numbers("--batch", ask.batch)
    yield None
    params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_new_tokens, seed=0, ignore_eos=True)
    tables, found = {}, []
    for drafter in ask.drafter or ["none", "ngram"]:
        watch = step_parts.Stopwatch()
        drafting: dict[str, Any] = {} if drafter == "none" else {"drafter": drafter, "budget": ask.budget}
        llm = LLM(ask.model, exact=ask.exact, max_sequences=max(batches), **ask.llm, **drafting)
        asks = max(*batches, ask.prompts)
        prompts = [_prompts(name, llm, asks, params.max_tokens or 0) for name in ask.names]
        made = []
        for size in batches:  # tasks in turn, so that every batch size asks something of each
            mixed = [prompts[i % len(prompts)][i // len(prompts)] for i in range(max(size, ask.prompts))]
            groups = [mixed[i : i + size] for i in range(0, len(mixed) - size + 1, size)]
            made.append(step_parts.measure(llm, watch, groups, params))
        tables[drafter] = _parts_rows(drafter, made)
        found += [{"drafter": drafter, **asdict(one)} for one in made]
    label = ask.model
    yield Table(
        title=f"The parts of a step of {label}",
        head=("drafter", "part, ms", *(f"{kind}, batch {size}" for size in batches for kind in ("host", "compiled"))),
        parts={"": [row for rows in tables.values() for row in rows]},
        values={**_facts(ask, label), "temperature": ask.temperature, "budget": ask.budget, "steps": found},
        how=[[f"{ask.max_new_tokens} tokens an answer; medians over steps that only decode", _machine(ask)]],
    )


def _prompts(name: str, llm: LLM, count: int, new_tokens: int) -> list[tuple[int, ...]]:
    """Token ids of the first turns of a workload."""
    workload = workloads.load(name, limit=count)
    encoded = encoding.Encoded(workload, llm.tokenizer, max_model_len=MOST_PROMPT, max_new_tokens=new_tokens)
    return [prompt.ids for prompt in encoded.prompts]


def _parts_rows(drafter: str, found: Sequence[step_parts.StepParts]) -> list[list[str]]:
    rows = []
    for index, part in enumerate(step_parts.PARTS):
        times = [one.parts[index] for one in found]
        if any(t.host_ms or t.native_ms for t in times):
            cells = [f"{ms:.3f}" if ms else "" for t in times for ms in (t.host_ms, t.native_ms)]
            rows.append([drafter, part, *cells])
    whole = [cell for one in found for cell in (f"{one.host_ms:.3f}", f"{one.step_ms - one.host_ms:.3f}")]
    tokens = [cell for one in found for cell in (f"{one.tokens:.2f} tokens", f"{one.steps} steps")]
    return [*rows, [drafter, "whole step", *whole], [drafter, "in a step", *tokens]]


@study.table(takes=("rows",), repeats=30, quick={"repeats": 3})
def linear(ask: MicroFlags) -> Iterator[Table | None]:
    """The linear layers and the head of a pass alone, by rows: what `paceline bench step` times is the whole pass."""
    counts, label = numbers("--rows", ask.rows), ask.model
    yield None
    with materialised(ask.model) as folder:
        decoder, bandwidth = LLM(folder, **ask.llm).decoder, machine.read_bandwidth(ask.device)
        times = {rows: median([linear_ms(decoder, rows) for _ in range(ask.repeats + 2)][2:]) for rows in counts}
    shares = {rows: decoder.pass_bytes / (1e-3 * ms) / bandwidth for rows, ms in times.items()}
    yield Table(
        title=f"Linear layers and head of {label}, {decoder.dtype}".replace("torch.", ""),
        head=("rows", "ms", "weights read, of the bandwidth"),
        parts={"": [[str(rows), f"{ms:.2f}", f"{shares[rows]:.0%}"] for rows, ms in times.items()]},
        values={**_facts(ask, label), "read_bandwidth_bytes_per_s": bandwidth, "linear_ms": times},
        how=[[f"{ask.repeats} repeats, medians; memory read at {bandwidth / 1e9:.1f} GB/s", _machine(ask)]],
    )


def products_of(decoder: Decoder) -> list[tuple[LinearOp, int]]:
    """(linear layer, width of its input) of every product of a pass, in order; the head is the last."""
    if decoder.stack is not None:
        return [(linear, linear.struct.k) for linear in decoder.stack.weights.products]
    widths = {name: inputs for name, (inputs, _) in linear_shapes(decoder.config).items()}
    found = [(getattr(layer, name), width) for layer in decoder.in_order() for name, width in widths.items()]
    return [*found, (decoder.head_product, decoder.config.d_model)]


@torch.inference_mode()
def linear_ms(decoder: Decoder, rows: int) -> float:
    """Milliseconds of all products of a pass, one after the other, without what lies between."""
    products = products_of(decoder)
    inputs = {width: torch.ones(rows, width, dtype=decoder.dtype, device=decoder.device) for _, width in products}
    began = perf_counter()
    for product, width in products:
        product(inputs[width])
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
    return (perf_counter() - began) * 1e3


@study.table(takes=("sizes",), repeats=2000, quick={"repeats": 200})
def hops(ask: MicroFlags) -> Iterator[Table | None]:
    """What it costs to pass a message to another process."""
    sizes = numbers("--sizes", ask.sizes)
    yield None
    costs = hopping.measure(sizes, ask.repeats)
    rows = [[c.wait, str(c.size_bytes), f"{c.median_us:.1f}", f"{c.low_us:.1f}-{c.high_us:.1f}"] for c in costs]
    yield Table(
        title="Hops between two processes on a core each",
        head=("other side", "bytes", "median us", "10-90 %"),
        parts={"": rows},
        values={"machine": machine.describe(), "repeats": ask.repeats, "hops": [asdict(c) for c in costs]},
        how=[[f"{ask.repeats} round trips each", machine.line()]],
    )


@study.table(takes=("rows",), repeats=50, rows="8", quick={"repeats": 5})
def joins(ask: MicroFlags) -> Iterator[Table | None]:
    """What two ranks take to sum rows of 768 floats, beside gloo."""
    wanted = numbers("--rows", ask.rows)
    yield None
    costs = [cost for rows in wanted for cost in joining.measure(rows, JOINED, ask.repeats)]
    rows = [[c.way, f"{c.rows} x {c.width}", f"{c.median_us:.0f}", f"{c.low_us:.0f}-{c.high_us:.0f}"] for c in costs]
    yield Table(
        title="A sum of two ranks",
        head=("way", "floats", "median us", "10-90 %"),
        parts={"": rows},
        values={"machine": machine.describe(), "repeats": ask.repeats, "joins": [asdict(c) for c in costs]},
        remarks=["of turns of all ways, one after the other; each mean is of a turn"],
        how=[[f"{joining.TURNS} turns of {ask.repeats} sums each", machine.line()]],
    )


def _machine(ask: MicroFlags) -> str:
    return machine.line(ask.device)


def _facts(ask: MicroFlags, label: str) -> dict[str, Any]:
    return {"model": label, "repeats": ask.repeats, **ask.llm, "machine": machine.describe(ask.device)}


if __name__ == "__main__":
    study.main()
