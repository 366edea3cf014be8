"""The token channel: what the target may be about to emit at each position of a pass, sent at mid-depth.

Source: Mirror Speculative Decoding, section 3.1, eq. 7 and 9.
"""

from __future__ import annotations

from collections import abc

from torch import Tensor

from ...core.sequence import Sequence
from ...draft.base import Levels


def propose(view: Sequence, window: abc.Sequence[int], logits: Tensor, kappa: int, noisy: bool = True) -> Levels | None:
    """M_t, the exit's candidates for one sequence; None: its own sampling rules fail, and verification will end it.

    Tokens of position j are the corrections that may come after j accepted tokens; of the last one, the bonus token.
    The window's own next token is left out: it cannot be the correction there.

    The scores go through the rules of the request and are ranked with the noise of the target's own choices, so that at
    temperature > 0 the tokens are those that the target would emit if its exit were its end.

    Args:
        view: the sequence.
        window: [gamma] drafted tokens under verification.
        logits: [gamma + 1, V] of the exit.
        kappa: tokens of a position.
        noisy: whether that noise counts; else scores alone do, as in the paper.

    Returns:
        [gamma + 1][<= kappa] tokens, likeliest first, and the log of their shares of the exit's scores.
    """
    paths, first = [window[:place] for place in range(len(logits))], len(view.tokens)
    try:
        log_p = view.sampler.ranked(logits, paths, range(first, first + len(logits)), noisy).log_softmax(dim=-1)
    except Exception:
        if view.sampler.fault is None:
            raise
        return None
    best = log_p.topk(min(kappa + 1, log_p.shape[-1]), dim=-1)
    tokens_of, log_p_of = list[list[int]](), list[list[float]]()
    for place, (values, tokens) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        drafted = window[place] if place < len(window) else -1
        rows = zip(tokens, values, strict=True)
        candidates = [(token, value) for token, value in rows if token != drafted and value > float("-inf")][:kappa]
        tokens_of.append([token for token, _ in candidates])
        log_p_of.append([value for _, value in candidates])
    return tokens_of, log_p_of
