"""A pass and its verdict in one compiled call, where every choice is the likeliest token.

In place of `passes.pack`, the layers, `read_logits` and `decide`, which remain the reference: the same numbers are
computed in the same order, and what comes out is equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.tree import TokenTree
from ..core.tree_lists import depths_below
from ..kv.pool import KVPool
from ..target.decoder import Decoder
from ..target.native import RowSpan
from .base import Work
from .passes import Pass, Span, main_adapters


def decide_compiled(p: Pass, target: Decoder, pool: KVPool) -> bool:
    """`Pass.tokens` and `Pass.paths` of a whole pass; False: it needs the long way, and nothing was done.

    The long way is for layers that are not compiled and for requests whose choice is more than an argmax of the logits
    (sampling, penalties, biases, masks), or that want log-probabilities.
    """
    stack = target.stack
    if stack is None or not p.works or not all(map(_simple, p.works)):
        return False
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[slice | Tensor] = []
    spans = []
    for work, span in zip(p.works, p.spans, strict=True):
        spans.append(_add(work, span, p.tree, tokens, positions, slots))
    wanted = [row for i in p.generating for row in range(p.spans[i].root, p.spans[i].stop)]
    where = slots[0] if len(slots) == 1 and isinstance(slots[0], slice) else _slot_list(slots)
    chosen = stack.decide(tokens, positions, where, spans, wanted, main_adapters(p), pool)
    begin = 0
    for i in p.generating:
        count = p.spans[i].nodes
        p.paths[i], p.tokens[i] = _walk(p.tree, p.spans[i], chosen[begin : begin + count])
        begin += count
    return True


def _simple(work: Work) -> bool:
    params = work.sequence.params
    return params.prompt_logprobs is None and (
        not work.generates or (params.logprobs is None and work.sequence.view.sampler.plain)
    )


def _add(
    work: Work,
    span: Span,
    tree: TokenTree | None,
    tokens: list[int],
    positions: list[int],
    slots: list[slice | Tensor],
) -> RowSpan:
    """Append one sequence's rows: pending tokens, then drafted nodes."""
    cache = work.sequence.cache
    assert cache is not None
    first = cache.committed
    stop = first + span.stop - span.start
    tokens += work.sequence.view.tokens[first : first + work.rows]
    parents = None
    if tree is None or span.tree_index < 0:
        positions += range(first, stop)
    else:
        lists, nodes = tree.lists(), span.nodes
        tokens += lists.tokens[span.tree_index][1:nodes]
        parents = lists.parents[span.tree_index][1:nodes]
        positions += range(first, first + work.rows)
        root = first + work.rows - 1
        positions += [root + depth for depth in depths_below(parents)]
        if parents == [*range(nodes - 1)]:
            parents = None
    slots.append(cache.slots(first, stop))
    return RowSpan(span.start, span.stop, first, cache.slots(0, stop), parents)


def _slot_list(slots: Sequence[slice | Tensor]) -> list[int]:
    found: list[int] = []
    for part in slots:
        found += range(part.start, part.stop) if isinstance(part, slice) else part.tolist()
    return found


def _walk(tree: TokenTree | None, span: Span, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """(accepted nodes, tokens that come out) of one sequence; see `verify.sample_and_match`."""
    path: list[int] = []
    want = chosen[0]
    if tree is None or span.tree_index < 0:
        return path, [want]
    lists = tree.lists()
    tokens, parents = lists.tokens[span.tree_index], lists.parents[span.tree_index]
    frontier, said = 0, []
    for node in range(1, span.nodes):  # children come after their parents
        if parents[node] == frontier and tokens[node] == want:
            path.append(node)
            said.append(want)
            frontier, want = node, chosen[node]
    return path, [*said, want]
