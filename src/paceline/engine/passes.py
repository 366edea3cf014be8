"""One target pass, from rows to accepted tokens: the parts that rounds are made of.

    lay_out -> embed -> (the target's layers) -> read_logits -> decide -> `outcome.Emitter.emit` -> `outcome.keep`

Each part reads and fills a `Pass`. A round that runs the layers in pieces, on other workers or in compiled code uses
the same record.
"""

from __future__ import annotations

from collections import abc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import WorkerRestarted
from ..core.request import token_logprobs
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..core.verify import walk
from ..kernels.calls import RowSpan, TokenPass
from ..model.adapters import AdapterRange
from ..model.applications import adapter_ranges
from ..model.base import Batch, ForwardState, KVCache
from ..model.decoder import Decoder
from ..model.packing import RowPacker
from ..model.parallel import BEST, LOGITS, NOTHING
from .base import StepResult, Work
from .verification import Verifier, choose_nodes, likeliest


@dataclass(slots=True)
class Span:
    """Describe where one sequence's rows lie in the packed pass."""

    start: int
    stop: int
    root: int  # row of the root; the drafted nodes follow it
    tree: TokenTree | None = None  # that its drafted nodes are of

    @property
    def nodes(self) -> int:
        """Rows of the root and of its drafted nodes."""
        return self.stop - self.root


@dataclass(slots=True, eq=False)
class Pass:
    """One target pass and its results. B works; rows are packed work after work."""

    works: abc.Sequence[Work]
    spans: list[Span]  # [B]
    generating: list[int]  # works that reach their last known token, so that a new one is generated
    remaining: dict[int, list[int]] = field(default_factory=dict)  # work -> proposed indices after pruning
    state: ForwardState = field(init=False)
    logits: Tensor = field(init=False)  # [nodes of all generating works, V]
    rows: dict[int, slice] = field(default_factory=dict)  # generating work -> rows of `logits`
    tokens: dict[int, list[int]] = field(default_factory=dict)  # generating work -> accepted tokens, then the next
    paths: dict[int, list[int]] = field(default_factory=dict)  # generating work -> accepted nodes
    emitted: list[int] = field(init=False)  # [B] tokens emitted, after the stop rules' cut
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)  # work -> tokens drafted, accepted

    @property
    def main_rows(self) -> int:
        """Return the rows of tokens and nodes; those that a hook adds follow them."""
        return self.spans[-1].stop if self.spans else 0

    def accept(self, work: int, path: list[int], token: int) -> None:
        """Return the verdict on a generating work: the accepted nodes, and the target's next token."""
        self.paths[work], self.tokens[work] = path, [token]
        tree = self.spans[work].tree
        if path and tree is not None:
            self.tokens[work] = [*(tree.tokens[n - 1] for n in path), token]

    def frontier(self, work: int) -> int:
        """Return the last accepted node of a generating work; 0: its root."""
        path = self.paths[work]
        return path[-1] if path else 0

    def result(self, draft_ms: float, verify_ms: float, host_ms: float, propose_ms: float) -> StepResult:
        """Return what the engine gets of it; see `StepResult`."""
        emitted = []
        for work, count in zip(self.works, self.emitted, strict=True):
            if count or work.sequence.fault is not None:
                emitted.append((work.sequence, count))
        return StepResult(self.works, self.counts, emitted, draft_ms, verify_ms, host_ms, propose_ms)


def lay_out(works: abc.Sequence[Work], drafting: abc.Sequence[Work], trees: abc.Sequence[TokenTree]) -> Pass:
    """Row ranges of every work; ``trees`` are of the ``drafting`` ones, or empty: none drafts."""
    drafts = dict(zip(map(id, drafting), trees, strict=True)) if trees else {}
    spans, generating = [], []
    start = 0
    for i, work in enumerate(works):
        tree = drafts.get(id(work)) if drafts else None
        root = start + work.rows - 1
        stop = root + 1 + (0 if tree is None else len(tree))
        spans.append(Span(start, stop, root, tree))
        if work.generates:
            generating.append(i)
        start = stop
    return Pass(works, spans, generating)


