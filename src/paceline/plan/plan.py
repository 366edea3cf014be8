"""Which drafter, depth and width pay for a target on a machine: all of them predicted, the best of each, ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from ..core.errors import ConfigError
from ..core.options import check, option
from .acceptance import Acceptance, assumed
from .machines import Machine
from .models import ModelSizes
from .throughput import RoundCost, ServedModel, held_bytes, pass_seconds, round_of

PLAIN = "none"  # the drafter of plain decoding
DEPTHS = tuple(range(1, 9))
WIDTHS = (1, 2, 4)
SINK = 1  # a sparse view keeps the first token, too
LEAST_WINDOW = 64  # of SPIRe, section 3.1
SHARE = 8  # a window is an eighth of the context where that is more, as in SPIRe's figure 6
# Drafters with the network that drafts: none, a small one, the target itself, or one that is cut out of it.
DRAFTERS = {"ngram": "", "streams": "", "draft_model": "small", "magicdec": "itself", "spire": "cut"}
SPARSE = ("magicdec", "spire")  # drafts that see a window with a sink alone
TREES = ("draft_model",)  # drafters of several chains
RIDING = ("streams",)  # drafters whose rows ride in the verifying pass
UPPER = 0.5  # share of the layers that streams go through, as of zoo/paceline-small-streams


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The inputs of a plan; a number out of bounds, of its own or of target and draft, is a `ConfigError`."""

    target: ModelSizes
    machine: Machine  # one device
    batch: int = option(1, help="sequences decoded at once, 1 or more", minimum=1, maximum=2**30)
    context: int = option(1024, help="tokens that each sequence has", minimum=1)
    draft: ModelSizes | None = None  # None: half the target's layers and width
    weight_bytes: float | None = None  # of a stored weight; None: as the model's files
    kv_bytes: float = 2.0  # of a stored number of K/V
    window: int | None = option(
        None,
        help="keys that a sparse draft sees besides the sink: 1 or more; none: the measured pair's, else an eighth of "
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

    def __post_init__(self) -> None:
        check(self)
        for shape in filter(None, (self.target, self.draft)):
            if self.context > (most := shape.max_position):
                raise ConfigError(
                    f"context={self.context}", f"{shape.name} has {most:,} positions", f"give 1 to {most}"
                )

    def keys(self, drafter: str) -> int | None:
        """Return the keys of a sparse view: as requested, as measured, or a part of the context; None: all are seen."""
        if drafter not in SPARSE:
            return None
        window = self.window or self.assumptions()[drafter].window or max(LEAST_WINDOW, self.context // SHARE - SINK)
        return min(self.context, window + SINK)

    @property
    def drafting(self) -> ModelSizes:
        """Return the draft model: the one that is named, or one as in SPIRe's comparison."""
        return self.draft or self.target.halved()

    def network(self, shape: ModelSizes, keys: int | None = None) -> ServedModel:
        """Return a model as it is served here."""
        stored = self.weight_bytes or shape.weight_bytes
        return ServedModel(shape=shape, weight_bytes=stored, kv_bytes=self.kv_bytes, keys=keys)

    def seconds(self, network: ServedModel, rows: int) -> float:
        """Return the seconds of a pass over so many rows of each sequence."""
        return pass_seconds(network, self.machine, self.batch, self.context, rows)

    def assumptions(self) -> dict[str, Acceptance]:
        """Return the acceptance of every drafter; requested values do not change a draft's size or window."""
        draft = self.draft.name if self.draft else None
        table = assumed(self.target.name, draft, self.context, self.window)
        for name, entry in self.acceptance.items():
            table[name] = replace(table[name], accept=entry.accept, source=entry.source, own=True)
        return table


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
    acceptance: Acceptance | None = None


def rank(q: PlanRequest) -> list[RankedDrafter]:
    """Return the best form of each drafter and plain decoding, the fastest first."""
    accepted, depths, widths = q.assumptions(), [q.depth] if q.depth else DEPTHS, [q.width] if q.width else WIDTHS
    forms = {name: product(depths, widths if name in TREES else [1]) for name in DRAFTERS}
    forms_by_drafter = [
        [_form(q, name, min(depth, accepted[name].deepest or depth), width, accepted[name]) for depth, width in of]
        for name, of in forms.items()
    ]
    best = [max(forms_of, key=lambda one: one.multiplier) for forms_of in forms_by_drafter]
    return sorted([_form(q, PLAIN, 0, 1, None), *best], key=lambda forms_of: -forms_of.multiplier)


def _form(q: PlanRequest, name: str, depth: int, width: int, accepted: Acceptance | None) -> RankedDrafter:
    """Return one drafter in one form; without an acceptance it is plain decoding."""
    target, network = q.network(q.target), None
    if accepted is not None and DRAFTERS[name]:
        layers = accepted.layers or max(1, round(q.target.num_layers / 4))
        shapes = {"small": q.drafting, "cut": q.target.last_layers(layers), "itself": q.target}
        network = q.network(shapes[DRAFTERS[name]], q.keys(name))
    rows = 1 + depth * width
    if name in RIDING:  # the root and each node carry the whole set through the upper layers
        rows += round(UPPER * rows * ((accepted and accepted.deepest) or depth))
    took = round_of(q.seconds, target, network, depth, width, rows=rows)
    tau = 1.0 if accepted is None else accepted.tokens(depth, width)
    held = [target, *([network] if network is not None and DRAFTERS[name] != "itself" else [])]
    return RankedDrafter(
        drafter=name,
        depth=depth,
        width=width,
        rows=rows,
        tau=tau,
        round=took,
        multiplier=took.multiplier(tau),
        tokens_per_s=q.batch * tau / (took.draft + took.verify),
        holds=sum(held_bytes(each, q.batch, q.context) for each in held),
        acceptance=accepted,
    )
