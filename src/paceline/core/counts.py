"""Counts of each token in a sequence's prompt and output, for penalties."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenCounts:
    """The counts of one sequence on one device, brought up to date when they are read."""

    def __init__(self, prompt_ids: list[int], vocab_size: int, device: torch.device) -> None:
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self.in_prompt[prompt] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)  # [V] in the committed output
        self.seen = len(prompt_ids)  # tokens of prompt and output so far

    def catch_up(self, tokens: list[int]) -> None:
        """Count the tokens of the output that are new, given prompt and output."""
        new = tokens[self.seen :]
        if new:
            ids = torch.tensor(new, dtype=torch.int64, device=self.counts.device)
            self.counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            self.seen = len(tokens)

    def with_paths(self, paths: Tensor | None) -> Tensor:
        """Return [n or 1, V] int32: occurrences in each row's output, its drafted ancestors included."""
        if paths is None or paths.shape[1] == 0:
            return self.counts[None]
        counts = self.counts.repeat(len(paths), 1)
        return counts.scatter_add_(1, paths.clamp(min=0), (paths >= 0).to(torch.int32))
