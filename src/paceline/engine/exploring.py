"""What the automatic budget spends on learning, and how much of it: see `engine.auto`."""

from __future__ import annotations

EXPLORE = 0.01  # of the time, for asks of a drafter that are not expected to pay; as much for plain steps
OVERDRAFT = 4.0  # plain steps that one such ask may cost beyond all that is saved: a long prompt to catch up with
FIRST_GAIN = 0.5  # tokens that the asks of an unknown look-up are taken to bring
FIRST_GAIN_NETWORK = 2.5  # the same of a drafter with a network: hopeful enough for a first try
PILOT = 3  # asks of a drafter with a network that are made for one sequence, to find out what it costs
TRIAL = 4  # asks of such a drafter for a new request, after which is known what it brings there
FIRST_LIFT = 0.35  # tokens an ask by which trials of an unknown one are taken to pay, over their cost
TRUSTED = 16  # asks of its kind that a new request's own are added to, at most: few of them mislead
QUICKEST = 0.08  # least weight of an ask in what its sequence's asks bring
RATE = 1 / 16  # weight of a step in the tokens a millisecond earned
KIND_RATE = 1 / 256  # least weight of an ask in what a kind's asks bring: several requests, not the last text
HORIZON = 64  # tokens over which catching up must pay; fewer where the request ends earlier
PLAIN_FIRST = 2  # plain steps seen at a batch size before drafts: what they are compared with must be measured
PLAIN_LEAST = 8  # steps between two plain ones, at least, where drafts hardly pay ..
PLAIN_MOST = 512  # .. and at most, however much they pay
FIRST_ROWS = 8  # nodes checked at once at a batch size where none were; then at most twice as many as ever
LISTEN_EVERY = 3  # steps of which one is observed, once a batch size is known: observing takes time
REST = 4  # steps after which a batch that nothing is drafted for is looked at again
KNOWN_AFTER = 48  # observed steps after which it is
MARGIN = 0.1  # by which nodes must be worth more than they cost: of many estimates the best are too good


class SavedTime:
    """The share of the time that may go into asks and rows that are not expected to pay: a plain step's at most."""

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms = 0.0

    def earn(self, ms: float, plain_ms: float) -> None:
        """Add so much time, where a plain step takes ``plain_ms``."""
        self.ms = min(plain_ms, self.ms + ms)

    def credit_ms(self, plain_ms: float) -> float:
        """What a trial may cost. A full saving may be overdrawn, else an expensive trial would never be made."""
        return self.ms + (OVERDRAFT * plain_ms if self.ms >= 0.99 * plain_ms else 0.0)

    def pay(self, ms: float, plain_ms: float) -> bool:
        """Spend so much, if there is credit for it."""
        if ms > self.credit_ms(plain_ms):
            return False
        self.ms -= max(0.0, ms)
        return True


def plain_due(since: int, seen: int, gain: float) -> bool:
    """Whether the cost of a plain step is to be measured again, for a bucket of batch sizes.

    What drafts are compared with fades like everything else. A plain step among drafts costs what they would have
    earned beyond it, so they come as often as that is `EXPLORE` of the time: seldom where drafts pay much, often where
    they hardly pay. The first ones come sooner, at intervals that double: drafts may seem to pay much because the few
    plain steps seen were slow.

    Args:
        since: steps since the last one.
        seen: plain steps that were measured.
        gain: by how much more drafts earn than plain steps, as a share.
    """
    share = min(PLAIN_MOST, max(PLAIN_LEAST, gain / EXPLORE))
    return seen < PLAIN_FIRST or since > min(share, 1 << min(seen, 16))
