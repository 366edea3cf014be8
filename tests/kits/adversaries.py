"""Drafters that follow a rule and know the right answer: right, wrong, too much, twice, late, at random, failing."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable

import torch

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter, DrafterSpec, DraftRequest
from paceline.model.decoder import TargetInfo

Nodes = tuple[list[int], list[int]]  # parents (0: the root) and tokens
Rule = Callable[[list[int], int, int, int, random.Random], Nodes]
Known = Callable[[Sequence], abc.Sequence[int] | None]  # the right answer to a sequence, where it is known


class Adversary(Drafter):
    """Drafts by a rule, knowing the right answer where anybody does.

    Args:
        rule: (right tokens to come, budget, max depth, vocabulary, random generator) -> parents and tokens.
        known: the right answers.
    """

    def __init__(self, rule: Rule, known: Known) -> None:
        self.spec = DrafterSpec(name=rule.__name__, default_budget=7, tree=True)
        self._rule, self._known = rule, known
        self._vocab = 0

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Nothing to prepare but the size of the vocabulary."""
        self._vocab = target.vocab_size

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One tree a sequence, by the rule."""
        return [TokenTree(tokens, parents) for parents, tokens in (self._nodes(*row) for row in want.rows())]

    def _nodes(self, sequence: Sequence, budget: int, max_depth: int) -> Nodes:
        done = len(sequence.tokens) - sequence.prompt_len
        draw = random.Random(f"{sequence.tokens} {sequence.sampler.sample_index}")
        right = list(self._known(sequence) or ())[done:]
        right += draw.choices(range(self._vocab), k=max(0, max(budget, max_depth) + 8 - len(right)))
        return self._rule(right, budget, max_depth, self._vocab, draw)


def chain(tokens: list[int]) -> Nodes:
    return [*range(len(tokens))], tokens


def always_right(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """The plain answer itself, and beyond its end."""
    return chain(right[: min(budget, depth)])


def partly_right(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Right up to a random depth, wrong from there."""
    good = draw.randint(0, budget)
    return chain([t if d < good else (t + 1) % vocab for d, t in enumerate(right[: min(budget, depth)])])


def always_wrong(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Every token beside the right one."""
    return chain([(t + 1) % vocab for t in right[: min(budget, depth)]])


def empty(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """The root alone."""
    return [], []


def too_deep(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Deeper than any token can come out."""
    return chain(right[: depth + 3])


def greedy_eater(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Wider, longer and deeper than asked, and the right path begins at the last child."""
    tokens = [(right[0] + 1) % vocab, (right[0] + 2) % vocab, *right[: max(budget, depth) + 6]]
    return [0, 0, *_below(2, len(tokens) - 2)], tokens


def _below(start: int, count: int) -> list[int]:
    """Parents of a chain of ``count`` nodes that begins at the root, behind ``start`` other nodes."""
    return [0, *range(start + 1, start + count)][:count]


def duplicates(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Every right token twice among the children; either one goes on."""
    parents: list[int] = []
    tokens: list[int] = []
    below = 0
    for token in right[: min(budget // 2, depth)]:
        parents += [below, below]
        tokens += [token, token]
        below = len(tokens) - draw.randint(0, 1)
    return parents, tokens


def later_sibling(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """The right token is the last of three children on every level."""
    parents: list[int] = []
    tokens: list[int] = []
    below = 0
    for token in right[: min(budget // 3, depth)]:
        parents += [below] * 3
        tokens += [(token + 1) % vocab, (token + 2) % vocab, token]
        below = len(tokens)
    return parents, tokens


def random_trees(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Any shape at all; tokens at random, or the right one of their depth."""
    parents: list[int] = []
    tokens: list[int] = []
    depths = [0]
    for _ in range(draw.randint(0, budget)):
        parent = draw.choice([n for n, d in enumerate(depths) if d < depth])
        parents.append(parent)
        tokens.append(right[depths[parent]] if draw.random() < 0.6 else draw.randrange(vocab))
        depths.append(depths[parent] + 1)
    return parents, tokens


def unreliable(right: list[int], budget: int, depth: int, vocab: int, draw: random.Random) -> Nodes:
    """Right, until it raises or proposes a token that does not exist: it is put aside, and no request suffers."""
    if draw.random() < 0.05:
        raise RuntimeError("the drafter has had enough")
    tokens = right[: min(budget, depth)]
    return chain([*tokens[:-1], vocab] if draw.random() < 0.05 else tokens)


RULES: tuple[Rule, ...] = (always_right, partly_right, always_wrong, empty, greedy_eater, duplicates, later_sibling)
RULES += (random_trees, unreliable)
