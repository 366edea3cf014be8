"""Token trees from a chain of logits: token-info sampling.

The logits of a level do not depend on the tokens drafted in front of it; the bias of a parent's token for its children
is a bias on them (`token_info`). So one chain of logits gives a whole tree, and another tree when the true token is
known.

Source: Lyanna, section 5.2 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...draft.growth import Grower, Growth

# Tokens [n] -> the bias of each for the logits of its children, [n, V]; None: nothing, for all
Bias = Callable[[Sequence[int]], "Tensor | None"]


def token_info_sampling(growths: Sequence[Growth], grower: Grower, bias: Bias) -> None:
    """Run Algorithm 1 for several sequences at once.

    Level by level the k likeliest children of every node of Q, and of all of them the k with the highest joint
    probability are the next Q.

    The trees are whole ones; `TokenTree.best` cuts one to a verification budget: the nodes with the highest cumulative
    probability, which holds every kept node's parent, since no node is likelier than its parent.

    Args:
        growths: each with the levels' logits; their trees are filled. A frontier is Q of Algorithm 1.
        grower: of dynamic trees; k is its ``topk``.
        bias: token-info.
    """
    for level in range(max((growth.max_depth for growth in growths), default=0)):
        alive = [growth for growth in growths if growth.frontier]
        if not alive:
            return
        logits = torch.cat([growth.logits[level].expand(len(growth.frontier), -1) for growth in alive])
        info = bias([growth.token(node) for growth in alive for node in growth.frontier])
        grower.expand(alive, logits if info is None else logits + info, level)
