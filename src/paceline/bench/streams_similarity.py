"""How near stream states come to the true later states, layer by layer (Speculative Streaming, figure 5).

The target answers the prompts of tasks greedily; over prompts and answers, teacher-forced, the state of stream j of row
t is held against main row t + j. The broken lines are main row t itself, which a stream starts near.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..drafters.streams.recipe import similarity
from ..llm import LLM
from ..target.loader import resolve_folder
from ..target.streams import StreamSet
from ..training.data import Example, collate
from ..training.network import Network
from . import figures, workloads
from .figures import COLOURS, Panel, Series
from .streams_plans import TrainedSet, workload_of


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Mean cosine similarities. Rows: before the first of the streams' layers, then after each."""

    layers: list[int]  # layers below: N - Ns .. N
    streams: list[list[float]]  # [1 + Ns][gamma] stream j of row t with main row t + j
    main: list[list[float]]  # [1 + Ns][gamma] main row t with main row t + j
    prompts: int
    rows: int  # that carry streams
    tasks: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measure(
    model: str,
    trained: TrainedSet,
    tasks: Sequence[str],
    data: Path | None,
    *,
    prompts: int = 12,
    max_new_tokens: int = 64,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Similarity:
    """Answer, then compare states in float32.

    Args:
        model: the target.
        trained: the set.
        tasks: what is asked, see `workload_of`.
        data: folder of workloads.
        prompts: of each task.
        options: of `LLM`.

    Raises:
        ConfigError: a task, set or model that cannot be used.
    """
    llm = _llm(model, trained, dict(options or {}))
    asked = [ids for task in tasks for ids in _prompts(llm, task, data, prompts, max_new_tokens, seed)]
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    given = [{"prompt_token_ids": ids} for ids in asked]
    outputs = llm.generate(given, params, application=trained.application)
    examples = [
        Example(np.array([*ids, *output.outputs[0].token_ids], dtype=np.int32), len(ids))
        for ids, output in zip(asked, outputs, strict=True)
    ]
    batch = collate([[example] for example in examples], max(len(e.tokens) for e in examples))
    network = Network.load(llm.folder, frozen=True)
    streams, main = similarity(network, StreamSet.load(resolve_folder(trained.folder)), batch)
    return Similarity(
        layers=[*range(trained.config.insertion, trained.config.num_layers + 1)],
        streams=streams.tolist(),
        main=main.tolist(),
        prompts=len(asked),
        rows=sum(len(e.tokens) - e.prompt for e in examples),
        tasks=list(tasks),
    )


def _llm(model: str, trained: TrainedSet, options: dict[str, Any]) -> LLM:
    if trained.application is None:
        return LLM(model, **options)
    return LLM(model, drafter="streams", budget=0, applications={trained.application: trained.folder}, **options)


def _prompts(llm: LLM, task: str, data: Path | None, limit: int, most: int, seed: int) -> list[list[int]]:
    if llm.tokenizer is None:
        raise ConfigError(f"task {task}", "this model has no tokenizer, so text means nothing to it", "add its files")
    workload = workloads.load(workload_of(task), folder=data, limit=limit, seed=seed)
    room = llm.engine.limits.max_model_len
    encoded = workloads.encode(workload, llm.tokenizer, max_model_len=room, max_new_tokens=most)
    return [list(prompt.ids) for prompt in encoded.prompts]


def plot(found: Similarity, path: Path) -> Path:
    """One line a stream, and its broken line of reference."""
    gamma = len(found.streams[0])
    series = []
    for j in range(gamma):
        colour = j % len(COLOURS)
        y = [row[j] for row in found.streams]
        still = [row[j] for row in found.main]
        series += [
            Series(label=f"stream {j + 1}", x=found.layers, y=y, colour=colour),
            Series(label=f"main state, {j + 1} before", x=found.layers, y=still, colour=colour, dashed=True),
        ]
    panel = Panel(
        title="Stream states and the true later states",
        x_label="layers passed",
        y_label="cosine similarity",
        series=series,
        columns=gamma,
    )
    return figures.lines([panel], path, width=1.7)
