"""What ``paceline plan --hosts`` shows: the best layouts, what one process would do, and the winner's command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.table import Table

from ..config import LLMConfig
from ..core.errors import PacelineError
from ..planning.hosts import DRAFT, HostLayout, Hosts, RankedLayout, rank_layouts
from ..planning.plan import PLAIN, PlanRequest
from .console import note, stdout
from .plan_view import DTYPES, HowToRun, wide_table

SHOWN = 5  # layouts
HEAD = ("stages", "ranks", "replicas", "a host", "draft", "ms a token", "tokens/s", "of a plain pass")


def show_layouts(
    q: PlanRequest, hosts: Hosts, links: str, target: str | None, draft: str | None, as_json: bool
) -> None:
    """Rank layouts and say so.

    Args:
        q, hosts: what is asked.
        links: where their figures are from, in words.
        target, draft: the models' names on the command line; None: there are no weights.
        as_json: print one JSON object.
    """
    ranked = rank_layouts(q, hosts)
    shown, alone = ranked[:SHOWN], next(made for made in ranked if made.layout.processes == 1)
    ways = [how_to_serve(q, hosts, made, target, draft) for made in shown]
    verdict = _verdict(ranked[0], alone)
    if as_json:
        names = "command", "missing"
        rows = [_json(made) | dict(zip(names, way, strict=True)) for made, way in zip(shown, ways, strict=True)]
        typer.echo(json.dumps({**asdict(hosts), "links": links, "layouts": rows, "one_process": _json(alone)}))
        return
    console = stdout()
    each = f"{hosts.each or q.machine.cores or 1} {'cores' if q.machine.cores else 'GPUs'}"
    size = f"batch {q.batch:,}, context {q.context:,}"
    title = (
        f"{q.target.name} on {hosts.hosts} host{'s' if hosts.hosts > 1 else ''} of {each} ({q.machine.about}); {size}"
    )
    console.print(title, style="bold", markup=False)
    apart = f"{hosts.alpha_us:g} us a hop between hosts, {hosts.join_us:g} a join, {hosts.gbit:g} Gbit/s ({links})"
    rates = f"{apart}; {hosts.local_us:g} us on one"
    console.print(rates, markup=False)
    console.print(_table([*shown, *([] if alone in shown else [alone])]))
    console.print(verdict, markup=False)
    for line in _commands(ways):
        console.print(line, markup=False, soft_wrap=True)
    note("predicted; queues, prefill and batches that are not full are left out, and acceptance is as without --hosts")


def _commands(ways: Sequence[HowToRun]) -> list[str]:
    """The winner's, or why there is none and that of the best which has one."""
    command, missing = ways[0]
    if command is not None:
        return [f"to run it: {command}"]
    others = [f"line {place} does: {other}" for place, (other, _) in enumerate(ways, 1) if other is not None]
    return [f"line 1 does not run yet: {missing}", *others[:1]]


def _table(ranked: Sequence[RankedLayout]) -> Table:
    table = wide_table(HEAD, ("draft", HEAD[-1]))
    for made in ranked:
        layout = made.layout
        sizes = [str(count) for count in (layout.stages, layout.ranks, layout.replicas, layout.per_host)]
        table.add_row(*sizes, _draft(made), f"{1e3 * made.token:.3g}", f"{made.tokens_per_s:,.0f}", _why(made))
    return table


def _draft(made: RankedLayout) -> str:
    if made.drafter == PLAIN:
        return PLAIN
    size = f"{made.size} a tick" if made.layout.stages > 1 else f"{made.size} deep"
    return f"{made.drafter}, {size}{', a process of its own' if made.layout.apart else ''}"


def _why(made: RankedLayout) -> str:
    if not made.fits:
        return f"does not fit: {made.holds / 1e9:,.1f} GB a process"
    words = [f"{1e3 * made.stage:.3g} ms {'a stage' if made.layout.stages > 1 else 'in all'}"]
    words += [f"{1e3 * made.joins:.2g} of it joins"] if made.joins else []
    words += [f"{1e3 * made.hops:.2g} ms of hops"] if made.hops else []
    return ", ".join(words)


