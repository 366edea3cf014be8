"""Draft sessions of a drafter with a network: a tree below each text, whose rows keep their K/V while the tree is cut.

    the K/V of one sequence      text that is computed | rows of nodes, in the order in which they were computed
    a node's row sees            all of it             | its ancestors, and itself

A row's ancestors are fixed when it is computed: cutting the tree drops rows, and moves those that stay together.

Look-ups may be called first. What they are sure of becomes a node of which nothing is computed until the network is
used below it; then the nodes above are computed in the same pass.
"""

from __future__ import annotations

from collections import abc
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..core.errors import PoolFullError
from ..core.inference import inference
from ..core.sequence import Sequence
from ..kv.pool import KVPool
from ..model.packing import RowPacker
from .base import Drafter, StepFeatures
from .growth import Growth, likeliest
from .sessions import Opening
from .text_sessions import Expansion, LookUps, TextSessions, opened


class NetworkSessions(TextSessions):
    """Sessions of a drafter with a network; look-ups may be called first.

    Args:
        vocab_size, eos_ids: of the target.
        coupled: children are those that the target's own noise favours; else the likeliest tokens.
    """

    pool: KVPool  # K/V of its texts

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...], coupled: bool) -> None:
        super().__init__(LookUps({}), vocab_size, eos_ids)  # what look-ups are sure of is not computed
        self._coupled = coupled
        self.source = 0  # mark of the network's own tokens

    def follow(self, view: Sequence) -> Any:
        """Return the session of a sequence whose own view it reads, brought up to its text; opened where it is new."""
        session: Any = self._open.get(view.key)
        if session is None:
            session = self._open[view.key] = self._begin(view)
        session.view = view
        if len(view.tokens) > session.text_length:
            self._clear(session, view.tokens[session.text_length :])
        return session

    def close(self, key: int) -> None:
        if key in self._open:
            self._free(self._open[key])
        super().close(key)

    def _free(self, session: Any) -> None:
        session.cache.release()
        if len(self._open) == 1 and not self.pool.idle:  # a level or a release ended in its middle
            self.pool.reset()

    def _asked(self, session: Any) -> bool:
        """Return whether a request wants tokens of the network."""
        return session.view.sources is None or self.source in session.view.sources

    @staticmethod
    def _reserve(session: Any, rows: int) -> bool:
        """Reserve what the text lacks and so many rows of nodes; False: the pool is full."""
        try:
            session.cache.reserve(session.pending + rows)
        except PoolFullError:
            return False
        return True

    def _compute(self, parts: abc.Sequence[Expansion]) -> Tensor:
        """Return [wanted nodes of all, V] logits."""
        raise NotImplementedError(f"{type(self).__name__}.compute")

    def logits_after(self, growths: abc.Sequence[Growth]) -> Tensor:
        """Return [frontier nodes of all, V] logits, as `Grower.grow` needs them."""
        parts = []
        for growth in growths:
            session = self.follow(growth.sequence)
            nodes = [reduce(session.add, growth.path(node), session.root) for node in growth.frontier]
            parts.append(Expansion(session, nodes, session.uncomputed(nodes)))
            self._reserve(session, len(parts[-1].computed))  # in blocks that are there
        return self._compute(parts)

    # -- growing

    def _expand(self, ready: abc.Sequence[Expansion]) -> None:
        """Compute one pass, and add the children from its logits."""
        logits = self._compute(ready)
        for one, part in zip(ready, logits.split([len(one.parents) for one in ready]), strict=True):
            scores = self._scores(one.session, one.parents, part, one.ask.width)
            children = [] if scores is None else likeliest(scores, one.ask.width)
            for parent, pairs in zip(one.parents, children, strict=False):
                self._put(one.session, parent, self.source, pairs, one.grown)

    def _scores(self, session: Any, parents: abc.Sequence[int], logits: Tensor, width: int) -> Tensor | None:
        """Return what children are ranked by; None: the request's own rules fail, and will end it.

        A chain's are ranked as by `Grower`. See `SequenceSampler.candidates` for several.
        """
        sampler = session.view.sampler
        if sampler.plain:
            return logits
        paths = [session.tokens(node) for node in parents]
        places = [len(session.view.tokens) + len(path) for path in paths]
        try:
            return (sampler.ranked if width == 1 else sampler.candidates)(logits, paths, places, self._coupled)
        except Exception:
            if sampler.fault is None:
                raise
            return None

    # -- the rows of a pass

    def _pack(self, packer: RowPacker, session: Any, pending: int, computed: abc.Sequence[int]) -> None:
        """Append the rows of a text's pending tokens, then of nodes, to those of a pass."""
        cache, nodes, tokens = session.cache, session.nodes, session.view.tokens
        base, first = cache.committed, cache.enter()
        stop = first + pending + len(computed)
        start = base + pending - 1 - nodes[session.root].place  # K/V may begin after the text does
        ahead = [0] * (first - base)  # positions of the rows that are there
        for node in session.computed():
            ahead[node.row] = start + node.place
        places = [*range(base, base + pending), *(start + nodes[n].place for n in computed)]
        chain = not computed and not ahead  # rows that see all that lies before them
        if not pending and len(computed) == 1:
            chain = len(session.path(computed[0])) == len(ahead) + 1
        packer.add(
            [*tokens[base : base + pending], *(nodes[n].token for n in computed)],
            places,
            slots=cache.slots(first, stop),
            keys=cache.slots(0, stop),
            num_keys=stop,
            prefix=stop - 1 if chain and not pending else base,
            visible=None if chain else self._visible(session, pending, computed, len(ahead)),
            block_positions=None if chain else [*ahead, *places],
        )

    @staticmethod
    def _visible(session: Any, pending: int, computed: abc.Sequence[int], ahead: int) -> Tensor:
        """Return [pending + computed, ahead + pending + computed] bool: itself and what precedes it."""
        count = pending + len(computed)
        mask = torch.zeros(count, ahead + count, dtype=torch.bool)
        mask[:pending, ahead : ahead + pending] = torch.ones(pending, pending, dtype=torch.bool).tril()
        mask[pending:, ahead : ahead + pending] = True
        place = {node: ahead + pending + i for i, node in enumerate(computed)}
        for row, node in enumerate(computed, start=pending):
            for above in session.path(node):
                mask[row, place[above] if above in place else session.nodes[above].row] = True
        return mask

    def _entered(self, session: Any, computed: abc.Sequence[int]) -> None:
        """Commit the text's rows after a pass; those of nodes stay."""
        cache, pending = session.cache, session.pending
        start = cache.ahead - len(computed) - pending
        for row, node in enumerate(computed, start=start):
            if session.nodes[node].row < 0:  # else descendants have seen the row that it has
                session.nodes[node].row = row
        if pending:
            assert start == 0, "a node has K/V though its text has none"
            self.pool.settle([(cache, range(cache.ahead), pending)])
            cache.publish(session.view.tokens)


class ObservingSessions(NetworkSessions):
    """Sessions of a drafter that is shown the target's states, those of a text before its session is open, too."""

    def open(self, opening: Opening) -> None:
        """Begin with a sequence; states observed of its text stay."""
        self.follow(opened(opening, self._vocab, self._eos_ids))


class ObservingDrafter(Drafter):
    """Base of drafters with such sessions: they add `spec`, `bind`, which sets `body`, `draft` and `sessions`."""

    trusted = True
    body: Any  # its texts

    @inference
    def observe(self, step: StepFeatures) -> None:
        """Note the states that a pass showed."""
        self.body.observe(step)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of ended or preempted sequences."""
        for key in keys:
            self.body.close(key)
