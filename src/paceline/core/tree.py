"""Drafts: batched token trees, stored as parent pointers.

Masks, depths, paths and children are derived from the parents; no operation changes a tree in place. `tree_lists`
has the form of plain lists, `tree_checks` the invariants. Axis letters: B requests, N nodes, D depth.

On the CPU every operation checks its arguments and returns the narrowest tree. On an accelerator `extend`
and `from_chain` do neither, because both would wait for the device (`check` and `trim` do it on demand).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import sparse_q, tree_checks, tree_lists
from .errors import ConfigError
from .sparse_q import SparseQ
from .tree_lists import PADDING, TreeLists, as_tensor

_FEW_NODES = 512  # columns of a batch of trees, padding included
_EMPTY = {"tokens": 0, "parents": PADDING, "node_id": PADDING, "source": 0, "log_score": float("-inf")}  # at padding


@dataclass(slots=True, eq=False)
class TokenTree:
    """B requests with one tree of candidate tokens each, padded to N nodes.

    Node 0 is the root: the last committed token. Real nodes occupy 0 .. num_nodes - 1 and a parent comes
    before its children. Two children of one parent may carry the same token: matching takes the first.
    The tensors are shared between trees: treat them as read-only. A tree that was built from lists keeps those and
    makes each tensor when it is first read; `lists` costs nothing then.
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
    known_depths: list[list[int]] | None = field(default=None, init=False, repr=False)  # like `depths`, unpadded

    if not TYPE_CHECKING:  # a checker is to find names that are not there

        def __getattr__(self, name):
            """A field of a tree that was built from lists, which has none but `known` until it is read."""
            make = _FROM_LISTS.get(name)
            if make is None:
                raise AttributeError(f"a TokenTree has no {name}")
            value = make(self.known)
            setattr(self, name, value)
            return value

    # ---- constructors

    @staticmethod
    def from_lists(lists: TreeLists) -> TokenTree:
        """Trees on the CPU from plain lists, which are trusted and kept: not a copy is made, nothing is checked.

        For lists that were checked before, such as those of `lists` or `TreeLists.kept`; `from_parents` checks.
        Nodes get fresh ids.
        """
        tree: TokenTree = object.__new__(TokenTree)
        tree.known, tree.known_depths, tree.checked, tree.q = lists, None, True, None
        return tree

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
            TypeError, OverflowError: an entry that is no number of its kind.
        """
        device = roots.device if isinstance(roots, Tensor) else None
        first = roots.tolist() if isinstance(roots, Tensor) else roots
        marks = [[source] * len(row) for row in tokens] if isinstance(source, int) else source
        tree_lists.check_lists(len(first), [parents, tokens, marks, *(() if log_score is None else (log_score,))])
        mark = source if isinstance(source, int) else 0
        lists = TreeLists(
            tokens=[[root, *row] for root, row in zip(first, tokens, strict=True)],
            parents=[[PADDING, *row] for row in parents],
            sources=[[mark, *row] for row in marks],
            counts=[len(row) + 1 for row in tokens],
            scores=None if log_score is None else [[0.0, *row] for row in log_score],
        )
        tree = TokenTree.from_lists(lists)
        tree.checked = lists.numbered
        return tree if device is None or device.type == "cpu" else tree.to(device)

    @staticmethod
    def from_paths(
        roots: Tensor | Sequence[int],
        paths: Sequence[Sequence[Sequence[int]]],
        source: int = 0,
        log_score: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> TokenTree:
        """Prefix trees of token paths: shared prefixes become one node, in first-seen order.

        Args:
            roots: [B] int64.
            paths: for each request its paths, each the tokens below the root.
            source: who proposes these nodes, 0 .. 255.
            log_score: like ``paths``, cumulative log q at each token; a merged node keeps the first.
        """
        tries = [tree_lists.trie(p, None if log_score is None else log_score[b]) for b, p in enumerate(paths)]
        parents, tokens, scores = [t[0] for t in tries], [t[1] for t in tries], [t[2] for t in tries]
        return TokenTree.from_parents(roots, parents, tokens, source, None if log_score is None else scores)

    @staticmethod
    def stack(trees: Sequence[TokenTree]) -> TokenTree:
        """The trees concatenated along the batch, padded to the widest.

        ``log_score`` and ``q`` are kept if every tree with drafted nodes has them.

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
        sampled = bool(drafted) and all(tree.q is not None for tree in drafted)
        parts = [(tree._columns(scored), (0, width - tree.tokens.shape[1])) for tree in trees]
        return TokenTree(
            **{n: torch.cat([pad(part[n], room, value=_EMPTY[n]) for part, room in parts]) for n in parts[0][0]},
            num_nodes=torch.cat([tree.num_nodes for tree in trees]),
            q=sparse_q.stacked([(len(tree.tokens), tree.q) for tree in trees], width) if sampled else None,
            next_id=torch.cat([tree.next_ids() for tree in trees]),
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
        next_id = self.next_ids()
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
        ``log_score`` is kept if both trees have it; q is dropped, since a merged node was not drawn from one q.

        Raises:
            ConfigError: different batch sizes or roots.
        """
        if len(self.tokens) != len(other.tokens) or not torch.equal(self.tokens[:, 0], other.tokens[:, 0]):
            raise ConfigError(
                "merge of trees with different roots",
                "trees can be merged only where they continue the same token",
                "reroot one of them first",
            )
        width, total = self.tokens.shape[1], self.tokens.shape[1] + other.tokens.shape[1]
        pairs = zip(self._nodes(), other._nodes(), strict=True)
        kept, parents = zip(*(tree_lists.union(mine, theirs, width, total) for mine, theirs in pairs), strict=True)
        keep = torch.tensor(kept, device=self.tokens.device)
        next_id = self.next_ids()
        fresh = keep[:, width:]
        scored = self.log_score is not None and other.log_score is not None
        mine, theirs = self._columns(scored), other._columns(scored)
        joined: dict[str, Any] = {name: torch.cat([mine[name], theirs[name]], dim=1) for name in mine}
        joined["parents"] = torch.tensor(parents, dtype=torch.int32, device=self.tokens.device)
        joined["node_id"] = torch.cat([self.node_id, next_id[:, None] + fresh.cumsum(dim=1) - 1], dim=1)
        grown = TokenTree(
            **joined,
            num_nodes=self.num_nodes,
            next_id=next_id + fresh.sum(dim=1),
            depth_bound=max(self.bound(), other.bound()),
        )
        return grown._keep(keep)

    def prune(self, keep: Tensor) -> TokenTree:
        """Only the nodes where ``keep`` [B, N] bool is set; q is dropped, even if all nodes are kept.

        (A rule that depends on the drawn tokens changes their distribution even where it keeps all of them.)

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

        q is kept: the nodes below a node were drawn independently of the branches that are dropped.

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
        return replace(
            self,
            **{name: column.to(device) for name, column in self._columns().items()},
            num_nodes=self.num_nodes.to(device),
            q=None if self.q is None else self.q.to(device),
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
            if self._small:
                return as_tensor(self.depth_lists(), torch.int64, PADDING, self.tokens.shape[1])
            return (self._lineage() > 0).sum(dim=2) - 1
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        if self.dense:
            return index.expand(self.tokens.shape)
        return torch.where(index < self.num_nodes[:, None], index, PADDING)

    def depth_lists(self) -> list[list[int]]:
        """`depths` on the host, unpadded (waits for the device)."""
        if self.known_depths is None:
            self.known_depths = tree_lists.depths(self.lists())
        return self.known_depths

    def ancestor_mask(self) -> Tensor:
        """[B, N, N] bool: [b, i, j] says that j is i itself or one of its ancestors; False at padding.

        Only the tree block: whatever comes before the root is visible to every node anyway.
        """
        batch, width = self.tokens.shape
        device = self.tokens.device
        if not self.chain:
            if self._small:
                return tree_lists.ancestor_mask(self.lists(), width)
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
        return tree_lists.leaf_paths(self._nodes()[b][1])

    def token_paths(self, b: int) -> list[list[int]]:
        """Like `leaf_paths`, as tokens; what `from_paths` takes."""
        tokens = self.tokens[b].tolist()
        return [[tokens[node] for node in path] for path in self.leaf_paths(b)]

    def lists(self) -> TreeLists:
        """The tree on the host, made once (waits for the device); of a tree that was built from lists, those."""
        if self.known is None:
            counts = self.num_nodes.tolist()

            def rows(column: Tensor) -> list[list]:
                return [row[:n] for row, n in zip(column.tolist(), counts, strict=True)]

            scores = None if self.log_score is None else rows(self.log_score)
            self.known = TreeLists(rows(self.tokens), rows(self.parents), rows(self.source), counts, scores)
        return self.known

    def check(self) -> None:
        """Check every invariant of the type (waits for the device).

        Raises:
            ConfigError: the first one that is broken.
        """
        for b, problem in () if self.checked else tree_checks.problems(self):
            raise ConfigError(f"tree of request {b}", problem, "build trees with the constructors of TokenTree")

    # ---- the parts that the operations are made of

    @property
    def _small(self) -> bool:
        """Few nodes on the host: plain lists are then several times faster than tensor operations."""
        return self.tokens.device.type == "cpu" and self.tokens.numel() <= _FEW_NODES

    def next_ids(self) -> Tensor:
        """[B] int64: the first node id of each request that was never used."""
        return self.node_id.amax(dim=1) + 1 if self.next_id is None else self.next_id

    def _scores(self) -> Tensor:
        if self.log_score is None:
            return torch.zeros(self.tokens.shape, dtype=torch.float64, device=self.tokens.device)
        return self.log_score

    def _columns(self, scored: bool | None = None) -> dict[str, Any]:
        """The tensors [B, N] by field, scores among them where there are any, or as ``scored`` says."""
        columns = {"tokens": self.tokens, "parents": self.parents, "node_id": self.node_id, "source": self.source}
        if self.log_score is not None if scored is None else scored:
            columns["log_score"] = self._scores()
        return columns

    def _nodes(self) -> list[tree_lists.Nodes]:
        """Tokens and parents of the real nodes of each request."""
        known = self.lists()
        return [*zip(known.tokens, known.parents, strict=True)]

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
        columns = {name: column.gather(1, order) for name, column in self._columns().items()}
        old = columns["parents"].long()
        columns["parents"] = index.gather(1, old.clamp(min=0)).masked_fill_(old < 0, PADDING).to(torch.int32)
        columns = {name: column.masked_fill_(~real, _EMPTY[name]) for name, column in columns.items()}
        columns["parents"][:, 0] = PADDING
        return TokenTree(
            **columns,
            num_nodes=counts,
            q=None if self.q is None else self.q.take(order),
            next_id=self.next_ids(),
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
        columns = {name: column.masked_fill(~real, _EMPTY[name]) for name, column in tree._columns().items()}
        return replace(tree, **columns, num_nodes=lengths, dense=host and len(lengths) == 1)

    def _narrow(self, width: int) -> TokenTree:
        """The first ``width`` columns."""
        return replace(
            self,
            **{name: column[:, :width] for name, column in self._columns().items()},
            num_nodes=self.num_nodes.clamp(max=width),
            q=None if self.q is None else self.q.narrow(width),
            next_id=self.next_ids(),
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


_FROM_LISTS: dict[str, Callable[[TreeLists], Any]] = {  # fields that are made when they are first read
    "tokens": lambda lists: as_tensor(lists.tokens, torch.int64),
    "parents": lambda lists: as_tensor(lists.parents, torch.int32, PADDING),
    "num_nodes": lambda lists: torch.tensor(lists.counts, dtype=torch.int64),
    "node_id": lambda lists: as_tensor([*map(range, lists.counts)], torch.int64, PADDING),
    "source": lambda lists: as_tensor(lists.sources, torch.uint8),
    "log_score": lambda lists: (
        None if lists.scores is None else as_tensor(lists.scores, torch.float64, _EMPTY["log_score"])
    ),
    "next_id": lambda lists: torch.tensor(lists.counts, dtype=torch.int64),
    "chain": lambda lists: lists.chains,
    "dense": lambda lists: len({*lists.counts}) == 1,
    "depth_bound": lambda lists: max(map(max, tree_lists.depths(lists)), default=0),
}
