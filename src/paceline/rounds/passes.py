"""One target pass, from rows to accepted tokens: the parts that rounds are made of.

    lay_out -> pack -> (the target's layers) -> read_logits -> decide -> `outcome.Emitter.emit` -> `outcome.keep`

Each part reads and fills a `Pass`. A round that runs the layers in pieces, on other workers or in compiled code uses
the same record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.request import token_logprobs
from ..core.tree import TokenTree
from ..network.adapters import AdapterRange
from ..network.applications import adapter_ranges
from ..network.base import Batch, ForwardState
from ..network.decoder import Decoder
from ..network.packing import RowPacker
from .base import RunningSequence, StepResult, Work
from .verification import Verifier, choose_packed


@dataclass(slots=True)
class Span:
    """Where one sequence's rows lie in the packed pass."""

    start: int
    stop: int
    root: int  # row of the root; the drafted nodes follow it
    tree_index: int  # which tree of the batch it has; -1: none

    @property
    def nodes(self) -> int:
        """Rows of the root and of its drafted nodes."""
        return self.stop - self.root


@dataclass(slots=True, eq=False)
class Pass:
    """One target pass and its results. B works; rows are packed work after work."""

    works: Sequence[Work]
    spans: list[Span]  # [B]
    tree: TokenTree | None  # of the works that draft, in their order
    generating: list[int]  # works that reach their last known token, so that a new one is generated
    kept: dict[int, list[int]] = field(default_factory=dict)  # work -> proposed index of each node that pruning left
    state: ForwardState = field(init=False)
    logits: Tensor = field(init=False)  # [nodes of all generating works, V]
    rows: dict[int, slice] = field(default_factory=dict)  # generating work -> rows of `logits`
    tokens: dict[int, list[int]] = field(default_factory=dict)  # generating work -> accepted tokens, then the next
    paths: dict[int, list[int]] = field(default_factory=dict)  # generating work -> accepted nodes
    emitted: list[int] = field(init=False)  # [B] tokens emitted, after the stop rules' cut
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)  # work -> tokens drafted, accepted

    @property
    def main_rows(self) -> int:
        """Rows of tokens and nodes; streams, where there are any, come behind them."""
        return self.spans[-1].stop if self.spans else 0

    def accept(self, work: int, path: list[int], token: int) -> None:
        """The verdict on a generating work: the accepted nodes, and the target's next token."""
        self.paths[work], self.tokens[work] = path, [token]
        if path and self.tree is not None:
            nodes = self.tree.tokens[self.spans[work].tree_index]
            self.tokens[work] = [*(nodes[n] for n in path), token]

    def frontier(self, work: int) -> int:
        """The last accepted node of a generating work; 0: its root."""
        path = self.paths[work]
        return path[-1] if path else 0

    def result(self, draft_ms: float, verify_ms: float, host_ms: float, ask_ms: float) -> StepResult:
        """What the engine gets of it; see `StepResult`."""
        said = []
        for work, count in zip(self.works, self.emitted, strict=True):
            if count or work.sequence.view.fault is not None:
                said.append((work.sequence, count))
        return StepResult(self.works, self.counts, said, draft_ms, verify_ms, host_ms, ask_ms)


def lay_out(works: Sequence[Work], drafting: Sequence[Work], tree: TokenTree | None) -> Pass:
    """Row ranges of every work; ``drafting`` works come in the order of the tree's batch."""
    counts = tree.counts if tree is not None else ()
    index = {id(work): b for b, work in enumerate(drafting)} if tree is not None else {}
    spans, generating = [], []
    start = 0
    for i, work in enumerate(works):
        b = index.get(id(work), -1) if index else -1
        root = start + work.rows - 1
        stop = root + (counts[b] if b >= 0 else 1)
        spans.append(Span(start, stop, root, b))
        if work.generates:
            generating.append(i)
        start = stop
    return Pass(works, spans, tree, generating)


class Rows(NamedTuple):
    """One sequence's rows of a pass: pending tokens, then drafted nodes."""

    first: int  # position of the first of them: tokens in front of it are committed
    tokens: list[int]
    positions: Sequence[int]
    keys: slice | Tensor  # K/V slots of the text and of these rows
    parents: list[int] | None  # of the drafted nodes, the last pending row being node 0; None: they are a chain

    @property
    def slots(self) -> slice | Tensor:
        """K/V slots of these rows."""
        keys, first = self.keys, self.first
        return slice(keys.start + first, keys.stop) if isinstance(keys, slice) else keys[first:]


def rows_of(p: Pass) -> Iterator[Rows]:
    """The rows of every work."""
    for work, span in zip(p.works, p.spans, strict=True):
        cache = work.sequence.cache
        assert cache is not None
        first = cache.committed
        stop = first + span.stop - span.start
        tokens = work.sequence.view.tokens[first : first + work.rows]
        positions: Sequence[int] = range(first, stop)
        parents = None
        if p.tree is not None and span.tree_index >= 0:
            tokens += p.tree.tokens[span.tree_index][1:]
            parents = p.tree.parents[span.tree_index][1:]
            if parents == [*range(len(parents))]:
                parents = None
            else:
                root = first + work.rows - 1
                positions = [*range(first, root), *(root + depth for depth in p.tree.depths()[span.tree_index])]
        yield Rows(first, tokens, positions, cache.slots(0, stop), parents)


