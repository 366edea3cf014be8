"""The ways that frames go: straight from stage to stage, and through the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from kit.clock import VIRTUAL
from kit.links import Link
from kit.study import Table
from kit.virtual_stages import Frames

from specpipe_parts.common import (
    HOW,
    Evenly,
    PipeFlags,
    decode,
    draft_of,
    greedy,
    levels,
    nothing,
    plain,
    prompts,
    study,
)

STAGE_S, LINK, STAGES = 4e-3, Link(latency_ms=1.0), 4
DRAFT_S = 1e-3  # a level: the source is never late
RATE = 0.95
WANTED = 1.15
WAYS: tuple[Frames, ...] = ("straight", "coordinator")


@study.table(takes=("draft", "width", "children"), tasks="sql,e2e,gsm8k", prompts=2, max_new_tokens=48)
def frames(ask: PipeFlags) -> Iterator[Table | None]:
    """4 stages of 4 ms on hosts of their own with links of 1 ms: the two ways, by what is drafted."""
    tokens = ask.max_new_tokens or 0
    found = prompts(ask, tokens)
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = True
    given: dict[str, Any] = {"stage_s": lambda rows: STAGE_S, "draft_s": lambda rows: DRAFT_S, "link": LINK}
    given |= {"coordinator_s": nothing, "hosts": range(STAGES)}
    for name in ("nothing", f"synthetic, P = {RATE}", ask.draft):
        times: dict[Frames, list[float]] = {way: [] for way in WAYS}
        hits: list[float] = []
        for prompt in found:
            jobs = [(prompt, greedy(tokens))]
            (answer,) = plain(ask, jobs)
            for way in WAYS:
                drafter: Any = None
                if name == ask.draft:
                    drafter = draft_of(ask)
                elif name != "nothing":
                    drafter = Evenly([*prompt, *answer], RATE)
                one = {"width": 1, "children": 1} if name.startswith("synthetic") else {}
                run = decode(ask, jobs, drafter, levels(ask, stages=STAGES, **one), frames=way, **given)
                same &= run.said == [answer]
                times[way].append(1e3 * run.tbt)
                hits.append(run.hit_rate)
        means = {way: fmean(own) for way, own in times.items()}
        ratio = means["coordinator"] / means["straight"]
        values.append({"drafts": name, "hit_rate": fmean(hits), "ms": means, "ratio": ratio})
        rows.append([name, f"{fmean(hits):.3f}", *(f"{means[way]:.2f}" for way in WAYS), f"{ratio:.2f}"])
    yield Table(
        title=f"{STAGES} stages of {1e3 * STAGE_S:g} ms, a host each, links of {LINK.latency_ms:g} ms ({VIRTUAL})",
        head=("drafts", "P", "straight, TBT ms", "through the coordinator", "times"),
        parts={"": rows},
        values={"rows": values},
        remarks=[f"wanted: straight at least {WANTED:g} times as fast, where drafts keep the stages busy"],
        how=[[HOW, f"{len(found)} prompts, {tokens} tokens; a level of drafts takes {1e3 * DRAFT_S:g} ms"]],
        same=same,
    )
