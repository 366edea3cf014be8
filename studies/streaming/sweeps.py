"""One setting after the other: streams, children a node, layers, thresholds, batches, dtypes."""

from __future__ import annotations

from typing import Any

from kit.study import Entry, Grid, numbers

from paceline.papers.streaming.drafter import StreamsConfig
from streaming.common import (
    CHOOSE,
    CUT,
    PRUNED_AT,
    PRUNING,
    USUAL,
    StreamingFlags,
    TrainedSet,
    grid_of,
    read_sets,
    study,
)

SWEPT_THRESHOLDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SWEPT_TOP_KS = (1, 5, 10, 20, 50, 0)
ANY_BATCH = 10**6  # sequences from which on a draft is the best path alone: never


@study.figure(needs=("set",))
def figure_10(ask: StreamingFlags) -> Grid:
    """Children a node (k): whole trees, which grow with k, pruned ones, and as many nodes of each as k=2 has."""
    trained = TrainedSet.read(str(ask.set))
    gamma = min(3, trained.config.gamma)
    equal = StreamsConfig(k=2).num_nodes(gamma)
    shapes: dict[str, dict[str, Any]] = {
        "whole tree": {},
        f"pruned below {PRUNED_AT:g}": {"prune_threshold": PRUNED_AT},
        f"best {equal} nodes": {"nodes": equal},
    }
    entries = [
        Entry(trained.method(f"{series}, k {k}", k=k, gamma=gamma, at="nodes", **options), series, k)
        for k in ask.few(range(1, 7))
        for series, options in shapes.items()
        if (trained.config.prune_rank or "prune_threshold" not in options) and (k > 1 or "nodes" not in options)
    ]
    label = "tokens taken from each stream (k)"
    title = f"Children a node, gamma={gamma}, streams on every node"
    return grid_of([trained], title, entries, x_label=label, choose=CHOOSE)


@study.figure(needs=("sets",))
def figure_11(ask: StreamingFlags) -> Grid:
    """Layers that streams go through (Ns): a set trained for each."""
    sets = read_sets(ask.sets)
    entries = [e for s in sets for e in s.chain_and_cut(f", {s.config.msa_layers} layers", s.config.msa_layers)]
    return grid_of(sets, "Layers that streams go through", entries, x_label="MSA layers (Ns)", choose=CHOOSE)


@study.figure(needs=("set",))
def figure_12b(ask: StreamingFlags) -> Grid:
    """Sampling at temperature 1 from the likeliest tokens."""
    trained, cells = TrainedSet.read(str(ask.set)), {"temperatures": (1.0,), "top_ks": ask.few(SWEPT_TOP_KS)}
    label, entries = "likeliest tokens sampled from (top-k)", trained.chain_and_cut()
    return grid_of([trained], "Sampling at temperature 1", entries, x_label=label, cell="top_k", cells=cells)


@study.figure(needs=("set",), takes=("batches",))
def figure_18(ask: StreamingFlags) -> Grid:
    """Requests at once: the paper's rule (appendix L), the best path, trees at any size, and the engine's budget."""
    trained = TrainedSet.read(str(ask.set))
    pruned = {"at": "nodes", "prune_threshold": PRUNED_AT, **trained.tree(3)} if trained.config.prune_rank else {}
    entries = [
        Entry(trained.method("best path", k=1), "best path"),
        Entry(trained.method("tree", k=3, nodes=CUT, best_path_batch=ANY_BATCH), f"best {CUT} nodes"),
        Entry(trained.method("auto", k=3, nodes=USUAL, budget="auto"), "auto budget"),
    ]
    if pruned:  # in batches the paper switches tree and pruning off
        always = trained.method("pruned tree", best_path_batch=ANY_BATCH, **pruned)
        entries += [
            Entry(trained.method("as in the paper", best_path_batch=2, **pruned), "as in the paper"),
            Entry(always, "pruned tree at any size"),
        ]
    batches = ask.few(numbers("--batches", ask.batches))
    shape = {"x_label": "batch size", "cell": "batch", "cells": {"batches": batches}, "log_x": True}
    return grid_of([trained], "Requests at once", entries, prompts=max(batches), **shape)


@study.figure(needs=("set",))
def table_4(ask: StreamingFlags) -> Grid:
    """The target as it is stored and in int8, each over its own plain decoding."""
    trained = TrainedSet.read(str(ask.set))
    dtypes = {"as stored": "auto", "int8": "int8"}
    entries = [e for shown, dtype in dtypes.items() for e in trained.chain_and_cut(f", {shown}", shown, dtype=dtype)]
    metrics = ("call_reduction", "speedup", "tokens_per_s")
    return grid_of([trained], "Target in int8", entries, x_label="weights of the target", plots=metrics)


@study.figure(needs=("set",))
def appendix_e1(ask: StreamingFlags) -> Grid:
    """Streams that draft (gamma), from one to all that were trained."""
    trained = TrainedSet.read(str(ask.set))
    counts = range(1, trained.config.gamma + 1)
    entries = [entry for gamma in counts for entry in trained.chain_and_cut(f", gamma {gamma}", gamma, gamma=gamma)]
    return grid_of([trained], "Streams that draft", entries, x_label="streams (gamma)", choose=CHOOSE)


@study.figure(needs=("set",))
def appendix_g1(ask: StreamingFlags) -> Grid:
    """The threshold of the pruning in mid-pass, streams on every node and at the frontier."""
    trained = TrainedSet.read(str(ask.set))
    trained.require_pruning()
    tree = trained.tree(3)
    series = {at: f"streams on {at}" if len(trained.places) > 1 else "pruned" for at in trained.places}
    entries = [
        Entry(trained.method(f"threshold {t:g} ({at})", at=at, prune_threshold=t, **tree), label, t)
        for at, label in series.items()
        for t in ask.few(SWEPT_THRESHOLDS)
    ]
    title = f"Pruning threshold, tree of k=3, gamma={tree['gamma']}"
    return grid_of([trained], title, entries, x_label="threshold", log_x=True, plots=PRUNING, choose=CHOOSE)
