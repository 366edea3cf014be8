"""Draft sessions of a draft model."""

from __future__ import annotations

import math
from collections import abc

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kv.pool import KVPool
from ..model.base import Batch
from ..model.decoder import Decoder
from ..model.packing import RowPacker
from ..model.parallel import LOGITS, NOTHING
from .network_sessions import NetworkSessions
from .text_sessions import DraftCache, Expansion

PREFILL_ROWS = 512  # rows of one pass over a long text


class ModelSessions(NetworkSessions):
    """Sessions of one draft model over a K/V pool of their own.

    Args:
        decoder: the draft.
        pool: its K/V.
        vocab_size, eos_ids: of the target.
        coupled: children are those that the target's own noise favours; else the likeliest tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        coupled: bool,
    ) -> None:
        super().__init__(vocab_size, eos_ids, coupled)
        self.decoder, self.pool = decoder, pool

    def _begin(self, view: Sequence) -> DraftCache:
        return DraftCache(view=view, cache=self.pool.open(view.tokens, expected=view.max_len))

    def forget(self) -> None:
        self.pool.forget()
        super().forget()

    def _clear(self, tree: DraftCache, tokens: abc.Sequence[int]) -> None:
        """Drop all nodes.

        K/V of drafted nodes that became text is kept, but for the last token: the next draft needs the logits after it.
        """
        node, rows = tree.root, list[int]()
        for token in tokens[:-1]:
            node = tree.children.get((node, token), -1)
            if node < 0 or tree.nodes[node].row < 0:
                break
            rows.append(tree.nodes[node].row)
        super()._clear(tree, tokens)
        self._keep(tree, rows, len(rows))

    def _keep(self, tree: DraftCache, rows: abc.Sequence[int], done: int) -> None:
        self.pool.settle([(tree.cache, rows, done)])
        tree.cache.publish(tree.view.tokens)

    def _prepare(self, session: DraftCache, nodes: abc.Sequence[int]) -> Expansion | None:
        chosen = [node for node in nodes if self._may_expand(session, node)] if self._asked(session) else []
        computed = session.uncomputed(chosen)
        return Expansion(session, chosen, computed) if chosen and self.make_room(session, len(computed)) else None

    def _may_expand(self, session: DraftCache, node: int) -> bool:
        """Return whether a node's own pass is possible and of use: the draft has its tokens and its position.

        The root is expanded while its K/V is not there; after that it has children.
        """
        if node == session.root and not session.pending:
            return False
        vocabulary, path = self.decoder.config.vocab_size, session.path(node)
        if not self.reads(session) or any(session.nodes[n].token >= vocabulary for n in path):
            return False
        return len(session.view.tokens) + len(path) <= self.decoder.config.max_position

    def reads(self, session: DraftCache) -> bool:
        """Return whether the draft has an embedding for all of a text, which only grows: each token is looked at once.

        Heads of one family often differ in how far they are padded. A target whose head is the wider one may be
        given, and may emit, ids that the draft lacks.
        """
        vocabulary, tokens = self.decoder.config.vocab_size, session.view.tokens
        if vocabulary >= self._vocab:
            return True
        while session.read < len(tokens) and tokens[session.read] < vocabulary:
            session.read += 1
        return session.read == len(tokens)

    def make_room(self, session: DraftCache, rows: int) -> bool:
        """Compute all but the last part of a long text, and reserve rows; False: the pool is full."""
        while session.pending > PREFILL_ROWS:
            if not self._reserve(session, PREFILL_ROWS - session.pending):
                return False
            packer = RowPacker(self.decoder, self.decoder.device)
            self._pack(packer, session, PREFILL_ROWS, [])
            batch = packer.batch()
            with self.decoder.whole_run(batch, self.pool, NOTHING, ()):
                self._run(batch)
            self.pool.settle([(session.cache, range(PREFILL_ROWS), PREFILL_ROWS)])
            session.cache.publish(session.view.tokens)
        return self._reserve(session, rows)

    def _compute(self, parts: abc.Sequence[Expansion]) -> Tensor:
        """[wanted nodes of all, V] logits; every sequence has just the rows of this pass reserved."""
        packer, rows = RowPacker(self.decoder, self.decoder.device), list[int]()
        for one in parts:
            first, pending = packer.rows, one.session.pending
            self._pack(packer, one.session, pending, one.computed)
            place = {node: first + pending + i for i, node in enumerate(one.computed)}
            rows += [place[node] if node != one.session.root else first + pending - 1 for node in one.parents]
        batch = packer.batch()
        with self.decoder.whole_run(batch, self.pool, LOGITS, rows):
            hidden = self._run(batch)
            chosen = hidden if rows == [*range(len(hidden))] else hidden[torch.tensor(rows, device=hidden.device)]
            logits = self.decoder.read(chosen)[:, : self._vocab]
        if missing := self._vocab - logits.shape[-1]:  # tokens that the draft lacks are impossible
            logits = pad(logits, (0, missing), value=-math.inf)
        for one in parts:
            self._entered(one.session, one.computed)
        return logits

    def computed(self, view: Sequence, draft: TokenTree, forwarded: int) -> None:
        """Note what compiled code did: K/V of the text's pending tokens, then of the first nodes of a draft."""
        session = self.follow(view)
        numbers = [session.root]
        for row, parent in enumerate(draft.parents[:forwarded]):
            numbers.append(session.add(numbers[parent], draft.tokens[row]))
            session.nodes[numbers[-1]].row = row
        session.cache.enter()
        self.pool.settle([(session.cache, range(session.cache.ahead), session.pending)])
        session.cache.publish(session.view.tokens)

    def _run(self, batch: Batch) -> Tensor:
        """[rows, d_model] states after the last layer."""
        state = self.decoder.embed(batch)
        return self.decoder.run_layers(state, 0, self.decoder.num_layers, self.pool).hidden
