"""Which drafter, depth and width pay for a target on a machine: all of them predicted, the best of each, ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..core.errors import ConfigError
from ..core.options import check, option
from .acceptance import Acceptance, assumed
from .machines import Machine
from .measured import PassLaw
from .models import ModelSizes
from .throughput import (
    DraftPlan,
    Parallel,
    Precision,
    RoundCost,
    ServedModel,
    held_bytes,
    link_seconds,
    pass_cost,
    pass_seconds,
    round_of,
)

PLAIN = "none"  # the drafter of plain decoding
DEPTHS = tuple(range(1, 9))
WIDTHS = (1, 2, 4)
SINK = 1  # a sparse view keeps the first token, too
LEAST_WINDOW = 64  # of SPIRe, section 3.1
SHARE = 8  # a window is an eighth of the context where that is more, as in SPIRe's figure 6
DEAR = 1.05  # a verification that costs more plain passes than this is said to


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter."""

    drafts: Literal["nothing", "small", "cut", "itself"]  # with which network; cut: out of the target
    sparse: bool = False  # whether that sees a window with a sink alone
    tree: bool = False  # whether it can draft several chains
    streams: bool = False  # whether its rows ride in the verifying pass


DRAFTERS = {
    "ngram": DrafterKind(drafts="nothing"),
    "streams": DrafterKind(drafts="nothing", streams=True),
    "draft_model": DrafterKind(drafts="small", tree=True),
    "magicdec": DrafterKind(drafts="itself", sparse=True),
    "spire": DrafterKind(drafts="cut", sparse=True),
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned for.

    Raises:
        ConfigError: a number out of bounds, a context that target or draft cannot have, more devices than parts.
    """

    target: ModelSizes = option(help="the target's sizes")
    machine: Machine = option(help="one device")
    batch: int = option(1, help="sequences decoded at once, 1 or more", minimum=1, maximum=2**30)
    context: int = option(1024, help="tokens that each sequence has", minimum=1)
    draft: ModelSizes | None = option(None, help="the draft model's sizes; none: half the target's layers and width")
    precision: Precision = field(default_factory=Precision)
    parallel: Parallel = field(default_factory=Parallel)
    window: int | None = option(
        None,
        help="keys that a sparse draft sees beside the sink: 1 or more; none: the measured pair's, else an eighth of "
        "the context",
        minimum=1,
    )
    depth: int | None = option(None, help="tokens of a draft: 1 to 64; none: the best of 1 to 8", minimum=1, maximum=64)
    width: int | None = option(
        None,
        help="chains of a draft, where the drafter has trees: 1 to 64; none: the best of 1, 2 and 4",
        minimum=1,
        maximum=64,
    )
    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)  # by drafter, in the place of what is assumed
    law: PassLaw | None = None  # of the machine, which is the present one; None: its peaks say what passes take

    def __post_init__(self) -> None:
        check(self)
        self._check_parallel()
        for shape in filter(None, (self.target, self.draft)):
            if self.context > shape.max_position:
                wrong = f"{shape.name} has {shape.max_position:,} positions"
                raise ConfigError(f"context={self.context}", wrong, f"give 1 to {shape.max_position}")

    def _check_parallel(self) -> None:
        """No device without a head, no stage without a layer."""
        bounds = {"devices": (self.parallel.tensor, "heads", self.target.num_heads)}
        bounds["stages"] = (self.parallel.stages, "layers", self.target.num_layers)
        for name, (asked, parts, most) in bounds.items():
            if asked > most:
                raise ConfigError(f"{name}={asked}", f"{self.target.name} has {most} {parts}", f"give 1 to {most}")

    def last_keys(self, drafter: str) -> int:
        """Keys of a sparse view's window: as asked for, as the pair was measured, or a part of the context."""
        measured = self.assumptions()[drafter].window
        return self.window or measured or max(LEAST_WINDOW, self.context // SHARE - SINK)

    def keys(self, drafter: str) -> int:
        """Keys of a sparse view."""
        return min(self.context, self.last_keys(drafter) + SINK)

    @property
    def drafting(self) -> ModelSizes:
        """The draft model: the one that is named, or one as in SPIRe's comparison."""
        return self.draft or self.target.halved()

    def network(self, shape: ModelSizes, keys: int | None = None) -> ServedModel:
        """A model as it is served here."""
        return ServedModel(shape=shape, precision=self.precision, keys=keys)

    def round_of(self, planned: DraftPlan) -> RoundCost:
        """A round in seconds."""
        size = self.batch, self.context
        if (law := self.law) is not None:
            return round_of(planned, lambda network, rows: law.seconds(network, *size, rows))
        return round_of(planned, lambda n, rows: pass_seconds(n, self.machine, *size, rows, self.parallel))

    def assumptions(self) -> dict[str, Acceptance]:
        """The acceptance of every drafter; what is given changes no draft's size or window."""
        draft = self.draft.name if self.draft else None
        known = assumed(self.target.name, draft, self.context, self.window)
        for name, said in self.acceptance.items():
            known[name] = replace(known[name], accept=said.accept, source=said.source, own=True)
        return known


@dataclass(frozen=True, kw_only=True)
class RankedDrafter:
    """One drafter with its depth and width, predicted. Plain decoding is one with a depth of 0."""

    drafter: str
    depth: int
    width: int
    rows: int  # of a sequence in the verifying pass
    tau: float  # tokens a round
    round: RoundCost  # seconds
    multiplier: float
    tokens_per_s: float  # of the whole batch
    holds: float  # bytes of target and draft together
    reason: str
    acceptance: Acceptance | None = None


def rank(question: PlanRequest) -> list[RankedDrafter]:
    """The best form of each drafter and plain decoding, the fastest first."""
    best = [max(_forms(question, name), key=lambda made: made.multiplier) for name in DRAFTERS]
    return sorted([plain(question), *best], key=lambda made: -made.multiplier)


def plain(question: PlanRequest) -> RankedDrafter:
    """Decoding without a draft."""
    q = question
    target = q.network(q.target)
    took = q.round_of(DraftPlan(target=target))
    return RankedDrafter(
        drafter=PLAIN,
        depth=0,
        width=1,
        rows=1,
        tau=1.0,
        round=replace(took, draft=0.0, verify=took.plain),
        multiplier=1.0,
        tokens_per_s=q.batch / took.plain,
        holds=held_bytes(target, q.batch, q.context),
        reason=f"{_bound(q, 1)}-bound",
    )


def _forms(question: PlanRequest, name: str) -> Iterator[RankedDrafter]:
    """Every depth and width that the question leaves open."""
    drafter, accepted = DRAFTERS[name], question.assumptions()[name]
    widths = (WIDTHS if question.width is None else (question.width,)) if drafter.tree else (1,)
    for depth in DEPTHS if question.depth is None else (question.depth,):
        for width in widths:
            yield _form(question, name, depth, width, accepted)


def _form(q: PlanRequest, name: str, depth: int, width: int, accepted: Acceptance) -> RankedDrafter:
    drafter = DRAFTERS[name]
    network = _network(q, name, accepted)
    extra = depth if drafter.streams else 0  # streams of one row, counted through all layers
    planned = DraftPlan(target=q.network(q.target), draft=network, depth=depth, width=width, extra_rows=extra)
    took, tau = q.round_of(planned), accepted.tokens(depth, width)
    holds = held_bytes(planned.target, q.batch, q.context)
    if network is not None and drafter.drafts != "itself":
        holds += held_bytes(network, q.batch, q.context)
    return RankedDrafter(
        drafter=name,
        depth=depth,
        width=width,
        rows=planned.rows,
        tau=tau,
        round=took,
        multiplier=took.multiplier(tau),
        tokens_per_s=q.batch * tau / (took.draft + took.verify),
        holds=holds,
        reason=_reason(q, name, planned, took),
        acceptance=accepted,
    )


def _network(q: PlanRequest, name: str, accepted: Acceptance) -> ServedModel | None:
    drafter = DRAFTERS[name]
    if drafter.drafts == "nothing":
        return None
    layers = accepted.layers or max(1, round(q.target.num_layers / 4))
    shapes = {"small": q.drafting, "cut": q.target.last_layers(layers), "itself": q.target}
    return q.network(shapes[drafter.drafts], q.keys(name) if drafter.sparse else None)


def _bound(q: PlanRequest, rows: int) -> str:
    """What limits a target pass, as words have it."""
    part = math.ceil(q.batch / q.parallel.stages)
    cost = pass_cost(q.network(q.target), part, q.context, rows)
    return {"weights": "weight"}.get(bound := cost.bound(q.machine.hoi), bound)


def _reason(q: PlanRequest, name: str, made: DraftPlan, took: RoundCost) -> str:
    """Why it is worth what it is, in words."""
    words = [f"{_bound(q, 1)}-bound: {_drafting(q, name, made, took)}"]
    verify = took.verify / took.plain
    if verify > DEAR:
        words.append(f"verifying {made.rows} rows takes {verify:.2g} passes, {_bound(q, made.rows)}-bound")
    if q.parallel.devices > 1:
        talk = link_seconds(made.target, q.machine, q.batch, made.rows, q.parallel)
        words.append(f"{talk / took.verify:.0%} of that is on the link")
    return "; ".join(words)


def _drafting(q: PlanRequest, name: str, made: DraftPlan, took: RoundCost) -> str:
    if DRAFTERS[name].streams:
        return "drafts are rows of the same pass"
    if made.draft is None:
        return "drafts cost nothing"
    share = f"a pass takes {took.draft / made.depth / took.plain:.0%} of the target's"
    sparse = DRAFTERS[name].sparse and q.keys(name) < q.context
    kind = f"sparse draft of {q.keys(name):,} keys" if sparse else "dense draft"
    return f"{kind}, {share}"


def devices_needed(question: PlanRequest, holds: float) -> int:
    """The fewest devices whose memory holds so many bytes."""
    return max(1, math.ceil(holds / question.machine.memory))
