"""Prompt lookup: continue as the last few tokens were continued where they occurred before.

Source: prompt lookup decoding (Saxena 2023); LLMA (Yang et al. 2023, arXiv 2304.04487) copies from
references in the same way. Differences: the index is updated token by token, so a step never rescans the
context; a match may run into its own continuation (periodic text).
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import DrafterSpec
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

LONGEST = 32  # matched tokens beyond which lengths are not distinguished
_LOOK_BACK = 64  # earlier occurrences of one n-gram that are looked at for another continuation: bounds a step


@dataclass(frozen=True, kw_only=True)
class NgramConfig(DrafterConfig):
    """Prompt lookup: continues as the last n tokens were continued before. Needs no model."""

    kind: ClassVar[str] = "ngram"

    max_ngram: int = option(4, help="longest run of last tokens that is looked up", minimum=1, maximum=64)
    min_ngram: int = option(1, help="shortest run of last tokens that is looked up", minimum=1, maximum=64)
    depth: int = option(8, help="tokens drafted along one continuation", minimum=1, maximum=1024)

    def validate(self) -> None:
        self.require("min_ngram", self.min_ngram <= self.max_ngram, f"must not exceed max_ngram={self.max_ngram}")

    def build(self, context: DrafterContext) -> NgramDrafter:
        return NgramDrafter(self)


class NgramIndex:
    """Describe where each n-gram of a growing token list was last seen; an update costs O(new tokens).

    An occurrence is stored as the position that follows it. The n-gram that ends the list is left out until a
    token follows it, so that every occurrence found has a continuation.
    """

    __slots__ = ("_earlier", "_indexed", "_latest", "_sizes")

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, list[int]] = {n: [-1] for n in self._sizes}  # by n, by position: the one before
        self._indexed = 1  # occurrences are known that are followed by positions below this

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Add the new tokens of ``tokens``."""
        for follower in range(self._indexed, len(tokens)):
            for n in self._sizes:
                before = -1
                if n <= follower:
                    ngram = tuple(tokens[follower - n : follower])
                    before = self._latest.get(ngram, -1)
                    self._latest[ngram] = follower
                self._earlier[n].append(before)
        self._indexed = max(self._indexed, len(tokens))

    def matches(self, tokens: abc.Sequence[int]) -> abc.Iterator[tuple[int, int]]:
        """(n, follower) for occurrences of the last n tokens, longest n first, most recent first."""
        for n in self._sizes:
            if n > len(tokens):
                continue
            follower = self._latest.get(tuple(tokens[len(tokens) - n :]), -1)
            for _ in range(_LOOK_BACK):
                if follower < 0:
                    break
                yield n, follower
                follower = self._earlier[n][follower]


class NgramDrafter(LookUp):
    """Drafts the continuation of the most recent occurrence of the longest n-gram that ends the context."""

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, observes=False, ahead=True)
        self._indices: dict[int, NgramIndex] = {}

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Return a chain."""
        depth = min(self.config.depth, max_depth, budget)
        if depth <= 0:
            return TokenTree()
        for n, follower in self._index(seq).matches(seq.tokens):
            copied = seq.tokens[follower : follower + depth]
            while len(copied) < depth:  # past the end, what was just copied repeats (periodic text)
                copied.append(copied[follower - len(seq.tokens)])  # one period back: len(tokens) - follower
            return _proposal(matched(seq.tokens, n, follower), copied, depth)
        return TokenTree()

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return what followed the longest n-grams of the text that end text and path."""
        index, tokens = self._index(sequence), [*sequence.tokens, *path]
        followers: dict[int, float] = {}
        log_rest = 0.0  # log of the chance that none of those before is right
        for n, follower in index.matches(tokens):
            if tokens[follower] not in followers:
                m = matched(tokens, n, follower)
                followers[tokens[follower]] = log_rest + log_trust(m, 1)
                log_rest += math.log(2 / (m + 2))
            if len(followers) == width:
                break
        return [*followers.items()]

    def release(self, keys: abc.Sequence[int]) -> None:
        """Forget these sequences."""
        for key in keys:
            self._indices.pop(key, None)

    def _index(self, seq: Sequence) -> NgramIndex:
        index = self._indices.get(seq.key)
        if index is None:
            index = self._indices[seq.key] = NgramIndex(self.config.min_ngram, self.config.max_ngram)
        index.extend(seq.tokens)
        return index


def log_trust(n: int, depth: int) -> float:
    """Log of the estimated chance that a match of n tokens continues alike for ``depth`` tokens.

    One token with a chance of n / (n + 2), and each makes the match longer: n / (n + 2) x (n + 1) / (n + 3) x ..; a
    rule of thumb, which the automatic budget corrects by what came of such matches.
    """
    return math.log(n * (n + 1) / ((n + depth) * (n + depth + 1)))


def matched(tokens: abc.Sequence[int], n: int, follower: int) -> int:
    """Return how many tokens before ``follower`` are those that end the text, given that ``n`` are.

    `LONGEST` at most.
    """
    end = len(tokens)
    most = min(LONGEST, follower)
    while n < most and tokens[follower - 1 - n] == tokens[end - 1 - n]:
        n += 1
    return n


def _proposal(matched: int, tokens: list[int], depth: int) -> TokenTree:
    return TokenTree(tokens, _parents(depth), _trust(matched, depth)) if matched else TokenTree()


@cache
def _parents(depth: int) -> list[int]:
    return [*range(depth)]


@cache
def _trust(n: int, depth: int) -> list[float]:
    return [log_trust(n, i) for i in range(1, depth + 1)]
