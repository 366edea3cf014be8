"""Rejection and block verification draw from p: chi-square tests, with their power shown.

The toy target and draft are tables: p(. | prefix) and q(. | prefix) for every prefix. What a verifier
emits is continued by plain draws from p to a fixed length, so that the joint distribution of several
tokens is known exactly. Two resolutions of the same samples: one token (finds a small bias), and the joint
of three tokens (finds a bias that depends on the history). Seeds are fixed. A right procedure fails at
p-value < ALPHA; every test of the kind is shown to reject wrong procedures at p-value < OVERWHELMING.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import chi2, chisquare, ncx2
from torch import Tensor

from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, block, rejection

ALPHA = 1e-3
OVERWHELMING = 1e-9
SAMPLES = 40_000  # where nothing shall be found
FEWER = 25_000  # where something shall
VOCAB = 4
Verifier = Callable[..., list[Accepted]]

CHAIN = [0, 1]  # parents of nodes 1, 2, ...
WIDE = [0, 0, 0, 1, 1, 2, 3, 3]  # three children, of which the first and the last have two, the second one


@dataclass(frozen=True)
class Tables:
    """p, q and what the draft says of q after every prefix of each length: entry d is [VOCAB ** d, VOCAB]."""

    p: list[Tensor]
    q: list[Tensor]
    told: list[Tensor]

    @staticmethod
    def random(seed: int, depth: int) -> Tables:
        generator = torch.Generator().manual_seed(seed)

        def table(d: int) -> Tensor:
            return torch.randn(VOCAB**d, VOCAB, generator=generator, dtype=torch.float64).mul(0.8).softmax(dim=1)

        p, q = ([table(d) for d in range(depth + 1)] for _ in range(2))
        return Tables(p, q, q)

    def joint(self, length: int) -> Tensor:
        """[VOCAB ** length]: the exact probability of every sequence under plain decoding."""
        joint = torch.ones(1, dtype=torch.float64)
        for d in range(length):
            joint = (joint[:, None] * self.p[d]).flatten()
        return joint


def draft(
    tables: Tables, parents: list[int], batch: int, generator: torch.Generator, replacement: bool = False
) -> tuple[list[TokenTree], Tensor, Tensor]:
    """Draws of a tree of the given shape, p at every node [B, N, V], and each node's prefix code [B, N].

    They are honest where siblings are drawn without replacement and ``tables.told`` is q.
    """
    count = len(parents) + 1
    depth, code, tokens = [0], [torch.zeros(batch, dtype=torch.int64)], [torch.zeros(batch, dtype=torch.int64)]
    taken: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        weights = tables.q[depth[parent]][code[parent]].clone()  # [B, V]
        if not replacement:
            for sibling in taken.get(parent, []):
                weights.scatter_(1, tokens[sibling][:, None], 0.0)
        taken.setdefault(parent, []).append(node)
        tokens.append(torch.multinomial(weights, 1, generator=generator).squeeze(1))
        depth.append(depth[parent] + 1)
        code.append(code[parent] * VOCAB + tokens[node])
    p = torch.stack([tables.p[depth[n]][code[n]] for n in range(count)], dim=1)
    q = torch.stack([tables.told[depth[n]][code[n]] for n in range(count)], dim=1)
    return trees_of(parents, torch.stack(tokens, dim=1), q), p, torch.stack(code, dim=1)


def trees_of(parents: list[int], tokens: Tensor, q: Tensor) -> list[TokenTree]:
    """Trees of one shape with ``tokens`` [B, N], the root's first, drawn from ``q`` [B, N, V]."""
    rows = zip(tokens[:, 1:].tolist(), q, strict=True)
    return [TokenTree(row, parents, q={node: own[node] for node in {*parents}}) for row, own in rows]


@dataclass(frozen=True)
class Outcome:
    """Verdicts as tensors, [B] each."""

    num_accepted: Tensor
    frontier: Tensor  # the last accepted node; 0: the root
    next_token: Tensor


def verify(verifier: Verifier, trees: list[TokenTree], p: Tensor, generator: torch.Generator) -> Outcome:
    batch, width, vocab = p.shape
    uniform = torch.rand(batch, width, generator=generator, dtype=torch.float64)
    rows = -torch.empty(batch, vocab, dtype=torch.float64).exponential_(generator=generator).log()
    noise = list(rows.unbind())
    verdicts = verifier(trees, p, uniform, lambda b, node: noise[b])
    ends = [(len(path), path[-1] if path else 0, token) for path, token in verdicts]
    return Outcome(*torch.tensor(ends).unbind(dim=1))


