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

from ..core.verify import walk
from ..kv.pool import KVPool
from ..network.decoder import Decoder
from ..network.native_calls import NativeTaps, RowSpan, TokenPass
from .passes import Pass, main_adapters, rows_of
from .taps import Tapped
from .verification import choose_nodes


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


def asked(p: Pass) -> TokenPass:
    """The rows of a pass as compiled code is asked for them: those that generate are wanted, without rules."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[slice | Tensor] = []
    wanted: list[int] = []
    spans = []
    for work, span, rows in zip(p.works, p.spans, rows_of(p), strict=True):
        tokens += rows.tokens
        positions += rows.positions
        slots.append(rows.slots)
        spans.append(RowSpan(span.start, span.stop, rows.first, rows.keys, rows.parents))
        if work.generates:
            wanted += range(span.root, span.stop)
    where = slots[0] if len(slots) == 1 and isinstance(slots[0], slice) else _slot_list(slots)
    return TokenPass(tokens, positions, where, spans, wanted, main_adapters(p))


def settle(p: Pass, chosen: list[int], plain: bool) -> None:
    """Sets what comes out of each generating work, from the choices after all their nodes."""
    begin = 0
    for i in p.generating:
        span = p.spans[i]
        end = begin + span.nodes
        picks = chosen[begin:end]
        if not plain:
            p.rows[i] = slice(begin, end)
            if -1 in picks:
                picks = choose_nodes(p.works[i].sequence.view, p.logits[p.rows[i]], p.tree, span.tree_index).tolist()
        if p.tree is None or span.tree_index < 0:
            p.accept(i, [], picks[0])
        else:
            p.accept(i, *walk(p.tree.tokens[span.tree_index], p.tree.parents[span.tree_index], picks))
        begin = end


def _slot_list(slots: Sequence[slice | Tensor]) -> list[int]:
    found: list[int] = []
    for part in slots:
        found += range(part.start, part.stop) if isinstance(part, slice) else part.tolist()
    return found
