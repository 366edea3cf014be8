"""The verifiers, case by case. That rejection and block draw from p is tests/lossless/test_distribution.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import verify
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.tree import SparseQ, TokenTree
from paceline.core.verify import VerifyOutcome, block, rejection, sample_and_match

VOCAB = 3


def choose(salt: int, history: tuple[int, ...]) -> int:
    """The toy target: its choice depends on the whole path."""
    state = salt
    for token in history:
        state = (state * 1103515245 + token + 12345) % 2**31
    return (state >> 8) % VOCAB


def choices(tree: TokenTree, salt: int) -> Tensor:
    """[B, N] what the toy target chooses after each node; garbage at padding."""
    chosen = torch.full(tree.tokens.shape, 77)
    for b, count in enumerate(tree.num_nodes.tolist()):
        paths: list[tuple[int, ...]] = [(int(tree.tokens[b, 0]),)]
        for node in range(1, count):
            paths.append((*paths[int(tree.parents[b, node])], int(tree.tokens[b, node])))
        chosen[b, :count] = torch.tensor([choose(salt, path) for path in paths])
    return chosen


@st.composite
def trees(draw) -> TokenTree:
    """Ragged batches of trees over a small vocabulary, so that matches and duplicate children are common."""
    parents = [
        [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 14)))] for _ in range(draw(st.integers(1, 4)))
    ]
    tokens = [[draw(st.integers(0, VOCAB - 1)) for _ in row] for row in parents]
    return TokenTree.from_parents([draw(st.integers(0, VOCAB - 1)) for _ in parents], parents, tokens)


def emitted(tree: TokenTree, outcome: VerifyOutcome, b: int) -> list[int]:
    return [int(tree.tokens[b, n]) for n in outcome.path[b].tolist() if n >= 0] + [int(outcome.next_token[b])]


def assert_equal(one: VerifyOutcome, other: VerifyOutcome) -> None:
    """Equal outcomes; the padding of the paths may differ."""
    for name in ("num_accepted", "next_token", "frontier"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    width = max(one.path.shape[1], other.path.shape[1])
    paths = [torch.nn.functional.pad(o.path, (0, width - o.path.shape[1]), value=-1) for o in (one, other)]
    assert torch.equal(*paths)


def on_cpu(o: VerifyOutcome) -> VerifyOutcome:
    return VerifyOutcome(o.path.cpu(), o.num_accepted.cpu(), o.next_token.cpu(), o.frontier.cpu())


@settings(deadline=None, max_examples=200)
@given(trees(), st.integers(0, 10**6))
def test_match_emits_what_plain_decoding_emits(tree, salt):
    chosen = choices(tree, salt)
    outcome = sample_and_match(tree, chosen)
    for b in range(len(tree.tokens)):
        plain: list[int] = []
        history = (int(tree.tokens[b, 0]),)
        for _ in emitted(tree, outcome, b):
            plain.append(choose(salt, history))
            history = (*history, plain[-1])
        assert emitted(tree, outcome, b) == plain
        assert outcome.num_accepted[b] == len(plain) - 1
        # It stops only where no first-of-its-token child carries the choice.
        stop = int(outcome.frontier[b])
        assert stop == (outcome.path[b, outcome.num_accepted[b] - 1] if len(plain) > 1 else 0)
        assert plain[-1] not in [int(tree.tokens[b, child]) for child in tree.children(b, stop)]
        # Of siblings with the same token it is the first.
        for node in outcome.path[b, : int(outcome.num_accepted[b])].tolist():
            siblings = tree.children(b, int(tree.parents[b, node]))
            assert node == next(s for s in siblings if tree.tokens[b, s] == tree.tokens[b, node])


@settings(deadline=None, max_examples=200)
@given(trees(), st.integers(0, 10**6))
def test_both_walks_agree(tree, salt):
    chosen = choices(tree, salt)
    lists = verify._match_lists(tree, chosen)
    assert_equal(lists, verify._match_tensors(tree, chosen))
    assert_equal(lists, verify._match_tensors(replace(tree, depth_bound=None), chosen))


def test_match_meets_every_accepted_length_and_later_siblings():
    """The cases that the property tests above are for do occur in trees of that kind."""
    generator = torch.Generator().manual_seed(0)
    lengths, later_sibling = set(), False
    for salt in range(300):
        parents = [int(torch.randint(0, i + 1, (), generator=generator)) for i in range(12)]
        tokens = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
        tree = TokenTree.from_parents([0], [parents], [tokens])
        outcome = sample_and_match(tree, choices(tree, salt))
        lengths.add(int(outcome.num_accepted[0]))
        path = [n for n in outcome.path[0].tolist() if n >= 0]
        later_sibling |= any(n != tree.children(0, int(tree.parents[0, n]))[0] for n in path)
    assert lengths >= {0, 1, 2, 3} and later_sibling


def test_match_of_a_large_batch_takes_the_tensor_walk_and_a_wrong_shape_is_refused():
    chain = TokenTree.from_chain(torch.arange(9).repeat(200, 1))
    chosen = torch.arange(1, 10).repeat(200, 1)
    assert chosen.numel() > verify._LIST_WALK_NODES
    outcome = sample_and_match(chain, chosen)
    assert (outcome.num_accepted == 8).all() and (outcome.next_token == 9).all() and (outcome.frontier == 8).all()
    with pytest.raises(ConfigError, match="shape"):
        sample_and_match(chain, chosen[:, :-1])


def test_bare_roots():
    tree = TokenTree.roots([1, 2])
    outcome = sample_and_match(tree, torch.tensor([[5], [6]]))
    assert outcome.path.tolist() == [[-1], [-1]] and outcome.next_token.tolist() == [5, 6]
    p = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    for verifier in (rejection, block):
        outcome = verifier(tree, p, torch.zeros(2, 1), lambda b, n: torch.zeros(3))
        assert outcome.path.tolist() == [[-1], [-1]] and outcome.next_token.tolist() == [1, 2]
        assert outcome.num_accepted.tolist() == outcome.frontier.tolist() == [0, 0]


# ---- rejection and block


def sampled_chains(seed: int, batch: int = 64, depth: int = 4) -> tuple[TokenTree, Tensor, Tensor, Tensor]:
    """Ragged chains with a q, p, uniforms, and one row of Gumbel noise a node."""
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    p = (torch.randn(batch, depth + 1, VOCAB, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    drawn = torch.multinomial(q[:, :-1].flatten(0, 1), 1, generator=generator).view(batch, depth)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), drawn], dim=1)
    lengths = torch.randint(1, depth + 2, (batch,), generator=generator)
    lengths[0] = depth + 1
    tree = TokenTree.from_chain(tokens, lengths, q=SparseQ(None, q))
    uniform = torch.rand(batch, depth + 1, generator=generator, dtype=torch.float64)
    noise = -torch.empty(batch, depth + 1, VOCAB, dtype=torch.float64).exponential_(generator=generator).log()
    return tree, p, uniform, noise


@pytest.mark.parametrize("seed", range(5))
def test_rejection_of_chains_and_of_trees_agree_on_chains(seed):
    tree, p, uniform, noise = sampled_chains(seed)
    assert tree.q is not None
    outcome = rejection(tree, p, uniform, lambda b, n: noise[b, n])
    general = verify._reject_tree(tree, tree.q, p, uniform, lambda b, n: noise[b, n])
    assert_equal(outcome, general)
    assert set(outcome.num_accepted.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("verifier", [rejection, block])
def test_rows_do_not_depend_on_their_batch(verifier):
    tree, p, uniform, noise = sampled_chains(7)
    whole = verifier(tree, p, uniform, lambda b, n: noise[b, n])
    assert tree.q is not None
    for b in range(0, 64, 5):
        count = int(tree.num_nodes[b])
        one = TokenTree.from_chain(tree.tokens[b : b + 1, :count], q=SparseQ(None, tree.q.probs[b : b + 1, :count]))
        single = verifier(one, p[b : b + 1, :count], uniform[b : b + 1, :count], lambda _, n, b=b: noise[b, n])
        assert emitted(one, single, 0) == emitted(tree, whole, b)


@pytest.mark.parametrize("verifier", [rejection, block])
def test_sparse_q_gives_what_the_dense_one_gives(verifier):
    tree, p, uniform, noise = sampled_chains(3)
    assert tree.q is not None
    order = torch.randperm(VOCAB)
    ids = torch.cat([order, torch.tensor([-1])]).expand(*tree.tokens.shape, VOCAB + 1)
    probs = torch.cat([tree.q.probs[..., order], torch.full((*tree.tokens.shape, 1), 0.5)], dim=2)
    sparse = tree.with_q(SparseQ(ids, probs))
    dense = verifier(tree, p, uniform, lambda b, n: noise[b, n])
    assert_equal(dense, verifier(sparse, p, uniform, lambda b, n: noise[b, n]))


@pytest.mark.parametrize("verifier", [rejection, block])
def test_a_perfect_draft_is_accepted_whole_and_the_bonus_comes_from_p(verifier):
    tree, _, uniform, noise = sampled_chains(1)
    assert tree.q is not None
    p = tree.q.probs
    outcome = verifier(tree, p, uniform, lambda b, n: noise[b, n])
    last = tree.num_nodes - 1
    assert torch.equal(outcome.num_accepted, last) and torch.equal(outcome.frontier, last)
    batch = torch.arange(len(last))
    assert torch.equal(outcome.next_token, (p[batch, last].log() + noise[batch, last]).argmax(dim=1))


@pytest.mark.parametrize("verifier", [rejection, block])
def test_an_impossible_draft_is_refused_at_once(verifier):
    """The target gives the drafted token no probability at all."""
    q = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    p = torch.tensor([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    tree = TokenTree.from_chain(torch.tensor([[1, 0]]), q=SparseQ(None, q))
    outcome = verifier(tree, p, torch.zeros(1, 2), lambda b, n: torch.zeros(3))
    assert outcome.num_accepted.tolist() == [0] and outcome.next_token.tolist() == [2]


def test_siblings_are_tried_in_order_against_the_residual():
    """By hand: p = (.5, .3, .2), q = (.7, .2, .1), children 0 then 1, drawn with replacement.

    Node 1 passes below .5 / .7. Then p becomes (0, .5, .5), and node 2 passes for sure (.5 > .2).
    """
    tree = TokenTree.from_parents([0], [[0, 0]], [[0, 1]]).with_q(SparseQ(None, torch.tensor([[[0.7, 0.2, 0.1]] * 3])))
    p = torch.tensor([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])

    def verdict(first: float, second: float, tree: TokenTree = tree) -> tuple[list[int], int]:
        outcome = rejection(tree, p, torch.tensor([[0.0, first, second]]), lambda b, n: torch.zeros(3))
        return [n for n in outcome.path[0].tolist() if n >= 0], int(outcome.next_token)

    assert verdict(0.71, 0.99) == ([1], 0)
    assert verdict(0.72, 0.99) == ([2], 2)
    # The same token twice: the second has no residual left, however small the uniform number.
    twice = replace(tree, tokens=torch.tensor([[0, 0, 0]]))
    assert verdict(0.72, 0.0, twice)[0] == []
    # Without replacement q loses token 0: (0, 2/3, 1/3), and node 2 passes below .5 / (2/3) = .75 only.
    assert tree.q is not None
    without = tree.with_q(replace(tree.q, replacement=False))
    assert verdict(0.72, 0.74, without) == ([2], 2)
    assert verdict(0.72, 0.76, without) == ([], 2)


def test_rejection_says_why_it_needs_q():
    tree, p, uniform, noise = sampled_chains(0)
    dropped = tree.prune(tree.real())
    for verifier in (rejection, block):
        with pytest.raises(CapabilityError, match="without q.*dropped.*sample_and_match"):
            verifier(dropped, p, uniform, lambda b, n: noise[b, n])
    assert tree.merge(tree).q is None and tree.top(1).q is None


def test_block_refuses_trees():
    tree = TokenTree.from_paths([0], [[[1], [2]]])
    tree = tree.with_q(SparseQ(None, torch.full((1, 3, VOCAB), 1 / 3)))
    with pytest.raises(CapabilityError, match="chains"):
        block(tree, torch.full((1, 3, VOCAB), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(VOCAB))


@pytest.mark.parametrize("verifier", [rejection, block])
def test_dishonest_or_misshapen_input_is_refused(verifier):
    tree, p, uniform, noise = sampled_chains(0)
    assert tree.q is not None
    zero = tree.q.probs.clone()
    zero[0, 0, tree.tokens[0, 1]] = 0.0
    bad = {
        "no probability": (tree.with_q(SparseQ(None, zero)), p, uniform),
        "whole vocabulary": (tree.with_q(SparseQ(None, tree.q.probs[..., :2])), p, uniform),
        "q of shape": (tree.with_q(SparseQ(None, tree.q.probs[:, :2])), p, uniform),
        "with p": (tree, p[:, :2], uniform),
        "accept_uniform": (tree, p, uniform[:, :2]),
    }
    for message, arguments in bad.items():
        with pytest.raises(ConfigError, match=message):
            verifier(*arguments, lambda b, n: noise[b, n])


def test_rejection_of_a_tree_refuses_nodes_that_q_cannot_have_drawn():
    tree = TokenTree.from_parents([0], [[0, 0]], [[0, 1]]).with_q(SparseQ(None, torch.tensor([[[1.0, 0.0, 0.0]] * 3])))
    with pytest.raises(ConfigError, match="node 2 of request 0.*no probability"):
        rejection(tree, torch.full((1, 3, 3), 1 / 3), torch.zeros(1, 3), lambda b, n: torch.zeros(3))


@pytest.mark.gpu
def test_verifiers_on_cuda_give_what_they_give_on_the_cpu():
    tree, p, uniform, noise = sampled_chains(2)
    there = tree.to("cuda")
    for verifier in (rejection, block):
        here = verifier(tree, p, uniform, lambda b, n: noise[b, n])
        other = verifier(there, p.cuda(), uniform.cuda(), lambda b, n: noise[b, n].cuda())
        assert_equal(here, on_cpu(other))
    chosen = choices(tree, 5)
    here, other = sample_and_match(tree, chosen), sample_and_match(there, chosen.cuda())
    assert_equal(here, on_cpu(other))
