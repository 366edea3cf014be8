"""What the parts of a pipeline take on this machine, and a virtual clock that is given these times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from kit.study import Table

from paceline.core.errors import ConfigError
from paceline.core.inference import inference
from paceline.draft.sessions import ROOT, Expand, Opening
from specpipe_parts.common import STAGE_MS, PipeFlags, Times, draft_of, greedy, stage_of, study, target
from specpipe_parts.cuts import cut_by_rows
from specpipe_parts.real import CONTEXT, PASSES, WARM_UP, layers_ms

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def times_of(ask: PipeFlags) -> Times:
    """Those of `times` and `costs`, where a folder of them is named, with the head in the last stage; else the
    paper's.

    Raises:
        ConfigError: the folder has not what they wrote.
    """
    if ask.measured is None:
        return Times(stages=[stage_of(STAGE_MS)] * ask.stages)
    try:
        read, costs = (json.loads((ask.measured / f"{name}.json").read_text("utf-8")) for name in ("times", "costs"))
        layer, head, draft = (_line(read[f"{name}_ms"]) for name in ("layer", "head", "draft"))
        count, plan, coordinator = int(read["layers"]), costs["plan_ms"], costs["coordinator_ms"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = f"no times ({error})"
        raise ConfigError(f"--measured {ask.measured}", wrong, "name the folder of `times` and `costs`") from error
    rows = [ask.width ** (1 - stage / max(1, ask.stages - 1)) for stage in range(ask.stages)]
    bounds = cut_by_rows(count, rows, layer, head(1))
    sizes = [stop - start for start, stop in pairwise(bounds)]
    made = [_stage(size, layer, head if place == len(sizes) - 1 else None) for place, size in enumerate(sizes)]
    cut = "x".join(map(str, sizes))
    shown = [f"{1e3 * own(1):.2f}" for own in made]
    words = (
        f"measured of this model, {read['threads']} thread: stages of {cut} layers, the head in the last one, take "
        f"{', '.join(shown)} ms with one row; a level of drafts {1e3 * draft(1):.2f} ms with one node and "
        f"{1e3 * draft(ask.width):.2f} with {ask.width}; {coordinator[0]:.2f} ms a tick and "
        f"{1e3 * coordinator[1]:.1f} us a row in flight for verdicts, pruning and frames; {plan[0]:.3f} ms a frame and "
        f"{1e3 * plan[1]:.1f} us a row for a stage's plan. The plain pipeline is charged neither of the last two"
    )
    return Times(stages=made, draft_s=draft, plan_ms=plan, coordinator_ms=coordinator, layers=cut, words=words)


def _line(points_ms: Mapping[str, float]) -> Callable[[float], float]:
    """Seconds by rows: between measured points a line, behind the last one the last one's slope a row."""
    rows = np.array(sorted(map(int, points_ms)), dtype=float)
    times = np.array([points_ms[str(int(count))] for count in rows]) * 1e-3
    slope = times[-1] / rows[-1]

    def seconds(count: float) -> float:
        return float(np.interp(count, rows, times) + max(0.0, count - rows[-1]) * slope)

    return seconds


def _stage(
    layers: int, layer: Callable[[float], float], head: Callable[[float], float] | None
) -> Callable[[int], float]:
    return lambda rows: layers * layer(rows) + (0.0 if head is None else head(rows))


@inference
def head_ms(ask: PipeFlags, rows: Sequence[int]) -> dict[int, float]:
    """Median ms of final norm and head, by rows."""
    decoder = target(ask).decoder
    hidden = torch.ones(max(rows), decoder.config.d_model, dtype=decoder.dtype)
    return _medians(rows, lambda count: _ms(lambda: decoder.read(hidden[:count])))


@inference
def draft_ms(ask: PipeFlags, rows: Sequence[int]) -> dict[int, float]:
    """Median ms of a level of drafts, by the nodes that are expanded, behind `CONTEXT` tokens."""
    llm, drafter = target(ask), draft_of(ask)
    drafter.bind(llm.decoder.info("target", llm.tokenizer), 1, 4096, llm.decoder.device)
    sessions, text = drafter.sessions(2 * max(rows)), [*range(100, 100 + CONTEXT)]

    def timed(count: int) -> float:
        sessions.open(Opening(0, text, len(text), greedy(8), 0, 0))
        (grown,) = sessions.grow([Expand(0, expand=[ROOT], width=count)])
        nodes = grown.nodes[:count]
        took = _ms(lambda: sessions.grow([Expand(0, expand=nodes, width=ask.children)]))
        sessions.close(0)
        return took

    return _medians(rows, timed)


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def _medians(rows: Sequence[int], timed: Callable[[int], float]) -> dict[int, float]:
    """In turn, so that a slow moment hits all alike."""
    found: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(WARM_UP + PASSES):
        for count, own in found.items():
            own.append(timed(count))
    return {count: median(own[WARM_UP:]) for count, own in found.items()}


@study.table(takes=("draft", "children"), tasks="sql", prompts=1, threads=1)
def times(ask: PipeFlags) -> Iterator[Table | None]:
    """Real time, on an idle machine: a layer, the head and a level of drafts by rows; `--measured` charges them."""
    target(ask)
    yield None
    rows = ask.few(ROWS)
    found = {
        "layer": {count: ms / target(ask).decoder.num_layers for count, ms in layers_ms(ask, rows, CONTEXT).items()},
        "head": head_ms(ask, rows),
        "draft": draft_ms(ask, rows),
    }
    threads = torch.get_num_threads()
    yield Table(
        title=f"Parts of {ask.model} by rows, ms",
        head=("rows", "a layer", "final norm and head", f"a level of drafts of {ask.draft}"),
        parts={"": [[str(count), *(f"{own[count]:.3f}" for own in found.values())] for count in rows]},
        values={f"{name}_ms": {str(count): ms for count, ms in own.items()} for name, own in found.items()}
        | {"layers": target(ask).decoder.num_layers, "threads": threads},
        how=[
            [f"{CONTEXT} tokens in front, {threads} thread, median of {PASSES} passes, {ask.children} children a node"]
        ],
        same=True,
    )
