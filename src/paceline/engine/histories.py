"""What the automatic budget keeps of sequences, of kinds of requests and of the coming step; see `engine.auto`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..drafters.base import SequenceView
from .chances import Chances, Offer

if TYPE_CHECKING:
    from .weighing import Offers


@dataclass(slots=True)
class AskGain:
    """What asking one source brings: for a sequence, or for a kind of requests at one batch size."""

    gain: float  # running mean: tokens of an ask beyond the price of their rows
    open: float = 1.0  # running mean: chance that the sources before it had not the next token
    asks: int = 0
    asked_at: int = -1  # step of the last ask
    begun: bool = False  # the last ask only prepared the next one
    seen: int = 0  # tokens of the text that the source has processed
    kind: AskGain | None = None  # of all requests of its kind
    tried: int = 0  # asks for this sequence; of a kind: completed trials
    lift: float = 0.0  # of a kind: running mean over trials: tokens an ask beyond its cost, where that is above 0

    def lifted(self, lift: float) -> None:
        """A trial for one request of this kind has ended."""
        self.tried += 1
        self.lift += max(1 / 16, 1 / (self.tried + 1)) * (lift - self.lift)

    def learn(self, gain: float, open_: float, quickest: float) -> None:
        """Take in one ask."""
        rate = max(quickest, 2 / (self.asks + 2))  # later ones count more: the chances behind them are known better
        self.gain += rate * (gain - self.gain)
        self.open += rate * (open_ - self.open)
        self.asks += 1


@dataclass(slots=True)
class Kind:
    """What requests of one kind (an application, or none) have in common."""

    chances: list[Chances]  # by source
    gains: dict[tuple[int, int], AskGain] = field(default_factory=dict)  # by source and bucket of batch sizes
    odds_at: tuple[int, ...] = field(init=False)  # addresses for compiled code
    counts_at: tuple[int, ...] = field(init=False)  # of hits, tries and odds

    def __post_init__(self) -> None:
        self.counts_at = tuple(place for chances in self.chances for place in chances.addresses)
        self.odds_at = self.counts_at[2::3]


@dataclass(slots=True)
class History:
    """What is known of one sequence."""

    kind: Kind
    view: SequenceView
    born: int  # step in which it was first seen
    rested_before: int  # steps at rest until then
    shift: array[float]  # by kind of nodes; its place does not change
    bucket: int  # of the batch sizes that `gains` are about
    gains: list[AskGain]  # by source
    offer: Offer | tuple[Offers, int] | None = None  # the last proposal; see `weighing`


@dataclass(slots=True)
class SourceStep:
    """One source in the coming step."""

    opens: dict[int, float] = field(default_factory=dict)  # sequence -> chance that it is needed; of those asked for
    unseen: int = 0  # tokens that it had to process first
    ms: float = 0.0  # that it took, where it was told
    passes: int = 0  # of its network; as many as its deepest proposal has levels, where it does not say


@dataclass(slots=True)
class Choice:
    """What the last step chose that asked for drafts."""

    batch_size: int = 0
    nodes: int = 0  # over the batch
    tokens: float = 0.0  # expected of them
    rows_ms: float = 0.0  # expected of them
