"""Predictions several tokens ahead from one row: aims, and counts of hits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from ...train.carriers import CarrierRows
from ...train.data import TokenBatch

TOP = 3  # children of a node that the simulated tree counts


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
        documents, tokens = batch.documents, batch.tokens.flatten()
        length = documents.shape[1]
        steps = torch.arange(1, gamma + 1, device=tokens.device)
        column = carriers.index[:, None] % length + steps + 1  # [R, gamma] place of the target in its row
        flat = carriers.index[:, None] + steps + 1
        inside = torch.where(column < length, flat, carriers.index[:, None])
        flat_documents = documents.flatten()
        exists = (column < length) & (flat_documents[inside] == flat_documents[carriers.index][:, None])
        main = torch.where(exists, flat - 1, carriers.index[:, None])
        return Aims(
            tokens=torch.where(exists, tokens[inside], 0),
            exists=exists,
            main=main,
            following=tokens[(carriers.index + 1).clamp(max=len(tokens) - 1)],
            counts=exists.sum(0) if whole is None else whole.counts,
            rows=len(carriers) if whole is None else whole.rows,
        )


class Tally:
    """Sums of held-out figures of one domain."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.hits = torch.zeros(2, gamma)  # likeliest, top 3
        self.losses, self.found = torch.zeros(gamma), torch.zeros(gamma)
        self.runs, self.carriers = [0.0, 0.0], 0
        self.main_loss, self.main_weight = 0.0, 0.0

    def main(self, loss: float, weight: float) -> None:
        """Next-token losses of a batch."""
        self.main_loss += loss
        self.main_weight += weight

    def count(self, logits: Tensor, says: Tensor, tokens: Tensor, exists: Tensor) -> None:
        """Count some carriers: logits [n, gamma, V], the target's tokens and the data's [n, gamma], which exist."""
        top = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices == says[..., None]
        hit = torch.stack((top[..., 0], top.any(-1))) & exists  # [2, n, gamma]
        counted = exists.any(-1)
        self.runs = [a + float(b) for a, b in zip(self.runs, hit.long().cumprod(-1).sum((1, 2)), strict=True)]
        self.carriers += int(counted.sum())
        self.hits += hit.sum(1).cpu()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
        self.losses += (loss * exists).sum(0).cpu()
        self.found += exists.sum(0).cpu()

    def figures(self) -> dict[str, float]:
        """Names hold ``{}`` where the domain goes."""
        figures = {}
        if self.main_weight:
            figures["loss/{}/main"] = self.main_loss / self.main_weight
        if self.carriers:
            figures["accepted/{}"] = self.runs[0] / self.carriers
            figures[f"accepted_top{TOP}/{{}}"] = self.runs[1] / self.carriers
        for j in range(self.gamma):
            if self.found[j]:
                figures[f"agreement/{{}}/{j + 1}"] = float(self.hits[0, j] / self.found[j])
                figures[f"loss/{{}}/stream_{j + 1}"] = float(self.losses[j] / self.found[j])
        return figures
