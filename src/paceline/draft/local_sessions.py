"""Growths of several levels, and draft sessions of this process that continue by themselves, as those elsewhere do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from .sessions import DraftSessions, Expand, NewNodes, Opening, Pending


@dataclass(slots=True)
class LocalGrowing:
    """A growth that is under way: requests of its next level, and results; see `Pending`."""

    asks: dict[int, Expand]  # by sequence, of the next level
    ticket: int = 0  # by which its caller knows it
    levels: list[dict[int, NewNodes]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    done: bool = False

    @staticmethod
    def of(asks: Sequence[Expand], ticket: int = 0) -> LocalGrowing:
        """Return its beginning; see `AsyncSessions.begin`."""
        return LocalGrowing({ask.key: ask for ask in asks}, ticket)

    def call_off(self, key: int) -> None:
        """Draft nothing more for a sequence."""
        self.asks.pop(key, None)
        self.done = not self.asks

    def advance(self, grow: Callable[..., list[NewNodes]], now: Callable[[], float] = perf_counter) -> None:
        """Draft one level of everything that is left, by a function that takes `Expand`s; the time is ``now``'s."""
        began, asks = now(), [*self.asks.values()]
        level = {ask.key: grown for ask, grown in zip(asks, grow(asks), strict=True)}
        for ask in asks:
            del self.asks[ask.key]
            grown, nodes = level[ask.key], [*level[ask.key].added, *ask.expand]
            wants = dict(zip(nodes, ask.levels or [1] * len(nodes), strict=True))
            tips = {n: wants[p] - 1 for p, n in zip(grown.parents, grown.nodes, strict=True) if wants[p] > 1}
            if tips:
                self.asks[ask.key] = Expand(ask.key, (), [*tips], levels=[*tips.values()])
        self.levels.append(level)
        self.times.append((began, now()))
        self.done = not self.asks


class LocalSessions:
    """Sessions of this process as `AsyncSessions`: a growth is drafted when it begins, or in a thread.

    Compiled passes hold no lock of Python's, so that a thread and its caller make way at the same time.

    Args:
        inner: the sessions.
        beside: whether a thread drafts.
    """

    def __init__(self, inner: DraftSessions, beside: bool = False) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(1, "paceline-drafts") if beside else None
        self._under_way: Future[None] | None = None
        self._growth: LocalGrowing | None = None  # the thread's last one
        self._halted = False

    def ready(self) -> bool:
        """Implement `AsyncSessions`."""
        return True

    def begin(self, asks: Sequence[Expand]) -> LocalGrowing:
        """Implement `AsyncSessions`; drafting at once raises what the sessions raise."""
        growth = LocalGrowing.of(asks)
        if self._thread is None:
            self._draft(growth)
        else:
            self._pause()
            self._growth, self._under_way = growth, self._thread.submit(self._draft, growth)
        return growth

    def _draft(self, growth: LocalGrowing) -> None:
        while not growth.done:
            growth.advance(self.inner.grow)
            if self._halted:  # looked at after a level alone: else a thread that begins late would draft nothing
                return

    def look(self) -> None:
        """Implement `AsyncSessions`; a thread ends with its level, and the rest is drafted by `wait`."""
        self._pause()

    def wait(self, growing: Pending, first: bool = False) -> None:
        """Implement `AsyncSessions`; waits until it is done."""
        self._settle()
        if isinstance(growing, LocalGrowing):
            self._draft(growing)  # the rest of one that was halted

    def _settle(self) -> None:
        """Until the thread rests."""
        while self._under_way is not None:
            under_way = self._under_way
            try:
                under_way.result()
            finally:
                if under_way.done():  # else the wait was interrupted, and the thread continues
                    self._under_way = None

    def _pause(self, key: int | None = None) -> DraftSessions:
        """Return the sessions, once the thread has left them; the rest of a sequence's growth is called off."""
        if self._under_way is not None:
            self._halted = True
            try:
                self._settle()
            finally:
                self._halted = False
        if self._growth is not None and key is not None:
            self._growth.call_off(key)
        return self.inner

    def open(self, opening: Opening) -> None:
        """Implement `DraftSessions`."""
        self._pause().open(opening)

    def grow(self, asks: Sequence[Expand]) -> list[NewNodes]:
        """Implement `DraftSessions`."""
        return self._pause().grow(asks)

    def reroot(self, key: int, node: int) -> None:
        """Implement `DraftSessions`."""
        self._pause(key).reroot(key, node)

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """Implement `DraftSessions`."""
        self._pause(key).commit(key, tokens)

    def close(self, key: int) -> None:
        """Implement `DraftSessions`."""
        self._pause(key).close(key)

    def forget(self) -> None:
        """Implement `DraftSessions`."""
        self._pause().forget()