def token_pass(p: Pass) -> TokenPass:
    """Return the rows of all sequences, one after the other: pending tokens, then drafted nodes.

    A choice is wanted after the root and every node of those that generate.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[slice | Tensor] = []
    choice_rows: list[int] = []
    spans = []
    for work, span in zip(p.works, p.spans, strict=True):
        cache = work.sequence.cache
        assert cache is not None
        first = cache.committed
        stop = first + span.stop - span.start
        tokens += work.sequence.tokens[first : first + work.rows]
        places: abc.Sequence[int] = range(first, stop)
        parents = None
        if span.tree is not None:
            tokens += span.tree.tokens
            if not span.tree.is_chain:
                parents, root = span.tree.parents, first + work.rows - 1
                places = [*range(first, root), *(root + depth for depth in span.tree.depths())]
        positions += places
        keys = cache.slots(0, stop)
        slots.append(slice(keys.start + first, keys.stop) if isinstance(keys, slice) else keys[first:])
        spans.append(RowSpan(span.start, span.stop, first, keys, parents))
        if work.generates:
            choice_rows += range(span.root, span.stop)
    where = slots[0] if len(slots) == 1 and isinstance(slots[0], slice) else _numbers(slots)
    return TokenPass(tokens, positions, where, spans, choice_rows, main_adapters(p))


def _numbers(slots: abc.Sequence[slice | Tensor]) -> list[int]:
    numbers: list[int] = []
    for part in slots:
        numbers += range(part.start, part.stop) if isinstance(part, slice) else part.tolist()
    return numbers


def embed(p: Pass, target: Decoder, batch: Batch | None = None) -> None:
    """Set `Pass.state`: all rows, as `packed` gives them, in front of the first layer."""
    p.state = target.embed(batch or packed(p, target))
    p.state.adapters = main_adapters(p)


def packed(p: Pass, target: Decoder) -> Batch:
    """All rows, as the target's layers take them."""
    request = token_pass(p)
    packer = RowPacker(target, target.device)
    for work, span, rows in zip(p.works, p.spans, request.spans, strict=True):
        positions, keys = request.positions[span.start : span.stop], rows.keys
        visible = None
        if rows.parents is not None:
            assert span.tree is not None
            visible = _block_mask(span.tree.ancestor_mask(), work.rows)
        packer.add(
            request.tokens[span.start : span.stop],
            positions,
            slots=slice(keys.start + rows.prefix, keys.stop) if isinstance(keys, slice) else keys[rows.prefix :],
            keys=keys,
            num_keys=rows.prefix + len(positions),
            prefix=rows.prefix,
            visible=visible,
            block_positions=None if visible is None else positions,
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
    """Return which main rows go through which application's adapters."""
    for work in p.works:
        if work.sequence.application is not None:
            break
    else:
        return ()
    return adapter_ranges([w.sequence.application for w in p.works], [(s.start, s.stop) for s in p.spans])


def whole_run(
    p: Pass, target: Decoder, batch: Batch, cache: KVCache, verify: Verifier | None
) -> AbstractContextManager[None]:
    """Enter what `embed`, all layers and `read_logits` are inside of; see `Decoder.whole_run`.

    A pass in which prompts' log-probabilities are read goes in parts.
    """
    if target.ranks is None or any(w.sequence.params.prompt_logprobs is not None for w in p.works):
        return nullcontext()
    rows = wanted_rows(p)
    read = (BEST if chooses_plainly(p, verify) else LOGITS) if rows else NOTHING
    return target.whole_run(batch, cache, read, rows, main_adapters(p))


def wanted_rows(p: Pass) -> list[int]:
    """Rows after which tokens are chosen."""
    rows: list[int] = []
    for i in p.generating:
        rows += range(p.spans[i].root, p.spans[i].stop)
    return rows


def chooses_plainly(p: Pass, verify: Verifier | None) -> bool:
    """Return whether all that is wanted is the likeliest token after each row."""
    views = [p.works[i].sequence for i in p.generating]
    return verify is None and all(s.sampler.plain and s.params.logprobs is None for s in views)


def read_logits(p: Pass, target: Decoder, verify: Verifier | None = None) -> list[int] | None:
    """Set `Pass.logits` from the last layer; records prompt log-probabilities, too.

    Returns:
        The likeliest token after each row, where ranks compute it and nothing else is needed: there are no logits then.
    """
    for work, span in zip(p.works, p.spans, strict=True):
        if work.sequence.params.prompt_logprobs is not None:
            try:
                assert work.sequence.cache is not None
                prompt_hidden = p.state.hidden[span.start : span.start + work.rows]
                record_prompt(work.sequence, work.sequence.cache.committed, prompt_hidden, target)
            except WorkerRestarted:
                raise
            except Exception as error:
                work.sequence.fault = error
    rows, hidden = wanted_rows(p), p.state.hidden
    if rows and target.ranks is not None and chooses_plainly(p, verify):
        chosen: list[int] = target.best(hidden[torch.tensor(rows)]).tolist()
        return chosen
    if not rows:
        p.logits = hidden.new_empty((0, target.config.vocab_size))
    elif len(rows) == hidden.shape[0]:
        p.logits = target.logits(p.state)
    else:
        p.logits = target.logits(p.state, torch.tensor(rows, device=hidden.device))
    return None


def record_prompt(sequence: Sequence, first: int, hidden: Tensor, target: Decoder) -> None:
    """Log-probabilities of the prompt tokens that follow some rows of a text.

    Args:
        sequence: whose text it is.
        first: position of the first of the rows.
        hidden: [rows, d_model] states after the last layer.
        target: reads them.
    """
    recorded = len(sequence.prompt_logprobs)  # of tokens 0 .. recorded - 1
    begin = max(recorded - 1, first)
    end = min(first + len(hidden), sequence.prompt_len - 1)
    if not recorded:
        sequence.prompt_logprobs.append(None)
        begin = first
    if begin >= end:
        return
    logits = target.read(hidden[begin - first : end - first])
    if sequence.params.logprobs_mode == "processed":
        logits = sequence.sampler.process(logits)
    actual = torch.tensor(sequence.tokens[begin + 1 : end + 1], device=logits.device)
    count = sequence.params.prompt_logprobs or 0
    sequence.prompt_logprobs += token_logprobs(logits, actual, count, sequence.token_text)


def decide(p: Pass, verify: Verifier | None, chosen: abc.Sequence[int] | None = None) -> None:
    """Set `Pass.tokens`, `Pass.paths` and `Pass.rows`.

    Of each generating work the accepted nodes and the next token.

    Args:
        verify: decides on trees; None, and for bare roots: the target's own choices are followed.
        chosen: the target's choices after all nodes that compiled code made; -1: the logits are to
            be used.
    """
    begin = 0
    for i in p.generating:
        p.rows[i] = slice(begin, begin + p.spans[i].nodes)
        begin = p.rows[i].stop
    trees = {} if verify is None else {i: tree for i in p.generating if (tree := p.spans[i].tree) is not None}
    unverified = [i for i in p.generating if i not in trees]
    if trees and verify is not None:
        logits = torch.cat([p.logits[p.rows[i]] for i in trees]) if unverified else p.logits
        verdicts = verify([p.works[i].sequence for i in trees], [*trees.values()], logits)
        for i, (path, token) in zip(trees, verdicts, strict=True):
            p.accept(i, path, token)
    if chosen is None:
        plain = unverified and all(p.works[i].sequence.sampler.plain for i in unverified)
        chosen = likeliest(p.logits).tolist() if plain else [-1] * begin
    for i in unverified:
        tree, picks = p.spans[i].tree, chosen[p.rows[i]]
        if -1 in picks:
            picks = choose_nodes(p.works[i].sequence, p.logits[p.rows[i]], tree).tolist()
        p.accept(i, *(([], picks[0]) if tree is None else walk(tree, picks)))
