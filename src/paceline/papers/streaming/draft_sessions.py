"""Draft sessions of a draft model with streams of its own: several tokens of a chain in one pass of it.

    pass j      tip - g1 - g2          g: what the streams of the last pass guessed after the tip
    predicts     t1    t2   t3          t1 = g1 and t2 = g2: the chain is three tokens longer, in one pass for three
    streams     of the last node that was right, of which the next pass's guesses are made

The draft model decides: a guess stays where the model itself emits it, so that a chain is, token for
token, the one that it drafts without streams, in fewer internal steps. Nothing changes for the target.

Source: Mirror Speculative Decoding, section 3.2 and appendix D.2; Speculative Streaming, sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...core.errors import PoolFullError
from ...draft.model_sessions import ModelSessions
from ...draft.sessions import ROOT
from ...draft.text_sessions import DraftCache, Expansion
from ...model.adapters import joined
from ...model.attention.base import Segment, slot_indices
from ...model.base import ForwardState
from .model import StreamSet
from .visibility import stream_sees

MAX_CARRIERS = 256  # nodes whose streams one pass runs at most; chains beyond it continue a token at a time


@dataclass(slots=True)
class _Chain:
    """A chain of one pass: the node that is expanded, the guesses below it, and what came of them."""

    tip: int
    most: int  # tokens wanted below the tip
    guesses: list[int] = field(default_factory=list)  # nodes
    head: int = ROOT  # the last node whose own pass is of use: its streams guess on
    drafted: int = 0  # tokens


@dataclass(slots=True)
class _Carrier:
    """A node whose streams run, and the child below which they guess."""

    session: DraftCache
    node: int
    child: int
    state: int  # row of the pass that is its state


class StreamingSessions(ModelSessions):
    """Sessions of a draft model that has streams.

    Args:
        streams: a lossless set that was trained for the draft model.
        model: the arguments of `ModelSessions`. The pool has ``gamma`` scratch slots for every node whose streams may
            run in one pass.
    """

    def __init__(self, streams: StreamSet, *model: Any) -> None:
        super().__init__(*model)
        self.streams, self.gamma = streams, streams.config.gamma
        self.passes, self.tokens = 0, 0  # since the start: that drafted chains, and the tokens of the longest in each
        self._guessed: dict[int, dict[int, list[int]]] = {}  # by sequence, by node: tokens that may follow it

    def close(self, key: int) -> None:
        """Implement `DraftSessions`."""
        self._guessed.pop(key, None)
        super().close(key)

    def reroot(self, key: int, node: int) -> None:
        """Implement `DraftSessions`. Guesses below nodes that stay remain of use."""
        super().reroot(key, node)
        stay = self._open[key].nodes
        guessed = self._guessed.pop(key, {})
        remaining = {number: tokens for number, tokens in guessed.items() if number in stay}
        if node in guessed:
            remaining[ROOT] = guessed[node]
        self._guessed[key] = remaining

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """Implement `DraftSessions`."""
        self._guessed.pop(key, None)
        super().commit(key, tokens)

    def _expand(self, ready: Sequence[Expansion]) -> None:
        chains = [self._guess(one) for one in ready]
        packer, rows = self._lay_out(ready)
        state = self.decoder.embed(packer.batch())
        self.decoder.run_layers(state, 0, self.streams.config.insertion, self.pool)
        inner = state.hidden[torch.tensor(rows, device=state.hidden.device)]  # a copy: the layers above may write there
        self.decoder.run_layers(state, self.streams.config.insertion, self.decoder.num_layers, self.pool)
        logits = self._logits(state.hidden, rows)
        carriers: list[_Carrier] = []
        begin, longest = 0, 0
        for one, own_chains in zip(ready, chains, strict=True):
            scores = logits[begin : begin + len(one.parents)]
            self._entered(one.session, one.computed)
            if own_chains:
                carriers += self._walk(one, own_chains, scores, begin)
                longest = max(longest, *(chain.drafted for chain in own_chains))
            else:
                self._add_children(one, scores)
            begin += len(one.parents)
        if longest:
            self.passes, self.tokens = self.passes + 1, self.tokens + longest
        room = min(MAX_CARRIERS, self.pool.scratch_slots // self.gamma)
        if carriers:
            self._listen(carriers[:room], inner)

    # -- what a pass checks

    def _guess(self, one: Expansion) -> list[_Chain]:
        """Add the guesses below the nodes to expand to what is computed; no chains where children are several."""
        if one.ask.width > 1:
            return []
        session, most = one.session, one.ask.room(one.grown.added)
        chains = [_Chain(node, max(1, most.get(node, 1)), head=node) for node in one.parents]
        guessed = self._guessed.setdefault(session.view.key, {})
        new: list[int] = []
        for chain in chains:
            tokens = guessed.pop(chain.tip, [])[: chain.most - 1]
            room = self.decoder.config.max_position - len(session.view.tokens) - session.depth(chain.tip)
            if tokens and (chain.tip, tokens[0]) not in session.children:
                node = chain.tip
                for token in tokens[: max(0, room)]:
                    node = session.add(node, token, 0.0)
                    chain.guesses.append(node)
                new += chain.guesses
        try:
            session.cache.reserve(session.pending + len(one.computed) + len(new))
        except PoolFullError:
            for chain in chains:
                self._remove(session, chain.guesses)
                chain.guesses = []
            session.cache.reserve(session.pending + len(one.computed))
            new = []
        one.computed += new
        one.parents += new
        return chains

    def _walk(self, one: Expansion, chains: Sequence[_Chain], logits: Tensor, first: int) -> list[_Carrier]:
        """Append to each chain what the model emits, along the guesses that it confirms.

        Args:
            one: the sequence's part of the pass.
            chains: below its nodes to expand.
            logits: [wanted, V].
            first: row of the first of them among those of all sequences.

        Returns:
            The nodes to guess on from.
        """
        session, carriers = one.session, list[_Carrier]()
        place = {node: row for row, node in enumerate(one.parents)}
        scores = self._scores(session, one.parents, logits, 1)
        if scores is None:
            for chain in chains:
                self._remove(session, chain.guesses)
            return []
        best = scores.log_softmax(dim=-1).max(dim=-1)
        values, tokens = best.values.tolist(), best.indices.tolist()
        for chain in chains:
            parent, guesses = chain.tip, [*chain.guesses]
            while values[place[parent]] > float("-inf"):
                value, token = values[place[parent]], tokens[place[parent]]
                right = bool(guesses) and session.nodes[guesses[0]].token == token
                above = 0.0 if parent == ROOT else session.nodes[parent].score
                if guesses and not right:
                    self._remove(session, guesses)
                    guesses = []
                node = guesses.pop(0) if right else session.add(parent, token, above + value)
                session.nodes[node].score = above + value
                one.grown.add(parent, node, token, value, self.source)
                chain.drafted, chain.head, parent = chain.drafted + 1, parent, node
                if not right or chain.drafted == chain.most:
                    break
            self._remove(session, guesses)
            if chain.drafted and chain.most - chain.drafted > 1 and parent not in place:
                carriers.append(_Carrier(session, chain.head, parent, first + place[chain.head]))
        return carriers

    @staticmethod
    def _remove(session: DraftCache, nodes: Sequence[int]) -> None:
        """Forget nodes without children but one another; the K/V of them is of no use, and goes with the next cut."""
        for number in nodes:
            node = session.nodes.pop(number)
            del session.children[node.parent, node.token]

    # -- the streams

    def _listen(self, carriers: Sequence[_Carrier], inner: Tensor) -> None:
        """Run the streams of some nodes and keep what they guess after these nodes' children.

        Args:
            carriers: session after session.
            inner: [rows, d_model] states where streams begin; see `_Carrier.state`.
        """
        gamma, device = self.gamma, self.decoder.device
        limit = self.decoder.config.max_position - gamma
        able = [c for c in carriers if len(c.session.view.tokens) + c.session.depth(c.node) <= limit]
        if not able:
            return
        scratch = self.pool.scratch(gamma * len(able))
        slots = torch.arange(scratch.start, scratch.stop, device=device)
        segments: list[Segment] = []
        places: list[int] = []
        for _, group in groupby(able, key=lambda carrier: id(carrier.session)):
            carriers_here, first = [*group], len(places)
            root = len(carriers_here[0].session.view.tokens) - 1
            where = [root + c.session.depth(c.node) + j for c in carriers_here for j in range(1, gamma + 1)]
            segments.append(self._segment(carriers_here, first, slots[first : first + len(where)], where))
            places += where
        positions = torch.tensor(places, device=device)
        begun = self.streams.begin(inner[torch.tensor([c.state for c in able], device=device)]).flatten(0, 1)
        state = ForwardState(begun, positions, scratch, self.decoder.plan(segments, positions))
        state.adapters = joined([(0, len(places), self.streams.adapters)])
        insertion = self.streams.config.insertion
        hidden = self.decoder.run_layers(state, insertion, self.decoder.num_layers, self.pool).hidden
        self._keep_guesses(able, self._logits(hidden, [*range(len(places))]))

    def _segment(self, carriers: Sequence[_Carrier], first: int, slots: Tensor, where: Sequence[int]) -> Segment:
        """Return the streams of one sequence's nodes.

        Each sees its text, its node's path, and the node's streams up to it.
        """
        session, gamma, device = carriers[0].session, self.gamma, self.decoder.device
        cache = session.cache
        base, ahead = cache.committed, cache.ahead
        seen = torch.zeros(len(carriers), ahead, dtype=torch.bool)
        for row, carrier in enumerate(carriers):
            seen[row, [session.nodes[node].row for node in session.path(carrier.node)]] = True
        owner = torch.arange(len(carriers)).repeat_interleave(gamma)
        number = torch.arange(gamma).repeat(len(carriers))
        visible = torch.cat((seen.repeat_interleave(gamma, 0), stream_sees(owner, number, owner, number)), 1)
        before = [0] * ahead  # positions of the rows that are there
        for node in session.nodes.values():
            if node.row >= 0:
                before[node.row] = len(session.view.tokens) - 1 + node.depth
        keys = torch.cat((slot_indices(cache.slots(0, base + ahead), device), slots))
        count = base + ahead + len(slots)
        positions = torch.tensor([*before, *where], device=device)
        return Segment(first, first + len(slots), keys, count, base, visible.to(device), positions)

    def _keep_guesses(self, carriers: Sequence[_Carrier], logits: Tensor) -> None:
        """Set what may follow the children: of each stream the token that the sequence's rules would choose.

        Args:
            carriers: whose streams they are.
            logits: [carriers * gamma, V].
        """
        for carrier, stream_scores in zip(carriers, logits.split(self.gamma), strict=True):
            session, sampler = carrier.session, carrier.session.view.sampler
            path = session.tokens(carrier.child)
            first = len(session.view.tokens) + len(path)
            try:
                ahead = range(first, first + self.gamma)
                scores = sampler.ranked(stream_scores, [path] * self.gamma, ahead, self._coupled)
            except Exception:
                if sampler.fault is None:
                    raise
                continue  # the request's own rules fail, and will end it
            guessed = self._guessed.setdefault(session.view.key, {})
            guessed[carrier.child] = scores.argmax(dim=-1).tolist()
