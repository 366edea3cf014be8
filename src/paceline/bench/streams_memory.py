"""Memory and speed of training streams: one dense attention, document by document, segment by segment.

Every way runs in a fresh process: resident memory never falls within one, so a later way would hide behind an
earlier one's peak. The figure is the highest resident memory of the steps over that before the first one: the
network, the set and torch itself are not in it. (Outside of Linux it is over the highest before: loading may hide
some of it.) On a GPU it is the peak of allocated memory over that before.

Source: Speculative Streaming, section 2.4 and appendix I (segment attention).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.errors import ConfigError
from ..drafters.streams.recipe import StreamOptions, StreamRecipe
from ..target.adapters import linear_shapes
from ..target.streams import StreamSet
from ..training.data import Example, TokenBatch, collate
from ..training.network import Network
from ..training.trainer import StepContext
from .models import materialised

NAIVE = 0  # a segment size that stands for the dense attention
_STEPS_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class SegmentTask:
    """What is trained on."""

    folder: str  # of the target
    mode: Literal["lossless", "shared"] = "lossless"
    gamma: int = 4
    layers: int = 4
    rank: int = 8
    rows: int = 4
    length: int = 512
    prompt: int = 128  # tokens of each row that carry no streams
    steps: int = 3  # timed ones, after one of a single row that is not
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "gamma"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", "nothing would be measured", "give 1 or more")
        if not 0 <= self.prompt < self.length - 1:
            raise ConfigError(
                f"prompt={self.prompt} of rows of {self.length}", "no token is left to draft for", "give a shorter one"
            )


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """One way's figures."""

    way: str  # naive, all, or the carriers of a segment
    peak_mib: float  # over the memory before the steps
    step_s: float  # median
    low_s: float
    high_s: float
    tokens_per_s: float  # tokens of the batch
    loss: float  # of the untrained set: the same for every way, up to rounding

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measure(
    task: SegmentTask, segments: Sequence[int | None], told: Callable[[SegmentCost], None] = lambda cost: None
) -> list[SegmentCost]:
    """Each way in a process of its own.

    Args:
        task: what is trained on; its folder may be a model's or ``random:LAYERSxWIDTHxFFxVOCAB``.
        segments: carriers of a segment; None: all at once; `NAIVE`: the dense attention.
        told: called with each result.

    Raises:
        ConfigError: a process that fails, with the last line it wrote.
    """
    found = []
    with materialised(task.folder) as folder:
        for segment in segments:
            values = {**asdict(task), "folder": folder}
            found.append(_apart(values, segment))
            told(found[-1])
    return found


def _apart(values: dict[str, Any], segment: int | None) -> SegmentCost:
    """Run `main` in a fresh interpreter."""
    command = [sys.executable, "-m", __name__, json.dumps({"task": values, "segment": segment})]
    source = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_STEPS_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            _way(segment), f"no result within {error.timeout:.0f} s", "give fewer or shorter rows"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"measuring {_way(segment)!r}", last, "give fewer or shorter rows if memory ran out")
    return SegmentCost(**json.loads(done.stdout.strip().splitlines()[-1]))


def _way(segment: int | None) -> str:
    return "all" if segment is None else str(segment) if segment != NAIVE else "naive"


def cost(task: SegmentTask, segment: int | None) -> SegmentCost:
    """Measure one way in this process, which should be a fresh one."""
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    recipe = _recipe(task, segment)
    batch = _batch(task, recipe.network.config.vocab_size)
    _step(recipe, batch.rows(0, 1), segment)  # libraries allocate what they keep
    before = _memory(task.device, reset=True)
    times, losses = [], []
    for _ in range(task.steps):
        began = perf_counter()
        losses.append(_step(recipe, batch, segment))
        times.append(perf_counter() - began)
    peak = _memory(task.device) - before
    middle = statistics.median(times)
    return SegmentCost(
        way=_way(segment),
        peak_mib=peak / 2**20,
        step_s=middle,
        low_s=min(times),
        high_s=max(times),
        tokens_per_s=batch.num_tokens / middle,
        loss=losses[0],
    )


def _recipe(task: SegmentTask, segment: int | None) -> StreamRecipe:
    network = Network.load(Path(task.folder), task.device, frozen=True)
    options = StreamOptions(
        mode=task.mode, gamma=task.gamma, layers=task.layers, rank=task.rank, segment=segment or None
    )
    shapes = linear_shapes(network.config)
    trained = StreamSet.fresh(options.config(network), shapes, torch.Generator().manual_seed(0))
    return StreamRecipe(network, trained.to(task.device), options)


def _batch(task: SegmentTask, vocab: int) -> TokenBatch:
    """Rows of one document each."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, vocab, (task.rows, task.length)).astype(np.int32)
    return collate([[Example(row, task.prompt)] for row in tokens], task.length).to(torch.device(task.device))


def _step(recipe: StreamRecipe, batch: TokenBatch, segment: int | None) -> float:
    """Forward and backward, in bf16 as training does."""
    device = batch.tokens.device.type
    recipe.module.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16):
        loss = _loss(recipe, batch, segment)
    loss.backward()
    value = float(loss.detach())  # waits for a GPU
    return value


def _loss(recipe: StreamRecipe, batch: TokenBatch, segment: int | None) -> Tensor:
    if segment != NAIVE:
        return recipe.loss(batch, StepContext(0, torch.Generator().manual_seed(0)))[0]
    with sdpa_kernel(SDPBackend.MATH):  # scores of all rows by all rows exist, as naive training has them
        return recipe.eager_loss(batch)


def _memory(device: str, reset: bool = False) -> int:
    """Bytes: the highest so far; since the last call with ``reset`` on Linux and on GPUs."""
    if device != "cpu":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(argument: str) -> None:
    """One way, asked for and answered in JSON."""
    asked = json.loads(argument)
    print(json.dumps(cost(SegmentTask(**asked["task"]), asked["segment"]).as_dict()))


if __name__ == "__main__":
    main(sys.argv[1])
