"""Two lossy ways to decide: the result is not what the target would have emitted (SpecPipe, section 3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .flight import Draft

TOP_P = 0.9  # of the set in which `within_top_p` accepts

# (the target's scores [V], after the request's rules; drafts in flight) -> a token; None: the target's own choice
Accept = Callable[[Tensor, Mapping[int, Draft]], int | None]


def relaxed(scores: Tensor, drafts: Mapping[int, Draft]) -> int | None:
    """Choose the target's favourite among drafts above the newest level, so that the pipeline never stalls.

    Any other draft costs ticks: a late sibling at once, one that nothing is left of soon. Drafts that the request's
    rules forbid are none. Of equals the lowest id is taken.
    """
    allowed = [token for token in sorted(drafts) if float(scores[token]) > -math.inf]
    farthest = max((drafts[token].reach for token in allowed), default=None)
    in_time = [token for token in allowed if drafts[token].reach == farthest]
    return max(in_time, key=lambda token: float(scores[token]), default=None)


def within_top_p(scores: Tensor, drafts: Mapping[int, Draft], p: float = TOP_P) -> int | None:
    """Choose, of the drafts in the target's top-p set, the one that the source ranks highest.

    The set is the smallest one of likeliest tokens whose probabilities reach ``p`` together.
    """
    chances = torch.softmax(scores.double(), dim=0)
    ordered, ids = chances.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    inside = {*ids[(before < p) & (ordered > 0)].tolist()}
    among = (token for token in sorted(drafts) if token in inside)
    return max(among, key=lambda token: drafts[token].score, default=None)


RULES: dict[str, Accept | None] = {"strict": None, "lossy_relaxed": relaxed, "lossy_top_p": within_top_p}
