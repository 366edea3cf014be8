"""What each component is worth (figure 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit import figures
from kit.grid import ALL, METRIC_NAMES, best_by, panel, series_of, whole
from kit.study import Entry, Grid, GridLine, Table

from paceline.papers.streaming.drafter import StreamsConfig
from streaming.common import CHOOSE, PRUNING, USUAL, StreamingFlags, TrainedSet, grid_of, study

THRESHOLDS = (0.001, 0.003, 0.01, 0.03, 0.1)
COUNTS = (8, 16, 32, 64)
FRONTIER = " at frontier"  # what a setting is called whose streams ride on the last accepted node alone
KEPT = 0.97  # of the whole tree's call reduction that pruning is to keep
SPENT = 0.40  # of its upper row-layers that pruning may take


@study.figure(needs=("set",), takes=("k", "nodes"))
def figure_13(ask: StreamingFlags) -> Grid:
    """Components: chain, whole tree, tree pruned in mid-pass, tree cut by its own scores, wherever streams ride."""
    trained = TrainedSet.read(str(ask.set))
    tree: dict[str, Any] = dict(trained.tree(ask.k)) if ask.nodes is None else {"k": ask.k, "nodes": ask.nodes}
    gamma = tree.get("gamma", trained.config.gamma)
    size = StreamsConfig(**tree).num_nodes(gamma)
    counts = ask.few([count for count in COUNTS if count < size])
    shapes: list[tuple[str, str, dict[str, Any]]] = [("chain", "chain", {"chain": True}), ("tree", "tree", tree)]
    if trained.config.prune_rank:
        shapes += [("pruned", f"threshold {t:g}", {**tree, "prune_threshold": t}) for t in ask.few(THRESHOLDS)]
        shapes += [("pruned", f"count {count}", {**tree, "prune_count": count}) for count in counts]
    shapes += [("cut", f"best {count}", {"k": ask.k, "nodes": count}) for count in counts]
    entries = [
        Entry(trained.method(label + (FRONTIER if at == "frontier" else ""), at=at, **options), family)
        for at in trained.places
        for family, label, options in shapes
    ]
    auto = Entry(trained.method("auto budget", budget="auto", k=ask.k, nodes=USUAL), "auto")
    shape = f"{trained.config.mode} set, tree of k={ask.k}, gamma={gamma}{f', {size} nodes' if ask.nodes else ''}"
    title = f"what each component is worth ({shape}, of {trained.config.gamma} trained)"
    return grid_of([trained], title, [*entries, auto], choose=CHOOSE, finish=_ablation)


def pruning(lines: Sequence[GridLine]) -> list[dict[str, Any]]:
    """Every pruned tree beside the whole tree of the same task, streams on every node: the share of its call reduction
    that is kept, that of its upper row-layers that is spent, and whether both are as wanted (good)."""
    trees = {line.task: line for line in lines if line.method == "tree"}
    found = []
    for line in (line for line in lines if line.series == "pruned" and not line.method.endswith(FRONTIER)):
        tree = trees.get(line.task)
        if tree and line.call_reduction and line.upper_row_layers and tree.call_reduction and tree.upper_row_layers:
            kept, spent = line.call_reduction / tree.call_reduction, line.upper_row_layers / tree.upper_row_layers
            good = kept >= KEPT and spent <= SPENT
            found.append({"task": line.task, "method": line.method, "kept": kept, "spent": spent, "good": good})
    return found


def verdicts(lines: Sequence[GridLine], choosing: Sequence[GridLine]) -> list[str]:
    """The sentences that the ablation ends in: the best settings of the prompts that choose, on those that report."""
    found = []
    for task in sorted({line.task for line in choosing}, key=lambda task: (task != ALL, task)):
        here, there = ([line for line in part if line.task == task] for part in (lines, choosing))
        own = {line.method: line for line in here}
        calls, fast = (best_by(there, metric) for metric in PRUNING[:2])
        if calls is not None and calls.method in own:
            told = own[calls.method].metric("call_reduction")
            found.append(f"{task}: chosen on other prompts for its call reduction: {calls.method}, here {told:.2f}")
        if fast is not None and fast.method in own:
            times = f"here {own[fast.method].bracketed} times plain decoding"
            found.append(f"{task}: chosen on other prompts for its speed: {fast.method}, {times}")
        found += _pruning_verdict(task, pruning(here), pruning(there))
    return found


def _pruning_verdict(task: str, found: Sequence[Mapping[str, Any]], choosing: Sequence[Mapping[str, Any]]) -> list[str]:
    told = {p["method"]: p for p in found}
    known = [p for p in choosing if p["method"] in told]
    if not known:
        return []
    cheapest = min((p for p in known if p["good"]), key=lambda p: p["spent"], default=None)
    chosen = cheapest or max(
        known, key=lambda p: (p["spent"] <= SPENT, p["kept"] if p["spent"] <= SPENT else -p["spent"])
    )
    p = told[chosen["method"]]
    wanted = f"{KEPT:.0%} of the whole tree's call reduction with at most {SPENT:.0%} of its upper row-layers"
    said = f"pruning keeps {wanted}:" if p["good"] else f"pruning does not keep {wanted}:"
    return [f"{task}: {said} {p['method']} keeps {p['kept']:.1%} with {p['spent']:.1%}"]


def _ablation(table: Table, lines: list[GridLine], choosing: list[GridLine]) -> Table:
    plots = {".svg": lambda path: _bars(lines, path), "-pruning.svg": lambda path: _trade(lines, path)}
    values = {**table.values, "pruning": pruning(lines)}
    return replace(table, remarks=verdicts(lines, choosing), values=values, plots=plots)


def _rides(line: GridLine, lines: Sequence[GridLine]) -> bool:
    """Whether the streams of this method ride at the frontier; the automatic budget does where any method does."""
    if line.series != "auto":
        return line.method.endswith(FRONTIER)
    return any(other.method.endswith(FRONTIER) for other in lines)


def _bars(lines: Sequence[GridLine], path: Path) -> Path:
    shown = whole(lines)
    order = list(dict.fromkeys(line.method.removesuffix(FRONTIER) for line in shown))
    panels = []
    for metric in PRUNING:
        series = []
        for label, frontier in (("streams on every node", False), ("streams at the frontier", True)):
            named = {ln.method.removesuffix(FRONTIER): ln for ln in shown if _rides(ln, shown) == frontier}
            if named:
                series.append(series_of(label, order, [named.get(name) for name in order], metric))
        panels.append(panel(metric, series, x_label=METRIC_NAMES[metric], y_label=""))
    return figures.bars(panels, path)


def _trade(lines: Sequence[GridLine], path: Path) -> Path:
    """Call reduction against upper row-layers, streams on every node."""
    shown = [line for line in whole(lines) if not _rides(line, lines) and line.upper_row_layers]
    points = [series_of(line.method, [line.upper_row_layers], [line], "call_reduction") for line in shown]
    colours = [("chain", "tree", "pruned", "cut", "auto").index(line.series) for line in shown]
    tree = next((line for line in shown if line.method == "tree"), None)
    series = [replace(point, colour=colour) for point, colour in zip(points, colours, strict=True)]
    title = f"What is kept, and what it costs (broken line: {KEPT:.0%} of the whole tree)"
    kept = KEPT * tree.metric("call_reduction") if tree else None
    labels = {"x_label": METRIC_NAMES["upper_row_layers"], "y_label": METRIC_NAMES["call_reduction"]}
    axes = panel("call_reduction", series, log_x=True, line_at=kept, **labels)
    return figures.points([replace(axes, title=title, names=True)], path)
