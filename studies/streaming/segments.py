"""Segment attention: memory and speed of a training step (appendix I)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from kit.dense_streams import eager_loss
from kit.grid import apart
from kit.memory import Memory
from kit.random_model import materialised
from kit.study import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.bench import machine
from paceline.bench import report as say
from paceline.core.errors import ConfigError
from paceline.model.adapters import linear_shapes
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.recipe import StreamRecipe, StreamsOptions
from paceline.train.data import Example, TokenBatch, collate
from paceline.train.network import Network
from paceline.weights.source import resolve_folder
from streaming.common import StreamingFlags, study

SEGMENT = {"gamma": 4, "layers": 4, "rank": 8, "rows": 4, "length": 512, "prompt": 128, "steps": 3}
QUICK_SEGMENT = {"rows": "1", "length": "128", "prompt": "32", "steps": "1", "segments": "naive+all+32"}


def segment_task(given: Mapping[str, str]) -> dict[str, Any]:
    """What is trained on: ``rows`` of ``length`` tokens, of which ``prompt`` carry no streams, in ``steps`` timed ones,
    after one of a single row that is not; ``segments``: carriers of each, all at once, or naive: one dense attention.

    Raises:
        ConfigError: an unknown setting, or a value that leaves nothing to measure.
    """
    words = {"mode": "lossless", "segments": "naive+all+512+128", **given}
    ways = words.pop("segments").split("+")
    task: dict[str, Any] = {"mode": words.pop("mode"), **SEGMENT, "segments": ways}
    for name, text in (*words.items(), *(("segments", way) for way in ways if way not in ("naive", "all"))):
        if name not in task or not text.isdecimal() or (not int(text) and name != "prompt"):
            remedy = f"give 1 or more of {', '.join(task)}"
            raise ConfigError(f"--segment {name}={text}", "nothing would be measured", remedy)
        task |= {name: int(text)} if name in SEGMENT else {}
    if task["prompt"] >= task["length"] - 1:
        raise ConfigError(f"prompt={task['prompt']}", "no token is left to draft for", "give a shorter one")
    return task


@study.table(takes=("segment",), model="random:12x384x1024x8192", quick={"segment": QUICK_SEGMENT})
def appendix_i(ask: StreamingFlags) -> Iterator[Table | None]:
    """Memory and speed of a training step: one dense attention, all carriers at once, segment by segment."""
    task = segment_task(ask.segment)
    yield None
    with materialised(ask.model) as folder:
        how_run = (str(resolve_folder(folder)), task, ask.device, ask.threads)
        # Each in a process of its own: resident memory never falls within one, so a later way would hide behind an
        # earlier one's peak.
        found = [apart(segment_cost, way, *how_run) for way in task["segments"]]
    facts = machine.describe(ask.device) | ({"threads": ask.threads} if ask.threads else {})
    shown = ("peak_mib", "step_s", "low_s", "high_s", "tokens_per_s")
    yield Table(
        title=f"A training step of {task['rows']} rows of {task['length']} tokens, {ask.model}, {task['mode']}",
        head=("segment", "peak MiB", "step s", "lowest", "highest", "tokens/s"),
        parts={"": [[cost["way"], *(say.number(cost[name]) for name in shown)] for cost in found]},
        values={"machine": facts, "task": task, "costs": found},
        how=[[f"{task['gamma']} streams over {task['layers']} layers", machine.line(ask.device)]],
    )


def segment_cost(way: str, folder: str, task: Mapping[str, Any], device: str, threads: int | None) -> dict[str, Any]:
    """Measure one way in this process, which should be a fresh one.

    Returns:
        Peak memory over that before the steps in MiB (None where the system does not tell), so the network, the set
        and torch itself are not in it; median, lowest and highest seconds a step; tokens of the batch a second; and
        the loss of the untrained set: the same for every way, up to rounding.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    network = Network.load(Path(folder), device, frozen=True)
    shape = {name: task[name] for name in ("mode", "gamma", "layers", "rank")}
    options = StreamsOptions(**shape, segment=int(way) if way.isdecimal() else None)
    shapes = linear_shapes(network.config)
    trained = StreamSet.fresh(options.config(network), shapes, torch.Generator().manual_seed(0))
    recipe = StreamRecipe(network, trained.to(device), options)
    tokens = np.random.default_rng(0).integers(0, network.config.vocab_size, (task["rows"], task["length"]))
    rows = [[Example(row, task["prompt"])] for row in tokens.astype(np.int32)]  # of one document each
    batch, memory = collate(rows, task["length"]).to(torch.device(device)), Memory(torch.device(device))
    _step(recipe, batch.rows(0, 1), way)  # libraries allocate what they keep
    can_peak, before = memory.reset_peak(), memory.held()
    times, losses = [], []
    for _ in range(task["steps"]):
        began = perf_counter()
        losses.append(_step(recipe, batch, way))
        times.append(perf_counter() - began)
    peak, middle = memory.peak() if can_peak else None, median(times)
    mib = None if peak is None or before is None else (peak - before) / 2**20
    speed = {"step_s": middle, "low_s": min(times), "high_s": max(times), "tokens_per_s": batch.num_tokens / middle}
    return {"way": way, "peak_mib": mib, **speed, "loss": losses[0]}


def _step(recipe: StreamRecipe, batch: TokenBatch, way: str) -> float:
    """Forward and backward, in bf16 as training does. The naive way keeps the scores of all rows by all rows."""
    recipe.module.zero_grad(set_to_none=True)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        if way == "naive":
            with sdpa_kernel(SDPBackend.MATH):
                loss = eager_loss(recipe, batch)
        else:
            loss = recipe.loss(batch, torch.Generator().manual_seed(0))[0]
    loss.backward()
    return float(loss.detach())  # waits for a GPU
