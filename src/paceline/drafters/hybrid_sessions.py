"""Draft sessions of several drafters as one: look-ups say what they are sure of, a draft model all else.

The tree is the draft model's own. What a look-up says becomes a node of which nothing is computed until the draft
model is asked below it; then the nodes above are computed in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import SequenceView
from .model_sessions import ModelSessions
from .sessions import Ask, Grown, Opening
from .text_sessions import LookUp

Found = list[tuple[int, float]]  # tokens and the log of each one's chance, best first


class LookUps(LookUp):
    """Look-ups as one, in the order in which they are asked.

    Args:
        parts: the look-ups.
        sure: log of the chance from which on none of the others is asked.
    """

    def __init__(self, parts: Sequence[LookUp], sure: float) -> None:
        self._parts, self._sure = parts, sure

    def knows(self, found: Found) -> bool:
        """Whether nobody else need be asked."""
        return bool(found) and found[0][1] >= self._sure

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> Found:
        """What the first says that is sure, else what the surest says."""
        best: Found = []
        for part in self._parts:
            found = part.continuations(sequence, path, width)
            if found and (not best or found[0][1] > best[0][1]):
                best = found
            if self.knows(best):
                break
        return best

    def release(self, keys: Sequence[int]) -> None:
        """See `Drafter`."""
        for part in self._parts:
            part.release(keys)

    def forget(self) -> None:
        """See `Drafter`."""
        for part in self._parts:
            part.forget()


class HybridSessions:
    """Sessions of a draft model with look-ups beside it.

    Args:
        model: of the draft model.
        look_ups: asked first for every node.
    """

    def __init__(self, model: ModelSessions, look_ups: LookUps) -> None:
        self._model, self._look_ups = model, look_ups

    def open(self, opening: Opening) -> None:
        """See `DraftSessions`."""
        self._model.open(opening)

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`: at most one pass of the draft model, over the nodes that no look-up is sure of."""
        grown: list[Grown] = []
        unsure: list[dict[int, Found]] = []
        for ask in asks:
            own = Grown([self._model.add(ask.key, *one) for one in ask.given])
            grown.append(own)
            unsure.append({})
            for node in dict.fromkeys([*own.given, *ask.expand]):
                found = self._look_ups.continuations(*self._model.text(ask.key, node), ask.width)
                if self._look_ups.knows(found):
                    self._put(ask.key, node, found, own)
                else:
                    unsure[-1][node] = found
        left = []
        for ask, own, nodes in zip(asks, grown, unsure, strict=True):
            room = ask.room(own.given)
            left.append(Ask(ask.key, expand=[*nodes], width=ask.width, most=[room[node] for node in nodes]))
        for ask, own, nodes, more in zip(asks, grown, unsure, self._model.grow(left), strict=True):
            for part in ("parents", "nodes", "tokens", "log_q"):
                getattr(own, part).extend(getattr(more, part))
            for node in nodes.keys() - {*more.parents}:  # the draft model has no room, or no such token
                self._put(ask.key, node, nodes[node], own)
        return grown

    def _put(self, key: int, parent: int, found: Found, grown: Grown) -> None:
        for token, log_q in found:
            grown.add(parent, self._model.add(key, parent, token, log_q), token, log_q)

    def reroot(self, key: int, node: int) -> None:
        """See `DraftSessions`."""
        self._model.reroot(key, node)

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """See `DraftSessions`."""
        self._model.commit(key, tokens)

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        self._model.close(key)
        self._look_ups.release([key])

    def forget(self) -> None:
        """See `DraftSessions`."""
        self._model.forget()
        self._look_ups.forget()
