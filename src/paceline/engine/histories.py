"""What the automatic budget keeps of sequences, of kinds of requests and of the coming step; see `engine.auto`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..drafters.base import SequenceView
from .chances import Chances, TextChances

FIRST_GAIN = 2.5  # tokens that the first ask of a source is taken to bring: hopeful enough for a try
TRUSTED = 16  # asks of its kind that a new request's own are added to, at most: few of them mislead
QUICKEST = 0.08  # least weight of an ask in what its sequence's asks bring
KIND_RATE = 1 / 256  # least weight of an ask in what a kind's asks bring: several requests, not the last text


@dataclass(slots=True)
class AskGain:
    """Running means of what asking a source brings: for a sequence, or for a kind of requests at a batch size."""

    gain: float = FIRST_GAIN  # tokens of an ask beyond the price of their rows
    open: float = 1.0  # chance that the sources before it had not the next token
    asks: int = 0

    def learn(self, gain: float, open_: float, slowest: float) -> None:
        """Take in one ask."""
        rate = max(slowest, 2 / (self.asks + 2))  # later ones count more: the chances behind them are known better
        self.gain += rate * (gain - self.gain)
        self.open += rate * (open_ - self.open)
        self.asks += 1


@dataclass(slots=True)
class RequestKind:
    """What requests of one kind (an application, or none) have in common."""

    chances: list[Chances]  # by source mark
    gains: dict[tuple[int, int], AskGain] = field(default_factory=dict)  # by source and bucket of batch sizes


class History(TextChances):
    """What is known of one sequence."""

    def __init__(self, view: SequenceView, kind: RequestKind, sources: int, born: int, rested: int) -> None:
        super().__init__(view, kind.chances)
        self.kind, self.born, self.rested_before = kind, born, rested  # step of its first plan; rests before it
        self.bucket = -1  # of the batch sizes that `gains` are about
        self.gains: list[AskGain] = []  # by source; until it was asked for this sequence, that of the kind
        self.seen = [0] * sources  # tokens of the text that each source has processed
        self.asked_at = [-1] * sources  # step of the last ask
        self.begun = [False] * sources  # the last ask only prepared the next one

    def at_batch(self, size: int) -> None:
        """The batch sizes are now those of a bucket, in which asks are worth something else."""
        if self.bucket != size:
            self.bucket, known = size, self.kind.gains
            self.gains = [known.setdefault((source, size), AskGain()) for source in range(len(self.seen))]

    def learn(self, source: int, gain: float, open_: float) -> None:
        """An ask brought so many tokens; the sequence's own means begin with its first."""
        known = self.kind.gains[source, self.bucket]
        if self.gains[source] is known:
            self.gains[source] = replace(known, asks=min(known.asks, TRUSTED))
        self.gains[source].learn(gain, open_, QUICKEST)
        known.learn(gain, open_, KIND_RATE)


@dataclass(slots=True)
class SourceStep:
    """One source in the coming step."""

    opens: dict[int, float] = field(default_factory=dict)  # sequence -> chance that it is needed; of those asked for
    unseen: int = 0  # tokens that it had to process first
    ms: float = 0.0  # that it took, where it was told
    passes: int = 0  # of its network; as many as its deepest proposal has levels, where it does not say