def _verdict(best: RankedLayout, alone: RankedLayout) -> str:
    if best is alone:
        return "one process is best: what divides the model costs more in hops, joins and shared memory than it gains"
    if not alone.fits:
        return f"one process does not hold it: {alone.holds / 1e9:,.1f} GB"
    times = best.tokens_per_s / alone.tokens_per_s
    return f"{times:.2f} times the tokens/s of one process, whose token takes {1e3 * alone.token:.3g} ms"


def _json(made: RankedLayout) -> dict[str, object]:
    seconds = {"token_s": made.token, "stage_s": made.stage, "joins_s": made.joins, "hops_s": made.hops}
    rest = {"drafter": made.drafter, "size": made.size, "tokens_per_s": made.tokens_per_s}
    return {**made.layout._asdict(), **rest, **seconds, "holds": made.holds, "fits": made.fits}


def how_to_serve(q: PlanRequest, hosts: Hosts, made: RankedLayout, target: str | None, draft: str | None) -> HowToRun:
    """The command of a layout, or what is missing for it.

    Args:
        q, hosts, made: the question, and a layout that answers it.
        target, draft: the models' names on the command line; None: there are no weights.
    """
    layout = made.layout
    if target is None or (made.drafter == DRAFT and draft is None):
        return None, "there are no weights of " + ("this model" if target is None else "a draft: name one with --draft")
    if q.weight_bytes not in DTYPES:
        return None, "weights are float32, bfloat16 or int8"
    if layout.ranks > 1 and layout.per_host % layout.ranks and layout.stages > 1:
        return None, "ranks of a stage are processes of one host"
    options = _options(q, hosts, made, draft)
    given = {**options, "pipeline": layout.stages if layout.stages > 1 else None, "tensor_parallel": layout.ranks}
    try:
        LLMConfig(model=target, **given)  # type: ignore[arg-type]
    except PacelineError as error:
        lacking = f"device={given.get('device')!r}"  # here, not on the planned hosts
        if getattr(error, "asked", "") != lacking:
            return None, str(error)
    flags = {name: value for name, value in given.items() if value not in (None, 1)}
    if layout.replicas > 1:
        flags |= {"replicas": layout.replicas, "cluster": options.get("cluster", "auto")}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    return " ".join(["paceline serve", target, *words]), None


def _options(q: PlanRequest, hosts: Hosts, made: RankedLayout, draft: str | None) -> dict[str, object]:
    """Those of an `LLM`, but numbers of stages, ranks and replicas."""
    layout, found = made.layout, dict[str, object]()
    if (dtype := DTYPES[q.weight_bytes]) is not None:
        found["dtype"] = dtype
    if q.machine.device == "cuda":
        found["device"] = "cuda"
    if made.drafter != PLAIN:
        name = f"{DRAFT}:{draft}" if made.drafter == DRAFT else made.drafter
        found["drafter"] = name if layout.stages > 1 else f"{name},depth={made.size}"
    found |= {"round": text} if (text := _round(q, made)) else {}
    if layout.processes > layout.per_host and (layout.stages > 1 or layout.apart):
        cores = (hosts.each or q.machine.cores) // layout.per_host
        found["cluster"] = f"auto,cores={cores}" if cores and q.machine.cores else "auto"
    return found


def _round(q: PlanRequest, made: RankedLayout) -> str:
    layout = made.layout
    if layout.stages == 1:
        return "mirror,rollout=process" if layout.apart else ""
    if made.drafter == PLAIN:
        return f"pipeline,texts={_together(q, layout)}"
    return f"pipeline,width={made.size}" + (",source=process" if layout.apart else "")


def _together(q: PlanRequest, layout: HostLayout) -> int:
    """Sequences of a part of a replica's batch, of which there are as many parts as stages."""
    batch = math.ceil(q.batch / layout.replicas)
    return math.ceil(batch / min(batch, layout.stages))
