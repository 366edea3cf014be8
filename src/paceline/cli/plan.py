"""``paceline plan``: which drafter, depth and width would pay for a model on a machine, before anyone rents it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from ..core.errors import ConfigError
from ..core.options import shown, suggest
from ..plan import machines, models
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
DEAR = 1.05  # a verification that costs more plain passes than this is reported
HEAD = ("drafter", "depth", "width", "tokens a round", "times plain", "tokens/s", "why")
Stored = Literal["float32", "bfloat16", "float16", "int8", "fp8", "int4"]


@app.command()
@takes(question=PlanRequest, only={"batch", "context"})
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
        Stored | None,
        typer.Option(help="How weights are stored.", show_default="a GGUF file's own types, else bfloat16"),
    ] = None,
    kv: Annotated[Stored, typer.Option(help="How keys and values are stored.")] = "bfloat16",
    *,
    question: dict[str, Any],
) -> None:
    """Rank drafters for a model on a machine, by predicted throughput over plain decoding.

    The model is a roofline: a pass takes as long as its arithmetic or its reads, whichever takes longer
    (docs/planning.md). The acceptance of drafts is that of measured pairs, else an assumption, which is marked.

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
        weight_bytes=None if weights is None else BYTES[weights],
        kv_bytes=BYTES[kv],
        **question,
    )
    show(request, rank(request))
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
    have = q.machine.memory
    needed = math.ceil(best.holds / have)
    room = "fits" if needed <= 1 else f"does not fit: {needed} devices would hold it; figures are as if it did"
    console.print(f"{best.drafter} holds {best.holds / 1e9:,.1f} GB of {have / 1e9:,.0f} GB: {room}", markup=False)
    console.print("acceptance (a token's chance):")
    for row in ranked:
        if (has := row.acceptance) is not None:
            origin = "" if has.own else "assumed, since nobody measured this pair: "
            console.print(f"  {row.drafter:<12} {has.accept:.2f}  {origin}{has.source}", markup=False)
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
        keys = row.keys or q.context
        kind = f"sparse draft of {keys:,} keys" if keys < q.context else "dense draft"
        drafts = f"{kind}, a pass takes {took.draft / row.depth / took.plain:.0%} of the target's"
    words = f"{bound(1)}-bound: {drafts}"
    if (verify := took.verify / took.plain) > DEAR:
        words += f"; verifying {row.rows} rows takes {verify:.2g} passes, {bound(row.rows)}-bound"
    return words


def resolve(text: str) -> ModelSizes:
    """Return the sizes of the model that ``--target`` or ``--draft`` names.

    Raises:
        ConfigError: no such model (it lists those that there are), or a config that cannot be used.
    """
    if (shape := models.named(text)) is not None:
        return shape
    if (folder := zoo.find(text)) is not None:
        return models.read_shape(folder)
    path = Path(text)
    path = local(text) or path if path.is_dir() else path  # a folder may hold one GGUF file
    if path.exists():
        return models.read_shape(path)
    embedded = [entry.name for entry in zoo.available() if entry.role in ("target", "draft")]
    remedy = suggest(text, [*models.names(), *embedded], "model")
    raise ConfigError(f"model {shown(text)}", "there is no such model, folder or config.json", remedy)
