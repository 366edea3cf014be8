"""A pass and its verdict in one compiled call.

In place of `passes.embed`, the layers, `read_logits` and the choices, which remain the reference: the same numbers are
computed in the same order, and the result is equal. Sequences that take the likeliest token and those that sample
with temperature, top-k, top-p and min-p alone, within a grammar or not, have their choices made in the call; others
choose from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..draft.base import LevelScores
from ..kernels.calls import NativeTaps, TokenPass
from ..kernels.layers import Stack
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from .passes import Pass, decide, token_pass
from .taps import Tapped


class PassHook:
    """Take part in one pass; this one does nothing."""

    compiles = True  # whether the pass may be one compiled call
    drops = False  # whether it drops rows of nodes
    layers: Sequence[int] = ()  # before which `before` is called, ascending
    rows = 0  # of its own in a compiled call, whose logits follow those of the pass
    late_ms = 0.0  # that its rows took after the verdict

    def prepare(self, stack: Stack, pool: KVPool) -> None:
        """Choose the rows of a compiled call."""

    def decide(self, stack: Stack, token_pass: TokenPass, pool: KVPool, taps: NativeTaps | None) -> list[int]:
        """Make the compiled call: `Stack.decide`, or one that takes its place."""
        return stack.decide(token_pass, pool, taps)

    def before(self, layer: int) -> None:
        """Add rows, drop rows or read states of `Pass.state` before a layer."""

    def after(self) -> Sequence[LevelScores | None]:
        """Read rows of the last accepted nodes, tokens being emitted and K/V committed: [B] for the drafter."""
        return ()


NO_HOOK = PassHook()


def decide_compiled(p: Pass, target: Decoder, pool: KVPool, tapped: Tapped | None, hook: PassHook = NO_HOOK) -> bool:
    """Set `Pass.tokens` and `Pass.paths` of a whole pass; False: it must go part by part, and nothing was done.

    Layers that are not compiled or of which ranks have parts, and requests that want log-probabilities of their prompt,
    go part by part. `Pass.logits` are set unless every choice is the likeliest token and nobody wants more.

    Args:
        tapped: rows whose states are taken in the same call.
        hook: makes the call.
    """
    stack, params = target.stack, [work.sequence.params for work in p.works]
    if stack is None or target.ranks is not None or not params:
        return False
    if any(params_of_one.prompt_logprobs is not None for params_of_one in params):
        return False
    hook.prepare(stack, pool)
    request = token_pass(p)
    works = [p.works[i] for i in p.generating]
    if not all(w.sequence.sampler.plain and w.sequence.params.logprobs is None for w in works):
        sampling = b"".join([work.sequence.sampler.rules for work in p.works])
        count = len(request.choice_rows)
        logits = torch.empty(count + hook.rows, target.config.vocab_size)
        p.logits = logits[:count]
        request = request._replace(rules=sampling, logits=logits, masks=_masks(p, count, target.config.vocab_size))
    taps = None if tapped is None else _room_for(tapped, p, target)
    decide(p, None, hook.decide(stack, request, pool, taps))
    if tapped is not None and taps is not None:
        _taken(tapped, taps, target)
    return True


def _masks(p: Pass, count: int, vocab_size: int) -> Tensor | None:
    """Return [wanted, words] of every node's grammar; None: no sequence has one.

    All bits are set where there is none; none is where the grammar's parser failed: compiled code leaves that node to
    the sampler, which states why.
    """
    samplers = [p.works[i].sequence.sampler for i in p.generating]
    if all(sampler.matcher is None for sampler in samplers):
        return None
    words, at = torch.full((count, (vocab_size + 31) // 32), -1, dtype=torch.int32), 0
    for i, sampler in zip(p.generating, samplers, strict=True):
        tree = p.spans[i].tree
        paths = [[]] if tree is None else tree.paths()
        rows = words[at : at + len(paths)]
        at += len(paths)
        if sampler.matcher is not None:
            try:
                for row, path in zip(rows, paths, strict=True):
                    sampler.matcher.fill([*sampler.output_ids, *path], row)
            except Exception:  # the sampler meets it again, and its request alone ends
                rows.zero_()
    return words


def _room_for(tapped: Tapped, p: Pass, target: Decoder) -> NativeTaps:
    """Return the rows whose states are taken, as compiled code is called for them."""
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
