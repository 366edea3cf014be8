"""When tokens arrive. Workers of other engines load this file too, without Paceline: it imports nothing."""

from typing import Any


class Arrivals:
    """Times at which new tokens came, and how many, all requests pooled."""

    def __init__(self, requests: int) -> None:
        self.counts = [0] * requests
        self.first_ms: list[Any] = [None] * requests
        self.last_ms: list[Any] = [None] * requests
        self.waits_ms: list[float] = []
        self.arrivals: list[int] = []

    def note(self, index: int, total: int, now_ms: float) -> None:
        """Request ``index`` has ``total`` new tokens, ``now_ms`` after the submission."""
        came = total - self.counts[index]
        if came <= 0:
            return
        if self.first_ms[index] is None:
            self.first_ms[index] = now_ms
        else:
            self.waits_ms.append(now_ms - self.last_ms[index])
            self.arrivals.append(came)
        self.counts[index], self.last_ms[index] = total, now_ms

    def as_dict(self) -> dict[str, list[Any]]:
        """Return what a worker reports of it."""
        return {"ttft_ms": self.first_ms, "waits_ms": self.waits_ms, "arrivals": self.arrivals}
