"""The verifiers, case by case. That rejection and block draw from p is tests/lossless/test_distribution.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.verdicts import sample_and_match
from torch import Tensor

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, block, rejection

VOCAB = 3


def choose(salt: int, history: tuple[int, ...]) -> int:
    """The toy target: its choice depends on the whole path."""
    state = salt
    for token in history:
        state = (state * 1103515245 + token + 12345) % 2**31
    return (state >> 8) % VOCAB


def choices(tree: TokenTree, salt: int) -> list[list[int]]:
    """[B][N] what the toy target chooses after each node."""
    chosen = []
    for tokens, parents in zip(tree.tokens, tree.parents, strict=True):
        paths: list[tuple[int, ...]] = [(tokens[0],)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        chosen.append([choose(salt, path) for path in paths])
    return chosen


def children(tree: TokenTree, b: int, node: int) -> list[int]:
    return [n for n, parent in enumerate(tree.parents[b]) if parent == node]


@st.composite
def trees(draw) -> TokenTree:
    """Ragged batches of trees over a small vocabulary, so that matches and duplicate children are common."""
    parents = [
        [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 14)))] for _ in range(draw(st.integers(1, 4)))
    ]
    tokens = [[draw(st.integers(0, VOCAB - 1)) for _ in row] for row in parents]
    return TokenTree.from_parents([draw(st.integers(0, VOCAB - 1)) for _ in parents], parents, tokens)


def emitted(tree: TokenTree, verdict: Accepted, b: int) -> list[int]:
    return [*(tree.tokens[b][n] for n in verdict[0]), verdict[1]]


@settings(deadline=None, max_examples=200)
@given(trees(), st.integers(0, 10**6))
def test_match_emits_what_plain_decoding_emits(tree, salt):
    for b, verdict in enumerate(sample_and_match(tree, choices(tree, salt))):
        plain: list[int] = []
        history = (tree.tokens[b][0],)
        for _ in emitted(tree, verdict, b):
            plain.append(choose(salt, history))
            history = (*history, plain[-1])
        assert emitted(tree, verdict, b) == plain
        # It stops only where no first-of-its-token child carries the choice.
        stop = verdict[0][-1] if verdict[0] else 0
        assert plain[-1] not in [tree.tokens[b][child] for child in children(tree, b, stop)]
        # Of siblings with the same token it is the first.
        for node in verdict[0]:
            siblings = children(tree, b, tree.parents[b][node])
            assert node == next(s for s in siblings if tree.tokens[b][s] == tree.tokens[b][node])


def test_match_meets_every_accepted_length_and_later_siblings():
    """The cases that the property tests above are for do occur in trees of that kind."""
    generator = torch.Generator().manual_seed(0)
    lengths, later_sibling = set(), False
    for salt in range(300):
        parents = [int(torch.randint(0, i + 1, (), generator=generator)) for i in range(12)]
        tokens = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
        tree = TokenTree.from_parents([0], [parents], [tokens])
        ((path, _),) = sample_and_match(tree, choices(tree, salt))
        lengths.add(len(path))
        later_sibling |= any(n != children(tree, 0, tree.parents[0][n])[0] for n in path)
    assert lengths >= {0, 1, 2, 3} and later_sibling


def chains(rows: list[list[int]], q: Tensor) -> TokenTree:
    """Chains of whole rows of tokens, drawn from ``q``."""
    tree = TokenTree.from_parents(
        [row[0] for row in rows], [range(len(row) - 1) for row in rows], [row[1:] for row in rows]
    )
    return replace(tree, q=q)


def sampled_chains(seed: int, batch: int = 64, depth: int = 4) -> tuple[TokenTree, Tensor, Tensor, Tensor]:
    """Ragged chains with a q, p, uniforms, and one row of Gumbel noise a node."""
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    p = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    drawn = torch.multinomial(q[:, :-1].flatten(0, 1), 1, generator=generator).view(batch, depth)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), drawn], dim=1)
    lengths = torch.randint(1, depth + 2, (batch,), generator=generator)
    lengths[0] = depth + 1
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    tree = chains(rows, q)
    uniform = torch.rand(batch, depth + 1, generator=generator, dtype=torch.float64)
    noise = -torch.empty(batch, depth + 1, VOCAB, dtype=torch.float64).exponential_(generator=generator).log()
    return tree, p, uniform, noise


def test_siblings_are_tried_in_order_against_the_residual():
    """By hand: p = (.5, .3, .2), q = (.7, .2, .1), children 0 then 1, drawn without replacement.

    Node 1 passes below .5 / .7. Then p becomes (0, .5, .5) and q loses token 0: (0, 2/3, 1/3), so that node 2 passes
    below .5 / (2/3) = .75.
    """
    tree = replace(TokenTree.from_parents([0], [[0, 0]], [[0, 1]]), q=torch.tensor([[[0.7, 0.2, 0.1]] * 3]))
    p = torch.tensor([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])

    def verdict(first: float, second: float) -> Accepted:
        (found,) = rejection(tree, p, torch.tensor([[0.0, first, second]]), lambda b, n: torch.zeros(3))
        return found

    assert verdict(0.71, 0.99) == ([1], 0)
    assert verdict(0.72, 0.74) == ([2], 2)
    assert verdict(0.72, 0.76) == ([], 2)


def test_rejection_says_why_it_needs_q():
    tree, p, uniform, noise = sampled_chains(0)
    dropped = tree.subset([range(count) for count in tree.counts])
    for verifier in (rejection, block):
        with pytest.raises(CapabilityError, match="without q.*dropped.*sample_and_match"):
            verifier(dropped, p, uniform, lambda b, n: noise[b, n])


def test_block_refuses_trees():
    tree = TokenTree.from_parents([0], [[0, 0]], [[1, 2]])
    tree = replace(tree, q=torch.full((1, 3, VOCAB), 1 / 3))
    with pytest.raises(CapabilityError, match="chains"):
        block(tree, torch.full((1, 3, VOCAB), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(VOCAB))


@pytest.mark.parametrize("verifier", [rejection, block])
def test_dishonest_or_misshapen_input_is_refused(verifier):
    tree, p, uniform, noise = sampled_chains(0)
    assert tree.q is not None
    zero = tree.q.clone()
    zero[0, 0, tree.tokens[0][1]] = 0.0
    bad = {
        "no probability": (replace(tree, q=zero), p, uniform),
        "whole vocabulary": (replace(tree, q=tree.q[..., :2]), p, uniform),
        "q of shape": (replace(tree, q=tree.q[:, :2]), p, uniform),
        "with p": (tree, p[:, :2], uniform),
        "accept_uniform": (tree, p, uniform[:, :2]),
    }
    for message, arguments in bad.items():
        with pytest.raises(ConfigError, match=message):
            verifier(*arguments, lambda b, n: noise[b, n])


def test_rejection_of_a_tree_refuses_nodes_that_q_cannot_have_drawn():
    tree = replace(TokenTree.from_parents([0], [[0, 0]], [[0, 1]]), q=torch.tensor([[[1.0, 0.0, 0.0]] * 3]))
    with pytest.raises(ConfigError, match="node 2 of request 0.*no probability"):
        rejection(tree, torch.full((1, 3, 3), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(3))


@pytest.mark.gpu
def test_verifiers_on_cuda_give_what_they_give_on_the_cpu():
    tree, p, uniform, noise = sampled_chains(2)
    for verifier in (rejection, block):
        here = verifier(tree, p, uniform, lambda b, n: noise[b, n])
        assert here == verifier(tree, p.cuda(), uniform.cuda(), lambda b, n: noise[b, n].cuda())
