"""The invariants of a `TokenTree`, checked one by one. Everything here waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .tree_lists import PADDING, depths_below

if TYPE_CHECKING:
    from .tree import TokenTree


def problems(tree: TokenTree) -> Iterator[tuple[int, str]]:
    """(request, what is wrong) of every broken invariant; where shapes are wrong, nothing else is looked at."""
    shapes = [(0, text) for text in _shape_problems(tree)]
    yield from shapes
    if shapes:
        return
    next_ids = tree.next_ids().tolist()
    columns = zip(tree.parents.tolist(), tree.node_id.tolist(), tree.num_nodes.tolist(), strict=True)
    for b, (parents, ids, count) in enumerate(columns):
        yield from ((b, text) for text in _row_problems(tree, parents, ids, count, next_ids[b]))


def _row_problems(tree: TokenTree, parents: list[int], ids: list[int], count: int, next_id: int) -> Iterator[str]:
    width = len(parents)
    if not 1 <= count <= width:
        yield f"num_nodes is {count}, not between 1 and {width}"
        return
    if parents[0] != PADDING or any(parent != PADDING for parent in parents[count:]):
        yield "the root or padding has a parent"
    wrong = [i for i in range(1, count) if not 0 <= parents[i] < i]
    if wrong:
        yield f"the parent of node {wrong[0]} is {parents[wrong[0]]}, not an earlier node"
        return
    if len(set(ids[:count])) < count or any(i != PADDING for i in ids[count:]):
        yield "node ids are not unique, or padding has one"
    if not all(0 <= i < next_id for i in ids[:count]):
        yield "a node id is not below next_id"
    depths = [0, *depths_below(parents[1:count])]
    if tree.chain and depths != list(range(count)):
        yield "it is said to be a chain and is not"
    if tree.dense and count < width:
        yield "it is said to be without padding and is not"
    if max(depths) > tree.bound():
        yield f"it is deeper than its depth_bound {tree.bound()}"


def _shape_problems(tree: TokenTree) -> Iterator[str]:
    batch, width = tree.tokens.shape
    expected = [
        ("tokens", torch.int64, (batch, width)),
        ("parents", torch.int32, (batch, width)),
        ("num_nodes", torch.int64, (batch,)),
        ("node_id", torch.int64, (batch, width)),
        ("source", torch.uint8, (batch, width)),
    ]
    for name, dtype, shape in expected:
        tensor = getattr(tree, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            yield f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
    if width == 0:
        yield "it has no root"
    scores, q = tree.log_score, tree.q
    if scores is not None and tuple(scores.shape) != (batch, width):
        yield f"log_score is {tuple(scores.shape)}, not {(batch, width)}"
    elif scores is not None and bool(scores.isnan().any()):
        yield "log_score holds NaN"
    if q is not None and tuple(q.probs.shape[:2]) != (batch, width):
        yield f"q.probs is {tuple(q.probs.shape)}, not [{batch}, {width}, K]"
    if q is not None and q.ids is not None and q.ids.shape != q.probs.shape:
        yield "q.ids and q.probs differ in shape"
