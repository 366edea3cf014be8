"""A pass and its verdict in one compiled call.

In place of `passes.pack`, the layers, `read_logits` and `decide`, which remain the reference: the same numbers are
computed in the same order, and what comes out is equal. Sequences that take the likeliest token and those that sample
with temperature, top-k, top-p and min-p alone have their choices made in the call; others choose from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..core.tree import TokenTree
from ..core.tree_lists import depths_below
from ..kv.pool import KVPool
from ..network.decoder import Decoder
from ..network.native_calls import Asked, NativeTaps, RowSpan
from .base import Work
from .passes import Pass, Span, main_adapters
from .taps import Tapped
from .verification import choose_rows


def decide_compiled(p: Pass, target: Decoder, pool: KVPool, tapped: Tapped | None = None) -> bool:
    """`Pass.tokens` and `Pass.paths` of a whole pass; False: it needs the long way, and nothing was done.

    The long way is for layers that are not compiled and for requests that want log-probabilities of their prompt.
    `Pass.logits` and `Pass.rows` are set unless every choice is the likeliest token and nobody wants more.

    Args:
        tapped: rows whose states are taken in the same call.
    """
    wanted = wants(p)
    if target.stack is None or wanted is None:
        return False
    given = asked(p)
    if wanted == "logits":
        p.logits = torch.empty(len(given.wanted), target.config.vocab_size)
        given = given._replace(rules=rules_of(p), logits=p.logits)
    taps = None if tapped is None else room_for(tapped, p, target)
    settle(p, target.stack.decide(given, pool, taps), wanted == "choices")
    if tapped is not None and taps is not None:
        taken(tapped, taps, target)
    return True


def room_for(tapped: Tapped, p: Pass, target: Decoder) -> NativeTaps:
    """The rows whose states are taken, as compiled code is asked for them."""
    rows = None if tapped.whole else tapped.rows(p)
    count, width = p.main_rows if rows is None else len(rows), target.config.d_model
    if len(tapped.layers) == 1:  # every tensor that is made takes microseconds
        return NativeTaps((tapped.layers[0] % target.num_layers,), rows, torch.empty(count, width, dtype=target.dtype))
    layers = tuple(sorted({name % target.num_layers for name in tapped.layers}))
    return NativeTaps(layers, rows, torch.empty(len(layers), count, width, dtype=target.dtype))


def taken(tapped: Tapped, taps: NativeTaps, target: Decoder) -> None:
    """Note where the states are that compiled code has taken."""
    tapped.apart, tapped.ms = taps.rows is not None, taps.ms
    if len(tapped.layers) == 1:
        tapped.source = {tapped.layers[0]: taps.out}
    else:
        states = dict(zip(taps.layers, taps.out, strict=True))
        tapped.source = {name: states[name % target.num_layers] for name in tapped.layers}


def wants(p: Pass) -> Literal["choices", "logits"] | None:
    """What a compiled pass is asked for beside choices: nothing, or logits, too; None: it needs the long way."""
    plain = True
    for work in p.works:
        params = work.sequence.state.request.params
        if params.prompt_logprobs is not None:
            return None
        plain = plain and (not work.generates or (work.sequence.view.sampler.plain and params.logprobs is None))
    return None if not p.works else "choices" if plain else "logits"


def rules_of(p: Pass) -> bytes:
    """How each sequence chooses, for compiled code."""
    return b"".join([work.sequence.view.sampler.rules for work in p.works])


def asked(p: Pass) -> Asked:
    """The rows of a pass as compiled code is asked for them: those that generate are wanted, without rules."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[slice | Tensor] = []
    wanted: list[int] = []
    spans = []
    for work, span in zip(p.works, p.spans, strict=True):
        if work.rows == 1 and span.tree_index < 0:
            cache = work.sequence.cache
            assert cache is not None
            first = cache.committed
            keys = cache.slots(0, first + 1)
            slots.append(slice(keys.stop - 1, keys.stop) if isinstance(keys, slice) else keys[first:])
            tokens.append(work.sequence.view.tokens[first])
            positions.append(first)
            spans.append(RowSpan(span.start, span.stop, first, keys, None))
            if work.generates:
                wanted.append(span.root)
            continue
        spans.append(_add(work, span, p.tree, tokens, positions, slots))
        if work.generates:
            wanted += range(span.root, span.stop)
    where = slots[0] if len(slots) == 1 and isinstance(slots[0], slice) else _slot_list(slots)
    return Asked(tokens, positions, where, spans, wanted, main_adapters(p))


def settle(p: Pass, chosen: list[int], plain: bool) -> None:
    """Sets what comes out of each generating work, from the choices after all their nodes."""
    begin = 0
    for i in p.generating:
        span = p.spans[i]
        end = begin + span.stop - span.root
        picks = chosen[begin:end]
        if not plain:
            p.rows[i] = slice(begin, end)
            if -1 in picks:
                picks = _chosen(p, i)
        if p.tree is None or span.tree_index < 0:
            p.paths[i], p.tokens[i] = [], picks
        else:
            p.paths[i], p.tokens[i] = _walk(p.tree, span, picks)
        begin = end


def _chosen(p: Pass, i: int) -> list[int]:
    """The choice of a work's own sampler after each of its nodes."""
    view, index, nodes = p.works[i].sequence.view, p.spans[i].tree_index, p.spans[i].nodes
    depths, paths = [0], None
    if p.tree is not None and index >= 0:
        depths, paths = p.tree.depth_lists()[index], p.tree.path_tokens()[index, :nodes]
    positions = [len(view.tokens) + depth for depth in depths]
    return choose_rows(view, p.logits[p.rows[i]], paths, positions).tolist()


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
