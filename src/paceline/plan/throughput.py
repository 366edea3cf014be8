"""What a forward pass costs and what speculation multiplies throughput by: the performance model of SPIRe, section 2.

    forward cost = max(compute, (weights + K/V) x HOI)          FLOPs or their equivalents
    multiplier   = tau / ((k x t_draft + t_verify) / t_target)

A pass over several rows computes that many times as much and reads weights and K/V once; reads and arithmetic overlap.
The paper leaves the LM head and attention's arithmetic out of the model; both are counted here. Not in it: activations,
norms, sampling, launches, the host's time.

Source: SPIRe: Boosting LLM Inference Throughput with Speculative Decoding. Sections in docstrings are its.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .machines import Machine
from .models import ModelSizes


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as it is served: its sizes, how numbers are stored, and how many keys a row sees at most.

    Arithmetic is done at the machine's 16-bit rate whatever is stored.
    """

    shape: ModelSizes
    weight_bytes: float = 2.0  # of a weight: 2 (bf16), 1 (int8), 0.5 (4 bits)
    kv_bytes: float = 2.0  # of a number in the K/V cache
    keys: int | None = None  # of a sparse view, sinks and window together; None: all

    def seen(self, context: float) -> float:
        """Return the keys that a row sees of so many tokens."""
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
        """Return the bytes read."""
        return self.weights + self.kv

    @property
    def intensity(self) -> float:
        """Return the FLOPs a byte read: figure 3 is that of verification by batch size."""
        return (self.compute + self.attention) / self.memory

    def forward(self, hoi: float) -> float:
        """Return the forward cost of section 2, in FLOPs; ``hoi`` in FLOPs a byte."""
        return max(self.compute + self.attention, self.memory * hoi)

    def bound(self, hoi: float) -> str:
        """Return what takes longest: compute, weights or KV."""
        if self.compute + self.attention >= self.memory * hoi:
            return "compute"
        return "KV" if self.kv > self.weights else "weights"


def pass_cost(network: ServedModel, batch: int, context: float, rows: int = 1) -> Cost:
    """Return the cost of a pass over ``rows`` tokens of each of ``batch`` sequences with ``context`` tokens.

    A product is 2 FLOPs a row and weight, attention 4 for each key, query head and dimension of it (scores, then their
    sum of values). What the rows themselves add to the cache is left out, as in the paper.
    """
    shape, keys, tokens = network.shape, network.seen(context), batch * rows
    return Cost(
        compute=2 * tokens * (shape.body_parameters + shape.head_parameters),
        attention=4 * tokens * shape.num_heads * shape.head_dim * shape.key_layers(keys),
        weights=network.weight_bytes * (shape.body_parameters + shape.head_parameters),
        kv=network.kv_bytes * batch * shape.kv_values(keys),
    )


def held_bytes(network: ServedModel, batch: int, context: float) -> float:
    """Return the bytes that a network holds: body, head, an embedding of its own, and the K/V of all sequences."""
    shape = network.shape
    weights = network.weight_bytes * (shape.body_parameters + 2 * shape.head_parameters)
    return weights + network.kv_bytes * batch * shape.kv_values(network.seen(context))


def pass_seconds(network: ServedModel, machine: Machine, batch: int, context: float, rows: int = 1) -> float:
    """Return the seconds of the pass of `pass_cost` on a device."""
    return pass_cost(network, batch, context, rows).forward(machine.hoi) / machine.flops


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """The cost of one round of speculation next to one plain pass, in one unit (FLOPs, seconds or milliseconds)."""

    plain: float
    draft: float  # all passes of the draft together
    verify: float

    def multiplier(self, tau: float) -> float:
        """Return the throughput multiplier of section 2; ``tau``: mean tokens a round."""
        return tau / ((self.draft + self.verify) / self.plain)


def round_of(
    each: Callable[[ServedModel, int], float],
    target: ServedModel,
    draft: ServedModel | None,
    depth: int,
    width: int = 1,
    *,
    rows: int | None = None,
) -> RoundCost:
    """Return a round whose passes over so many rows a sequence cost ``each(network, rows)``.

    Args:
        draft: the draft model, in one pass a level; None: a drafter without a network.
        depth: tokens of a chain (the paper's k); 0 is plain decoding.
        width: chains of a draft, which begin with the likeliest first tokens.
        rows: of a sequence in the verifying pass; default: the root and the draft.
    """
    drafted = 0.0 if draft is None else each(draft, 1) + (depth - 1) * each(draft, width)
    return RoundCost(plain=each(target, 1), draft=drafted, verify=each(target, rows or 1 + depth * width))
