"""What ``paceline plan`` shows: the table, the command that would run a line of it, JSON and plots."""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from ..bench.methods import default_methods
from ..plan.plan import DRAFTERS, PLAIN, RIDING, SINK, PlanRequest, RankedDrafter
from ..plan.throughput import ServedModel, link_seconds, pass_cost
from ..weights import zoo
from .console import note, stdout

DTYPES = {None: None, 2.0: "bfloat16", 1.0: "int8", 4.0: "float32"}  # bytes of a weight -> what --dtype takes for it
MOST_BATCH = 2**40  # beyond it nothing changes
DEAR = 1.05  # a verification that costs more plain passes than this is reported to
ADVICE = {  # where a drafter's weights are missing
    "streams": "train a set of streams (paceline train streams)",
    "spire": "train a draft (paceline train spire)",
    "draft_model": "name a draft model with --draft",
}
HEAD = ("drafter", "depth", "width", "tokens a round", "times plain", "tokens/s", "why")


HowToRun = tuple[str | None, str | None]  # the command that would measure a drafter, or what is missing for that


def show(question: PlanRequest, ranked: Sequence[RankedDrafter], ways: Sequence[HowToRun], target: str | None) -> None:
    """Print the table, the assumptions, and how to run each drafter."""
    console = stdout()
    console.print(_title(question), style="bold", markup=False)
    console.print(_table(question, ranked))
    for line in _remarks(question, ranked):
        console.print(line, markup=False)
    _show_acceptance(ranked)
    console.print("to run it:", style="bold")
    for made, (command, missing) in zip(ranked, ways, strict=True):
        console.print(Text(f"  {command}") if command else Text(f"  {made.drafter}: {missing}", style="dim"))
    if others := unpredicted(target):
        console.print(f"not predicted: {', '.join(others)}; `paceline bench` measures all of them", markup=False)
    note("predicted from published peaks, not measured: tokens/s are upper bounds, ratios are what to go by")


def print_json(
    question: PlanRequest,
    ranked: Sequence[RankedDrafter],
    ways: Sequence[HowToRun],
    target: str | None,
) -> None:
    """Print the same as one JSON object."""
    rows = []
    for made, (command, missing) in zip(ranked, ways, strict=True):
        took = {"draft_s": made.round.draft, "verify_s": made.round.verify, "plain_s": made.round.plain}
        values = {name: value for name, value in asdict(made).items() if name != "round"}
        devices = devices_needed(question, made)
        told = {"reason": reason(question, made), "devices_needed": devices, "command": command, "missing": missing}
        rows.append({**values, **took, **told})
    asked = {name: value for name, value in asdict(question).items() if name not in ("draft", "acceptance")}
    found = {"draft": asdict(question.drafting), "ranked": rows, "unpredicted": unpredicted(target)}
    typer.echo(json.dumps({**asked, **found}))


def unpredicted(target: str | None) -> list[str]:
    """List the drafters that exist for a model that runs, and that the planner has no law of."""
    methods = default_methods(target) if target else []
    return [method.name for method in methods if not method.plain and method.name not in DRAFTERS]


def _show_acceptance(ranked: Sequence[RankedDrafter]) -> None:
    """Print a token's acceptance and its source: measured for this pair, or assumed."""
    console, known = stdout(), [(made.drafter, made.acceptance) for made in ranked if made.acceptance is not None]
    for own, title in (
        (True, "acceptance of this very pair (a token's chance; --tau DRAFTER=T changes it):"),
        (False, "assumed of acceptance, since nobody measured this pair (--tau DRAFTER=T changes it):"),
    ):
        lines = [f"  {name:<12} {has.accept:.2f}  {has.source}" for name, has in known if has.own == own]
        if lines:
            console.print(title, style="bold")
            console.print("\n".join(lines), markup=False)


def _title(q: PlanRequest) -> str:
    spread = f"{q.all_devices} x " if q.all_devices > 1 else ""
    about = f"{spread}{q.machine.about}, {q.machine.hoi:.0f} FLOPs a byte"
    return f"{q.target.name} on {about}; batch {q.batch:,}, context {q.context:,}"


def _table(q: PlanRequest, ranked: Sequence[RankedDrafter]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("drafter", "why") else "right", overflow="fold")
    for made in ranked:
        form = ("", "") if made.drafter == PLAIN else (str(made.depth), str(made.width))
        figures_ = (f"{made.tau:.2f}", f"{made.multiplier:.2f}", f"{made.tokens_per_s:,.0f}")
        table.add_row(made.drafter, *form, *figures_, reason(q, made))
    return table


