"""Correct at a stated rate, by reading the target's recorded answers: for measuring an engine, never for use.

What a step costs depends on how many drafted tokens are accepted, and that depends on the model and the text.
With the answers known beforehand the rate is a setting, so an engine can be measured with any model, even a random one.
Nothing is predicted here: figures obtained with it say nothing about a drafter and are labelled
synthetic wherever they are shown (`DrafterSpec.synthetic`).
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from ..core.errors import ConfigError
from .base import DrafterSpec, SequenceView
from .proposal import Proposal
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

if TYPE_CHECKING:
    from ..network.decoder import TargetInfo

log = logging.getLogger(__name__)

_FORM = 'one JSON object a line, {"prompt": [ids], "output": [ids]}; write_answers writes such a file'
_NEVER = 1e-9  # log scores need a chance above 0


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(DrafterConfig):
    """Synthetic, for measuring engines: right at a stated rate by reading recorded answers. It guesses nothing."""

    kind: ClassVar[str] = "synthetic"

    answers: str = option(help="file of the target's own recorded answers; write_answers writes one")
    accept: float = option(0.8, help="chance to be right, given that all above was", minimum=0, maximum=1)
    depth: int = option(4, help="tokens of a draft", minimum=1, maximum=1024)
    seed: int = option(0, help="seed of the draws; with prompt, position and depth it decides which drafts are right")

    def build(self, context: DrafterContext) -> SyntheticDrafter:
        return SyntheticDrafter(self)


# ---------------------------------------------------------------------------------------------------------------------
# Recorded answers


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The target's answer to one prompt."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    line: int = 0  # of the file, from 1


def read_answers(path: str | Path) -> list[RecordedAnswer]:
    """The answers of a file, in its order.

    Raises:
        ConfigError: no such file, no answer in it, or a line that is none; names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"answers={path}", f"the file cannot be read ({error})", _FORM) from error
    answers = [_read_line(path, i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not answers:
        raise ConfigError(f"answers={path}", "the file holds no answer", _FORM)
    return answers


def _read_line(path: str | Path, number: int, line: str) -> RecordedAnswer:
    asked = f"answers={path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(asked, f"not JSON ({error})", _FORM) from error
    if not isinstance(row, dict):
        raise ConfigError(asked, f"a {type(row).__name__}, not an object", _FORM)
    for name in ("prompt", "output"):
        ids = row.get(name)
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(asked, f"{name!r} is not a list of token ids", _FORM)
    if not row["prompt"]:
        raise ConfigError(asked, "the prompt is empty", _FORM)
    return RecordedAnswer(tuple(row["prompt"]), tuple(row["output"]), number)


def write_answers(path: str | Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Write (prompt ids, output ids) in the form that `read_answers` reads."""
    rows = (json.dumps({"prompt": list(prompt), "output": list(output)}) + "\n" for prompt, output in answers)
    Path(path).write_text("".join(rows), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# The drafter


@dataclass(slots=True)
class _Reading:
    """Where one running sequence stands in its recorded answer."""

    left: list[RecordedAnswer]  # answers that agree with the output so far; the first is read from
    known: int = 0  # output tokens that were compared
    key: bytes = b""  # of the draws: stands for seed and prompt


MISSES = {  # why a proposal stayed empty for want of a recorded token
    "unknown": "for prompts that are not in the file",
    "left": "in sequences that had left the recorded answer",
    "ended": "behind the end of the recorded answer",
}


class SyntheticDrafter(LookUp):
    """Proposes the recorded next tokens, each replaced by a wrong one with a stated chance.

    Whether the token at a depth is right, and which wrong one stands in its place, is a function of (seed,
    prompt, position, depth): not of the batch, the budget or the order of the requests.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, synthetic=True, ahead=True)
        self._answers: dict[tuple[int, ...], list[RecordedAnswer]] = {}
        for answer in read_answers(config.answers):
            self._answers.setdefault(answer.prompt, []).append(answer)
        self._readings: dict[int, _Reading] = {}
        self._vocab_size = 0
        self.misses: Counter[str] = Counter()  # by `MISSES`

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check that the answers are of this target's vocabulary.

        Raises:
            ConfigError: an id that the target does not have.
        """
        super().bind(target, max_sequences, pool_tokens, device)
        self._vocab_size = target.vocab_size
        for answer in (answer for same in self._answers.values() for answer in same):
            largest = max((*answer.prompt, *answer.output))
            if largest >= target.vocab_size:
                raise ConfigError(
                    f"answers={self.config.answers}, line {answer.line}",
                    f"token id {largest}, and {target.name} has {target.vocab_size}",
                    "record the answers of this target",
                )

    def draft_one(self, seq: SequenceView, budget: int, max_depth: int) -> Proposal:
        """The recorded tokens, or wrong ones in their places."""
        depth = min(self.config.depth, max_depth, budget)
        if depth <= 0:
            return Proposal()
        reading = self._reading(seq)
        said = len(seq.tokens) - seq.prompt_len
        following = reading.left[0].output[said : said + depth] if reading.left else ()
        if not following:
            self._miss(seq, reading)
            return Proposal()
        tokens = [self._guess(reading, len(seq.tokens) + level, level + 1, t) for level, t in enumerate(following)]
        return Proposal.chain(tokens, max(self.config.accept, _NEVER))

    def _guess(self, reading: _Reading, position: int, depth: int, token: int) -> int:
        """What is drafted for a recorded token."""
        uniform, offset = self._draw(reading, position, depth)
        return token if uniform < self.config.accept else self._wrong(token, offset)

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> list[tuple[int, float]]:
        """The recorded token, or a wrong one in its place, then other wrong ones.

        Whether it is right is a function of its position in the text, not of where drafting began.
        """
        reading, said = self._reading(sequence), len(sequence.tokens) - sequence.prompt_len
        place = said + len(path)
        if not reading.left or place >= len(reading.left[0].output):
            self._miss(sequence, reading)
            return []
        output = reading.left[0].output
        uniform, offset = self._draw(reading, len(sequence.tokens) + len(path), 1)
        right = [output[place]] if uniform < self.config.accept and [*output[said:place]] == [*path] else []
        wrong = [self._wrong(output[place], offset + other) for other in range(width - len(right))]
        scores = [math.log(max(self.config.accept, _NEVER)), *[math.log(_NEVER)] * (width - 1)]
        return [*zip([*right, *wrong], scores, strict=True)]

    def release(self, keys: Sequence[int]) -> None:
        """Forget these sequences."""
        for key in keys:
            self._readings.pop(key, None)

    # -- the record

    def _reading(self, seq: SequenceView) -> _Reading:
        """The sequence's place in its answers, brought up to date with what it has said."""
        reading = self._readings.get(seq.key)
        if reading is None:
            prompt = tuple(seq.tokens[: seq.prompt_len])
            key = blake2b(repr((self.config.seed, prompt)).encode(), digest_size=16).digest()
            reading = self._readings[seq.key] = _Reading(self._answers.get(prompt, [])[:], key=key)
        start, stop = seq.prompt_len + reading.known, len(seq.tokens)
        new = tuple(seq.tokens[start:stop])
        reading.left = [a for a in reading.left if a.output[reading.known : reading.known + len(new)] == new]
        reading.known += len(new)
        return reading

    def _miss(self, seq: SequenceView, reading: _Reading) -> None:
        """Count an empty proposal, and say so the first time."""
        known = tuple(seq.tokens[: seq.prompt_len]) in self._answers
        why = "ended" if reading.left else "left" if known else "unknown"
        self.misses[why] += 1
        if self.misses.total() == 1:
            log.warning("synthetic has no recorded token %s (%s): plain decoding", MISSES[why], self.config.answers)

    # -- the draws

    def _draw(self, reading: _Reading, position: int, depth: int) -> tuple[float, int]:
        """One pseudo-random draw: a number in [0, 1) of 53 bits, and 32 bits that are independent of it."""
        place = position.to_bytes(8, "little") + depth.to_bytes(8, "little")
        bits = int.from_bytes(blake2b(place, key=reading.key, digest_size=12).digest())
        return (bits >> 43) * 2.0**-53, bits & 0xFFFFFFFF

    def _wrong(self, token: int, offset: int) -> int:
        """A token that is not ``token``; neighbouring offsets give different ones."""
        return (token + 1 + offset % (self._vocab_size - 1)) % self._vocab_size
