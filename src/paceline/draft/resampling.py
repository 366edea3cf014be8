"""Re-sampling and verification fusion, for every drafter whose logits of a level do not depend on drafted tokens.

Once the target has chosen which token is right, the levels after it still stand: each is of a place in the text. They
give new candidates below the new root, which are verified on top of the next draft, in place of some of it, or alone.

Source: Lyanna, sections 5.3 (Algorithm 2) and 6.2 (verification fusion).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import LevelScores
from .levels import count, cut
from .registry import DrafterConfig, option

FRESH, AGAIN = 0, 1  # source marks
MARK = "re-sampled"  # the name of the second
MOST_EXTRA = 256

Resample = Literal["off", "top", "equal", "alone"]
FORMS = (
    "candidates from what the last draft left over: off; on top of the fresh nodes; in place of some (equal rows); or "
    "alone, in place of a fresh draft"
)


# -- the options


@dataclass(frozen=True, kw_only=True)
class ResamplingConfig(DrafterConfig):
    """Base of the options of drafters that can."""

    resample: Resample = option("off", help=FORMS)
    extra: int = option(4, help="re-sampled nodes at most", minimum=1, maximum=MOST_EXTRA)
    threshold: int = option(0, help="levels left over at or below which nothing is re-sampled", minimum=0)


_WHY = "cannot re-sample: its logits of a level depend on the tokens drafted in front of it, one of which was wrong"
REFUSED: abc.Mapping[str, tuple[str, str]] = {
    name: (_WHY, f"leave {name} out, or use a drafter that has it") for name in ("resample", "extra", "threshold")
}  # for `DrafterConfig.refuses` of drafters without level logits


# -- at work


# Tokens of a text, the last of which was the root, and the levels of the draft below it
Drafted = tuple[int, LevelScores]


def left_over(drafted: Drafted | None, length: int, threshold: int) -> LevelScores | None:
    """Return Algorithm 2's levels, once the draft was verified and the text has ``length`` tokens.

    Those after the new root's level; None where they are ``threshold`` or fewer: then nothing is re-sampled.

    With a tokens accepted the target's own one is at level a + 1: rejected there, or not drafted at all. So the first
    level is of the place after the new root, as a fresh draft's first one is. Noise belongs to places, so that of
    levels that are kept as their best tokens stays right.
    """
    if drafted is None or length <= drafted[0]:
        return None
    rest = cut(drafted[1], length - drafted[0])
    return rest if count(rest) > threshold else None


class Resampling:
    """Describe what each sequence's last draft left over, and how fresh and re-sampled nodes share a budget.

    Args:
        config: of the drafter.
        nodes: of a fresh draft.
        levels: of a fresh draft.

    Raises:
        ConfigError: no fresh node is left, a threshold without re-sampling, or one deeper than the draft.
    """

    def __init__(self, config: ResamplingConfig, nodes: int, levels: int) -> None:
        self.form, self.extra, self.threshold, self.nodes = config.resample, config.extra, config.threshold, nodes
        self._drafted: dict[int, Drafted] = {}  # by sequence: levels not used again so far
        if not self.on:
            config.require("threshold", not config.threshold, "is of no meaning without re-sampling")
        else:
            rule = f"must be below the {levels - 1} levels that a draft of {levels} can leave over"
            config.require("threshold", config.threshold < levels - 1, rule)
        rule = f"must leave a fresh node: they are to be {nodes} together"
        config.require("extra", self.form != "equal" or config.extra < nodes, rule)

    @property
    def on(self) -> bool:
        """Return whether there is any."""
        return self.form != "off"

    @property
    def most(self) -> int:
        """Nodes to verify at most, re-sampled ones among them."""
        return {"top": self.nodes + self.extra, "alone": max(self.nodes, self.extra)}.get(self.form, self.nodes)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names of the source marks, for `DrafterSpec.sources` of a drafter called ``name``."""
        return (name, MARK) if self.on else ()

    def share(self, budget: int, again: bool) -> tuple[int, int]:
        """Return how many fresh and how many re-sampled nodes a budget has room for: fresh ones come first.

        Args:
            budget: nodes.
            again: whether anything was left over.
        """
        whole = min(self.nodes, budget)
        if not again:
            return whole, 0
        room = self._room(budget)
        return {"alone": 0, "equal": whole - room}.get(self.form, whole), room

    def _room(self, budget: int) -> int:
        if self.form == "alone":
            return min(self.extra, budget)
        fresh_nodes = self.nodes - self.extra if self.form == "equal" else self.nodes
        return max(0, min(self.extra, budget - fresh_nodes))

    def keep(self, view: Sequence, scores: LevelScores) -> None:
        """Note what a fresh draft is made of."""
        if self.on:
            self._drafted[view.key] = len(view.tokens), scores

    def take(self, view: Sequence, budget: int, max_depth: int) -> LevelScores | None:
        """Return the levels that were left over, as many as can be used; None: there are none, or there is no room.

        They are used in the draft that comes next or never.
        """
        if not self.on:
            return None
        drafted = self._drafted.pop(view.key, None)
        most = min(self._room(budget), max_depth)
        rest = left_over(drafted, len(view.tokens), self.threshold) if most > 0 else None
        return None if rest is None else cut(rest, 0, most)

    def fresh(self, rest: LevelScores | None) -> bool:
        """Return whether a sequence gets a fresh draft, given what it has left over."""
        return self.form != "alone" or rest is None

    def release(self, keys: abc.Sequence[int]) -> None:
        """Forget ended or preempted sequences."""
        for key in keys:
            self._drafted.pop(key, None)


def merge(fresh: TokenTree, again: TokenTree | None) -> TokenTree:
    """Verification fusion: both trees below one root. A path that both have is a fresh node.

    Args:
        fresh: left as it is.
        again: of the levels left over; None or empty: there is none.
    """
    if not again:
        return fresh
    merged = TokenTree(fresh.tokens[:], fresh.parents[:], fresh.scores[:])
    merged.graft(again, AGAIN)
    return merged
