"""Prune token trees in mid-pass by an early exit before the streams' first layer.

Nodes that are pruned keep the K/V that the lower layers wrote until the sequence's region is committed (lazy trimming).

Source: Speculative Streaming, section 2.3 (threshold) and appendix G.1 (fixed size, lazy trimming).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from ...core.tree import TokenTree
from ...engine.passes import Pass, Span
from ...model.attention.base import Segment, slot_indices
from ...model.decoder import Decoder
from .pass_rows import StreamAnchors, StreamInsertion


def prune(
    p: Pass,
    carriers: Sequence[StreamAnchors],
    insertion: StreamInsertion,
    target: Decoder,
    threshold: float | None,
    count: int | None,
) -> bool:
    """Drop unlikely nodes from tree and rows by the early exit's transition probabilities.

    Args:
        p: the pass; its trees, spans and state become those of the nodes that are kept, listed in `Pass.remaining`.
        carriers: whose trees may be pruned now: each is pruned once.
        insertion: the pass's segments, and the streams that are in it; to be planned again where nodes went.
        target: the model.
        threshold, count: as of `surviving`.

    Returns:
        Whether any node was pruned.
    """
    treed = [(c, tree) for c in carriers if (tree := p.spans[c.work].tree) is not None and len(tree)]
    if not treed:
        return False
    cut = set()
    for (c, tree), transitions in zip(treed, _transitions(p, treed, target), strict=True):
        survivors = surviving(tree.parents, transitions, threshold, count)
        c.pruned = len(transitions) - len(survivors)
        if c.pruned:
            p.remaining[c.work], p.spans[c.work].tree = [0, *survivors], tree.subset(survivors)
            cut.add(c.work)
    if cut:
        _drop_rows(p, insertion, cut, target.device)
    return bool(cut)


def surviving(
    parents: Sequence[int], transitions: Sequence[float], threshold: float | None, count: int | None
) -> list[int]:
    """Return the drafted nodes of one tree that are kept, ascending.

    Args:
        parents: of each drafted node.
        transitions: log p of each given its parent.
        threshold: a node whose transition probability is below it is pruned with its subtree.
        count: drafted nodes to keep: those with the best cumulative score, of equals the earlier ones.

    Source: Speculative Streaming, section 2.3 and appendix G.1.
    """
    floor = -math.inf if threshold is None else math.log(threshold)
    scores = [0.0]
    alive = []
    gone = set()
    for node, (parent, transition) in enumerate(zip(parents, transitions, strict=True), start=1):
        scores.append(scores[parent] + transition)
        if parent in gone or transition < floor:
            gone.add(node)
        else:
            alive.append(node)
    if count is not None and len(alive) > count:
        # A score is never above its parent's, and parents come first, so a tree remains.
        alive = sorted(sorted(alive, key=lambda n: (-scores[n], n))[:count])
    return alive


def _transitions(p: Pass, treed: Sequence[tuple[StreamAnchors, TokenTree]], target: Decoder) -> list[list[float]]:
    """Return log p of every drafted node given its parent, by the early exit.

    Source: Speculative Streaming, section 2.3: z = H(o_theta(M)), with M before the streams' first layer.
    """
    mapped, rows, columns, base = [], [], [], 0
    for c, tree in treed:
        inner = sorted({*tree.parents})
        place = {node: base + i for i, node in enumerate(inner)}
        base += len(inner)
        assert c.streams.prune_map is not None, "refused where the round was made"
        mapped.append(c.streams.prune_map(p.state.hidden[[p.spans[c.work].root + node for node in inner]]))
        rows += [place[parent] for parent in tree.parents]
        columns += tree.tokens
    z = target.read(torch.cat(mapped))
    values = iter((z[rows, columns] - z.logsumexp(dim=-1)[rows]).tolist())
    return [[*islice(values, len(tree))] for _, tree in treed]


def _drop_rows(p: Pass, insertion: StreamInsertion, cut: set[int], device: torch.device) -> None:
    """Take pruned nodes and their streams out of the rows; the others keep their slots."""
    segments = insertion.main
    rows: list[int] = []
    spans = []
    remaining = {}
    for i, span in enumerate(p.spans):
        before = span.root - span.start  # rows of the segment that stay whatever goes
        nodes: Sequence[int] = p.remaining[i] if i in cut else range(span.nodes)
        rows_left = [*range(before), *(before + n for n in nodes)]
        if i in cut:
            segments[i] = _thinned(segments[i], rows_left, device)
            remaining[i] = rows_left
        start = len(rows)
        rows += [span.start + row for row in rows_left]
        spans.append(Span(start, len(rows), start + before, span.tree))
        segments[i] = replace(segments[i], start=start, stop=len(rows))
    rows += insertion.drop(remaining)
    p.state = p.state.keep(torch.tensor(rows, device=device))
    p.spans = spans


def _thinned(segment: Segment, rows: Sequence[int], device: torch.device) -> Segment:
    """Return the segment of the rows (and their keys) that are left; the rows are its whole block."""
    prefix, count = segment.prefix, len(rows)
    index: Tensor | slice
    keys = segment.keys
    if rows[-1] == count - 1:  # the first ones
        index = slice(0, count)
        keys = slice(keys.start, keys.start + prefix + count) if isinstance(keys, slice) else keys[: prefix + count]
    else:
        index = torch.tensor(rows, device=device)
        slots = slot_indices(keys, device)
        keys = torch.cat((slots[:prefix], slots[prefix:][index]))
    visible = None if segment.visible is None else segment.visible[index][:, index]
    positions = None if segment.positions is None else segment.positions[index]
    return replace(segment, keys=keys, num_keys=prefix + count, visible=visible, positions=positions)
