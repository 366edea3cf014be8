"""What the automatic budget spends on learning, and how much of it: see `engine.auto`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AutoBudgetConfig:
    """What is spent on learning, and how fast old figures fade."""

    explore: float = 0.01  # of the time, for asks of a drafter that are not expected to pay; as much for plain steps
    purse: float = 1.0  # of that share, plain steps that may be saved up
    overdraft: float = 4.0  # plain steps that one such ask may cost beyond a full purse: a long prompt to catch up with
    first_gain: float = 0.5  # tokens that the asks of an unknown look-up are taken to bring
    first_gain_network: float = 2.5  # the same of a drafter with a network: hopeful enough for a first try
    pilot: int = 3  # asks of a drafter with a network that are made for one sequence, to find out what it costs
    trial: int = 4  # asks of such a drafter for a new request, after which is known what it brings there
    first_lift: float = 0.35  # tokens an ask by which trials of an unknown one are taken to pay, over their cost
    trusted: int = 16  # asks of its kind that a new request's own are added to, at most: few of them mislead
    quickest: float = 0.08  # least weight of an ask in what its sequence's asks bring
    rate: float = 1 / 16  # weight of a step in the tokens a millisecond earned
    kind_rate: float = (
        1 / 256
    )  # least weight of an ask in what a kind's asks bring: several requests, not the last text
    horizon: int = 64  # tokens over which catching up must pay; fewer where the request ends earlier
    plain_first: int = 2  # plain steps seen at a batch size before drafts: what they are compared with must be measured
    plain_least: int = 8  # steps between two plain ones, at least, where drafts hardly pay ..
    plain_most: int = 512  # .. and at most, however much they pay
    first_rows: int = 8  # nodes checked at once at a batch size where none were; then at most twice as many as ever
    listen_every: int = 3  # steps of which one is observed, once a batch size is known: observing takes time
    rest: int = 4  # steps after which a batch that nothing is drafted for is looked at again
    known_after: int = 48  # observed steps after which it is
    margin: float = 0.1  # by which nodes must be worth more than they cost: of many estimates the best are too good


class Purse:
    """The share of the time that may go into asks and rows that are not expected to pay.

    Args:
        config: the share, and how much of it may be saved up.
    """

    __slots__ = ("_config", "ms")

    def __init__(self, config: AutoBudgetConfig) -> None:
        self._config = config
        self.ms = 0.0

    def save(self, ms: float, plain_ms: float) -> None:
        """So much time has gone by, where a plain step takes ``plain_ms``."""
        self.earn(self._config.explore * ms, plain_ms)

    def earn(self, ms: float, plain_ms: float) -> None:
        """What was tried has saved so much time."""
        self.ms = min(self._config.purse * plain_ms, self.ms + ms)

    def credit_ms(self, plain_ms: float) -> float:
        """What a trial may cost. A full purse may be overdrawn, else an expensive trial would never be made."""
        full = self.ms >= 0.99 * self._config.purse * plain_ms
        return self.ms + (self._config.overdraft * plain_ms if full else 0.0)

    def pay(self, ms: float, plain_ms: float) -> bool:
        """Spend so much, if there is credit for it."""
        if ms > self.credit_ms(plain_ms):
            return False
        self.ms -= max(0.0, ms)
        return True


class PlainSteps:
    """When the cost of a plain step is to be measured, by bucket of batch sizes.

    What drafts are compared with fades like everything else. A plain step among drafts costs what they would have
    earned beyond it, so they come as often as that is `explore` of the time: seldom where drafts pay much, often where
    they hardly pay. The first ones come sooner, at intervals that double: drafts may seem to pay much because the few
    plain steps seen were slow.

    Args:
        config: how often at least and at most.
    """

    __slots__ = ("_config", "_last")

    def __init__(self, config: AutoBudgetConfig) -> None:
        self._config = config
        self._last: dict[int, int] = {}  # by bucket: the last plain step, or attempt at one

    def note(self, size: int, step: int) -> None:
        """This step was a plain one, or was to be."""
        self._last[size] = step

    def due(self, size: int, step: int, seen: int, gain: float) -> bool:
        """Whether one is due.

        Args:
            size: bucket of the batch size.
            step: the coming one.
            seen: plain steps that were measured there.
            gain: by how much more drafts earn than plain steps, as a share.
        """
        config = self._config
        if seen < config.plain_first:
            return True
        share = min(config.plain_most, max(config.plain_least, gain / config.explore))
        return step - self._last.get(size, 0) > min(share, 1 << min(seen, 16))
