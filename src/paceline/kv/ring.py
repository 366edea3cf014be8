"""K/V of a few first and the last tokens of each text: constant bytes a text, however long it grows.

    slots of a text    0 .. sinks - 1 | sinks .. sinks + window + spare - 1
    positions          the same       | sinks + (position - sinks) modulo (window + spare)

A position takes the slot of the one that is window + spare tokens older, which no row after the window sees any more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .views import SinkWindow


class RingCache:
    """Rings of several texts, as many as may be held at once.

    Args:
        cache_shape: layers, K/V heads and a head's width.
        view: the tokens that rows see.
        spare: slots beyond the window, for tokens that are drafted.
    """

    def __init__(
        self,
        cache_shape: tuple[int, int, int],
        view: SinkWindow,
        spare: int,
        texts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers, heads, width = cache_shape
        self.view, self.span = view, view.window + spare
        self.size = view.sinks + self.span
        self._free = [*range(texts)][::-1]
        # One more slot a text: rows whose own K/V no row may see write there.
        storage = torch.zeros((2, layers, heads, texts * (self.size + 1), width), dtype=dtype, device=device)
        self.k, self.v = list(storage[0].unbind(0)), list(storage[1].unbind(0))
        self._texts = texts

    def open(self) -> int:
        """Return a ring for a text.

        Raises:
            IndexError: all are in use.
        """
        return self._free.pop()

    def close(self, ring: int) -> None:
        """Give one back."""
        self._free.append(ring)

    @property
    def idle(self) -> bool:
        """Return whether no text holds a ring."""
        return len(self._free) == self._texts

    def slot(self, ring: int, position: int) -> int:
        """Return the slot of a position's K/V."""
        sinks = self.view.sinks
        place = position if position < sinks else sinks + (position - sinks) % self.span
        return ring * self.size + place

    def slots(self, ring: int, positions: Iterable[int]) -> list[int]:
        """Return the slots of several positions."""
        return [self.slot(ring, position) for position in positions]

    def unseen(self, ring: int) -> int:
        """Return a slot that no row sees."""
        return self._texts * self.size + ring