def pack(p: Pass, target: Decoder) -> Batch:
    """Rows of all sequences, one after the other."""
    packer = RowPacker(target, target.device)
    for work, span, rows in zip(p.works, p.spans, rows_of(p), strict=True):
        visible = None
        if rows.parents is not None:
            assert p.tree is not None
            visible = _block_mask(p.tree.ancestor_mask(span.tree_index), work.rows)
        stop = rows.first + len(rows.tokens)
        packer.add(
            rows.tokens,
            rows.positions,
            [-1] * (work.rows - 1) + ([*range(span.nodes)] if work.generates else [-1]),
            slots=rows.slots,
            keys=rows.keys,
            num_keys=stop,
            prefix=rows.first,
            visible=visible,
            block_positions=None if visible is None else rows.positions,
        )
    return packer.batch()


def _block_mask(ancestors: Tensor, pending: int) -> Tensor:
    """[pending - 1 + nodes, same] bool: a chain of pending rows, whose last one is the tree's root."""
    if pending == 1:
        return ancestors
    size = pending - 1 + len(ancestors)
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask[pending - 1 :, pending - 1 :] = ancestors
    return mask


def main_adapters(p: Pass) -> tuple[AdapterRange, ...]:
    """Which main rows go through which application's adapters."""
    for work in p.works:
        if work.sequence.view.application is not None:
            break
    else:
        return ()
    return adapter_ranges([w.sequence.application for w in p.works], [(s.start, s.stop) for s in p.spans])


def read_logits(p: Pass, target: Decoder) -> None:
    """Sets `Pass.logits` and `Pass.rows` from the last layer; records prompt log-probabilities, too."""
    for work, span in zip(p.works, p.spans, strict=True):
        if work.sequence.params.prompt_logprobs is not None:
            try:
                assert work.sequence.cache is not None
                known = p.state.hidden[span.start : span.start + work.rows]
                record_prompt(work.sequence, work.sequence.cache.committed, known, target)
            except Exception as error:
                work.sequence.view.fault = error
    rows: list[int] = []
    for i in p.generating:
        begin = len(rows)
        rows += range(p.spans[i].root, p.spans[i].stop)
        p.rows[i] = slice(begin, len(rows))
    hidden = p.state.hidden
    if not rows:
        p.logits = hidden.new_empty((0, target.config.vocab_size))
    elif len(rows) == hidden.shape[0]:
        p.logits = target.logits(p.state)
    else:
        p.logits = target.logits(p.state, torch.tensor(rows, device=hidden.device))


def record_prompt(sequence: RunningSequence, first: int, hidden: Tensor, target: Decoder) -> None:
    """Log-probabilities of the prompt tokens that follow some rows of a text.

    Args:
        sequence: whose text it is.
        first: position of the first of the rows.
        hidden: [rows, d_model] states behind the last layer.
        target: reads them.
    """
    known = len(sequence.prompt_logprobs)  # of tokens 0 .. known - 1
    begin = max(known - 1, first)
    end = min(first + len(hidden), sequence.view.prompt_len - 1)
    if not known:
        sequence.prompt_logprobs.append(None)
        begin = first
    if begin >= end:
        return
    logits = target.read(hidden[begin - first : end - first])
    if sequence.params.logprobs_mode == "processed":
        logits = sequence.view.sampler.process(logits)
    actual = torch.tensor(sequence.view.tokens[begin + 1 : end + 1], device=logits.device)
    wanted = sequence.params.prompt_logprobs or 0
    sequence.prompt_logprobs += token_logprobs(logits, actual, wanted, sequence.state.token_text)


def decide(p: Pass, verify: Verifier) -> None:
    """Sets `Pass.tokens` and `Pass.paths`: the target's own choice after bare roots, the verifier's result on trees."""
    plain = [i for i in p.generating if p.spans[i].tree_index < 0]
    treed = [i for i in p.generating if p.spans[i].tree_index >= 0]
    if plain:
        rows = p.logits if not treed else p.logits[[p.rows[i].start for i in plain]]
        views = [p.works[i].sequence.view for i in plain]
        for i, token in zip(plain, choose_packed(views, [1] * len(plain), rows, None).tolist(), strict=True):
            p.accept(i, [], token)
    if treed and p.tree is not None:
        rows = p.logits if not plain else torch.cat([p.logits[p.rows[i]] for i in treed])
        verdicts = verify([p.works[i].sequence.view for i in treed], p.tree, rows)
        for i, (path, token) in zip(treed, verdicts, strict=True):
            p.accept(i, path, token)
