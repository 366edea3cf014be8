"""The verifiers, case by case. That rejection and block draw from p is tests/lossless/test_distribution.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, block, rejection, walk

VOCAB = 3


def choose(salt: int, history: tuple[int, ...]) -> int:
    """The toy target: its choice depends on the whole path."""
    state = salt
    for token in history:
        state = (state * 1103515245 + token + 12345) % 2**31
    return (state >> 8) % VOCAB


def choices(tree: TokenTree, salt: int) -> list[int]:
    """[nodes] what the toy target chooses after each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return [choose(salt, path) for path in paths]


def children(tree: TokenTree, node: int) -> list[int]:
    return [n for n, parent in enumerate(tree.parents, start=1) if parent == node]


@st.composite
def trees(draw) -> TokenTree:
    """Trees over a small vocabulary, so that matches and duplicate children are common."""
    parents = [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 14)))]
    return TokenTree([draw(st.integers(0, VOCAB - 1)) for _ in parents], parents)


@settings(deadline=None, max_examples=400)
@given(trees(), st.integers(0, 10**6))
def test_match_emits_what_plain_decoding_emits(tree, salt):
    path, token = walk(tree, choices(tree, salt))
    emitted, plain = [*(tree.tokens[n - 1] for n in path), token], list[int]()
    for _ in emitted:
        plain.append(choose(salt, tuple(plain)))
    assert emitted == plain
    # It stops only where no first-of-its-token child carries the choice.
    stop = path[-1] if path else 0
    assert token not in [tree.tokens[child - 1] for child in children(tree, stop)]
    # Of siblings with the same token it is the first.
    for node in path:
        siblings = children(tree, tree.parents[node - 1])
        assert node == next(s for s in siblings if tree.tokens[s - 1] == tree.tokens[node - 1])


def sampled_chains(seed: int, batch: int = 64, depth: int = 4) -> tuple[list[TokenTree], Tensor, Tensor, Tensor]:
    """Ragged chains with a q, p, uniforms, and one row of Gumbel noise a node."""
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    p = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    drawn = torch.multinomial(q[:, :-1].flatten(0, 1), 1, generator=generator).view(batch, depth)
    lengths = torch.randint(0, depth + 1, (batch,), generator=generator)
    lengths[0] = depth
    rows = [row[:length] for row, length in zip(drawn.tolist(), lengths.tolist(), strict=True)]
    trees = [TokenTree(row, [*range(len(row))], q=dict(enumerate(own))) for row, own in zip(rows, q, strict=True)]
    uniform = torch.rand(batch, depth + 1, generator=generator, dtype=torch.float64)
    noise = -torch.empty(batch, depth + 1, VOCAB, dtype=torch.float64).exponential_(generator=generator).log()
    return trees, p, uniform, noise


def test_siblings_are_tried_in_order_against_the_residual():
    """By hand: p = (.5, .3, .2), q = (.7, .2, .1), children 0 then 1, drawn without replacement.

    Node 1 passes below .5 / .7. Then p becomes (0, .5, .5) and q loses token 0: (0, 2/3, 1/3), so that node 2 passes
    below .5 / (2/3) = .75.
    """
    tree = TokenTree([0, 1], [0, 0], q={0: torch.tensor([0.7, 0.2, 0.1])})
    p = torch.tensor([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])

    def verdict(first: float, second: float) -> Accepted:
        (found,) = rejection([tree], p, torch.tensor([[0.0, first, second]]), lambda b, n: torch.zeros(3))
        return found

    assert verdict(0.71, 0.99) == ([1], 0)
    assert verdict(0.72, 0.74) == ([2], 2)
    assert verdict(0.72, 0.76) == ([], 2)


def test_rejection_says_why_it_needs_q():
    trees, p, uniform, noise = sampled_chains(0)
    dropped = [tree.subset(range(1, len(tree) + 1)) for tree in trees]
    for verifier in (rejection, block):
        with pytest.raises(CapabilityError, match="without q.*dropped.*sample_and_match"):
            verifier(dropped, p, uniform, lambda b, n: noise[b, n])


def test_block_refuses_trees():
    tree = TokenTree([1, 2], [0, 0], q={0: torch.full((VOCAB,), 1 / 3)})
    with pytest.raises(CapabilityError, match="chains"):
        block([tree], torch.full((1, 3, VOCAB), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(VOCAB))


@pytest.mark.parametrize("verifier", [rejection, block])
def test_dishonest_or_misshapen_input_is_refused(verifier):
    trees, p, uniform, noise = sampled_chains(0)
    first = trees[0]
    zero = first.q[0].clone()
    zero[first.tokens[0]] = 0.0
    bad = {
        "no probability": ([replace(first, q=first.q | {0: zero}), *trees[1:]], p, uniform),
        "q of shape": ([replace(first, q=first.q | {0: zero[:2]}), *trees[1:]], p, uniform),
        "with p": (trees, p[:, :2], uniform),
        "accept_uniform": (trees, p, uniform[:, :2]),
    }
    for message, arguments in bad.items():
        with pytest.raises(ConfigError, match=message):
            verifier(*arguments, lambda b, n: noise[b, n])


def test_rejection_of_a_tree_refuses_nodes_that_q_cannot_have_drawn():
    tree = TokenTree([0, 1], [0, 0], q={0: torch.tensor([1.0, 0.0, 0.0])})
    with pytest.raises(ConfigError, match="node 2 of request 0.*no probability"):
        rejection([tree], torch.full((1, 3, 3), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(3))


@pytest.mark.gpu
def test_verifiers_on_cuda_give_what_they_give_on_the_cpu():
    trees, p, uniform, noise = sampled_chains(2)
    for verifier in (rejection, block):
        here = verifier(trees, p, uniform, lambda b, n: noise[b, n])
        assert here == verifier(trees, p.cuda(), uniform.cuda(), lambda b, n: noise[b, n].cuda())
