"""What a forward pass costs and what speculation multiplies throughput by: the performance model of SPIRe, section 2.

    forward cost = max(compute, (weights + K/V) x HOI)          FLOPs or their equivalents
    multiplier   = tau / ((k x t_draft + t_verify) / t_target)

A pass over several rows of a sequence (verification of k drafts has k + 1) computes that many times as much, and reads
weights and K/V once. Reads and arithmetic overlap wholly, as the paper assumes.

The paper leaves the LM head and the arithmetic of attention out of the model; both are counted here. Not in the model:
activations, norms, sampling, launches, the host's time.

Source: SPIRe: Boosting LLM Inference Throughput with Speculative Decoding. Sections in docstrings are its.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError
from ..core.options import check, option
from .machines import Machine
from .models import ModelSizes

MOST_ROWS = 2**40  # sequences or tokens: beyond it nothing changes
ACTIVATION_BYTES = 2  # of one number on its way to another device
# Of the tables of costs that the draft budget reads:
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one sequence
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sequences of one row each
CONTEXT = 128  # committed tokens of each
FURTHER = 1024  # tokens beyond it, to see how costs grow
Seconds = Callable[[int, float, int], float]  # of a pass: sequences, tokens that each has, rows of each


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one stored number. Arithmetic is done at the machine's 16-bit rate whatever is stored.

    Raises:
        ConfigError: a size that is not above 0, or above 8.
    """

    weight_bytes: float = option(2.0, help="bytes of a weight, such as 2 (bf16), 1 (int8), 0.5 (4 bits)", above=0)
    kv_bytes: float = option(2.0, help="bytes of a number in the K/V cache, such as 2 or 1", above=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How one copy of the models is spread over devices.

    Raises:
        ConfigError: less than one device or stage.
    """

    tensor: int = option(1, help="devices that share every layer (tensor parallel)", minimum=1, flag="--devices")
    stages: int = option(1, help="groups of devices, each with a part of the layers (pipeline parallel)", minimum=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.stages


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as it is served: its sizes, how numbers are stored, and how many keys a row sees at most.

    Raises:
        ConfigError: a view of less than one key.
    """

    shape: ModelSizes = option(help="the sizes of the model")
    precision: Precision = field(default_factory=Precision)
    keys: int | None = option(None, help="keys of a sparse view, sinks and window together; none: all", minimum=1)

    def __post_init__(self) -> None:
        check(self)

    def seen(self, context: float) -> float:
        """Keys that a row sees of so many tokens."""
        return context if self.keys is None else min(context, self.keys)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One forward pass. Zero is a pass that is not made."""

    compute: float = 0.0  # FLOPs of products with weights
    attention: float = 0.0  # FLOPs of attention's own: rows x keys
    weights: float = 0.0  # bytes read
    kv: float = 0.0  # bytes read

    @property
    def memory(self) -> float:
        """Bytes read."""
        return self.weights + self.kv

    @property
    def intensity(self) -> float:
        """FLOPs a byte read: figure 3 is that of verification by batch size."""
        return (self.compute + self.attention) / self.memory

    def forward(self, hoi: float) -> float:
        """The forward cost of section 2, in FLOPs; ``hoi`` in FLOPs a byte."""
        return max(self.compute + self.attention, self.memory * hoi)

    def bound(self, hoi: float) -> str:
        """What takes longest: compute, weights or KV."""
        if self.compute + self.attention >= self.memory * hoi:
            return "compute"
        return "KV" if self.kv > self.weights else "weights"


def pass_cost(network: ServedModel, batch: int, context: float, rows: int = 1) -> Cost:
    """What a pass over ``rows`` tokens of each of ``batch`` sequences with ``context`` tokens computes and reads.

    A product of a row with a matrix is 2 FLOPs a weight. Attention is 4 FLOPs for each key, query head and dimension of
    it (scores, then their sum of values). What the rows themselves add to the cache is left out, as in the paper.
    """
    shape, precision = network.shape, network.precision
    keys, tokens = network.seen(context), batch * rows
    return Cost(
        compute=2 * tokens * (shape.active_parameters + shape.head_parameters),
        attention=4 * tokens * shape.num_heads * shape.head_dim * shape.key_layers(keys),
        weights=precision.weight_bytes * (shape.read_parameters(tokens) + shape.head_parameters),
        kv=precision.kv_bytes * batch * shape.kv_values(keys),
    )


def held_bytes(network: ServedModel, batch: int, context: float) -> float:
    """Bytes that a network holds: body, head, an embedding of its own, and the K/V of all sequences."""
    shape, precision = network.shape, network.precision
    weights = precision.weight_bytes * (shape.body_parameters + 2 * shape.head_parameters)
    return weights + precision.kv_bytes * batch * shape.kv_values(network.seen(context))


def pass_seconds(
    network: ServedModel, machine: Machine, batch: int, context: float, rows: int = 1, parallel: Parallel | None = None
) -> float:
    """Seconds of the pass of `pass_cost` on devices of one kind.

    Tensor parallel: every device has its share of weights, arithmetic and K/V heads (with more devices than heads some
    hold the same ones), and each layer ends in two all-reduces on a ring. Pipeline parallel: every stage works on
    another part of the batch; when all have moved on by a token, each part has been through all layers once.

    Raises:
        ConfigError: several devices that no link joins.
    """
    spread = parallel or Parallel()
    if spread.devices > 1 and not machine.link:
        asked = f"{spread.devices} devices of {machine.name}"
        raise ConfigError(asked, "no link between them is known", "use one device, or another machine")
    cost, n = pass_cost(network, math.ceil(batch / spread.stages), context, rows), spread.tensor
    heads = min(n, network.shape.num_kv_heads)
    share = Cost(compute=cost.compute / n, attention=cost.attention / n, weights=cost.weights / n, kv=cost.kv / heads)
    return share.forward(machine.hoi) / machine.flops + link_seconds(network, machine, batch, rows, spread)


def link_seconds(network: ServedModel, machine: Machine, batch: int, rows: int, parallel: Parallel) -> float:
    """Of `pass_seconds` those in which devices talk: nothing is computed meanwhile (Mirror, appendix C).

    In an all-reduce on a ring a device sends 2 (G - 1) shares of the sums; the paper prints one.
    """
    if parallel.devices == 1:
        return 0.0
    part, per_word = math.ceil(batch / parallel.stages), ACTIVATION_BYTES / machine.link
    words = part * rows * network.shape.d_model
    reduced = 2 * network.shape.num_layers * 2 * (parallel.tensor - 1) * words / parallel.tensor  # two a layer
    return (reduced + (parallel.stages - 1) * words) * per_word


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """A target, what drafts for it, and the form of the draft.

    The draft is ``width`` chains of ``depth`` tokens that begin with the likeliest first tokens: 1 is a chain. A draft
    of n passes costs n passes of ``draft``; None is a drafter without a network.

    Raises:
        ConfigError: a depth or width below 1.
    """

    target: ServedModel = option(help="what verifies")
    draft: ServedModel | None = option(None, help="what drafts; none: a look-up")
    depth: int = option(4, help="tokens of a draft, 1 or more (the paper's k)", minimum=1)
    width: int = option(1, help="chains of a draft, 1 or more", minimum=1)
    extra_rows: int = option(0, help="rows of the verifying pass beside root and draft, such as streams", minimum=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def rows(self) -> int:
        """Of one sequence in the verifying pass: the root and the draft."""
        return 1 + self.depth * self.width + self.extra_rows


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What one round of speculation takes beside one plain pass, in one unit (FLOPs, seconds or milliseconds)."""

    plain: float
    draft: float  # all passes of the draft together
    verify: float

    @property
    def iteration_multiplier(self) -> float:
        """Delta t of section 2."""
        return (self.draft + self.verify) / self.plain

    def multiplier(self, tau: float) -> float:
        """The throughput multiplier of section 2; ``tau``: mean tokens a round."""
        return tau / self.iteration_multiplier


def round_of(plan: DraftPlan, each: Callable[[ServedModel, int], float]) -> RoundCost:
    """A round whose passes over so many rows a sequence cost ``each(network, rows)``."""
    s, drafted = plan, 0.0
    if s.draft is not None:
        drafted = each(s.draft, 1) + (s.depth - 1) * each(s.draft, s.width)
    return RoundCost(plain=each(s.target, 1), draft=drafted, verify=each(s.target, s.rows))


def critical_batch(network: ServedModel, context: float, hoi: float, rows: int) -> int | None:
    """B_crit of section 4 and figure 3: the smallest batch for which a pass is compute-bound; None: there is none.

    Beyond it a larger batch adds latency and no throughput. The intensity rises with the batch, since weights are
    shared and K/V is not.
    """
    return first_that(lambda batch: pass_cost(network, batch, context, rows).intensity >= hoi)


def first_that(holds: Callable[[int], bool]) -> int | None:
    """The smallest number from 1 on for which a condition holds that stays true once it is; None up to `MOST_ROWS`."""
    found = 1 + bisect_left(range(1, MOST_ROWS + 1), True, key=holds)
    return found if found <= MOST_ROWS else None


# -- the table of costs that the engine's draft budget reads


def cost_points(seconds: Seconds, max_position: int) -> dict[str, Any]:
    """Milliseconds of passes, the fields of `engine.costs.CostTable`.

    Args:
        seconds: what passes are predicted to take.
        max_position: of the model.
    """
    context = max(0, min(CONTEXT, max_position - ROWS[-1]))
    grown = 1e6 * (seconds(1, context + FURTHER, 1) - seconds(1, context, 1)) / FURTHER
    return {
        "chain": [[rows, 1e3 * seconds(1, context, rows)] for rows in ROWS],
        "plain": [[batch, 1e3 * seconds(batch, context, 1)] for batch in BATCHES],
        "context": context,
        "context_ms": max(0.0, grown),
    }


def predicted_points(network: ServedModel, machine: Machine) -> dict[str, Any]:
    """The table of a machine that has a name, from its published peaks: no host work, no kernel's losses."""

    def seconds(batch: int, context: float, rows: int) -> float:
        return pass_seconds(network, machine, batch, context, rows)

    return cost_points(seconds, network.shape.max_position)
