"""The tree's mask matrix as the paper has it: M[i, j] says that token i is token j or follows it.

`flight` needs no matrix: it knows parents, and who is left. These are the paper's own rules; tests hold them beside it.

Source: SpecPipe, section 3.2.1, algorithm 1 and figure 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def append_layer(mask: Tensor, parents: Sequence[int]) -> Tensor:
    """Layer appending: the old mask, below it the parents' rows, an identity beside these.

    Args:
        mask: [n, n] bool.
        parents: [k] rows of the new tokens' parents.

    Returns:
        [n + k, n + k] bool.
    """
    old, new = mask.shape[0], len(parents)
    grown = torch.zeros(old + new, old + new, dtype=torch.bool)
    grown[:old, :old] = mask
    grown[old:, :old] = mask[torch.tensor(parents, dtype=torch.int64)]
    grown[old:, old:] = torch.eye(new, dtype=torch.bool)
    return grown


def subtree(mask: Tensor, token: int) -> Tensor:
    """[n] bool: the token and what follows it, column ``token``. Tree and embeddings are pruned by it."""
    return mask[:, token]


def kept_cache(mask: Tensor, token: int) -> Tensor:
    """[n] bool: row OR column of the token: what it follows has K/V that stay, too (figure 8)."""
    return mask[token] | mask[:, token]


def pruned(mask: Tensor, keep: Tensor) -> Tensor:
    """[kept, kept] bool: the rows and columns that ``keep`` [n] bool names."""
    return mask[keep][:, keep]
