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
    if stack is None or not simple(p):
        return False
    settle(p, stack.decide(*asked(p), main_adapters(p), pool))
    return True


def simple(p: Pass) -> bool:
    """Whether every choice of the pass is the likeliest token, and nothing else is asked of its logits."""
    for work in p.works:
        if not _simple(work):
            return False
    return bool(p.works)


def asked(p: Pass) -> tuple[list[int], list[int], slice | list[int], list[RowSpan], list[int]]:
    """Tokens, positions and slots of the rows of a pass, where they lie, and which of them generate."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[slice | Tensor] = []
    wanted: list[int] = []
    spans = []
    for work, span in zip(p.works, p.spans, strict=True):
        spans.append(_add(work, span, p.tree, tokens, positions, slots))
        if work.generates:
            wanted += range(span.root, span.stop)
    where = slots[0] if len(slots) == 1 and isinstance(slots[0], slice) else _slot_list(slots)
    return tokens, positions, where, spans, wanted


def settle(p: Pass, chosen: Sequence[int]) -> None:
    """Sets `Pass.tokens` and `Pass.paths` by the likeliest token after each row that generates."""
    begin = 0
    for i in p.generating:
        span = p.spans[i]
        if p.tree is None or span.tree_index < 0:
            p.paths[i], p.tokens[i] = [], [chosen[begin]]
        else:
            p.paths[i], p.tokens[i] = _walk(p.tree, span, chosen[begin : begin + span.stop - span.root])
        begin += span.stop - span.root


def _simple(work: Work) -> bool:
    params = work.sequence.state.request.params
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
    keys = cache.slots(0, stop)
    slots.append(slice(keys.start + first, keys.stop) if isinstance(keys, slice) else keys[first:])
    tokens += work.sequence.view.tokens[first : first + work.rows]
    parents = None
    if tree is None or span.tree_index < 0:
        positions += range(first, stop)
    else:
        lists = tree.lists()
        tokens += lists.tokens[span.tree_index][1:]
        parents = lists.parents[span.tree_index][1:]
        if parents == [*range(len(parents))]:
            parents = None
            positions += range(first, stop)
        else:
            positions += range(first, first + work.rows)
            root = first + work.rows - 1
            positions += [root + depth for depth in depths_below(parents)]
    return RowSpan(span.start, span.stop, first, keys, parents)


def _slot_list(slots: Sequence[slice | Tensor]) -> list[int]:
    found: list[int] = []
    for part in slots:
        found += range(part.start, part.stop) if isinstance(part, slice) else part.tolist()
    return found


def _walk(tree: TokenTree, span: Span, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """(accepted nodes, tokens that come out) of one sequence; see `verify.sample_and_match`."""
    lists = tree.lists()
    tokens, parents = lists.tokens[span.tree_index], lists.parents[span.tree_index]
    path: list[int] = []
    said: list[int] = []
    frontier, want = 0, chosen[0]
    for node in range(1, len(tokens)):  # children come after their parents
        if parents[node] == frontier and tokens[node] == want:
            path.append(node)
            said.append(want)
            frontier, want = node, chosen[node]
    said.append(want)
    return path, said
