"""How near stream states come to the true later states (figure 5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from kit import figures
from kit.figures import COLOURS, Panel, Series
from kit.scores import encoded_prompts, workload_of
from kit.study import Table
from torch import Tensor

from paceline.api.llm import LLM
from paceline.bench import workloads
from paceline.core.sampling import SamplingParams
from paceline.papers.streaming.ahead import Aims
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.multistream import lossless_streams, main_pass, shared_pass
from paceline.train.carriers import choose_carriers
from paceline.train.data import Example, TokenBatch, collate
from paceline.train.network import Network
from paceline.weights.source import resolve_folder
from streaming.common import StreamingFlags, TrainedSet, study


@torch.no_grad()
def similarity(network: Network, trained: StreamSet, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Cosine similarity of stream j's state of row t with main row t + j, layer by layer.

    Args:
        network: the target.
        trained: the set.
        batch: on the network's device.

    Returns:
        Mean cosine similarity [1 + Ns, gamma], before the first MSA layer and after each; and the same of main row t
        itself, the line that a stream starts near.

    Source: fig. 5 (section 3.2).
    """
    carriers = choose_carriers(batch)
    aims = Aims.of(batch, carriers, trained.config.gamma)
    if trained.config.mode == "shared":
        run = shared_pass(network, trained, batch, carriers)
        main, streams = run.states, run.stream_states
    else:
        frozen = main_pass(network, batch, trained.config.insertion)
        main = frozen.states
        streams = tuple(lossless_streams(network, trained, frozen, carriers)[1])
    own = [_cosine(s, m[aims.main], aims.exists) for s, m in zip(streams, main, strict=True)]
    still = [_cosine(m[carriers.index][:, None], m[aims.main], aims.exists) for m in main]
    return torch.stack(own), torch.stack(still)


def _cosine(states: Tensor, later: Tensor, exists: Tensor) -> Tensor:
    """[gamma] mean over the rows that exist."""
    found = F.cosine_similarity(states.float(), later.float(), dim=-1) * exists
    return found.sum(0) / exists.sum(0).clamp(min=1)


def states(ask: StreamingFlags, trained: TrainedSet) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Mean cosine similarities with main row t + j, of stream j of row t and of main row t itself.

    The target answers prompts greedily; over prompts and answers, teacher-forced, states are compared in float32.

    Returns:
        [1 + Ns, gamma] of streams, the same of main rows (before the first of the streams' layers, then after each),
        and how many prompts, and rows with streams, are behind them.
    """
    apps: dict[str, Any] = {"drafter": "streams", "budget": 0, "applications": {trained.application: trained.folder}}
    llm = LLM(ask.model, **(apps if trained.application else {}), **ask.llm)
    prompts: list[list[int]] = []
    for task in ask.names:
        workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
        prompts += encoded_prompts(llm, workload, ask.max_new_tokens)[0]
    params = SamplingParams(temperature=0, max_tokens=ask.max_new_tokens)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    answers = [output.outputs[0].token_ids for output in llm.generate(given, params, application=trained.application)]
    examples = [
        Example(np.array([*ids, *said], dtype=np.int32), len(ids)) for ids, said in zip(prompts, answers, strict=True)
    ]
    batch = collate([[example] for example in examples], max(len(e.tokens) for e in examples))
    network = Network.load(llm.folder, frozen=True)
    loaded = StreamSet.load(resolve_folder(trained.folder), dtype=torch.float32)  # as the network
    streams, main = similarity(network, loaded, batch)
    return streams, main, {"prompts": len(prompts), "rows": sum(map(len, answers))}


@study.figure(needs=("set",), tasks="sql,e2e,gsm8k", prompts=12, max_new_tokens=64)
def figure_5(ask: StreamingFlags) -> Iterator[Table | None]:
    """Cosine similarity of stream states to the true later states, layer by layer."""
    trained = TrainedSet.read(str(ask.set))
    facts: dict[str, Any] = {"model": ask.model, "set": ask.set, "tasks": ask.names}
    yield None
    streams, main, counts = states(ask, trained)
    gamma, layers = trained.config.gamma, [*range(trained.config.insertion, trained.config.num_layers + 1)]
    lines = {f"stream {j + 1}": streams[:, j].tolist() for j in range(gamma)}
    lines |= {f"main state, {j + 1} before": main[:, j].tolist() for j in range(gamma)}
    series = [
        Series(label=label, x=layers, y=y, colour=i % gamma % len(COLOURS), dashed=i >= gamma)
        for i, (label, y) in enumerate(lines.items())
    ]
    ordered = [series[i] for j in range(gamma) for i in (j, gamma + j)]
    title = "Stream states and the true later states"
    axes = Panel(title=title, series=ordered, x_label="layers passed", y_label="cosine similarity", columns=gamma)
    facts |= {"max_new_tokens": ask.max_new_tokens, "seed": ask.seed, **counts}
    rows = zip(layers, *lines.values(), strict=True)
    yield Table(
        title="Cosine similarity of stream states to the true later states",
        head=("layers passed", *lines),
        parts={"": [[str(n), *(f"{value:.3f}" for value in row)] for n, *row in rows]},
        values={**facts, "layers": layers, "streams": streams.tolist(), "main": main.tolist()},
        how=[[f"{name}: {value}" for name, value in facts.items()]],
        plots={".svg": lambda path: figures.lines([axes], path, width=1.7)},
    )
