"""Prompts whose K/V is computed once and lent to every engine: what is timed and counted is decoding alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kit.peer_runs import PeerRun
from torch import Tensor

from paceline.api.llm import LLM
from paceline.bench.config import BenchConfig
from paceline.bench.measure import Group
from paceline.core.sampling import SamplingParams

FIRST_BLOCK = 16  # tokens, of which a pool's blocks are


@dataclass(frozen=True, slots=True)
class LentPrompts:
    """Prompts and their K/V, to be lent to engines of the same target: none of them computes it again."""

    prompts: list[list[int]]
    kv: list[tuple[Tensor, Tensor]]  # of each prompt [layers, kv_heads, tokens, head_dim], of whole blocks

    def part(self, turn: int, count: int) -> LentPrompts:
        """So many prompts, in every turn the next ones. Where that is more than there are, further ones are copies with
        K/V of their own: another token in the first block, whose K/V stays, lets no prompt find another's."""
        at = [(turn * count + n) % len(self.prompts) for n in range(count)]
        found = []
        for place, n in enumerate(at):
            ids = [*self.prompts[n]]
            ids[FIRST_BLOCK - 1] += place // len(self.prompts)
            found.append(ids)
        return LentPrompts(found, [self.kv[n] for n in at])

    def lend(self, llm: LLM, room: int) -> None:
        """Put them into an engine's cache, where requests find them.

        Args:
            llm: of the same target.
            room: tokens that each is going to grow by.
        """
        pool, opened = llm.engine.pool, []
        pool.forget()
        for ids, (keys, values) in zip(self.prompts, self.kv, strict=True):
            cache, tokens = pool.open(ids, reuse=0, expected=len(ids) + room), keys.shape[2]
            cache.reserve(tokens)
            slots = cache.slots(0, tokens)
            for held, own in ((pool.k, keys), (pool.v, values)):
                for layer, values_ in zip(held, own, strict=True):
                    layer[:, slots] = values_
            pool.commit([(cache, range(tokens))])
            cache.publish(ids)
            opened.append(cache)
        for cache in opened:  # not before all are placed, or each would lie right behind the one in front, without room
            cache.release()


def computed(llm: LLM, prompts: list[list[int]]) -> LentPrompts:
    """Compute prompts with the target, and take their K/V out of its cache."""
    pool, found = llm.engine.pool, list[tuple[Tensor, Tensor]]()
    pool.forget()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=1))
    for ids in prompts:
        cache = pool.open(ids)
        slots = cache.slots(0, cache.committed)
        keys, values = (torch.stack([layer[:, slots] for layer in held]) for held in (pool.k, pool.v))
        found.append((keys, values))
        cache.release()
    pool.forget()
    return LentPrompts(prompts, found)


def made_up(llm: LLM, prompts: list[list[int]]) -> LentPrompts:
    """K/V of prompts that nobody computed, for models whose answers mean nothing: what a step costs is the same."""
    layers, heads, width = llm.decoder.cache_shape
    tokens = (len(prompts[0]) - 1) // llm.engine.pool.block_size * llm.engine.pool.block_size
    one = torch.full((layers, heads, tokens, width), 0.1, dtype=llm.decoder.dtype)
    return LentPrompts(prompts, [(one, one)] * len(prompts))


Known = dict[tuple[tuple[int, ...], ...], LentPrompts]  # by the ids of a group's prompts


class LentRun(PeerRun):
    """A run whose prompts plain decoding computes once for all methods and settings. What it takes from a prompt to
    the answer is no figure then; tokens, passes and acceptance are.

    Args:
        known: what was computed, by this run or by others of the same target.
    """

    def __init__(self, config: BenchConfig, *, known: Known, **options: Any) -> None:
        super().__init__(config, **options)
        self._known = known
        self.notes.append("K/V of a prompt was computed once and lent to all methods")

    def build(self, folder: Path, stack: ExitStack) -> None:
        super().build(folder, stack)
        self._runners = {name: replace(runner, begin=self._begin) for name, runner in self._runners.items()}

    def _begin(self, llm: LLM, group: Group) -> None:
        """Nothing of an earlier trial is found but the group's prompts."""
        prompts = tuple(tuple(prompt.ids) for prompt in group.prompts)
        if prompts not in self._known:
            self._known[prompts] = computed(self._runners[self._plain.name].llm, [list(ids) for ids in prompts])
        llm.forget()
        self._known[prompts].lend(llm, group.cell.max_new_tokens)
