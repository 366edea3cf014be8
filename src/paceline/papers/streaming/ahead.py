"""Predictions several tokens ahead from one row: what they aim at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...train.carriers import CarrierRows
from ...train.data import TokenBatch
from ...train.recipes.heads import Ahead


@dataclass(frozen=True, slots=True)
class Aims:
    """Tokens that are to be predicted 1 to gamma places ahead of the next token, from R rows (carriers)."""

    tokens: Tensor  # [R, gamma] y_{t+1+j}; 0 where there is none
    exists: Tensor  # [R, gamma] bool
    main: Tensor  # [R, gamma] flat main row t + j, which predicts p(y_{t+1+j}); the carrier itself where there is none
    following: Tensor  # [R] y_{t+1}
    counts: Tensor  # [gamma] rows of the whole batch that have a target: the denominators
    rows: int  # carriers of the whole batch

    @staticmethod
    def of(batch: TokenBatch, carriers: CarrierRows, gamma: int, whole: Aims | None = None) -> Aims:
        """Return the aims of ``carriers``, a segment of those of ``whole``."""
        ahead = [Ahead.of(batch, carriers.index, step) for step in range(2, gamma + 2)]
        rows = torch.stack([one.rows for one in ahead], 1)  # [R, gamma]
        exists, tokens = rows != carriers.index[:, None], batch.tokens.flatten()
        return Aims(
            tokens=torch.where(exists, tokens[rows], 0),
            exists=exists,
            main=rows - exists.long(),
            following=tokens[(carriers.index + 1).clamp(max=len(tokens) - 1)],
            counts=exists.sum(0) if whole is None else whole.counts,
            rows=len(carriers) if whole is None else whole.rows,
        )