def reason(q: PlanRequest, made: RankedDrafter) -> str:
    """Return why a drafter has its value, in words."""
    bound, took = f"{_bound(q, 1)}-bound", made.round
    if made.drafter == PLAIN:
        return bound
    drafts = "drafts are rows of the same pass" if made.drafter in RIDING else "drafts cost nothing"
    if DRAFTERS[made.drafter]:
        keys = q.keys(made.drafter) or q.context
        kind = f"sparse draft of {keys:,} keys" if keys < q.context else "dense draft"
        drafts = f"{kind}, a pass takes {took.draft / made.depth / took.plain:.0%} of the target's"
    words = [f"{bound}: {drafts}"]
    if (verify := took.verify / took.plain) > DEAR:
        words.append(f"verifying {made.rows} rows takes {verify:.2g} passes, {_bound(q, made.rows)}-bound")
    if q.all_devices > 1:
        talk = link_seconds(q.network(q.target), q.machine, q.batch, made.rows, q.devices, q.stages)
        words.append(f"{talk / took.verify:.0%} of that is on the link")
    return "; ".join(words)


def _bound(q: PlanRequest, rows: int) -> str:
    """Return what limits a target pass."""
    cost = pass_cost(q.network(q.target), math.ceil(q.batch / q.stages), q.context, rows)
    return cost.bound(q.machine.hoi).removesuffix("s")


def devices_needed(q: PlanRequest, made: RankedDrafter) -> int:
    """Return the fewest devices whose memory holds target and draft."""
    return max(1, math.ceil(made.holds / q.machine.memory))


def _remarks(q: PlanRequest, ranked: Sequence[RankedDrafter]) -> list[str]:
    """Return remarks on memory, and on the batch from which verification is compute-bound."""
    best = ranked[0]
    holds, have = best.holds, q.machine.memory * q.all_devices
    needed = devices_needed(q, best)
    room = "fits" if holds <= have else f"does not fit: {needed} devices would hold it; figures are as if it did"
    batch = critical_batch(q.network(q.target), q.context, q.machine.hoi, best.rows)
    bound = "at no batch size" if batch is None else f"from batch {batch:,} on"
    return [
        f"{best.drafter} holds {holds / 1e9:,.1f} GB of {have / 1e9:,.0f} GB: {room}",
        f"a pass over {best.rows} row{'s' if best.rows > 1 else ''} a sequence is compute-bound {bound}",
    ]


def critical_batch(network: ServedModel, context: float, hoi: float, rows: int) -> int | None:
    """Return the smallest batch for which a pass is compute-bound (B_crit of SPIRe, section 4); None: there is none.

    Beyond it a larger batch adds latency and no throughput. The intensity rises with the batch, since weights are
    shared and K/V is not.
    """
    sizes = range(1, MOST_BATCH + 1)
    place = bisect_left(sizes, True, key=lambda batch: pass_cost(network, batch, context, rows).intensity >= hoi)
    return sizes[place] if place < MOST_BATCH else None


def how_to_run(question: PlanRequest, made: RankedDrafter, target: str | None, draft: str | None) -> HowToRun:
    """Return the command that would measure a drafter, or what is missing for that.

    Args:
        target, draft: the models' names on the command line; None: there are no weights.
    """
    weights = _weights(made, target, draft)
    if missing := _missing(question, made, target is not None, weights is not None):
        return None, missing
    dtype = DTYPES[question.weight_bytes]
    more = (f" --dtype {dtype}" if dtype else "") + (" --device cuda" if question.machine.device == "cuda" else "")
    method = PLAIN if made.drafter == PLAIN else f"{_method(question, made, weights)};budget={made.depth * made.width}"
    return f'paceline bench --model {shlex.quote(str(target))} --batch {question.batch}{more} --method "{method}"', None


def _missing(q: PlanRequest, made: RankedDrafter, target: bool, weights: bool) -> str | None:
    """Return why this engine cannot run it now; None: it can."""
    kv = 4.0 if q.weight_bytes == 4.0 else 2.0
    reasons = {
        "there are no weights of this model": not target,
        "mixtures of experts are not there yet": q.target.experts is not None,
        "several devices are not there yet": q.all_devices > 1,
        "CPUs and CUDA GPUs are what there is so far": not q.machine.device,
        "weights are float32, bfloat16 or int8, keys and values as activations": q.weight_bytes not in DTYPES
        or q.kv_bytes != kv,
        f"memory: {devices_needed(q, made)} devices would hold it": made.holds > q.machine.memory,
        f"{ADVICE.get(made.drafter)} first": not weights,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _method(q: PlanRequest, made: RankedDrafter, weights: str | None) -> str:
    """Return the value of ``--method``."""
    depth = f"depth={made.depth}"
    options = {
        "streams": "chain=true",
        # The widest level first and one child each after it.
        "draft_model": "branching=" + "x".join([str(made.width), *["1"] * (made.depth - 1)]) if made.width > 1 else "",
    }
    if made.drafter == "magicdec":
        options["magicdec"] = f"window={q.last_keys(made.drafter)},sinks={SINK},{depth}"
    return made.drafter + (f":{weights}," if weights else ",") + (options.get(made.drafter) or depth)


def _weights(made: RankedDrafter, target: str | None, draft: str | None) -> str | None:
    """Return the draft model's name, or the zoo's trained weights; None: there are none; empty: it needs none."""
    if made.drafter == "draft_model":
        return draft
    return zoo.weights(made.drafter, target or "") if made.drafter in ADVICE else ""
