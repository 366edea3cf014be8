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
from ..plan.throughput import ServedModel, pass_cost
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
    q, best, console = question, ranked[0], stdout()
    title = f"{q.target.name} on {q.machine.about}, {q.machine.hoi:.0f} FLOPs a byte; batch {q.batch:,}, context "
    console.print(f"{title}{q.context:,}", style="bold", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("drafter", "why") else "right", overflow="fold")
    for row in ranked:
        form = ("", "") if row.drafter == PLAIN else (str(row.depth), str(row.width))
        figures = (f"{row.tau:.2f}", f"{row.multiplier:.2f}", f"{row.tokens_per_s:,.0f}")
        table.add_row(row.drafter, *form, *figures, reason(q, row))
    console.print(table)
    needed, have = devices_needed(q, best), q.machine.memory
    room = "fits" if needed == 1 else f"does not fit: {needed} devices would hold it; figures are as if it did"
    console.print(f"{best.drafter} holds {best.holds / 1e9:,.1f} GB of {have / 1e9:,.0f} GB: {room}", markup=False)
    batch = critical_batch(q.network(q.target), q.context, q.machine.hoi, best.rows)
    bound = "at no batch size" if batch is None else f"from batch {batch:,} on"
    rows = f"{best.rows} row" + "s" * (best.rows > 1)
    console.print(f"a pass over {rows} a sequence is compute-bound {bound}", markup=False)
    acceptances = [(row.drafter, row.acceptance) for row in ranked if row.acceptance is not None]
    for pair, title in (
        (True, "acceptance of this very pair (a token's chance; --tau DRAFTER=T changes it):"),
        (False, "assumed of acceptance, since nobody measured this pair (--tau DRAFTER=T changes it):"),
    ):
        lines = [f"  {name:<12} {has.accept:.2f}  {has.source}" for name, has in acceptances if has.own == pair]
        if lines:
            console.print("\n".join([title, *lines]), markup=False)
    console.print("to run it:", style="bold")
    for row, (command, missing) in zip(ranked, ways, strict=True):
        console.print(Text(f"  {command}") if command else Text(f"  {row.drafter}: {missing}", style="dim"))
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
    for row, (command, missing) in zip(ranked, ways, strict=True):
        took = {"draft_s": row.round.draft, "verify_s": row.round.verify, "plain_s": row.round.plain}
        values = {name: value for name, value in asdict(row).items() if name != "round"}
        needed = {"reason": reason(question, row), "devices_needed": devices_needed(question, row)}
        rows.append({**values, **took, **needed, "command": command, "missing": missing})
    request = {name: value for name, value in asdict(question).items() if name not in ("draft", "acceptance")}
    rest = {"draft": asdict(question.drafting), "ranked": rows, "unpredicted": unpredicted(target)}
    typer.echo(json.dumps({**request, **rest}))


def unpredicted(target: str | None) -> list[str]:
    """List the drafters that exist for a model that runs, and that the planner has no law of."""
    methods = default_methods(target) if target else []
    return [method.name for method in methods if not method.plain and method.name not in DRAFTERS]


def reason(q: PlanRequest, row: RankedDrafter) -> str:
    """Return why a drafter has its value, in words."""

    def bound(rows: int) -> str:
        return pass_cost(q.network(q.target), q.batch, q.context, rows).bound(q.machine.hoi).removesuffix("s")

    took = row.round
    if row.drafter == PLAIN:
        return f"{bound(1)}-bound"
    drafts = "drafts are rows of the same pass" if row.drafter in RIDING else "drafts cost nothing"
    if DRAFTERS[row.drafter]:
        keys = q.keys(row.drafter) or q.context
        kind = f"sparse draft of {keys:,} keys" if keys < q.context else "dense draft"
        drafts = f"{kind}, a pass takes {took.draft / row.depth / took.plain:.0%} of the target's"
    words = f"{bound(1)}-bound: {drafts}"
    if (verify := took.verify / took.plain) > DEAR:
        words += f"; verifying {row.rows} rows takes {verify:.2g} passes, {bound(row.rows)}-bound"
    return words


def devices_needed(q: PlanRequest, row: RankedDrafter) -> int:
    """Return the fewest devices whose memory holds target and draft."""
    return max(1, math.ceil(row.holds / q.machine.memory))


def critical_batch(network: ServedModel, context: float, hoi: float, rows: int) -> int | None:
    """Return the smallest batch for which a pass is compute-bound (B_crit of SPIRe, section 4); None: there is none.

    Beyond it a larger batch adds latency and no throughput. The intensity rises with the batch, since weights are
    shared and K/V is not.
    """
    sizes = range(1, MOST_BATCH + 1)
    place = bisect_left(sizes, True, key=lambda batch: pass_cost(network, batch, context, rows).intensity >= hoi)
    return sizes[place] if place < MOST_BATCH else None


def how_to_run(question: PlanRequest, row: RankedDrafter, target: str | None, draft: str | None) -> HowToRun:
    """Return the command that would measure a drafter, or what is missing for that.

    Args:
        target, draft: the models' names on the command line; None: there are no weights.
    """
    q, name, kv = question, row.drafter, 4.0 if question.weight_bytes == 4.0 else 2.0
    weights = draft if name == "draft_model" else zoo.weights(name, target or "") if name in ADVICE else ""
    reasons = {
        "there are no weights of this model": target is None,
        "CPUs and CUDA GPUs are what there is so far": not q.machine.device,
        "weights are float32, bfloat16 or int8, keys and values as activations": q.weight_bytes not in DTYPES
        or q.kv_bytes != kv,
        f"memory: {devices_needed(q, row)} devices would hold it": row.holds > q.machine.memory,
        f"{ADVICE.get(name)} first": weights is None,
    }
    if missing := next((reason for reason, holds in reasons.items() if holds), None):
        return None, missing
    dtype, options = DTYPES[q.weight_bytes], f"depth={row.depth}"
    if name == "streams":
        options = "chain=true"
    elif name == "draft_model" and row.width > 1:  # the widest level first and one child each after it
        options = "branching=" + "x".join([str(row.width), *["1"] * (row.depth - 1)])
    elif name == "magicdec":
        options = f"window={q.last_keys(name)},sinks={SINK},{options}"
    method = f"{name}{f':{weights}' if weights else ''},{options};budget={row.depth * row.width}"
    more = (f" --dtype {dtype}" if dtype else "") + (" --device cuda" if q.machine.device == "cuda" else "")
    ran = PLAIN if name == PLAIN else method
    return f'paceline bench --model {shlex.quote(str(target))} --batch {q.batch}{more} --method "{ran}"', None