def sequences(tables: Tables, outcome: Outcome, code: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """[B] code of the first ``length`` tokens: what was emitted, continued by plain decoding, cut there."""
    prefix = code.gather(1, outcome.frontier[:, None]).squeeze(1) * VOCAB + outcome.next_token
    known = outcome.num_accepted + 1  # [B] tokens in prefix
    result = torch.zeros_like(prefix)
    for have in range(1, int(known.max()) + 1):
        rows = (known == have).nonzero().squeeze(1)
        codes = prefix[rows]
        for d in range(have, length):
            codes = codes * VOCAB + torch.multinomial(tables.p[d][codes], 1, generator=generator).squeeze(1)
        result[rows] = codes // VOCAB ** max(have - length, 0)
    return result


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square of samples [n] against the probabilities of their values."""
    counts = torch.bincount(observed, minlength=len(expected)).double()
    expected = expected * len(observed)
    assert expected.min() > 5, "cells too thin for a chi-square test"
    return float(chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue)


def run(
    verifier: Verifier,
    shape: list[int],
    samples: int,
    *,
    replacement: bool = False,
    spoil: Callable[[list[Tensor]], list[Tensor]] = list,
) -> list[float]:
    """p-values of one emitted token and of three against p; ``spoil`` makes the draft dishonest."""
    generator = torch.Generator().manual_seed(0)
    tables = Tables.random(100, depth=3)
    tables = replace(tables, told=spoil(tables.q))
    trees, p, code = draft(tables, shape, samples, generator, replacement)
    outcome = verify(verifier, trees, p, generator)
    return [p_value(sequences(tables, outcome, code, n, generator), tables.joint(n)) for n in (1, 3)]


CASES = {"rejection, chain": (rejection, CHAIN), "rejection, tree": (rejection, WIDE), "block, chain": (block, CHAIN)}


@pytest.mark.parametrize("case", CASES)
def test_emits_the_distribution_of_the_target(case):
    assert min(run(*CASES[case], SAMPLES)) > ALPHA


def wrong_q(q: list[Tensor]) -> list[Tensor]:
    """The draft lies: it reports a q sharper by half (temperature 0.67) than it drew from."""
    return [table.log().mul(1.5).softmax(1) for table in q]


def wrong_q_below_the_root(q: list[Tensor]) -> list[Tensor]:
    """As `wrong_q`, but honest about the first token."""
    return [q[0], *wrong_q(q[1:])]


@pytest.mark.parametrize("case", CASES)
def test_the_same_test_finds_a_draft_that_lies_about_q(case):
    assert max(run(*CASES[case], FEWER, spoil=wrong_q)) < OVERWHELMING


def test_only_the_joint_finds_a_lie_about_later_tokens():
    one, three = run(rejection, CHAIN, SAMPLES, spoil=wrong_q_below_the_root)
    assert three < OVERWHELMING and one > ALPHA


def test_the_same_test_finds_siblings_drawn_with_replacement():
    assert run(rejection, WIDE, FEWER, replacement=True)[0] < OVERWHELMING


def test_the_same_test_finds_siblings_that_are_not_in_draw_order():
    """Siblings sorted by q after the draw, as a tree that ranks its nodes would have them."""

    def ranked(tree: TokenTree) -> TokenTree:
        return replace(tree, tokens=sorted(tree.tokens, key=lambda token: -float(tree.q[0][token])))

    generator = torch.Generator().manual_seed(0)
    tables = Tables.random(100, depth=1)
    trees, p, _ = draft(tables, [0, 0, 0], SAMPLES, generator)

    def first_tokens(trees: list[TokenTree]) -> Tensor:
        outcome = verify(rejection, trees, p, generator)
        tokens = torch.tensor([[-1, *tree.tokens] for tree in trees])
        accepted = tokens.gather(1, outcome.frontier[:, None]).squeeze(1)
        return torch.where(outcome.num_accepted > 0, accepted, outcome.next_token)

    assert p_value(first_tokens(trees), tables.p[0][0]) > ALPHA
    assert p_value(first_tokens([*map(ranked, trees)]), tables.p[0][0]) < OVERWHELMING


@pytest.mark.parametrize("verifier", [rejection, block])
def test_the_same_test_finds_a_deterministic_child(verifier):
    """A child that was not drawn but is q's likeliest: p = (.5, .3, .2) comes out as (.71, .14, .14)."""
    samples = 20_000
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def first_tokens(drawn: Tensor) -> Tensor:
        tokens = torch.stack([torch.zeros_like(drawn), drawn], dim=1)
        tree = trees_of([0], tokens, q.expand(samples, 2, 3))
        outcome = verify(verifier, tree, p.expand(samples, 2, 3), generator)
        return torch.where(outcome.num_accepted > 0, drawn, outcome.next_token)

    honest = first_tokens(torch.multinomial(q, samples, replacement=True, generator=generator))
    assert p_value(honest, p) > ALPHA
    likeliest = first_tokens(torch.zeros(samples, dtype=torch.int64))
    assert p_value(likeliest, p) < OVERWHELMING
    measured = torch.bincount(likeliest, minlength=3) / samples
    assert torch.allclose(measured.double(), torch.tensor([5 / 7, 1 / 7, 1 / 7]).double(), atol=0.015)


def test_power_of_the_one_token_test():
    """At 40,000 samples a shift of 1.5% of the probability mass is found with probability above 0.999."""
    shift = 0.015
    p = Tables.random(100, depth=0).p[0][0]
    # The least visible way to move mass: from the likeliest to the second likeliest token.
    top = p.sort(descending=True).values[:2]
    noncentrality = SAMPLES * shift**2 * float((1 / top).sum())
    threshold = chi2.isf(ALPHA, VOCAB - 1)
    assert ncx2.sf(threshold, VOCAB - 1, noncentrality) > 0.999


def test_block_accepts_what_the_theory_says_and_more_than_rejection():
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 tokens by rejection, 11/9 by blocks."""
    samples = 40_000
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(samples, 3, 2)
    q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 2 * samples, replacement=True, generator=generator).view(samples, 2)
    tokens = torch.cat([torch.zeros(samples, 1, dtype=torch.int64), drawn], dim=1)
    tree = trees_of([0, 1], tokens, q.expand(samples, 3, 2))
    for verifier, mean in ((rejection, 10 / 9), (block, 11 / 9)):
        accepted = verify(verifier, tree, p, generator).num_accepted.double()
        standard_error = float(accepted.std()) / samples**0.5
        assert abs(float(accepted.mean()) - mean) < 4 * standard_error  # 4 errors are 0.018, a sixth of the gap
