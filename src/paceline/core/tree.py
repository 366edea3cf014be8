"""What is being tried: batched token trees, held as parent pointers.

Masks, depths, paths and children are derived from the parents by small pure functions; no operation
changes a tree in place. Axis letters: B requests, N nodes, D depth, K candidates, V vocabulary.

On the CPU every operation checks its arguments and returns the narrowest tree. On an accelerator `extend`
and `from_chain` do neither, because both would wait for the device (`check` and `trim` do it on demand).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import ConfigError

_FEW_NODES = 512  # columns of a batch of trees, padding included
PADDING = -1  # parents, node ids and path tokens of padding; token columns hold 0 there


@dataclass(frozen=True, slots=True, eq=False)
class SparseQ:
    """The distribution that the children of each node were drawn from.

    Only honest draws may carry it: every child of node n was drawn from row n, siblings in index order,
    and no node was removed after the draw. Rows of nodes without children are never read.
    """

    ids: Tensor | None  # [B, N, K] int64  tokens with non-zero probability, -1 padded; None: all tokens, K = V
    probs: Tensor  # [B, N, K] float  each row with children sums to 1
    replacement: bool = True  # False: a token drawn for one sibling was out of the draw for the next

    def dense(self, b: int, n: int, vocab_size: int) -> Tensor:
        """[V] float64: the distribution that the children of node ``n`` of request ``b`` were drawn from."""
        node = torch.tensor([n], device=self.probs.device)
        return replace(self, ids=None if self.ids is None else self.ids[b : b + 1], probs=self.probs[b : b + 1]).rows(
            node, vocab_size
        )[0]

    def rows(self, nodes: Tensor, vocab_size: int) -> Tensor:
        """[B, V] float64: the distribution below ``nodes`` [B], one node a request."""
        self.require_vocab(vocab_size)
        batch = torch.arange(nodes.shape[0], device=nodes.device)
        probs = self.probs[batch, nodes].double()  # [B, K]
        if self.ids is None:
            return probs
        ids = self.ids[batch, nodes]  # [B, K]
        rows = probs.new_zeros(nodes.shape[0], vocab_size)
        return rows.scatter_add_(1, ids.clamp(min=0), probs.masked_fill(ids < 0, 0.0))

    def of_tokens(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """[B, M] float64: probability of ``tokens`` [B, M] below ``nodes`` [B, M] int64."""
        batch = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        if self.ids is None:
            return self.probs[batch, nodes, tokens].double()
        here = self.ids[batch, nodes] == tokens[:, :, None]  # [B, M, K]
        return (self.probs[batch, nodes].double() * here).sum(dim=2)

    def require_vocab(self, vocab_size: int) -> None:
        """Raises ConfigError if this q has no ids and covers another number of tokens."""
        if self.ids is None and self.probs.shape[2] != vocab_size:
            raise ConfigError(
                f"q over {self.probs.shape[2]} tokens for a target with {vocab_size}",
                "a q without ids must cover the whole vocabulary",
                "give ids, or probabilities for every token of the target",
            )

    def take(self, order: Tensor) -> SparseQ:
        """The rows of nodes ``order`` [B, M] int64."""
        batch = torch.arange(order.shape[0], device=order.device)[:, None]
        ids = None if self.ids is None else self.ids[batch, order]
        return replace(self, ids=ids, probs=self.probs[batch, order])


@dataclass(frozen=True, slots=True, eq=False)
class TreeLists:
    """A batch of trees as plain lists, padding included."""

    tokens: list[list[int]]
    parents: list[list[int]]
    sources: list[list[int]]
    counts: list[int]  # real nodes of each, the root included


@dataclass(slots=True, eq=False)
class TokenTree:
    """B requests with one tree of candidate tokens each, padded to N nodes.

    Node 0 is the root: the last committed token. Real nodes occupy 0 .. num_nodes - 1 and a parent comes
    before its children. Two children of one parent may carry the same token: matching takes the first.
    The tensors are shared between trees: treat them as read-only.
    """

    tokens: Tensor  # [B, N] int64  0 at padding
    parents: Tensor  # [B, N] int32  parent index < own index; -1 for the root and for padding
    num_nodes: Tensor  # [B] int64  real nodes, the root included
    node_id: Tensor  # [B, N] int64  stable across prune, extend, reroot and merge; -1 at padding
    source: Tensor  # [B, N] uint8  who proposed the node (statistics); 0 at padding, the root's has no meaning
    log_score: Tensor | None = None  # [B, N] cumulative log q along the path; ranks nodes, never accepts them
    q: SparseQ | None = None  # only for sampled drafts
    next_id: Tensor | None = None  # [B] int64  first node id never used; None: one above the largest in use
    chain: bool | None = None  # whether every node is the child of the one before; None: not known yet
    dense: bool = False  # whether it is known that no request has padding
    depth_bound: int | None = None  # no node is deeper; None: N - 1
    # What a constructor knows of its own tree. `replace` makes a tree of which nothing is known.
    checked: bool = field(default=False, init=False)  # whether `check` would find nothing
    known: TreeLists | None = field(default=None, init=False, repr=False)
    known_depths: list[list[int]] | None = field(default=None, init=False, repr=False)  # like `depths`

    # ---- constructors

    @staticmethod
    def roots(tokens: Tensor | Sequence[int]) -> TokenTree:
        """Trees of the root alone, from ``tokens`` [B]."""
        return TokenTree.from_chain(torch.as_tensor(tokens, dtype=torch.int64)[:, None])

    @staticmethod
    def from_chain(
        tokens: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        source: int | Tensor = 0,
        log_score: Tensor | None = None,
        q: SparseQ | None = None,
    ) -> TokenTree:
        """One chain a request.

        Args:
            tokens: [B, D + 1] int64, the root first.
            lengths: [B] real nodes of each chain, the root included; all D + 1 by default.
            source: who proposes these nodes, 0 .. 255: one for all, or [B, D + 1].
            log_score: [B, D + 1] cumulative log q; the root's is 0.
            q: what the tokens were drawn from, for sampled drafts.

        Raises:
            ConfigError: a length below 1 or above D + 1.
        """
        batch, width = tokens.shape
        device = tokens.device
        num_nodes = torch.full((batch,), width, device=device)
        tree = TokenTree(
            tokens=tokens.long(),
            parents=torch.arange(-1, width - 1, dtype=torch.int32, device=device).expand(batch, width),
            num_nodes=num_nodes,
            node_id=torch.arange(width, device=device).expand(batch, width),
            source=torch.full((batch, width), source, dtype=torch.uint8, device=device)
            if isinstance(source, int)
            else source.to(torch.uint8),
            log_score=log_score,
            q=q,
            next_id=num_nodes,
            chain=True,
            dense=True,
            depth_bound=width - 1,
        )
        return tree if lengths is None else tree._cut(torch.as_tensor(lengths, device=device).long())

    @staticmethod
    def from_parents(
        roots: Tensor | Sequence[int],
        parents: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        source: int | Sequence[Sequence[int]] = 0,
        log_score: Sequence[Sequence[float]] | None = None,
    ) -> TokenTree:
        """Trees from plain lists of their drafted nodes.

        Args:
            roots: [B] int64.
            parents: for each request the parent of node 1, 2, ...; 0 is the root.
            tokens: for each request the token of node 1, 2, ...
            source: one for all, or like ``tokens``.
            log_score: like ``tokens``, cumulative log q.

        Raises:
            ConfigError: a parent that does not come before its child, or lists of unequal length.
        """
        roots = torch.as_tensor(roots, dtype=torch.int64)
        _check_lists(len(roots), parents, tokens, source, log_score)
        counts = [len(row) + 1 for row in tokens]
        width = max(counts, default=1)
        depths = [_depths(row) for row in parents]
        marks = [[source] * len(row) for row in tokens] if isinstance(source, int) else source
        lists = TreeLists(
            tokens=_padded(tokens, roots.tolist(), width, 0),
            parents=_padded(parents, PADDING, width, PADDING),
            sources=_padded(marks, source if isinstance(source, int) else 0, width, 0),
            counts=counts,
        )
        ids = _padded([range(1, n) for n in counts], 0, width, PADDING)
        scores = None if log_score is None else _padded(log_score, 0.0, width, float("-inf"))
        num_nodes = torch.tensor(counts)
        tree = TokenTree(
            tokens=_tensor(lists.tokens, torch.int64),
            parents=_tensor(lists.parents, torch.int32),
            num_nodes=num_nodes,
            node_id=_tensor(ids, torch.int64),
            source=_tensor(lists.sources, torch.uint8),
            log_score=None if scores is None else _tensor(scores, torch.float64),
            next_id=num_nodes,
            chain=all(depth == list(range(1, len(depth) + 1)) for depth in depths),
            dense=min(counts, default=1) == width,
            depth_bound=max((max(depth, default=0) for depth in depths), default=0),
        )
        tree.known, tree.known_depths = lists, _padded(depths, 0, width, PADDING)
        tree.checked = scores is None or all(score == score for row in scores for score in row)  # no NaN
        return tree if roots.device.type == "cpu" else tree.to(roots.device)

    @staticmethod
    def from_paths(
        roots: Tensor | Sequence[int],
        paths: Sequence[Sequence[Sequence[int]]],
        source: int = 0,
        log_score: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> TokenTree:
        """Tries of token paths: shared beginnings become one node, in first-seen order.

        Args:
            roots: [B] int64.
            paths: for each request its paths, each the tokens below the root.
            source: who proposes these nodes, 0 .. 255.
            log_score: like ``paths``, cumulative log q at each token; a merged node keeps the first.
        """
        parents: list[list[int]] = []
        tokens: list[list[int]] = []
        scores: list[list[float]] = []
        for b, branches in enumerate(paths):
            trie: dict[tuple[int, int], int] = {}
            scores.append([])
            for i, path in enumerate(branches):
                node = 0
                for depth, token in enumerate(path):
                    known = trie.setdefault((node, token), len(trie) + 1)
                    if known == len(scores[b]) + 1:
                        scores[b].append(0.0 if log_score is None else log_score[b][i][depth])
                    node = known
            parents.append([parent for parent, _ in trie])
            tokens.append([token for _, token in trie])
        return TokenTree.from_parents(roots, parents, tokens, source, None if log_score is None else scores)

    @staticmethod
    def stack(trees: Sequence[TokenTree]) -> TokenTree:
        """The trees one below the other along the batch, padded to the widest.

        ``log_score`` and ``q`` survive if every tree with drafted nodes has them.

        Raises:
            ConfigError: no tree at all, or sampled drafts of different kinds (ids, replacement, dtype).
        """
        if not trees:
            raise ConfigError("stack of no trees", "there is nothing to stack", "give at least one tree")
        if len(trees) == 1:
            return trees[0]
        width = max(tree.tokens.shape[1] for tree in trees)
        drafted = [tree for tree in trees if tree.tokens.shape[1] > 1]
        scored = bool(drafted) and all(tree.log_score is not None for tree in drafted)
        return TokenTree(
            tokens=_stacked([tree.tokens for tree in trees], width, 0),
            parents=_stacked([tree.parents for tree in trees], width, PADDING),
            num_nodes=torch.cat([tree.num_nodes for tree in trees]),
            node_id=_stacked([tree.node_id for tree in trees], width, PADDING),
            source=_stacked([tree.source for tree in trees], width, 0),
            log_score=_stacked([tree._scores() for tree in trees], width, float("-inf")) if scored else None,
            q=_stacked_q(trees, width) if drafted and all(tree.q is not None for tree in drafted) else None,
            next_id=torch.cat([tree._next() for tree in trees]),
            chain=True if all(tree.chain for tree in trees) else None,
            dense=all(tree.dense and tree.tokens.shape[1] == width for tree in trees),
            depth_bound=max(tree.bound() for tree in trees),
        )

    # ---- operations: a new tree from a tree

    def extend(
        self,
        parents: Tensor,
        tokens: Tensor,
        log_score: Tensor | None = None,
        source: int | Tensor = 0,
    ) -> TokenTree:
        """Append nodes below existing ones; q is dropped (`with_q` attaches that of the grown tree).

        Args:
            parents: [B, M] index of each new node's parent in this tree; -1 is padding, anywhere.
            tokens: [B, M] int64.
            log_score: [B, M] cumulative log q; required if this tree has scores, else only allowed below
                bare roots.
            source: who proposes the new nodes, one for all or [B, M].

        Raises:
            ConfigError: a parent that is not in the tree, or scores on one side only.
        """
        batch, added = parents.shape
        scores = self._extended_scores(log_score)
        fresh = parents >= 0  # [B, M]
        whole = False
        if parents.device.type == "cpu":
            self._require_nodes(parents, fresh)
            whole = self.dense and bool(fresh.all())
        next_id = self._next()
        marks = torch.as_tensor(source, dtype=torch.uint8, device=parents.device).expand(batch, added)
        grown = TokenTree(
            tokens=torch.cat([self.tokens, tokens.long()], dim=1),
            parents=torch.cat([self.parents, parents.to(torch.int32)], dim=1),
            num_nodes=self.num_nodes + fresh.sum(dim=1),
            node_id=torch.cat([self.node_id, next_id[:, None] + fresh.cumsum(dim=1) - 1], dim=1),
            source=torch.cat([self.source, marks], dim=1),
            log_score=scores,
            next_id=next_id + fresh.sum(dim=1),
            dense=whole,
            depth_bound=self.bound() + min(added, 1),
        )
        if whole or added == 0:
            return grown
        keep = torch.cat([self.real(), fresh], dim=1)
        return grown._keep(keep, None if parents.device.type == "cpu" else keep.shape[1])

    def with_q(self, q: SparseQ) -> TokenTree:
        """The same tree as a sampled draft: its children were drawn from ``q``, siblings in index order."""
        return replace(self, q=q)

    def merge(self, other: TokenTree) -> TokenTree:
        """One tree with the paths of both: this tree's nodes first, then what is new in ``other``.

        No two nodes of the result have the same path. New nodes get fresh ids; every node keeps its source.
        ``log_score`` survives if both trees have it; q is dropped, for a merged node was not drawn from one q.

        Raises:
            ConfigError: different batch sizes or roots.
        """
        if len(self.tokens) != len(other.tokens) or not torch.equal(self.tokens[:, 0], other.tokens[:, 0]):
            raise ConfigError(
                "merge of trees with different roots",
                "trees can be merged only where they continue the same token",
                "reroot one of them first",
            )
        width = self.tokens.shape[1]
        own = self._lists()
        foreign = other._lists()
        joined = [_joined(mine, theirs, width) for mine, theirs in zip(own, foreign, strict=True)]
        total = width + other.tokens.shape[1]
        device = self.tokens.device
        keep = torch.tensor([_filled(keep, total, False) for keep, _ in joined], device=device)
        parents = torch.tensor([_filled(p, total, PADDING) for _, p in joined], dtype=torch.int32, device=device)
        next_id = self._next()
        fresh = keep[:, width:]
        scored = self.log_score is not None and other.log_score is not None
        grown = TokenTree(
            tokens=torch.cat([self.tokens, other.tokens], dim=1),
            parents=parents,
            num_nodes=self.num_nodes,
            node_id=torch.cat([self.node_id, next_id[:, None] + fresh.cumsum(dim=1) - 1], dim=1),
            source=torch.cat([self.source, other.source], dim=1),
            log_score=torch.cat([self._scores(), other._scores()], dim=1) if scored else None,
            next_id=next_id + fresh.sum(dim=1),
            depth_bound=max(self.bound(), other.bound()),
        )
        return grown._keep(keep)

    def prune(self, keep: Tensor) -> TokenTree:
        """Only the nodes that ``keep`` [B, N] bool names; q is dropped, even if all nodes stay.

        (A rule that looks at drawn tokens and happens to spare them has still made q a lie.)

        Raises:
            ConfigError: the root is not kept, or a kept node's parent is not.
        """
        keep = keep & self.real()
        has_parent = keep.gather(1, self.parents.long().clamp(min=0))
        if not bool((keep[:, 0].all()) & (has_parent | ~keep).all()):
            raise ConfigError(
                "prune to a set of nodes without some of their ancestors",
                "what is kept must hold the root and every kept node's parent",
                "close the set under ancestors: keep = (tree.ancestor_mask() & keep[:, :, None]).any(dim=1)",
            )
        return replace(self, q=None)._keep(keep)

    def top(self, budgets: Tensor | Sequence[int] | int) -> TokenTree:
        """The best drafted nodes by ``log_score``, at most ``budgets`` (int or [B], root not counted).

        A node ranks by the worst score on its path, so that its ancestors are kept with it; ties go to the
        smaller index. A chain needs no scores. q is dropped if anything is cut.

        Raises:
            ConfigError: a negative budget, or something must be cut from a tree without scores.
        """
        width = self.tokens.shape[1]
        limit = torch.as_tensor(budgets, dtype=torch.int64, device=self.tokens.device).expand(len(self.tokens))
        if bool((limit < 0).any()):
            raise ConfigError("top of a negative number of nodes", "a budget is 0 or more", "use 0 for the root alone")
        if not bool((self.num_nodes - 1 > limit).any()):
            return self
        if self.is_chain:
            return replace(self, q=None)._cut(torch.minimum(self.num_nodes, limit + 1))
        if self.log_score is None:
            raise ConfigError(
                f"top of a tree with up to {width} nodes that has no log_score",
                "its nodes cannot be ranked",
                "give log_score when the tree is built, or draft within the budget",
            )
        rank = self._rank()  # [B, N]
        return replace(self, q=None)._keep((rank <= limit[:, None]) & self.real())

    def reroot(self, nodes: Tensor | Sequence[int]) -> TokenTree:
        """The subtree below ``nodes`` [B]; that node becomes node 0, scores are counted from it.

        q is kept: whatever is below a node was drawn without regard to the branches that go.

        Raises:
            ConfigError: a node that is not in the tree.
        """
        nodes = torch.as_tensor(nodes, dtype=torch.int64, device=self.tokens.device)
        self._require_nodes(nodes[:, None], torch.ones_like(nodes[:, None], dtype=torch.bool))
        if nodes.device.type == "cpu" and not bool(nodes.any()):
            return self
        below = (self._lineage() == (nodes + 1)[:, None, None]).any(dim=2)  # [B, N]
        tree = self._keep(below)
        if tree.log_score is not None:
            tree.log_score = tree.log_score - tree.log_score[:, :1]
        return tree

    def trim(self) -> TokenTree:
        """Without the columns that no request uses (waits for the device)."""
        width = int(self.num_nodes.max())
        return self if width == self.tokens.shape[1] else self._narrow(width)

    def to(self, device: torch.device | str) -> TokenTree:
        """The same tree on another device."""
        q = self.q
        if q is not None:
            q = replace(q, ids=None if q.ids is None else q.ids.to(device), probs=q.probs.to(device))
        return replace(
            self,
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            num_nodes=self.num_nodes.to(device),
            node_id=self.node_id.to(device),
            source=self.source.to(device),
            log_score=None if self.log_score is None else self.log_score.to(device),
            q=q,
            next_id=None if self.next_id is None else self.next_id.to(device),
        )

    # ---- views: everything else follows from the parents

    @property
    def is_chain(self) -> bool:
        """Whether every node of every request is the child of the node before it."""
        if self.chain is None:
            index = torch.arange(-1, self.tokens.shape[1] - 1, device=self.parents.device)
            self.chain = bool(((self.parents == index) | ~self.real()).all())
        return self.chain

    def bound(self) -> int:
        """A depth that no node exceeds, known without waiting for the device."""
        width = self.tokens.shape[1]
        return width - 1 if self.depth_bound is None else min(self.depth_bound, width - 1)

    def real(self) -> Tensor:
        """[B, N] bool: which columns are nodes rather than padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes[:, None]

    def depths(self) -> Tensor:
        """[B, N] int64: edges from the root; -1 at padding."""
        if not self.chain:
            return self._host_depths() if self._small else (self._lineage() > 0).sum(dim=2) - 1
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        if self.dense:
            return index.expand(self.tokens.shape)
        return torch.where(index < self.num_nodes[:, None], index, PADDING)

    def depth_lists(self) -> list[list[int]]:
        """`depths` on the host (waits for the device)."""
        return self.depths().tolist() if self.known_depths is None else self.known_depths

    def ancestor_mask(self) -> Tensor:
        """[B, N, N] bool: [b, i, j] says that j is i itself or one of its ancestors; False at padding.

        Only the tree block: whatever comes before the root is visible to every node anyway.
        """
        batch, width = self.tokens.shape
        device = self.tokens.device
        if not self.chain:
            if self._small:
                return self._host_mask()
            mask = torch.zeros(batch, width, width + 1, dtype=torch.bool, device=device)
            return mask.scatter_(2, self._lineage(), True)[:, :, 1:]
        lower = torch.ones(width, width, dtype=torch.bool, device=device).tril_()
        return lower.expand(batch, width, width) if self.dense else lower & self.real()[:, :, None]

    def path_tokens(self) -> Tensor:
        """[B, N, D] int64: tokens from below the root to each node, itself included; -1 padded.

        D is the depth of the deepest node (on an accelerator possibly more, so as not to wait for it).
        """
        if not self.chain:
            return self._path_tokens()
        width = self.tokens.shape[1]
        within = torch.ones(width, width - 1, dtype=torch.bool, device=self.tokens.device).tril_(-1)
        if not self.dense:
            within = within & self.real()[:, :, None]
        return torch.where(within, self.tokens[:, None, 1:], PADDING)

    def children(self, b: int, n: int) -> list[int]:
        """Children of node ``n`` of request ``b``, in index order."""
        return [node for node, parent in enumerate(self.parents[b].tolist()) if parent == n]

    def leaf_paths(self, b: int) -> list[list[int]]:
        """For each drafted leaf of request ``b``, in index order, the nodes from below the root to it."""
        parents = self.parents[b].tolist()
        inner = set(parents)
        paths: list[list[int]] = [[]]
        for node in range(1, int(self.num_nodes[b])):
            paths.append([*paths[parents[node]], node])
        return [path for path in paths[1:] if path[-1] not in inner]

    def token_paths(self, b: int) -> list[list[int]]:
        """Like `leaf_paths`, as tokens; what `from_paths` takes."""
        tokens = self.tokens[b].tolist()
        return [[tokens[node] for node in path] for path in self.leaf_paths(b)]

    def lists(self) -> TreeLists:
        """The tree on the host, made once (waits for the device)."""
        if self.known is None:
            columns = (self.tokens, self.parents, self.source, self.num_nodes)
            self.known = TreeLists(*(column.tolist() for column in columns))
        return self.known

    def check(self) -> None:
        """Test every invariant of the type (waits for the device).

        Raises:
            ConfigError: the first one that is broken.
        """
        for b, problem in () if self.checked else self._problems():
            raise ConfigError(f"tree of request {b}", problem, "build trees with the constructors of TokenTree")

    # ---- the parts that the operations are made of

    @property
    def _small(self) -> bool:
        """Few nodes on the host: plain lists are then several times faster than tensor operations."""
        return self.tokens.device.type == "cpu" and self.tokens.numel() <= _FEW_NODES

    def _host_depths(self) -> Tensor:
        if self.known_depths is not None:
            return _tensor(self.known_depths, torch.int64)
        rows = []
        for parents, count in zip(self.parents.tolist(), self.num_nodes.tolist(), strict=True):
            depths = [0] * count + [PADDING] * (len(parents) - count)
            for node in range(1, count):
                depths[node] = depths[parents[node]] + 1
            rows.append(depths)
        return torch.tensor(rows)

    def _host_mask(self) -> Tensor:
        batch, width = self.tokens.shape
        mask = torch.zeros(batch, width, width, dtype=torch.bool)
        host = mask.numpy()
        lists = self.lists()
        for rows, parents, count in zip(host, lists.parents, lists.counts, strict=True):
            for node in range(count):
                if node:
                    rows[node] = rows[parents[node]]
                rows[node, node] = True
        return mask

    def _next(self) -> Tensor:
        return self.node_id.amax(dim=1) + 1 if self.next_id is None else self.next_id

    def _scores(self) -> Tensor:
        if self.log_score is None:
            return torch.zeros(self.tokens.shape, dtype=torch.float64, device=self.tokens.device)
        return self.log_score

    def _lists(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of the real nodes of each request."""
        rows = zip(self.tokens.tolist(), self.parents.tolist(), self.num_nodes.tolist(), strict=True)
        return [(tokens[:count], parents[:count]) for tokens, parents, count in rows]

    def _lineage(self) -> Tensor:
        """[B, N, D + 1] int64: column k is one more than the node k steps up, 0 above the root and at padding."""
        up = pad(self.parents.long() + 1, (1, 0))  # [B, N + 1], shifted by one so that 0 can mean "none"
        index = torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        current = torch.where(index <= self.num_nodes[:, None], index, 0)
        columns = [current]
        host = up.device.type == "cpu"
        for _ in range(self.bound()):
            current = up.gather(1, current)
            if host and not current.any():
                break
            columns.append(current)
        return torch.stack(columns, dim=2)

    def _path_tokens(self) -> Tensor:
        lineage = self._lineage()
        batch, width, levels = lineage.shape
        depth = (lineage > 0).sum(dim=2, keepdim=True) - 1  # [B, N, 1]
        level = torch.arange(levels - 1, device=lineage.device)
        nodes = lineage.gather(2, (depth - 1 - level).clamp(min=0))  # [B, N, D]
        tokens = pad(self.tokens, (1, 0)).gather(1, nodes.flatten(1)).view(batch, width, levels - 1)
        return torch.where(level < depth, tokens, PADDING)

    def _rank(self) -> Tensor:
        """[B, N] int64: place of each node in the order of `top`; the root is 0."""
        lineage = self._lineage()
        batch, width, levels = lineage.shape
        scores = self._scores().clone()
        scores[:, 0] = float("inf")  # the root neither competes nor holds anybody back
        by_step = pad(scores, (1, 0), value=float("inf")).gather(1, lineage.flatten(1)).view(batch, width, levels)
        worst = torch.where(self.real(), by_step.amin(dim=2), float("-inf"))
        order = worst.argsort(dim=1, descending=True, stable=True)
        place = torch.arange(width, device=order.device).expand(batch, width)
        return torch.empty_like(order).scatter_(1, order, place)

    def _keep(self, keep: Tensor, width: int | None = None) -> TokenTree:
        """The nodes that ``keep`` [B, N] names, in order; the first of each request becomes its root."""
        index = keep.cumsum(dim=1) - 1  # [B, N] where each kept node goes
        counts = index[:, -1] + 1
        width = int(counts.max()) if width is None else width
        order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # kept columns first
        real = torch.arange(width, device=keep.device) < counts[:, None]
        old = self.parents.gather(1, order).long()
        parents = torch.where(real & (old >= 0), index.gather(1, old.clamp(min=0)), PADDING)
        parents[:, 0] = PADDING
        scores = self.log_score
        if scores is not None:
            scores = scores.gather(1, order).masked_fill_(~real, float("-inf"))
        return TokenTree(
            tokens=torch.where(real, self.tokens.gather(1, order), 0),
            parents=parents.to(torch.int32),
            num_nodes=counts,
            node_id=torch.where(real, self.node_id.gather(1, order), PADDING),
            source=self.source.gather(1, order).masked_fill_(~real, 0),
            log_score=scores,
            q=None if self.q is None else self.q.take(order),
            next_id=self._next(),
            chain=True if self.chain else None,
            dense=len(counts) == 1 and keep.device.type == "cpu",
            depth_bound=self.bound(),
        )

    def _cut(self, lengths: Tensor) -> TokenTree:
        """The first ``lengths`` [B] nodes of each request; callers see to it that they are closed (a chain)."""
        width = self.tokens.shape[1]
        host = lengths.device.type == "cpu"
        if host:
            shortest, longest = (int(x) for x in lengths.aminmax())
            if len(lengths) != len(self.tokens) or shortest < 1 or longest > width:
                raise ConfigError(
                    f"chain lengths {lengths.tolist()} for {len(self.tokens)} chains of {width} nodes",
                    "a length counts the root, so each is at least 1 and at most the width of the tokens",
                    "give one length a request within these bounds",
                )
            if shortest == width:
                return self
        tree = self._narrow(longest) if host else self
        real = torch.arange(tree.tokens.shape[1], device=lengths.device) < lengths[:, None]
        return replace(
            tree,
            tokens=torch.where(real, tree.tokens, 0),
            parents=torch.where(real, tree.parents, PADDING),
            num_nodes=lengths,
            node_id=torch.where(real, tree.node_id, PADDING),
            source=torch.where(real, tree.source, 0),
            log_score=None if tree.log_score is None else tree.log_score.masked_fill(~real, float("-inf")),
            dense=host and len(lengths) == 1,
        )

    def _narrow(self, width: int) -> TokenTree:
        """The first ``width`` columns."""
        q = self.q
        if q is not None:
            q = replace(q, ids=None if q.ids is None else q.ids[:, :width], probs=q.probs[:, :width])
        return replace(
            self,
            tokens=self.tokens[:, :width],
            parents=self.parents[:, :width],
            num_nodes=self.num_nodes.clamp(max=width),
            node_id=self.node_id[:, :width],
            source=self.source[:, :width],
            log_score=None if self.log_score is None else self.log_score[:, :width],
            q=q,
            next_id=self._next(),
            depth_bound=min(self.bound(), width - 1),
        )

    def _extended_scores(self, log_score: Tensor | None) -> Tensor | None:
        bare = self.log_score is None and self.tokens.shape[1] == 1
        if log_score is None and (self.log_score is None or bare):
            return None
        if log_score is None or (self.log_score is None and not bare):
            raise ConfigError(
                "extend with log_score on one side only",
                "a tree ranks either all of its nodes or none",
                "give log_score at every call of extend, or at none",
            )
        return torch.cat([self._scores().to(log_score.dtype), log_score], dim=1)

    def _require_nodes(self, nodes: Tensor, where: Tensor) -> None:
        if bool((where & ((nodes < 0) | (nodes >= self.num_nodes[:, None]))).any()):
            raise ConfigError(
                f"nodes {nodes.tolist()} of trees with {self.num_nodes.tolist()} nodes",
                "a node that is not in the tree was named",
                "name nodes by their index, below num_nodes",
            )

    def _problems(self) -> list[tuple[int, str]]:
        """(request, what is wrong) of everything that `check` finds."""
        batch, width = self.tokens.shape
        problems = [(0, text) for text in self._shape_problems(batch, width)]
        if problems:
            return problems
        next_ids = self._next().tolist()
        node_ids = self.node_id.tolist()
        depths: list[int] = []
        for b, (parents, count) in enumerate(zip(self.parents.tolist(), self.num_nodes.tolist(), strict=True)):
            ids = node_ids[b]
            if not 1 <= count <= width:
                problems.append((b, f"num_nodes is {count}, not between 1 and {width}"))
                continue
            if parents[0] != PADDING or any(parent != PADDING for parent in parents[count:]):
                problems.append((b, "the root or padding has a parent"))
            wrong = [i for i in range(1, count) if not 0 <= parents[i] < i]
            if wrong:
                problems.append((b, f"the parent of node {wrong[0]} is {parents[wrong[0]]}, not an earlier node"))
                continue
            if len(set(ids[:count])) < count or any(i != PADDING for i in ids[count:]):
                problems.append((b, "node ids are not unique, or padding has one"))
            if not all(0 <= i < next_ids[b] for i in ids[:count]):
                problems.append((b, "a node id is not below next_id"))
            depths = [0, *_depths(parents[1:count])]
            if self.chain and depths != list(range(count)):
                problems.append((b, "it is said to be a chain and is not"))
            if self.dense and count < width:
                problems.append((b, "it is said to be without padding and is not"))
            if max(depths) > self.bound():
                problems.append((b, f"it is deeper than its depth_bound {self.bound()}"))
        return problems

    def _shape_problems(self, batch: int, width: int) -> list[str]:
        expected = [
            ("tokens", self.tokens, torch.int64, (batch, width)),
            ("parents", self.parents, torch.int32, (batch, width)),
            ("num_nodes", self.num_nodes, torch.int64, (batch,)),
            ("node_id", self.node_id, torch.int64, (batch, width)),
            ("source", self.source, torch.uint8, (batch, width)),
        ]
        problems = [
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            for name, tensor, dtype, shape in expected
            if tensor.dtype != dtype or tuple(tensor.shape) != shape
        ]
        if width == 0:
            problems.append("it has no root")
        if self.log_score is not None:
            if tuple(self.log_score.shape) != (batch, width):
                problems.append(f"log_score is {tuple(self.log_score.shape)}, not {(batch, width)}")
            elif bool((self.log_score.isnan()).any()):
                problems.append("log_score holds NaN")
        if self.q is not None:
            if tuple(self.q.probs.shape[:2]) != (batch, width):
                problems.append(f"q.probs is {tuple(self.q.probs.shape)}, not [{batch}, {width}, K]")
            if self.q.ids is not None and self.q.ids.shape != self.q.probs.shape:
                problems.append("q.ids and q.probs differ in shape")
        return problems


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of node 1, 2, ... from the parent of each."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def _filled(row: list, width: int, value: int | bool) -> list:
    return row + [value] * (width - len(row))


def _padded(rows: Sequence[Sequence], first: object, width: int, value: float) -> list[list]:
    """[B][width]: ``first`` (one for all or one a row), the row, then padding."""
    heads = first if isinstance(first, list) else [first] * len(rows)
    return [[head, *row, *([value] * (width - 1 - len(row)))] for head, row in zip(heads, rows, strict=True)]


_CODES = {torch.int64: "q", torch.int32: "i", torch.uint8: "B", torch.float64: "d"}  # of `array`


def _tensor(rows: list[list], dtype: torch.dtype) -> Tensor:
    """Rows of equal length as a tensor, in half the time that `torch.tensor` takes for a few numbers."""
    if not rows or not rows[0]:
        return torch.tensor(rows, dtype=dtype)
    flat = rows[0] if len(rows) == 1 else chain.from_iterable(rows)
    return torch.frombuffer(array(_CODES[dtype], flat), dtype=dtype).view(len(rows), len(rows[0]))


def _check_lists(batch: int, parents: Sequence, tokens: Sequence, source: object, log_score: Sequence | None) -> None:
    like = [parents, tokens]
    if not isinstance(source, int):
        like.append(source)  # type: ignore[arg-type]
    if log_score is not None:
        like.append(log_score)
    lengths = [[len(row) for row in rows] for rows in like]
    if len(tokens) != batch or any(a != b for a, b in pairwise(lengths)):
        raise ConfigError(
            f"trees of {batch} roots from lists of lengths {lengths}",
            "the lists do not describe the same nodes",
            "give for every root the parent, the token (and the score) of each node",
        )
    for row in parents:
        for node, parent in enumerate(row, start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} below node {parent}",
                    "a parent must come before its child",
                    "list the nodes top down, the root is 0",
                )


def _joined(
    mine: tuple[list[int], list[int]], theirs: tuple[list[int], list[int]], width: int
) -> tuple[list[bool], list[int]]:
    """Which nodes of two trees laid side by side stay, and the parent of each in that layout.

    The second tree's nodes start at ``width``; a node stays if it is the first with its path.
    """
    known: dict[tuple[int, int], int] = {}
    keep: list[bool] = []
    joined_parents: list[int] = []
    for offset, (tokens, parents) in ((0, mine), (width, theirs)):
        keep += [False] * (offset - len(keep))
        joined_parents += [PADDING] * (offset - len(joined_parents))
        place: list[int] = []  # where each node of this tree ended up
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            own = offset + node
            key = (place[parent] if node else PADDING, token)
            place.append(known.setdefault(key, own))
            keep.append(place[-1] == own)
            joined_parents.append(key[0])
    return keep, joined_parents


def _stacked(tensors: Sequence[Tensor], width: int, value: float) -> Tensor:
    return torch.cat([pad(t, (0, width - t.shape[1]), value=value) for t in tensors])


def _stacked_q(trees: Sequence[TokenTree], width: int) -> SparseQ:
    given = [tree.q for tree in trees if tree.q is not None]
    kinds = {(q.ids is None, q.replacement, q.probs.dtype) for q in given}
    candidates = max(q.probs.shape[2] for q in given)
    if len(kinds) > 1 or (given[0].ids is None and any(q.probs.shape[2] != candidates for q in given)):
        raise ConfigError(
            "stack of sampled drafts of different kinds",
            "their q differ in replacement, dtype, vocabulary, or in whether they list token ids",
            "draw the drafts of one batch in the same way",
        )

    def grown(q: SparseQ | None, tensor: Tensor | None, value: float) -> Tensor:
        if tensor is None:
            like = given[0].probs if q is None and value == 0.0 else given[0].ids
            assert like is not None
            return like.new_full((1, width, candidates), value)
        return pad(tensor, (0, candidates - tensor.shape[2], 0, width - tensor.shape[1]), value=value)

    probs: list[Tensor] = []
    ids: list[Tensor] = []
    for tree in trees:
        q = tree.q
        batch = len(tree.tokens)
        probs.append(grown(q, None if q is None else q.probs, 0.0).expand(batch, width, candidates))
        if given[0].ids is not None:
            ids.append(grown(q, None if q is None else q.ids, PADDING).expand(batch, width, candidates))
    return SparseQ(torch.cat(ids) if ids else None, torch.cat(probs), given[0].replacement)
