"""What follows from the performance model of SPIRe beyond what plans need: costs in FLOPs, critical contexts, savings.

Source: SPIRe: Boosting LLM Inference Throughput with Speculative Decoding. Sections in docstrings are its.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from paceline.engine.costs import CostTable
from paceline.plan.throughput import Cost, RoundCost, ServedModel, pass_cost, round_of

MOST_ROWS = 2**40  # sequences: beyond it nothing changes


def paper_cost(network: ServedModel, batch: int, context: float, rows: int) -> Cost:
    """What a pass computes and reads as the paper counts: without the LM head and the arithmetic of attention."""
    headless = replace(network, shape=replace(network.shape, vocab_size=0))
    return replace(pass_cost(headless, batch, context, rows), attention=0.0)


def round_cost(
    target: ServedModel, draft: ServedModel, depth: int, batch: int, context: float, hoi: float
) -> RoundCost:
    """A round in FLOPs or their equivalents, from HOI alone (section 2). ``hoi`` in FLOPs a byte."""
    return round_of(lambda n, rows: paper_cost(n, batch, context, rows).forward(hoi), target, draft, depth)


def critical_context(network: ServedModel, hoi: float, rows: int) -> int | None:
    """L_crit of section 4 and figure 3: the longest context for which some batch makes a pass compute-bound.

    The paper gives it as a power of two (`power_of_two`). None: at any context (a sparse view, or windows). 0: at no
    context.
    """

    def memory_bound(context: int) -> bool:
        cost = paper_cost(network, 1, context, rows)
        return cost.compute < cost.kv * hoi  # in an endless batch each sequence has no part of the weights

    beyond = first_that(memory_bound)
    return None if beyond is None else beyond - 1


def critical_batch(network: ServedModel, context: float, hoi: float, rows: int) -> int | None:
    """B_crit of section 4 and figure 3: the smallest batch for which a pass is compute-bound; None: there is none."""
    return first_that(lambda batch: paper_cost(network, batch, context, rows).intensity >= hoi)


def first_that(holds: Callable[[int], bool]) -> int | None:
    """The smallest number from 1 on for which a condition holds that stays true once it is; None up to `MOST_ROWS`."""
    found = 1 + bisect_left(range(1, MOST_ROWS + 1), True, key=holds)
    return found if found <= MOST_ROWS else None


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


def nodes_that_pay(table: CostTable, accept: float, batch: int, most: int = 16) -> int:
    """Drafted nodes a sequence that give the most tokens a millisecond, of chains that cost nothing to draft and whose
    tokens are all accepted with one chance: what the automatic budget comes to over many steps (`engine.auto`)."""

    def speed(nodes: int) -> float:
        return sum(accept**n for n in range(nodes + 1)) / table.step_ms(batch, batch * nodes)

    return max(range(most + 1), key=lambda nodes: (speed(nodes), -nodes))
