"""A drafter that is right at a stated rate, by reading recorded answers: it measures an engine and guesses nothing.

Importing this module registers it as ``synthetic``. Whether the token at a depth is right, and which wrong one stands
in its place, is a function of (seed, prompt, position, depth): not of the batch, the budget or the order of requests.
"""

from __future__ import annotations

import json
import math
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import DrafterSpec
from paceline.draft.registry import DrafterConfig, DrafterContext, option, register
from paceline.draft.text_sessions import LookUp

if TYPE_CHECKING:
    from paceline.model.decoder import TargetInfo

_NEVER = 1e-9  # log scores need a chance above 0


@register
@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(DrafterConfig):
    """Synthetic, for measuring engines: right at a stated rate by reading recorded answers."""

    kind: ClassVar[str] = "synthetic"

    answers: str = option(help="file of the target's own answers; write_answers writes one")
    accept: float = option(0.8, help="chance to be right, given that all above was", minimum=0, maximum=1)
    depth: int = option(4, help="tokens of a draft", minimum=1, maximum=1024)
    seed: int = option(0, help="seed of the draws")

    def build(self, context: DrafterContext) -> SyntheticDrafter:
        return SyntheticDrafter(self)


def write_answers(path: str | Path, answers: Iterable[tuple[abc.Sequence[int], abc.Sequence[int]]]) -> None:
    """Write prompts' and outputs' ids, one JSON list of both a line."""
    lines = (json.dumps([[*prompt], [*output]]) + "\n" for prompt, output in answers)
    Path(path).write_text("".join(lines), encoding="utf-8")


class SyntheticDrafter(LookUp):
    """Propose the recorded next tokens, each replaced by a wrong one with a stated chance."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, ahead=True)
        lines = Path(config.answers).read_text(encoding="utf-8").splitlines()
        self._answers = [(tuple(prompt), tuple(output)) for prompt, output in map(json.loads, lines)]
        self._vocab_size = 0

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Note the target's vocabulary, from which wrong tokens are drawn."""
        super().bind(target, max_sequences, pool_tokens, device)
        self._vocab_size = target.vocab_size

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Propose the recorded tokens, or wrong ones in their places."""
        depth, following = min(self.config.depth, max_depth, budget), self._following(seq, ())
        tokens = []
        for level, token in enumerate(following[: max(0, depth)]):
            uniform, offset = self._draw(seq, len(seq.tokens) + level, level + 1)
            tokens.append(token if uniform < self.config.accept else self._wrong(token, offset))
        return TokenTree.chain(tokens, max(self.config.accept, _NEVER)) if tokens else TokenTree()

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return the recorded token, or a wrong one in its place, then other wrong ones.

        Whether it is right is a function of its position in the text, not of where drafting began.
        """
        if not (following := self._following(sequence, ())[len(path) :]):
            return []
        uniform, offset = self._draw(sequence, len(sequence.tokens) + len(path), 1)
        right = [following[0]] if uniform < self.config.accept and self._following(sequence, path) else []
        wrong = [self._wrong(following[0], offset + other) for other in range(width - len(right))]
        scores = [math.log(max(self.config.accept, _NEVER)), *[math.log(_NEVER)] * (width - 1)]
        return [*zip([*right, *wrong], scores, strict=True)]

    def _following(self, seq: Sequence, path: abc.Sequence[int]) -> tuple[int, ...]:
        """The recorded tokens after the text and a path; empty where no record agrees with them."""
        prompt, output = tuple(seq.tokens[: seq.prompt_len]), (*seq.tokens[seq.prompt_len :], *path)
        agreeing = (said for asked, said in self._answers if asked == prompt and said[: len(output)] == output)
        return next(agreeing, ())[len(output) :]

    def _draw(self, seq: Sequence, position: int, depth: int) -> tuple[float, int]:
        """A number in [0, 1) of 53 bits, and 32 bits that are independent of it."""
        place = repr((self.config.seed, tuple(seq.tokens[: seq.prompt_len]), position, depth)).encode()
        bits = int.from_bytes(blake2b(place, digest_size=12).digest())
        return (bits >> 43) * 2.0**-53, bits & 0xFFFFFFFF

    def _wrong(self, token: int, offset: int) -> int:
        """A token that is not ``token``; neighbouring offsets give different ones."""
        return (token + 1 + offset % (self._vocab_size - 1)) % self._vocab_size
