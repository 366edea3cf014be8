"""What follows from the performance model of SPIRe beyond what plans need: costs in FLOPs, critical contexts, savings.

Source: SPIRe: Boosting LLM Inference Throughput with Speculative Decoding. Sections in docstrings are its.
"""

from __future__ import annotations

import math

from paceline.planning.throughput import Counting, Network, RoundCost, Speculation, first_that, pass_cost, round_of


def round_cost(
    speculation: Speculation, batch: int, context: float, hoi: float, counting: Counting | None = None
) -> RoundCost:
    """A round in FLOPs or their equivalents, from HOI alone (section 2). ``hoi`` in FLOPs a byte."""
    return round_of(speculation, lambda n, rows: pass_cost(n, batch, context, rows, counting).forward(hoi))


def critical_context(network: Network, hoi: float, rows: int, counting: Counting | None = None) -> int | None:
    """L_crit of section 4 and figure 3: the longest context for which some batch makes a pass compute-bound.

    The paper gives it as a power of two (`power_of_two`). None: at any context (a sparse view, or windows). 0: at no
    context.
    """

    def memory_bound(context: int) -> bool:
        cost = pass_cost(network, 1, context, rows, counting)
        return cost.compute < cost.kv * hoi  # in an endless batch each sequence has no part of the weights

    beyond = first_that(memory_bound)
    return None if beyond is None else beyond - 1


def power_of_two(value: float) -> int:
    """The largest one that is no more than ``value`` (1 or more)."""
    return 1 << (int(value).bit_length() - 1)


def saved_units(decoding: float, multiplier: float, training: float = 0.0) -> float:
    """What speculation saves of the ``decoding`` units that plain decoding would cost, less the draft's training.

    Section 5: 10 x (1 - 1 / 2.78) - 0.25 for SPIRe, in units of the target's training.
    """
    return decoding * (1 - 1 / multiplier) - training


def payback_units(training: float, multiplier: float) -> float:
    """Units of plain decoding after which a draft's training is paid for; infinite where nothing is saved."""
    return training / (1 - 1 / multiplier) if multiplier > 1 else math.inf
