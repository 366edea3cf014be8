"""Draft sessions of a draft model: a tree below each text, whose rows keep their K/V while the tree is cut.

    the K/V of one sequence      text that is computed | rows of nodes, in the order in which they were computed
    a node's row sees            all of it             | its ancestors, and itself

A row's ancestors are fixed when it is computed: cutting the tree drops rows, and moves those that stay together.

Look-ups may be asked first. What they are sure of becomes a node of which nothing is computed until the draft model is
asked below it; then the nodes above are computed in the same pass.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.errors import PoolFullError
from ..core.inference import inference
from ..core.sequence import Sequence
from ..kv.pool import KVPool, SequenceCache
from ..model.base import Batch
from ..model.decoder import Decoder
from ..model.packing import RowPacker
from ..model.parallel import LOGITS, NOTHING
from .proposal import Proposal
from .sessions import ROOT, Ask, Grown
from .text_sessions import DraftTree, Found, LookUps, TextSessions

PREFILL_ROWS = 512  # rows of one pass over a long text


@dataclass(slots=True)
class Session(DraftTree):
    """A sequence's text and tree, and what is computed of both."""

    cache: SequenceCache = field(kw_only=True)
    read: int = 0  # leading tokens of the text that the draft has an embedding for
    known: int = 0  # tokens of the text that the tree hangs below

    @property
    def pending(self) -> int:
        """Tokens of the text without K/V."""
        return len(self.view.tokens) - self.cache.committed

    def uncomputed(self, wanted: abc.Iterable[int]) -> list[int]:
        """The nodes to compute so that the wanted ones have logits: these, and ancestors without K/V; parents first."""
        found = {node for end in wanted for node in self.path(end) if node == end or self.nodes[node].row < 0}
        return sorted(found, key=lambda node: (self.nodes[node].depth, node))


NOBODY = Ask(-1)  # of a pass that no level was asked for


@dataclass(slots=True)
class Expansion:
    """One sequence's part of a pass."""

    session: Session
    wanted: list[int]  # nodes to expand
    computed: list[int]  # nodes without K/V that the pass computes, parents first
    ask: Ask = NOBODY  # the level that was asked for, where it is one
    grown: Grown = field(default_factory=Grown)  # the answer


