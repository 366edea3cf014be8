"""``paceline plan``: which drafter, depth and width would pay for a model on a machine, before anyone rents it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..core.errors import ConfigError
from ..core.options import named_values, shown, suggest
from ..plan import machines, models
from ..plan.acceptance import Acceptance, accept_of
from ..plan.models import ModelSizes
from ..plan.plan import DRAFTERS, PLAIN, RIDING, PlanRequest, RankedDrafter, rank
from ..plan.throughput import pass_cost
from ..weights import zoo
from ..weights.hub import local
from .console import note, stdout
from .options import takes

app = typer.Typer(add_completion=False)

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
MODEL_HELP = "A named model, an embedded one, a Hugging Face config.json or its folder."
TAU_DEPTH = 4  # of a --tau that names no depth: the k of SPIRe
DEAR = 1.05  # a verification that costs more plain passes than this is reported
HEAD = ("drafter", "depth", "width", "tokens a round", "times plain", "tokens/s", "why")
STORED = f"{', '.join(BYTES)}, or bytes such as 0.55"


@app.command()
@takes(
    question=PlanRequest,
    without={"target", "machine", "draft", "weight_bytes", "kv_bytes", "acceptance"},
)
def plan(
    target: Annotated[str, typer.Option(metavar="MODEL", help=MODEL_HELP)],
    machine: Annotated[str, typer.Option(metavar="NAME", help=f"One device: {', '.join(machines.machines())}.")],
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The draft model. Default: the zoo's for its targets, else half the target's layers and width.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=f"How weights are stored: {STORED}. Default: a GGUF file's own types, else bfloat16.",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help=f"How keys and values are stored: {STORED}. Default: bfloat16."),
    ] = None,
    tau: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFTER=T[@K]",
            help="Mean tokens a round of drafts of K tokens (default: 4), in the place of what is known or assumed. "
            "Repeat it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    question: dict[str, Any],
) -> None:
    """Rank drafters for a model on a machine, by predicted throughput over plain decoding.

    The model is a roofline: a pass takes as long as its arithmetic or its reads, whichever takes longer
    (docs/planning.md). The acceptance of drafts is that of measured pairs, else an assumption, which is marked;
    --tau takes your own.

    Examples:
        paceline plan --target llama-3.1-8b --machine h100
        paceline plan --target smollm2-135m --machine cpu --batch 4
        paceline plan --target llama-3.1-8b --machine h100 --batch 64
    """
    shape = resolve(target)
    # the named draft model, or the zoo's draft for its target
    drafting = draft or next((entry.name for entry in zoo.trained_for(target) if entry.role == "draft"), None)
    request = PlanRequest(
        target=shape,
        machine=machines.machine(machine),
        draft=None if drafting is None else resolve(drafting),
        weight_bytes=None if weights is None else _bytes("--weights", weights),
        kv_bytes=_bytes("--kv", kv or "bfloat16"),
        acceptance=given_acceptance(tau or ()),
        **question,
    )
    ranked = rank(request)
    if as_json:
        more = [{"reason": reason(request, row), "devices_needed": devices_needed(request, row)} for row in ranked]
        rows = [{**asdict(row), **facts} for row, facts in zip(ranked, more, strict=True)]
        typer.echo(json.dumps({**asdict(request), "draft": asdict(request.drafting), "ranked": rows}))
        return
    show(request, ranked)
    entry = models.named(target)
    if runs := target if entry is None else entry.hub:
        note(f"what it is worth here: paceline bench --model {shlex.quote(runs)} --batch {request.batch}")


def show(q: PlanRequest, ranked: Sequence[RankedDrafter]) -> None:
    """Print the table and the assumptions."""
    best, console = ranked[0], stdout()
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
    acceptances = [(row.drafter, row.acceptance) for row in ranked if row.acceptance is not None]
    for pair, title in (
        (True, "acceptance of this very pair (a token's chance; --tau DRAFTER=T changes it):"),
        (False, "assumed of acceptance, since nobody measured this pair (--tau DRAFTER=T changes it):"),
    ):
        lines = [f"  {name:<12} {has.accept:.2f}  {has.source}" for name, has in acceptances if has.own == pair]
        if lines:
            console.print("\n".join([title, *lines]), markup=False)
    note("predicted from published peaks, not measured: tokens/s are upper bounds, ratios are what to go by")


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


def given_acceptance(taus: Sequence[str]) -> dict[str, Acceptance]:
    """Return the acceptance that ``--tau`` sets: ``spire=3.4``, or ``spire=3.4@8`` of drafts of 8 tokens.

    Raises:
        ConfigError: an unknown drafter, or no number.
    """
    acceptances = {}
    for name, text in named_values("--tau", taus).items():
        subject, (tau, at, depth) = f"--tau {name}={text}", text.partition("@")
        if name not in DRAFTERS:
            raise ConfigError(subject, "the planner has no model of such a drafter", suggest(name, DRAFTERS, "drafter"))
        try:
            tokens, levels = float(tau), int(depth) if at else TAU_DEPTH
        except ValueError:
            tokens, levels = 0.0, 0
        if levels < 1:
            remedy = f"write {name}=3.4, or {name}=3.4@8 for drafts of 8 tokens"
            raise ConfigError(subject, "it is not a number of tokens a round", remedy)
        acceptances[name] = Acceptance(accept=accept_of(tokens, levels), source=subject)
    return acceptances


def resolve(text: str) -> ModelSizes:
    """Return the sizes of the model that ``--target`` or ``--draft`` names.

    Raises:
        ConfigError: no such model (it lists those that there are), or a config that cannot be used.
    """
    if (shape := models.named(text)) is not None:
        return shape
    if (folder := zoo.find(text)) is not None:
        return replace(models.read_shape(folder), source=f"the zoo's {text}")
    path = Path(text)
    path = local(text) or path if path.is_dir() else path  # a folder may hold one GGUF file
    if path.exists():
        return models.read_shape(path)
    embedded = [entry.name for entry in zoo.available() if entry.role in ("target", "draft")]
    remedy = suggest(text, [*models.names(), *embedded], "model")
    raise ConfigError(f"model {shown(text)}", "there is no such model, folder or config.json", remedy)


def _bytes(flag: str, text: str) -> float:
    """Return the bytes of a number of that type."""
    if text in BYTES:
        return BYTES[text]
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}", "it is not a type or a number of bytes", f"use {STORED}") from error
    if not 0 < value <= 8:
        raise ConfigError(f"{flag} {text}", "a number takes more than 0 bytes, and 8 at most", f"use {STORED}")
    return value
