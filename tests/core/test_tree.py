"""Every operation of `TokenTree` against a plain model of a tree: the list of its nodes' token paths."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.tree import SparseQ, TokenTree
from paceline.core.tree_lists import TreeLists

quick = settings(max_examples=60, deadline=None)

VOCAB = 4  # small, so that duplicate children occur


@st.composite
def trees(draw, max_batch: int = 3, max_nodes: int = 9, scored: bool = False) -> TokenTree:
    """A ragged batch of random trees; duplicate children and bare roots included."""
    batch = draw(st.integers(1, max_batch))
    parents, tokens, scores = [], [], []
    for _ in range(batch):
        count = draw(st.integers(0, max_nodes))
        parents.append([draw(st.integers(0, i)) for i in range(count)])
        tokens.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)))
        scores.append(draw(st.lists(st.integers(-5, 0).map(float), min_size=count, max_size=count)))
    roots = draw(st.lists(st.integers(0, VOCAB - 1), min_size=batch, max_size=batch))
    source = [[i % 7 for i in range(len(row))] for row in tokens]
    tree = TokenTree.from_parents(roots, parents, tokens, source, scores if scored else None)
    tree.check()
    return tree


@st.composite
def trees_with_same_roots(draw) -> tuple[TokenTree, TokenTree]:
    one = draw(trees(max_batch=2))
    other = draw(trees(max_batch=2).filter(lambda tree: len(tree.tokens) == len(one.tokens)))
    return one, replace(other, tokens=torch.cat([one.tokens[:, :1], other.tokens[:, 1:]], dim=1))


@st.composite
def trees_and_closed_sets(draw) -> tuple[TokenTree, torch.Tensor]:
    """A tree and a set of its nodes that is closed under ancestors."""
    tree = draw(trees())
    batch, width = tree.tokens.shape
    picked = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * width, max_size=batch * width)))
    picked = picked.view(batch, width) & tree.real()
    picked[:, 0] = True
    return tree, (tree.ancestor_mask() & picked[:, :, None]).any(dim=1)


def node_paths(tree: TokenTree, b: int) -> list[tuple[int, ...]]:
    """Token path of each real node from below the root, by following parents one by one."""
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    paths: list[tuple[int, ...]] = []
    for node in range(int(tree.num_nodes[b])):
        paths.append(() if node == 0 else (*paths[parents[node]], tokens[node]))
    return paths


def ancestors(tree: TokenTree, b: int, node: int) -> set[int]:
    """The node and everything above it."""
    found = {node}
    while tree.parents[b, node] >= 0:
        node = int(tree.parents[b, node])
        found.add(node)
    return found


def ids(tree: TokenTree, b: int) -> list[int]:
    return tree.node_id[b, : int(tree.num_nodes[b])].tolist()


def forgetful(tree: TokenTree) -> TokenTree:
    """The same tree without the hints that its constructor left."""
    return replace(tree, chain=None, dense=False, depth_bound=None)


def assert_same(one: TokenTree, other: TokenTree) -> None:
    for name in ("tokens", "parents", "num_nodes", "node_id", "source"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.log_score is None) == (other.log_score is None)
    if one.log_score is not None and other.log_score is not None:
        assert torch.equal(one.log_score.double(), other.log_score.double())


def assert_views_agree_with_parents(tree: TokenTree) -> None:
    depths, mask, paths = tree.depths(), tree.ancestor_mask(), tree.path_tokens()
    batch, width = tree.tokens.shape
    assert depths.dtype == torch.int64 and mask.dtype == torch.bool and mask.shape == (batch, width, width)
    deepest = 0
    for b in range(batch):
        expected = node_paths(tree, b)
        for node in range(width):
            if node >= len(expected):
                assert depths[b, node] == -1 and not mask[b, node].any() and (paths[b, node] == -1).all()
                continue
            deepest = max(deepest, len(expected[node]))
            assert depths[b, node] == len(expected[node])
            assert set(mask[b, node].nonzero().flatten().tolist()) == ancestors(tree, b, node)
            row = paths[b, node].tolist()
            assert row == [*expected[node], *[-1] * (len(row) - len(expected[node]))]
            assert tree.children(b, node) == [i for i in range(1, len(expected)) if tree.parents[b, i] == node]
        leaves = [i for i in range(1, len(expected)) if not tree.children(b, i)]
        assert [path[-1] for path in tree.leaf_paths(b)] == leaves
        assert [tuple(path) for path in tree.token_paths(b)] == [expected[leaf] for leaf in leaves]
    assert paths.shape == (batch, width, deepest)


@quick
@given(trees())
def test_views_agree_with_following_parents(tree):
    assert_views_agree_with_parents(tree)
    assert_views_agree_with_parents(forgetful(tree))
    chain = all(tree.parents[b, i] == i - 1 for b in range(len(tree.tokens)) for i in range(int(tree.num_nodes[b])))
    assert tree.is_chain == forgetful(tree).is_chain == chain


@quick
@given(st.data())
def test_chain_shortcuts_agree_with_the_general_views(data):
    batch, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    tokens = torch.arange(batch * width).view(batch, width)
    lengths = data.draw(st.none() | st.lists(st.integers(1, width), min_size=batch, max_size=batch))
    scores = -torch.arange(width).double().expand(batch, width)
    chain = TokenTree.from_chain(tokens, lengths, source=3, log_score=scores)
    chain.check()
    lists = [row[1:n] for row, n in zip(tokens.tolist(), lengths or [width] * batch, strict=True)]
    parents = [list(range(len(row))) for row in lists]
    log_score = [[-1.0 - i for i in range(len(row))] for row in lists]
    general = TokenTree.from_parents(tokens[:, 0], parents, lists, 3, log_score)
    assert chain.is_chain
    assert_same(chain, general)
    assert_views_agree_with_parents(chain)
    for view in ("depths", "ancestor_mask", "path_tokens"):
        assert torch.equal(getattr(chain, view)(), getattr(forgetful(chain), view)())


def test_roots_are_trees_of_one_node():
    tree = TokenTree.roots([5, 7])
    tree.check()
    assert tree.tokens.tolist() == [[5], [7]] and tree.num_nodes.tolist() == [1, 1]
    assert tree.path_tokens().shape == (2, 1, 0) and tree.leaf_paths(0) == [] and tree.is_chain


@quick
@given(st.lists(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), min_size=1, max_size=3))
def test_from_paths_is_the_trie_in_first_seen_order(paths):
    scores = [[[-10.0 * i - d for d in range(len(path))] for i, path in enumerate(branches)] for branches in paths]
    tree = TokenTree.from_paths(torch.zeros(len(paths), dtype=torch.int64), paths, 4, scores)
    tree.check()
    assert tree.log_score is not None
    for b, branches in enumerate(paths):
        first_seen: dict[tuple[int, ...], float] = {}
        for i, path in enumerate(branches):
            for d in range(len(path)):
                first_seen.setdefault(tuple(path[: d + 1]), scores[b][i][d])
        assert node_paths(tree, b) == [(), *first_seen]
        assert tree.log_score[b, 1 : len(first_seen) + 1].tolist() == list(first_seen.values())
    again = TokenTree.from_paths(tree.tokens[:, 0], [tree.token_paths(b) for b in range(len(paths))])
    assert [set(node_paths(again, b)) for b in range(len(paths))] == [
        set(node_paths(tree, b)) for b in range(len(paths))
    ]


@quick
@given(st.lists(trees(scored=True), min_size=1, max_size=4))
def test_stack_keeps_every_tree(parts):
    whole = TokenTree.stack(parts)
    whole.check()
    assert_views_agree_with_parents(whole)
    row = 0
    for part in parts:
        for b in range(len(part.tokens)):
            count = int(part.num_nodes[b])
            assert node_paths(whole, row) == node_paths(part, b) and ids(whole, row) == ids(part, b)
            assert whole.source[row, :count].tolist() == part.source[b, :count].tolist()
            assert whole.tokens[row, 0] == part.tokens[b, 0]
            if whole.log_score is not None and part.log_score is not None and part.tokens.shape[1] > 1:
                assert whole.log_score[row, :count].tolist() == part.log_score[b, :count].tolist()
            row += 1
    assert (whole.log_score is not None) or all(p.log_score is None or p.tokens.shape[1] == 1 for p in parts)


@quick
@given(trees_with_same_roots())
def test_merge_is_the_union_of_paths(pair):
    one, other = pair
    before = snapshot(one)
    merged = one.merge(other)
    merged.check()
    for b in range(len(one.tokens)):
        paths = node_paths(merged, b)
        mine, theirs = node_paths(one, b), node_paths(other, b)
        assert paths == list(dict.fromkeys(mine + theirs))  # no path twice, the first tree's nodes first
        firsts = [mine.index(path) for path in dict.fromkeys(mine)]
        assert ids(merged, b)[: len(firsts)] == [ids(one, b)[i] for i in firsts]
        assert not set(ids(merged, b)[len(firsts) :]) & set(ids(one, b))
        for node, path in enumerate(paths):
            origin, index = (one, mine.index(path)) if path in mine else (other, theirs.index(path))
            assert merged.source[b, node] == origin.source[b, index]
    assert snapshot(one) == before


def test_merge_refuses_different_roots():
    with pytest.raises(ConfigError, match="different roots"):
        TokenTree.roots([1, 2]).merge(TokenTree.roots([1, 3]))
    with pytest.raises(ConfigError, match="different roots"):
        TokenTree.roots([1, 1]).merge(TokenTree.roots([1]))


@quick
@given(trees(scored=True), st.data())
def test_extend_appends_ragged_levels(tree, data):
    before = snapshot(tree)
    batch, added = len(tree.tokens), data.draw(st.integers(0, 4))
    parents = [[data.draw(st.integers(-1, int(tree.num_nodes[b]) - 1)) for _ in range(added)] for b in range(batch)]
    tokens = torch.arange(batch * added).view(batch, added) % VOCAB
    scores = -torch.arange(batch * added).double().view(batch, added)
    grown = tree.extend(torch.tensor(parents).view(batch, added), tokens, scores, source=9)
    grown.check()
    for b in range(batch):
        old = node_paths(tree, b)
        new = [m for m in range(added) if parents[b][m] >= 0]
        assert node_paths(grown, b) == old + [(*old[parents[b][m]], int(tokens[b, m])) for m in new]
        assert ids(grown, b)[: len(old)] == ids(tree, b) and len(set(ids(grown, b))) == len(old) + len(new)
        count = int(grown.num_nodes[b])
        assert grown.source[b, len(old) : count].tolist() == [9] * len(new)
        assert grown.log_score is not None
        assert grown.log_score[b, len(old) : count].tolist() == [float(scores[b, m]) for m in new]
    assert grown.tokens.shape[1] == int(grown.num_nodes.max())
    assert snapshot(tree) == before


def test_extend_refuses_unknown_parents_and_half_scored_trees():
    tree = TokenTree.from_chain(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ConfigError, match="not in the tree"):
        tree.extend(torch.tensor([[3]]), torch.tensor([[0]]))
    with pytest.raises(ConfigError, match="one side only"):
        tree.extend(torch.tensor([[2]]), torch.tensor([[0]]), torch.zeros(1, 1))
    scored = TokenTree.roots([1]).extend(torch.tensor([[0]]), torch.tensor([[0]]), torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="one side only"):
        scored.extend(torch.tensor([[1]]), torch.tensor([[0]]))


@quick
@given(trees_and_closed_sets())
def test_prune_keeps_exactly_what_is_named(pair):
    tree, keep = pair
    tree = tree.with_q(uniform_q(tree))
    before = snapshot(tree)
    pruned = tree.prune(keep)
    pruned.check()
    for b in range(len(tree.tokens)):
        kept = keep[b].nonzero().flatten().tolist()
        assert node_paths(pruned, b) == [node_paths(tree, b)[i] for i in kept]
        assert ids(pruned, b) == [ids(tree, b)[i] for i in kept]
        assert pruned.source[b, : len(kept)].tolist() == tree.source[b, kept].tolist()
    assert pruned.q is None
    assert snapshot(tree) == before


@quick
@given(trees(), st.data())
def test_prune_refuses_sets_that_are_not_closed(tree, data):
    b = data.draw(st.integers(0, len(tree.tokens) - 1))
    inner = [i for i in range(int(tree.num_nodes[b])) if tree.children(b, i)]
    if not inner:
        inner = [0]
    keep = tree.real()
    keep[b, data.draw(st.sampled_from(inner))] = False
    with pytest.raises(ConfigError, match="ancestors"):
        tree.prune(keep)


@quick
@given(trees(scored=True), st.data())
def test_reroot_is_the_subtree(tree, data):
    tree = tree.with_q(uniform_q(tree))
    nodes = [data.draw(st.integers(0, int(n) - 1)) for n in tree.num_nodes]
    below = tree.reroot(nodes)
    below.check()
    assert below.q is not None and tree.q is not None and tree.log_score is not None and below.log_score is not None
    for b, top in enumerate(nodes):
        members = [i for i in range(int(tree.num_nodes[b])) if top in ancestors(tree, b, i)]
        paths = node_paths(tree, b)
        assert node_paths(below, b) == [paths[i][len(paths[top]) :] for i in members]
        assert ids(below, b) == [ids(tree, b)[i] for i in members]
        assert below.tokens[b, 0] == tree.tokens[b, top]
        count = len(members)
        assert torch.equal(below.q.probs[b, :count], tree.q.probs[b, members])
        assert below.log_score[b, :count].tolist() == (tree.log_score[b, members] - tree.log_score[b, top]).tolist()


def test_reroot_refuses_nodes_outside_the_tree():
    tree = TokenTree.from_chain(torch.tensor([[1, 2], [3, 4]]), [2, 1])
    for nodes in ([0, 1], [2, 0], [-1, 0]):
        with pytest.raises(ConfigError, match="not in the tree"):
            tree.reroot(nodes)


@quick
@given(trees(scored=True), st.data())
def test_top_keeps_the_best_by_the_worst_score_on_the_path(tree, data):
    budgets = [data.draw(st.integers(0, 10)) for _ in tree.tokens]
    best = tree.top(budgets)
    best.check()
    assert tree.log_score is not None
    for b, budget in enumerate(budgets):
        count = int(tree.num_nodes[b])
        worst = [
            min([float(tree.log_score[b, a]) for a in ancestors(tree, b, i) - {0}], default=0) for i in range(count)
        ]
        ranked = sorted(range(1, count), key=lambda i, worst=worst: (-worst[i], i))
        kept = [0, *sorted(ranked[:budget])]
        assert ids(best, b) == [ids(tree, b)[i] for i in kept]
        assert node_paths(best, b) == [node_paths(tree, b)[i] for i in kept]


@quick
@given(trees(scored=True), st.integers(0, 10))
def test_top_drops_q_only_if_it_cuts(tree, budget):
    cuts = bool((tree.num_nodes - 1 > budget).any())
    best = tree.with_q(uniform_q(tree)).top(budget)
    assert (best.q is None) == cuts


def test_top_of_a_chain_needs_no_scores_and_a_tree_does():
    chain = TokenTree.from_chain(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), [4, 2])
    cut = chain.top([2, 5])
    cut.check()
    assert cut.tokens.tolist() == [[1, 2, 3], [5, 6, 0]] and cut.num_nodes.tolist() == [3, 2]
    tree = TokenTree.from_paths([1], [[[2], [3]]])
    assert tree.top(2) is tree
    with pytest.raises(ConfigError, match="log_score"):
        tree.top(1)
    with pytest.raises(ConfigError, match="negative"):
        tree.top(-1)


@quick
@given(st.data())
def test_ids_stay_with_their_nodes_through_any_operations(data):
    """One id never names two different nodes, whatever is done in between."""
    tree = TokenTree.roots([0, 0])
    trunk: list[tuple[int, ...]] = [(), ()]  # tokens above the present root
    named: list[dict[int, tuple[int, ...]]] = [{}, {}]
    for step in range(data.draw(st.integers(1, 8))):
        operation = data.draw(st.sampled_from(["extend", "prune", "reroot", "merge"]))
        if operation == "extend":
            parents = [[data.draw(st.integers(-1, int(n) - 1)) for _ in range(3)] for n in tree.num_nodes]
            # A token never used before makes each path unique.
            tokens = torch.arange(6).view(2, 3) + 6 * step + 1
            tree = tree.extend(torch.tensor(parents), tokens)
        elif operation == "prune":
            picked = torch.tensor([[data.draw(st.booleans()) for _ in row] for row in tree.tokens]) & tree.real()
            picked[:, 0] = True
            tree = tree.prune((tree.ancestor_mask() & picked[:, :, None]).any(dim=1))
        elif operation == "reroot":
            nodes = [data.draw(st.integers(0, int(n) - 1)) for n in tree.num_nodes]
            trunk = [trunk[b] + node_paths(tree, b)[node] for b, node in enumerate(nodes)]
            tree = tree.reroot(nodes)
        else:
            tree = tree.merge(TokenTree.from_paths(tree.tokens[:, 0], [[[1000 + step]], []]))
        tree.check()
        for b in range(2):
            for node_id, path in zip(ids(tree, b), node_paths(tree, b), strict=True):
                assert named[b].setdefault(node_id, trunk[b] + path) == trunk[b] + path


def test_check_finds_each_broken_invariant():
    good = TokenTree.from_paths([1, 1], [[[2, 3], [4]], [[5]]])
    good.check()

    def changed(name: str, b: int, node: int, value: int) -> TokenTree:
        tensor = getattr(good, name).clone()
        tensor[b, node] = value
        return replace(good, **{name: tensor})

    broken = {
        "not an earlier node": changed("parents", 0, 2, 3),
        "has a parent": changed("parents", 1, 3, 0),
        "not unique": changed("node_id", 0, 2, 1),
        "below next_id": changed("node_id", 0, 2, 99),
        "num_nodes is 0": replace(good, num_nodes=torch.tensor([4, 0])),
        "said to be a chain": replace(good, chain=True),
        "without padding": replace(good, dense=True),
        "depth_bound": replace(good, depth_bound=1),
        "torch.int64": replace(good, parents=good.parents.long()),
        "log_score": replace(good, log_score=torch.zeros(2, 2)),
        "NaN": replace(good, log_score=torch.full((2, 4), float("nan"))),
        "q.probs": good.with_q(SparseQ(None, torch.ones(2, 3, 1))),
    }
    for message, tree in broken.items():
        with pytest.raises(ConfigError, match=message):
            tree.check()


def test_what_a_constructor_knows_is_what_the_tensors_say():
    made = TokenTree.from_parents([7, 8], [[0, 0, 1, 3], [0]], [[1, 2, 3, 4], [5]], [[0, 1, 1, 0], [2]])
    plain = replace(made)
    assert made.checked and not plain.checked and plain.known is None and plain.known_depths is None
    plain.check()
    assert made.tokens.tolist() == [[7, 1, 2, 3, 4], [8, 5, 0, 0, 0]]
    assert_same_lists(made.lists(), plain.lists())
    assert made.depth_lists() == plain.depth_lists() == [[0, 1, 1, 2, 3], [0, 1]]
    assert plain.depths().tolist() == made.depths().tolist() == [[0, 1, 1, 2, 3], [0, 1, -1, -1, -1]]
    nan = TokenTree.from_parents([7], [[0]], [[1]], log_score=[[float("nan")]])
    with pytest.raises(ConfigError, match="NaN"):
        nan.check()


@quick
@given(trees(), trees(scored=True))
def test_a_tree_of_lists_is_the_tree_of_the_tensors_that_it_makes(one, other):
    """Fields that are made when they are read, against what is found out of the tensors alone."""
    for tree in (one, other):
        made = TokenTree.from_lists(tree.lists())
        assert made.lists() is tree.lists()
        plain = forgetful(made)
        assert made.checked and plain.known is None
        plain.check()
        assert_same(made, plain)
        assert_same_lists(plain.lists(), made.lists())
        assert made.is_chain == made.chain == plain.is_chain
        assert made.dense == bool((made.num_nodes == made.tokens.shape[1]).all())
        assert made.depth_bound == int(plain.depths().max())
        assert torch.equal(made.depths(), plain.depths()) and torch.equal(made.next_ids(), made.num_nodes)


def test_a_tree_of_lists_makes_a_tensor_when_it_is_read():
    tree = TokenTree.from_parents([7], [[0, 0]], [[1, 2]])

    def made() -> set[str]:
        return {f.name for f in fields(TokenTree) if _is_set(tree, f.name)}

    before = made()
    assert before == {"known", "known_depths", "checked", "q"}
    tree.check()
    assert tree.lists().tokens == [[7, 1, 2]] and tree.depth_lists() == [[0, 1, 1]]
    assert made() == before
    assert tree.parents is tree.parents and made() == before | {"parents"}
    with pytest.raises(AttributeError, match="no branches"):
        tree.branches  # noqa: B018


def _is_set(tree: TokenTree, name: str) -> bool:
    try:
        object.__getattribute__(tree, name)
    except AttributeError:
        return False
    return True


@quick
@given(trees_and_closed_sets(), st.booleans())
def test_kept_lists_are_those_of_the_pruned_tree(pair, scored):
    tree, keep = pair
    tree = replace(tree, log_score=torch.rand(tree.tokens.shape, dtype=torch.float64)) if scored else tree
    nodes = [row.nonzero().flatten().tolist() for row in keep]
    assert_same_lists(tree.lists().kept(nodes), tree.prune(keep).lists())


def assert_same_lists(one: TreeLists, other: TreeLists) -> None:
    for field in fields(TreeLists):
        assert getattr(one, field.name) == getattr(other, field.name), field.name


@pytest.mark.parametrize(
    "lists",
    [([[0.0]], [[5]], 0), ([[0]], [[5.0]], 0), ([[0]], [["5"]], 0), ([[0]], [[5]], [[0.5]]), ([[0]], [[5]], [[-1]])],
)
def test_lists_hold_numbers_of_their_kind(lists):
    with pytest.raises((TypeError, OverflowError)):
        TokenTree.from_parents([1], *lists)


def test_constructors_refuse_what_is_not_a_tree():
    with pytest.raises(ConfigError, match="must come before its child"):
        TokenTree.from_parents([1], [[1]], [[5]])
    with pytest.raises(ConfigError, match="must come before its child"):
        TokenTree.from_parents([1], [[-1]], [[5]])
    with pytest.raises(ConfigError, match="same nodes"):
        TokenTree.from_parents([1], [[0, 0]], [[5]])
    with pytest.raises(ConfigError, match="same nodes"):
        TokenTree.from_parents([1, 2], [[0]], [[5]])
    for lengths in ([0, 1], [3, 1], [1]):
        with pytest.raises(ConfigError, match="chain lengths"):
            TokenTree.from_chain(torch.tensor([[1, 2], [3, 4]]), lengths)
    with pytest.raises(ConfigError, match="at least one"):
        TokenTree.stack([])


def test_sparse_q_reads_like_the_dense_one():
    probs = torch.tensor(
        [[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0]], [[0.25] * 4, [0.125, 0.5, 0.25, 0.125]]]
    ).double()
    ids_ = torch.tensor([[[1, 0, 2, -1], [3, -1, -1, -1]], [[0, 1, 2, 3], [3, 2, 1, 0]]])
    sparse = SparseQ(ids_, probs.gather(2, ids_.clamp(min=0)).masked_fill(ids_ < 0, 0.9), replacement=False)
    dense = SparseQ(None, probs, replacement=False)
    nodes, tokens = torch.tensor([[0, 1, 0], [1, 0, 1]]), torch.tensor([[3, 3, 0], [0, 2, 2]])
    for q in (sparse, dense):
        assert torch.equal(torch.stack([q.dense(b, n, 4) for b in (0, 1) for n in (0, 1)]).view(2, 2, 4), probs)
        assert q.of_tokens(nodes, tokens).tolist() == [[0.0, 1.0, 0.5], [0.125, 0.25, 0.25]]
        assert q.take(torch.tensor([[1], [0]])).dense(0, 0, 4).tolist() == [0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="whole vocabulary"):
        dense.dense(0, 0, 5)


def test_stack_pads_q_and_gives_bare_roots_an_empty_one():
    one = TokenTree.from_chain(torch.tensor([[1, 2]]), q=SparseQ(torch.tensor([[[2], [3]]]), torch.ones(1, 2, 1)))
    two = TokenTree.from_chain(
        torch.tensor([[1, 2, 3]]), q=SparseQ(torch.tensor([[[2, 0], [3, 0], [0, 1]]]), torch.full((1, 3, 2), 0.5))
    )
    whole = TokenTree.stack([one, TokenTree.roots([9]), two])
    whole.check()
    assert whole.q is not None
    assert whole.q.dense(0, 0, 4).tolist() == [0, 0, 1, 0] and whole.q.dense(2, 1, 4).tolist() == [0.5, 0, 0, 0.5]
    assert whole.q.dense(1, 0, 4).tolist() == [0, 0, 0, 0]
    assert TokenTree.stack([one, TokenTree.from_chain(torch.tensor([[1, 2]]))]).q is None
    other_kind = one.with_q(SparseQ(None, torch.ones(1, 2, 1)))
    with pytest.raises(ConfigError, match="different kinds"):
        TokenTree.stack([one, other_kind])


def test_trim_removes_unused_columns_only():
    wide = replace(
        TokenTree.from_chain(torch.tensor([[1, 2, 0, 0]]), q=SparseQ(None, torch.ones(1, 4, 1))),
        parents=torch.tensor([[-1, 0, -1, -1]], dtype=torch.int32),
        num_nodes=torch.tensor([2]),
        node_id=torch.tensor([[0, 1, -1, -1]]),
        dense=False,
    )
    wide.check()
    narrow = wide.trim()
    narrow.check()
    assert narrow.tokens.tolist() == [[1, 2]] and narrow.trim() is narrow


def uniform_q(tree: TokenTree) -> SparseQ:
    batch, width = tree.tokens.shape
    marks = torch.arange(batch * width).view(batch, width, 1).double()  # tells the rows apart
    return SparseQ(None, marks.expand(batch, width, VOCAB))


def snapshot(tree: TokenTree) -> list:
    """The contents of every tensor, to show that an operation changed nothing in place."""
    values = [getattr(tree, field.name) for field in fields(tree)]
    return [value.tolist() for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.gpu
@settings(max_examples=20, deadline=None)
@given(trees(scored=True), st.data())
def test_operations_on_cuda_give_what_they_give_on_the_cpu(tree, data):
    twin = tree.to("cuda")
    nodes = torch.tensor([data.draw(st.integers(0, int(n) - 1)) for n in tree.num_nodes])
    parents = torch.stack([nodes, torch.full_like(nodes, -1), torch.zeros_like(nodes)], dim=1)
    tokens, scores = torch.ones_like(parents), torch.zeros(parents.shape, dtype=torch.float64)
    budget = data.draw(st.integers(0, 9))
    pairs = [
        (tree.extend(parents, tokens, scores), twin.extend(parents.cuda(), tokens.cuda(), scores.cuda()).trim()),
        (tree.reroot(nodes), twin.reroot(nodes.cuda())),
        (tree.top(budget), twin.top(budget)),
        (tree.merge(tree), twin.merge(twin)),
        (tree.prune(tree.real()), twin.prune(twin.real())),
        (TokenTree.stack([tree, tree.top(1)]), TokenTree.stack([twin, twin.top(1)])),
    ]
    for here, there in pairs:
        there.check()
        assert there.tokens.device.type == "cuda"
        assert_same(here, there.to("cpu"))
        assert torch.equal(here.depths(), there.depths().cpu())
        assert torch.equal(here.ancestor_mask(), there.ancestor_mask().cpu())
        depth = here.path_tokens().shape[2]
        assert torch.equal(here.path_tokens(), there.path_tokens()[..., :depth].cpu())