class ModelSessions(TextSessions):
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
        super().__init__(None, vocab_size, eos_ids)
        self.decoder, self.pool = decoder, pool
        self._coupled = coupled
        self.look_ups: LookUps | None  # asked first for every node: what they are sure of is not computed
        self.source = 0  # mark of the draft model's own tokens

    def begin(self, view: Sequence) -> Session:
        """See `TextSessions`."""
        return Session(view, cache=self.pool.open(view.tokens, expected=view.max_len), known=len(view.tokens))

    def follow(self, view: Sequence) -> Session:
        """The session of a sequence whose own view it reads, brought up to its text; opened where it is new."""
        session: Session | None = self._open.get(view.key)
        if session is None:
            session = self._open[view.key] = self.begin(view)
        if len(view.tokens) > session.known:
            self.clear(session, view.tokens[session.known :])
        return session

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        session: Session | None = self._open.get(key)
        if session is not None:
            session.cache.release()
        super().close(key)
        if not self._open and not self.pool.idle:  # a level or a release ended in its middle
            self.pool.reset()

    def forget(self) -> None:
        """See `DraftSessions`."""
        self.pool.forget()
        super().forget()

    def clear(self, tree: Session, said: abc.Sequence[int]) -> None:
        """See `TextSessions`. K/V of drafted nodes that became text is kept, but for the last token: what is drafted
        next needs the logits behind it."""
        node, rows = ROOT, list[int]()
        for token in said[:-1]:
            node = tree.children.get((node, token), -1)
            if node < 0 or tree.nodes[node].row < 0:
                break
            rows.append(tree.nodes[node].row)
        super().clear(tree, said)
        self.keep(tree, rows, len(rows))

    def keep(self, tree: Session, rows: abc.Sequence[int], done: int) -> None:
        """See `TextSessions`."""
        self.pool.settle([(tree.cache, rows, done)])
        tree.cache.publish(tree.view.tokens)
        tree.known = len(tree.view.tokens)

    # -- growing

    @inference
    def grow(self, asks: abc.Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`: at most one pass, over the nodes that no look-up is sure of."""
        grown, unsure = [Grown() for _ in asks], list[dict[int, tuple[int, Found]]]()
        ready: list[Expansion] = []
        for ask, own in zip(asks, grown, strict=True):
            session = self._open[ask.key]
            own.given = [session.add(parent, token, 0.0) for parent, token in ask.given]
            unsure.append(self._look_up(session, ask, own))
            wanted = [node for node in unsure[-1] if self._may_expand(session, node)]
            computed = session.uncomputed(wanted)
            if wanted and self.make_room(session, len(computed)):
                ready.append(Expansion(session, wanted, computed, ask, own))
        if ready:
            self._expand(ready)
        if self.look_ups is not None:
            for ask, own, left in zip(asks, grown, unsure, strict=True):
                for node in left.keys() - {*own.parents}:  # the draft model has no room, or no such token
                    self._put(self._open[ask.key], node, *left[node], own)
        return grown

    def _look_up(self, session: Session, ask: Ask, grown: Grown) -> dict[int, tuple[int, Found]]:
        """The nodes that no look-up is sure of, and what the look-ups say there; children of the others are added."""
        nodes = dict.fromkeys([*grown.given, *ask.expand])
        if self.look_ups is None:
            return {node: (0, []) for node in nodes}
        unsure: dict[int, tuple[int, Found]] = {}
        for node in nodes:
            source, found = self.look_ups.find(session.view, session.tokens(node), ask.width)
            if self.look_ups.knows(found):
                self._put(session, node, source, found, grown)
            else:
                unsure[node] = source, found
        return unsure

    @staticmethod
    def _put(session: Session, parent: int, source: int, found: Found, grown: Grown) -> None:
        above = 0.0 if parent == ROOT else session.nodes[parent].score
        for token, log_q in found:
            grown.add(parent, session.add(parent, token, above + log_q), token, log_q, source)

    def _may_expand(self, session: Session, node: int) -> bool:
        """Whether a node's own pass is possible and of use: the draft has its tokens and its position.

        The root is expanded while its K/V is not there; after that it has children.
        """
        sources = session.view.sources
        if (node == ROOT and not session.pending) or (sources is not None and self.source not in sources):
            return False
        known, path = self.decoder.config.vocab_size, session.path(node)
        if not self.reads(session) or any(session.nodes[n].token >= known for n in path):
            return False
        return len(session.view.tokens) + len(path) <= self.decoder.config.max_position

    def reads(self, session: Session) -> bool:
        """Whether the draft has an embedding for all of a text, which only grows: each token is looked at once.

        Heads of one family often differ in how far they are padded. A target whose head is the wider one may be
        given, and may say, ids that the draft lacks.
        """
        known, tokens = self.decoder.config.vocab_size, session.view.tokens
        if known >= self._vocab:
            return True
        while session.read < len(tokens) and tokens[session.read] < known:
            session.read += 1
        return session.read == len(tokens)

    def make_room(self, session: Session, rows: int) -> bool:
        """Compute all but the last part of a long text, and reserve rows; False: the pool is full."""
        try:
            while session.pending > PREFILL_ROWS:
                session.cache.reserve(PREFILL_ROWS)
                packer = RowPacker(self.decoder, self.decoder.device)
                self._pack(packer, session, PREFILL_ROWS, [])
                batch = packer.batch()
                with self.decoder.whole_run(batch, self.pool, NOTHING, ()):
                    self._run(batch)
                self.pool.settle([(session.cache, range(PREFILL_ROWS), PREFILL_ROWS)])
                session.cache.publish(session.view.tokens)
            session.cache.reserve(session.pending + rows)
        except PoolFullError:
            return False
        return True

    def _expand(self, ready: abc.Sequence[Expansion]) -> None:
        """One pass over all that is to be computed, and the children from its logits."""
        logits = self.compute(ready)
        for one, said in zip(ready, logits.split([len(one.wanted) for one in ready]), strict=True):
            self._add_children(one.session, one.wanted, said, one.ask.width, one.grown)

    def compute(self, parts: abc.Sequence[Expansion]) -> Tensor:
        """[wanted nodes of all, V] logits; every sequence has just the rows of this pass reserved."""
        packer, rows = self._lay_out(parts)
        batch = packer.batch()
        with self.decoder.whole_run(batch, self.pool, LOGITS, rows):
            logits = self._logits(self._run(batch), rows)
        for one in parts:
            self._entered(one.session, one.computed)
        return logits

    def computed(self, view: Sequence, draft: Proposal, forwarded: int) -> None:
        """Note what compiled code did: K/V of the text's pending tokens, then of the first nodes of a draft."""
        session, numbers = self.follow(view), [ROOT]
        for row, parent in enumerate(draft.parents[:forwarded]):
            numbers.append(session.add(numbers[parent], draft.tokens[row], 0.0))
            session.nodes[numbers[-1]].row = row
        session.cache.enter()
        self.pool.settle([(session.cache, range(session.cache.ahead), session.pending)])
        session.cache.publish(session.view.tokens)

    def _lay_out(self, ready: abc.Sequence[Expansion]) -> tuple[RowPacker, list[int]]:
        """The rows of a pass, and those of the wanted nodes, session by session."""
        packer = RowPacker(self.decoder, self.decoder.device)
        rows: list[int] = []
        for one in ready:
            first, pending = packer.rows, one.session.pending
            self._pack(packer, one.session, pending, one.computed)
            place = {node: first + pending + i for i, node in enumerate(one.computed)}
            rows += [place[node] if node != ROOT else first + pending - 1 for node in one.wanted]
        return packer, rows

    def _pack(self, packer: RowPacker, session: Session, pending: int, computed: abc.Sequence[int]) -> None:
        """The rows of a text's pending tokens, then of nodes, behind what is computed."""
        cache, nodes, tokens = session.cache, session.nodes, session.view.tokens
        base, first = cache.committed, cache.enter()
        root = len(tokens) - 1
        stop = first + pending + len(computed)
        ahead = [0] * (first - base)  # positions of the rows that are there
        for node in nodes.values():
            if node.row >= 0:
                ahead[node.row] = root + node.depth
        places = [*range(base, base + pending), *(root + nodes[n].depth for n in computed)]
        chain = not computed and not ahead  # rows that see all that lies before them
        if not pending and len(computed) == 1:
            chain = nodes[computed[0]].depth == len(ahead) + 1
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
    def _visible(session: Session, pending: int, computed: abc.Sequence[int], ahead: int) -> Tensor:
        """[pending + computed, ahead + pending + computed] bool: ancestors and itself; a text's token sees the text."""
        count = pending + len(computed)
        mask = torch.zeros(count, ahead + count, dtype=torch.bool)
        mask[:pending, ahead : ahead + pending] = torch.ones(pending, pending, dtype=torch.bool).tril()
        mask[pending:, ahead : ahead + pending] = True
        place = {node: ahead + pending + i for i, node in enumerate(computed)}
        for row, node in enumerate(computed, start=pending):
            for above in session.path(node):
                mask[row, place[above] if above in place else session.nodes[above].row] = True
        return mask

    def _entered(self, session: Session, computed: abc.Sequence[int]) -> None:
        """After the pass: the text's rows are committed, those of nodes stay."""
        cache, pending = session.cache, session.pending
        start = cache.ahead - len(computed) - pending
        for row, node in enumerate(computed, start=start):
            if (
                session.nodes[node].row < 0
            ):  # one that was expanded before keeps its row, which its descendants have seen
                session.nodes[node].row = row
        if pending:
            assert start == 0, "a node has K/V though its text has none"
            self.pool.settle([(cache, range(cache.ahead), pending)])
            cache.publish(session.view.tokens)

    def _run(self, batch: Batch) -> Tensor:
        """[rows, d_model] states behind the last layer."""
        state = self.decoder.embed(batch)
        return self.decoder.run_layers(state, 0, self.decoder.num_layers, self.pool).hidden

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """[len(rows), V] over the target's vocabulary; tokens that the draft lacks are impossible."""
        chosen = hidden if rows == [*range(len(hidden))] else hidden[torch.tensor(rows, device=hidden.device)]
        logits = self.decoder.read(chosen)[:, : self._vocab]
        missing = self._vocab - logits.shape[-1]
        return pad(logits, (0, missing), value=-math.inf) if missing else logits

    def _add_children(self, session: Session, wanted: list[int], logits: Tensor, width: int, grown: Grown) -> None:
        scores = self._scores(session, wanted, logits, width)
        if scores is None:
            return
        log_q = scores.log_softmax(dim=-1)  # [wanted, V]
        # Of equals `topk` takes any; a chain takes the one that the drafter takes elsewhere.
        best = log_q.max(dim=-1, keepdim=True) if width == 1 else log_q.topk(min(width, log_q.shape[-1]), dim=-1)
        for parent, values, tokens in zip(wanted, best[0].tolist(), best[1].tolist(), strict=True):
            pairs = zip(tokens, values, strict=True)
            allowed = [pair for pair in pairs if pair[1] > -math.inf]
            self._put(session, parent, self.source, allowed, grown)

    def _scores(self, session: Session, wanted: abc.Sequence[int], logits: Tensor, width: int) -> Tensor | None:
        """What children are ranked by; None: the request's own rules fail, and will end it.

        A chain's are ranked as by `Grower`. See `SequenceSampler.candidates` for several.
        """
        sampler = session.view.sampler
        if sampler.plain:
            return logits
        paths = [session.tokens(node) for node in wanted]
        places = [len(session.view.tokens) + len(path) for path in paths]
        try:
            return (sampler.ranked if width == 1 else sampler.candidates)(logits, paths, places, self._coupled)
        except Exception:
            if sampler.fault is None:
                raise
            return None
