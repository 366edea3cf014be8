"""``paceline plan``: which drafter, depth and width would pay for a model on a machine, before anyone rents it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import ConfigError
from ..core.options import named_values, shown, suggest
from ..plan import machines, models
from ..plan.acceptance import Acceptance, accept_of
from ..plan.models import ModelSizes
from ..plan.plan import DRAFTERS, PlanRequest, rank
from ..weights import zoo
from ..weights.gguf import is_gguf
from ..weights.hub import local
from . import plan_view
from .options import takes

app = typer.Typer(add_completion=False)

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
MODEL_HELP = "A named model, an embedded one, a Hugging Face config.json or its folder."
TAU_DEPTH = 4  # of a --tau that names no depth: the k of SPIRe
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
    names = _runnable(target), _runnable(drafting) if drafting else None
    found_ways = [(ranking, plan_view.how_to_run(request, ranking, *names)) for ranking in rank(request)]
    # What can be run comes first.
    ranked, ways = zip(*sorted(found_ways, key=lambda pair: pair[1][0] is None), strict=True)
    if as_json:
        plan_view.print_json(request, ranked, ways, names[0])
    else:
        plan_view.show(request, ranked, ways, names[0])


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


def _runnable(text: str) -> str | None:
    """Return the value of ``--model`` for this model; None: there are no weights of it."""
    entry, path = models.named(text), Path(text)
    if entry is not None:
        return entry.hub or None
    return str(path.parent) if path.is_file() and not is_gguf(path) else text


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
