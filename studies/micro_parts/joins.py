"""What a sum of two ranks takes: through the memory that they share, and by gloo, in turns."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import distributed

from paceline.model.joins import Collectives, RankMemory

TURNS = 20  # of each way
WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class JoinCost:
    """Sums of so many floats; microseconds of one."""

    way: str
    rows: int
    width: int
    median_us: float
    low_us: float  # 10th percentile, of the turns' means
    high_us: float  # 90th percentile


def measure(rows: int, width: int, repeats: int) -> list[JoinCost]:
    """Time sums of ``rows`` x ``width`` floats, ``repeats`` in each of `TURNS` turns.

    Raises:
        RuntimeError: a rank ended.
    """
    memory, context = RankMemory(2), multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        answers: Any = context.Queue()
        given = memory.path, str(Path(folder) / "store"), rows, width, repeats, answers
        ranks = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        found: list[JoinCost] = answers.get(timeout=WAIT_S)
        for rank in ranks:
            rank.join(WAIT_S)
    memory.close()
    return found


def _rank(rank: int, path: str, store: str, rows: int, width: int, repeats: int, answers: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    joins, x = Collectives.opened(path, rank, 2), torch.ones(rows, width)
    ways: dict[str, Callable[[], Any]] = {
        "shared memory": lambda: joins.sum(x),
        "gloo": lambda: distributed.all_reduce(x),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, call in ways.items():
            distributed.barrier()
            began = perf_counter()
            for _ in range(repeats):
                call()
                x.fill_(1.0)
            taken[way].append((perf_counter() - began) / repeats * 1e6)
    if rank == 0:
        answers.put([_cost(way, rows, width, us) for way, us in taken.items()])
    distributed.barrier()
    distributed.destroy_process_group()


def _cost(way: str, rows: int, width: int, us: list[float]) -> JoinCost:
    low, middle, high = map(float, np.quantile(us, [0.1, 0.5, 0.9]))
    return JoinCost(way=way, rows=rows, width=width, median_us=middle, low_us=low, high_us=high)
