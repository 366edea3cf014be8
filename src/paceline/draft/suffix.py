"""Suffix decoding: continue the longest run of last tokens seen before, here or in earlier outputs.

A suffix automaton over the sequence's own tokens and one over the outputs of earlier requests answer two
questions in constant time: which is the longest suffix seen before, and how often did each token follow it. They are
compiled code (``cpp/kernels/lookup.h``).

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975), sections 3.1-3.3, for the pattern lookup, the score of a
draft and its size limit. Differences: an automaton in place of a suffix tree, which keeps contexts of up to
``max_match`` tokens only: that bounds the work a token and makes repetitive text free; the likeliest chain is drafted,
no tree.
"""

from __future__ import annotations

import logging
import math
from collections import abc
from dataclasses import dataclass, replace
from typing import ClassVar

from .. import kernels
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kernels.lookup import SuffixTexts
from .base import DrafterSpec, DraftRequest, StepFeatures
from .ngram import NgramConfig, NgramDrafter, log_trust
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(DrafterConfig):
    """Suffix decoding: continues the longest match in the prompt, the output and earlier outputs. Needs no model."""

    kind: ClassVar[str] = "suffix"
    min_match: ClassVar[int] = 1  # shortest run of last tokens that counts as a match
    max_match: ClassVar[int] = 32  # longest run of last tokens that is distinguished
    reach: ClassVar[float] = 4.0  # tokens drafted at most for each matched token
    min_prob: ClassVar[float] = 0.1  # a draft stops where its estimated chance falls below

    depth: int = option(16, help="deepest token drafted", minimum=1, maximum=1024)
    max_tokens: int = option(
        100_000, help="tokens of earlier outputs remembered, about 1 kB each; 0 remembers none", minimum=0
    )

    def build(self, context: DrafterContext) -> SuffixDrafter | NgramDrafter:
        if (why := kernels.unavailable()) is None:
            return SuffixDrafter(self)
        log.warning("suffix drafts by n-grams: its automata are compiled code, and there is none: %s", why)
        drafter = NgramConfig(depth=self.depth).build(context)
        drafter.spec = replace(drafter.spec, name=self.kind)
        return drafter


class SuffixDrafter(LookUp):
    """Drafts the most frequent continuations of the longest suffix seen before."""

    def __init__(self, config: SuffixConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, ahead=True)
        lengths = config.min_match, config.max_match
        self.texts = SuffixTexts(*lengths, config.reach, config.min_prob, config.max_tokens)
        self._outputs: dict[int, tuple[list[int], int]] = {}  # live tokens of each sequence, and of its prompt

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return what follows the longest suffix of text and path, of the own text or of earlier outputs."""
        self._outputs[sequence.key] = sequence.tokens, sequence.prompt_len
        matched, shares = self.texts.followers(sequence.key, sequence.tokens, path, width)
        return [(token, math.log(share) + log_trust(matched, 1)) for token, share in shares.items()]

    def observe(self, step: StepFeatures) -> None:
        """Note the running sequences: an output is remembered even if its sequence was never drafted for."""
        for seq in step.sequences:
            self._outputs[seq.key] = seq.tokens, seq.prompt_len

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return the best scored draft of the own text and of earlier outputs; empty where nothing matches."""
        most, texts = self.config.depth, []
        for seq, budget, max_depth in want.rows():
            if budget > 0 and max_depth > 0:
                self._outputs[seq.key] = seq.tokens, seq.prompt_len
                texts.append((seq.key, seq.tokens, min(most, budget), min(most, max_depth)))
        drafts, trees = iter(self.texts.draft(texts) if texts else ()), list[TokenTree]()
        for _, budget, max_depth in want.rows():
            _, tokens, scores = next(drafts) if budget > 0 and max_depth > 0 else (0, [], [])
            trees.append(TokenTree(tokens, [*range(len(tokens))], scores))
        return trees

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of these sequences but remember their outputs.

        One that was preempted comes back under the same key and is remembered once more at its end: its first
        part then counts twice, which changes frequencies a little and nothing else.
        """
        for key in keys:
            tokens, prompt_len = self._outputs.pop(key, ([], 0))
            self.texts.drop(key)
            self.texts.remember(tokens[prompt_len:])

    def forget(self) -> None:
        """Forget the outputs of earlier requests."""
        self.texts.forget()
