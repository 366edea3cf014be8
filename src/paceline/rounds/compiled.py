"""A pass and its verdict in one compiled call.

In place of `passes.embed`, the layers, `read_logits` and the choices, which remain the reference: the same numbers are
computed in the same order, and what comes out is equal. Sequences that take the likeliest token and those that sample
with temperature, top-k, top-p and min-p alone, within a grammar or not, have their choices made in the call; others
choose from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv.pool import KVPool
from ..network.decoder import Decoder
from ..network.native_calls import NativeTaps
from ..network.native_streams import StreamRun, StreamTokens
from .passes import Pass, decide, token_pass
from .taps import Tapped


def decide_compiled(
    p: Pass, target: Decoder, pool: KVPool, tapped: Tapped | None = None, streams: StreamRun | None = None
) -> tuple[Sequence[StreamTokens | None], float] | None:
    """`Pass.tokens` and `Pass.paths` of a whole pass, and what its streams say; None: it needs the long way, and
    nothing was done.

    The long way is for layers that are not compiled or of which ranks have parts, and for requests that want
    log-probabilities of their prompt.
    `Pass.logits` are set unless every choice is the likeliest token and nobody wants more.

    Args:
        tapped: rows whose states are taken in the same call.
        streams: who carries streams.

    Returns:
        What the streams of each carrier say, and the milliseconds of those that ran after the verdict.
    """
    params = [work.sequence.state.request.params for work in p.works]
    if (
        target.stack is None
        or target.ranks is not None
        or not params
        or any(own.prompt_logprobs is not None for own in params)
    ):
        return None
    given = token_pass(p)
    works = [p.works[i] for i in p.generating]
    if not all(w.sequence.view.sampler.plain and w.sequence.state.request.params.logprobs is None for w in works):
        rules = b"".join([work.sequence.view.sampler.rules for work in p.works])
        wanted = len(given.wanted)
        logits = torch.empty(wanted + (0 if streams is None else streams.rows), target.config.vocab_size)
        p.logits = logits[:wanted]
        given = given._replace(rules=rules, logits=logits, masks=_masks(p, wanted, target.config.vocab_size))
    taps = None if tapped is None else _room_for(tapped, p, target)
    answers: Sequence[StreamTokens | None] = ()
    late_ms = 0.0
    if streams is None:
        chosen = target.stack.decide(given, pool, taps)
    else:
        chosen, answers, late_ms = target.stack.decide_streams(given, streams, pool, taps)
    decide(p, None, chosen)
    if tapped is not None and taps is not None:
        _taken(tapped, taps, target)
    return answers, late_ms


def _masks(p: Pass, wanted: int, vocab_size: int) -> Tensor | None:
    """[wanted, words] of every node's grammar; None: no sequence has one. All bits are set where there is
    none; none is where the grammar's parser failed: compiled code leaves that node to the sampler, which says why."""
    samplers = [p.works[i].sequence.view.sampler for i in p.generating]
    if all(sampler.matcher is None for sampler in samplers):
        return None
    made, at = torch.full((wanted, (vocab_size + 31) // 32), -1, dtype=torch.int32), 0
    for i, sampler in zip(p.generating, samplers, strict=True):
        b = p.spans[i].tree_index
        paths = p.tree.paths(b) if p.tree is not None and b >= 0 else [[]]
        rows = made[at : at + len(paths)]
        at += len(paths)
        if sampler.matcher is not None:
            try:
                for row, path in zip(rows, paths, strict=True):
                    sampler.matcher.fill([*sampler.output_ids, *path], row)
            except Exception:  # the sampler meets it again, and its request alone ends
                rows.zero_()
    return made


def _room_for(tapped: Tapped, p: Pass, target: Decoder) -> NativeTaps:
    """The rows whose states are taken, as compiled code is asked for them."""
    rows = None if tapped.whole else tapped.rows(p)
    count, width = p.main_rows if rows is None else len(rows), target.config.d_model
    if len(tapped.layers) == 1:  # every tensor that is made takes microseconds
        return NativeTaps((tapped.layers[0] % target.num_layers,), rows, torch.empty(count, width, dtype=target.dtype))
    layers = tuple(sorted({name % target.num_layers for name in tapped.layers}))
    return NativeTaps(layers, rows, torch.empty(len(layers), count, width, dtype=target.dtype))


def _taken(tapped: Tapped, taps: NativeTaps, target: Decoder) -> None:
    """Note where the states are that compiled code has taken."""
    tapped.apart, tapped.ms = taps.rows is not None, taps.ms
    if len(tapped.layers) == 1:
        tapped.source = {tapped.layers[0]: taps.out}
    else:
        states = dict(zip(taps.layers, taps.out, strict=True))
        tapped.source = {name: states[name % target.num_layers] for name in tapped.layers}
