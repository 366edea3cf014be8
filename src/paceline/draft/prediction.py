"""Predicted output: a request brings a text that its answer is likely to repeat, and drafts are read from it.

The place in the prediction is followed token by token. Where the answer departs from it, the place after the last
n-gram of the answer is looked for again, the nearest one ahead first.
"""

from __future__ import annotations

from collections import abc
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import DrafterSpec
from .ngram import LONGEST, NgramIndex, log_trust
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

SHORTEST, LONGEST_RUN = 2, 6  # runs of last tokens by which a place is found again
START = 8  # tokens that count as matched at the beginning of an answer


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(DrafterConfig):
    """Predicted output: drafts from the text that a request predicts, and nothing for those without one."""

    kind: ClassVar[str] = "prediction"

    depth: int = option(16, help="tokens drafted at once", minimum=1, maximum=1024)

    def build(self, context: DrafterContext) -> PredictionDrafter:
        return PredictionDrafter(self)


class _Progress:
    """Describe where an answer is in its prediction."""

    __slots__ = ("at", "index", "last", "read", "run")

    def __init__(self, view: Sequence) -> None:
        self.index = NgramIndex(SHORTEST, LONGEST_RUN)
        self.index.extend(view.prediction)
        self.at: int | None = 0  # of the next token; None: lost
        self.last = 0  # the place before it was lost
        self.run = START  # tokens matched so far
        self.read = view.prompt_len  # tokens of the text that were followed

    def follow(self, tokens: abc.Sequence[int], predicted: abc.Sequence[int]) -> None:
        """Take in the new tokens of the text."""
        for token in tokens[self.read :]:
            if self.at is None:
                break
            if self.at < len(predicted) and predicted[self.at] == token:
                self.at, self.run = self.at + 1, self.run + 1
            else:
                self.last, self.at = self.at, None
        new, self.read = len(tokens) > self.read, len(tokens)
        if self.at is None and new:
            self._find(tokens)

    def _find(self, tokens: abc.Sequence[int]) -> None:
        """Find the place after the longest n-gram that ends the text; of several the nearest after the last place."""
        longest, best = 0, -1
        for n, follower in self.index.matches(tokens):
            if longest and n < longest:
                break
            longest = n
            if best < 0 or self._far(follower) < self._far(best):
                best = follower
        if best >= 0:
            self.at, self.run = best, longest

    def _far(self, place: int) -> tuple[bool, int]:
        return place < self.last, abs(place - self.last)


class PredictionDrafter(LookUp):
    """Drafts the prediction's tokens from where the answer is in it."""

    def __init__(self, config: PredictionConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, observes=False, ahead=True)
        self._places: dict[int, _Progress] = {}

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Return a chain, if the sequence has a prediction and its answer is in it."""
        tokens, run = self._next(seq, (), min(self.config.depth, budget, max_depth))
        scores = [log_trust(run, level) for level in range(1, len(tokens) + 1)]
        return TokenTree(tokens, [*range(len(tokens))], scores)

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return the prediction's next token, if text and path are in it."""
        tokens, run = self._next(sequence, path, 1)
        return [(token, log_trust(run, 1)) for token in tokens]

    def _next(self, view: Sequence, path: abc.Sequence[int], most: int) -> tuple[list[int], int]:
        """Return the prediction's tokens from where text and path are in it, and how many before them match."""
        if not view.prediction:
            return [], 0
        place = self._places.get(view.key)
        if place is None:
            place = self._places[view.key] = _Progress(view)
        place.follow(view.tokens, view.prediction)
        if path:
            place = copy(place)
            place.follow([*view.tokens, *path], view.prediction)
        if place.at is None or most <= 0:
            return [], 0
        return list(view.prediction[place.at : place.at + most]), min(place.run, LONGEST)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Forget these sequences."""
        for key in keys:
            self._places.pop(key, None)
