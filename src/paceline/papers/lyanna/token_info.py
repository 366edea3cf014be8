"""Token-info: the bias of a token for the logits of the one after it, added to logits that were made without it.

    l' = l + RMSNorm(E'(t)),   E'(t) = t^T W_E W1 W2

with W_E the target's frozen embedding [V, n], W1 [n, r] and W2 [r, V] of low rank r, and t the *parent's* token. The
norm is taken over the whole row of E' and has a gain for every entry.

A row's mean square is a quadratic form of its r factors, a^T (W2 W2^T) a / V with a = t^T W_E W1. So the normed row is
known from r numbers, u = a / rms, and the table [V, r] that they are multiplied with: rows of V numbers, of which there
are V, are never made.

Source: Lyanna, sections 4.1 (normalise and add) and 5.1 (low rank).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...model.linear import nan_parameter

EPS = 1e-6  # of the norm
GAIN = 0.1  # of the norm at the start of training: the bias is a small one until it is trained


class TokenInfo(nn.Module):
    """W1, W2 and the norm's gain. Parameters are NaN until loaded or made by `start`.

    Args:
        width: n, of the target's embedding.
        rank: r.
        vocab: V.
    """

    def __init__(
        self,
        width: int,
        rank: int,
        vocab: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.down = nan_parameter((width, rank), dtype, device)  # W1
        self.up = nan_parameter((rank, vocab), dtype, device)  # W2
        self.gain = nan_parameter((vocab,), dtype, device)
        self.vocab = vocab

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """W1 and W2 keep the size of what they read; a small gain."""
        for value in (self.down, self.up):
            value.copy_(torch.randn(value.shape, generator=generator).to(value) * value.shape[0] ** -0.5)
        self.gain.fill_(GAIN)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters under their names in a file."""
        return {"token_info.down": self.down.data, "token_info.up": self.up.data, "token_info.gain": self.gain.data}

    def factors(self, embedded: Tensor) -> Tensor:
        """Return u = a / rms(a W2), [..., r], from the target's embedding [..., n] of the parents' tokens."""
        wide = torch.float64 if self.up.dtype == torch.float64 else torch.float32
        a = embedded.to(self.down.dtype) @ self.down
        a, up = a.to(wide), self.up.to(wide)
        gram = up @ up.t() / up.shape[1]  # [r, r]
        square = ((a @ gram) * a).sum(-1, keepdim=True)
        return a * (square + EPS).rsqrt()

    def table(self) -> Tensor:
        """Return [V, r], what `factors` are multiplied with."""
        return (self.gain * self.up).t()
