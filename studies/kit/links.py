"""Links between hosts that are emulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.options import check, option


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two hosts that is emulated: a frame occupies it for its bytes, then travels."""

    latency_ms: float = option(0.0, help="milliseconds that a frame travels", minimum=0.0, maximum=1e6)
    gbit_per_s: float = option(math.inf, help="10^9 bits a second; inf: frames take no time", above=0.0)

    def __post_init__(self) -> None:
        check(self, "link ")

    def transfer_s(self, size: int) -> float:
        """Seconds for which so many bytes occupy it."""
        return size * 8e-9 / self.gbit_per_s
