"""Which drafter, depth and width pay for a target on a machine: all of them predicted, the best of each, ranked."""

from __future__ import annotations

from dataclasses import dataclass
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
    draft: ModelSizes | None = None  # None: half the target's layers and width, as in SPIRe's comparison
    weight_bytes: float | None = None  # of a stored weight; None: as the model's files
    kv_bytes: float = 2.0  # of a stored number of K/V

    def __post_init__(self) -> None:
        check(self)
        for shape in filter(None, (self.target, self.draft)):
            if self.context > (most := shape.max_position):
                raise ConfigError(
                    f"context={self.context}", f"{shape.name} has {most:,} positions", f"give 1 to {most}"
                )

    def network(self, shape: ModelSizes, keys: int | None = None) -> ServedModel:
        """Return a model as it is served here."""
        stored = self.weight_bytes or shape.weight_bytes
        return ServedModel(shape=shape, weight_bytes=stored, kv_bytes=self.kv_bytes, keys=keys)

    def seconds(self, network: ServedModel, rows: int) -> float:
        """Return the seconds of a pass over so many rows of each sequence."""
        return pass_seconds(network, self.machine, self.batch, self.context, rows)


@dataclass(frozen=True, kw_only=True)
class RankedDrafter:
    """One drafter with its depth and width, predicted. Plain decoding is one with a depth of 0."""

    drafter: str
    depth: int
    width: int
    rows: int  # of a sequence in the verifying pass
    keys: int | None  # that a sparse draft sees; None: all
    tau: float  # tokens a round
    round: RoundCost  # seconds
    tokens_per_s: float  # of the whole batch
    holds: float  # bytes of target and draft together
    acceptance: Acceptance | None = None

    @property
    def multiplier(self) -> float:
        """Return the throughput over plain decoding's."""
        return self.round.multiplier(self.tau)


def rank(q: PlanRequest) -> list[RankedDrafter]:
    """Return the best form of each drafter and plain decoding, the fastest first."""
    ranked = [predict(q, PLAIN, 0, 1, None)]
    for name, accepted in assumed(q.target.name, q.draft.name if q.draft else None, q.context).items():
        forms = product(DEPTHS[: accepted.deepest], WIDTHS if name in TREES else (1,))
        predictions = [predict(q, name, depth, width, accepted) for depth, width in forms]
        ranked.append(max(predictions, key=lambda one: one.multiplier))
    return sorted(ranked, key=lambda one: -one.multiplier)


def predict(q: PlanRequest, name: str, depth: int, width: int, accepted: Acceptance | None) -> RankedDrafter:
    """Return one drafter in one form; without an acceptance it is plain decoding."""
    target, network, keys, tau = q.network(q.target), None, None, 1.0
    held, rows = [target], 1 + depth * width
    if accepted is not None:
        tau = accepted.tokens(depth, width)
        if name in SPARSE:  # as measured, or a part of the context
            keys = min(q.context, (accepted.window or max(LEAST_WINDOW, q.context // SHARE - SINK)) + SINK)
        if name in RIDING:  # the root and each node carry the whole set through the upper layers
            rows += round(UPPER * rows * (accepted.deepest or depth))
        if kind := DRAFTERS[name]:
            layers = accepted.layers or max(1, round(q.target.num_layers / 4))
            drafting = {"small": q.draft or q.target.halved(), "cut": q.target.last_layers(layers), "itself": q.target}
            network = q.network(drafting[kind], keys)
            held += [network] if kind != "itself" else []
    took = round_of(q.seconds, target, network, depth, width, rows=rows)
    return RankedDrafter(
        drafter=name,
        depth=depth,
        width=width,
        rows=rows,
        keys=keys,
        tau=tau,
        round=took,
        tokens_per_s=q.batch * tau / (took.draft + took.verify),
        holds=sum(held_bytes(each, q.batch, q.context) for each in held),
        acceptance=accepted,
    )
