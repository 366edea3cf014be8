"""Speculative Streaming: the paper's tables and figures, measured on this machine.

    python studies/speculative_streaming.py --quick --out build/quick
    python studies/speculative_streaming.py figure_13 --set paceline-small-streams --tasks sql,gsm8k --out build/streams

Every function below is a table or figure, named as in the paper. What came of them: docs/speculative-streaming.md.

Source: Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.bench import figures, machine, workloads
from paceline.bench.figures import COLOURS, Panel, Series
from paceline.bench.grid import ALL, METRIC_NAMES, apart, how, lines_of, panel, series_of, whole
from paceline.bench.measure import Memory
from paceline.bench.methods import show
from paceline.bench.models import materialised
from paceline.bench.records import PLAIN, Method
from paceline.bench.report import wording as say
from paceline.bench.scores import TASK_WORKLOADS, encoded_prompts, evaluate, known_tasks, means, workload_of
from paceline.bench.study import Entry, Grid, Line, Options, Study, Table, asked, measure
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.drafters.streams import StreamsConfig
from paceline.drafters.streams.recipe import StreamOptions, StreamRecipe, similarity
from paceline.kv.pool import SequenceCache
from paceline.llm import LLM
from paceline.target.adapters import MLP, linear_shapes
from paceline.target.loader import resolve_folder
from paceline.target.native_calls import Asked as Pass
from paceline.target.native_calls import RowSpan
from paceline.target.native_streams import CarrierRows, Riding
from paceline.target.streams import StreamConfig, StreamSet, read_config
from paceline.training.data import Example, TokenBatch, collate
from paceline.training.network import Network
from paceline.training.trainer import StepContext

FULL_TREE = 128  # most drafted nodes of a tree that is verified whole
THRESHOLDS = (0.001, 0.003, 0.01, 0.03, 0.1)
COUNTS = (8, 16, 32, 64)
SWEPT_THRESHOLDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SWEPT_TOP_KS = (1, 5, 10, 20, 50, 0)
SWEPT_BATCHES = (1, 2, 4, 8, 16)
USUAL = 32  # most nodes, where the engine chooses the budget
CUT = 16  # nodes of the tree that stands for a usual setting
PRUNED_AT = 0.01  # the threshold that stands for a usual setting
FRONTIER = " at frontier"  # what a setting is called whose streams ride on the last accepted node alone
KEPT = 0.97  # of the whole tree's call reduction that pruning is to keep
SPENT = 0.40  # of its upper row-layers that pruning may take
SHIPPED = {"sql": "paceline-small-sql", "e2e": "paceline-small-e2e"}
ONCE = {"prompts": 1, "repeats": 1, "scored": 8}  # how often things are done where it is to be quick
PRUNING = ("call_reduction", "speedup", "upper_row_layers")  # metrics that tell what pruning does


@dataclass(frozen=True, kw_only=True)
class Asked(Options):
    """What this study can be asked beside what all can."""

    set: str | None = asked(None, "Trained set of streams.", "FOLDER")
    sets: dict[str, str] = asked({}, "Sets with streams through so many layers.", "LAYERS=FOLDER")
    streams: dict[str, str] = asked({}, "Shared set with streams for a task (sql, e2e, ..).", "TASK=FOLDER")
    adapter: dict[str, str] = asked({}, "Adapter without streams for the same task.", "TASK=FOLDER")
    rotated: str | None = asked(None, "Trained as --set is, with rotated values in place of embeddings.", "FOLDER")
    own_mlp: str | None = asked(None, "Trained as --set is, with an adapter in place of the MLP.", "FOLDER")
    tasks: str = asked("sql,e2e", "sql, e2e, gsm8k, dialogsum, or any workload's name.", "NAME,..")
    k: int = asked(3, "Children of a node, of figure_13's tree.", "N")
    nodes: int | None = asked(None, "Most nodes of figure_13's tree, best first; the full tree if not given.", "N")
    scored: int = asked(200, "Prompts of each task whose answers are scored.", "N")
    segment: dict[str, str] = asked({}, "Of appendix_i: rows=4, length=512, segments=naive+all+128, ..", "KEY=VALUE")


study = Study(
    "Speculative Streaming: the paper's tables and figures, measured on this machine.",
    Asked,
    quick={"set": "paceline-small-streams", "streams": SHIPPED, "tasks": "sql", "max_new_tokens": 12, **ONCE},
)


# -- sets


@dataclass(frozen=True, kw_only=True)
class TrainedSet:
    """A trained set that is measured."""

    folder: str
    config: StreamConfig
    application: str | None  # the name it runs under in shared mode; None: it drafts for the base model

    @staticmethod
    def read(folder: str, name: str = "set") -> TrainedSet:
        """Its configuration.

        Raises:
            ConfigError: there is none, or the set has no streams.
        """
        config = read_config(Path(resolve_folder(folder)))
        if not config.gamma:
            raise ConfigError(f"set {folder}", "it has adapters alone, no streams", "name a set with streams")
        return TrainedSet(folder=folder, config=config, application=name if config.mode == "shared" else None)

    @property
    def line(self) -> str:
        """Its shape in words."""
        shape = self.config
        return f"{shape.mode}, gamma {shape.gamma}, streams through {shape.msa_layers} of {shape.num_layers} layers"

    @property
    def places(self) -> tuple[str, ...]:
        """Where its streams can ride: main rows of a shared set need theirs on every node."""
        return ("nodes",) if self.application else ("nodes", "frontier")

    def method(self, name: str, **options: Any) -> Method:
        """The drafter with these options and a draft budget that lets its whole tree through.

        Args:
            options: of `StreamsConfig`; streams usually ride at the frontier, if they can. ``budget`` and ``dtype`` are
                the method's.
        """
        options = {"at": self.places[-1], **options}
        dtype, budget = options.pop("dtype", "auto"), options.pop("budget", None)
        size = StreamsConfig(path=self.folder, **options).num_nodes(options.get("gamma") or self.config.gamma)
        return Method(
            name=name,
            drafter=written("streams" if self.application else f"streams:{self.folder}", options),
            settings={"budget": size if budget is None else budget},
            dtype=dtype,
            application=self.application,
        )

    def chain_and_cut(self, where: str = "", x: float | str | None = None, **options: Any) -> list[Entry]:
        """A chain, and a tree of the best `CUT` nodes."""
        return [
            Entry(self.method(f"chain{where}", chain=True, **options), "chain", x),
            Entry(self.method(f"best {CUT}{where}", k=3, nodes=CUT, **options), f"best {CUT} nodes", x),
        ]

    def tree(self, k: int, gamma: int | None = None) -> dict[str, int]:
        """``k`` and the most streams with which a full tree has at most `FULL_TREE` nodes."""
        wanted = self.config.gamma if gamma is None else gamma
        fits = [g for g in range(1, wanted + 1) if sum(k**i for i in range(1, g + 1)) <= FULL_TREE]
        return {"k": k, "gamma": max(fits, default=1)}

    def require_pruning(self) -> None:
        """Raises CapabilityError where it has no early exit."""
        if not self.config.prune_rank:
            wrong = "it has no early exit, so it cannot prune"
            raise CapabilityError(f"set {self.folder}", wrong, "train it with prune_rank=8")


def written(drafter: str, options: Mapping[str, Any]) -> str:
    """A drafter with its options as the registry reads it."""
    return ",".join([drafter, *(f"{key}={show(value)}" for key, value in options.items())])


def read_sets(folders: Mapping[str, str]) -> list[TrainedSet]:
    """Trained sets by the number of layers that their streams go through, fewest first.

    Raises:
        ConfigError: fewer than two, a name that is not that number, or a mixture of modes.
    """
    found = [TrainedSet.read(folder, f"set{name}") for name, folder in folders.items()]
    for name, trained in zip(folders, found, strict=True):
        ns, said = trained.config.msa_layers, f"--sets {name}={trained.folder}"
        if name != str(ns):
            raise ConfigError(said, f"its streams go through {ns} layers", f"write {ns}={trained.folder}")
    if len({trained.config.mode for trained in found}) > 1:
        raise ConfigError("--sets", "some are lossless and some are shared", "compare sets of one mode")
    if len(found) < 2:
        raise ConfigError("--sets", f"{len(found)} sets make no sweep", "add --sets LAYERS=FOLDER for two or more")
    return sorted(found, key=lambda trained: trained.config.msa_layers)


def grid_of(sets: Sequence[TrainedSet], title: str, entries: Sequence[Entry], **more: Any) -> Grid:
    """Methods of trained sets."""
    return Grid(
        title=f"Speculative streams: {title}",
        entries=entries,
        applications={s.application: s.folder for s in sets if s.application},
        facts=[f"set {s.folder}: {s.line}" for s in sets],
        values={"sets": [{"folder": s.folder, **s.config.to_json()} for s in sets]},
        **more,
    )


# -- what each component is worth (figure 13)


@study.figure(needs=("set",), takes=("k", "nodes"))
def figure_13(ask: Asked) -> Grid:
    """Components: chain, whole tree, tree pruned in mid-pass, tree cut by its own scores, wherever streams ride."""
    trained = TrainedSet.read(str(ask.set))
    tree: dict[str, Any] = dict(trained.tree(ask.k)) if ask.nodes is None else {"k": ask.k, "nodes": ask.nodes}
    gamma = tree.get("gamma", trained.config.gamma)
    size = StreamsConfig(**tree).num_nodes(gamma)
    counts = [count for count in COUNTS if count < size]
    shapes: list[tuple[str, str, dict[str, Any]]] = [("chain", "chain", {"chain": True}), ("tree", "tree", tree)]
    if trained.config.prune_rank:
        shapes += [("pruned", f"threshold {t:g}", {**tree, "prune_threshold": t}) for t in THRESHOLDS]
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
    return grid_of([trained], title, [*entries, auto], finish=_ablation)


def pruning(lines: Sequence[Line]) -> list[dict[str, Any]]:
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


def verdicts(lines: Sequence[Line]) -> list[str]:
    """The sentences that the ablation ends in."""
    found = []
    for task in sorted({line.task for line in lines}, key=lambda task: (task != ALL, task)):
        here = [line for line in lines if line.task == task]
        calls, fast = (
            max((ln for ln in here if getattr(ln, metric) is not None), key=lambda ln: ln.metric(metric), default=None)
            for metric in PRUNING[:2]
        )
        if calls is not None:
            found.append(f"{task}: highest call reduction: {calls.method}, {calls.metric('call_reduction'):.2f}")
        if fast is not None:
            found.append(f"{task}: fastest: {fast.method}, {fast.bracketed} times plain decoding")
        found += _pruning_verdict(task, pruning(here))
    return found


def _pruning_verdict(task: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    wanted = f"{KEPT:.0%} of the whole tree's call reduction with at most {SPENT:.0%} of its upper row-layers"
    said, good = f"pruning keeps {wanted}:", [p for p in found if p["good"]]
    p = min(good, key=lambda p: p["spent"], default=None)
    if p is None:
        said = f"no pruning keeps {wanted};"
        p = max(found, key=lambda p: (p["spent"] <= SPENT, p["kept"] if p["spent"] <= SPENT else -p["spent"]))
    return [f"{task}: {said} {p['method']} keeps {p['kept']:.1%} with {p['spent']:.1%}"]


def _ablation(table: Table, lines: list[Line]) -> Table:
    plots = {".svg": lambda path: _bars(lines, path), "-pruning.svg": lambda path: _trade(lines, path)}
    return replace(table, remarks=verdicts(lines), values={**table.values, "pruning": pruning(lines)}, plots=plots)


def _rides(line: Line, lines: Sequence[Line]) -> bool:
    """Whether the streams of this method ride at the frontier; the automatic budget does where any method does."""
    if line.series != "auto":
        return line.method.endswith(FRONTIER)
    return any(other.method.endswith(FRONTIER) for other in lines)


def _bars(lines: Sequence[Line], path: Path) -> Path:
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


def _trade(lines: Sequence[Line], path: Path) -> Path:
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


# -- sweeps


@study.figure(needs=("set",))
def figure_10(ask: Asked) -> Grid:
    """Children a node (k): the whole tree, pruned in mid-pass, and cut by its own scores."""
    trained = TrainedSet.read(str(ask.set))
    gamma = min(3, trained.config.gamma)
    shapes: dict[str, dict[str, Any]] = {
        "whole tree": {"at": "nodes"},
        f"pruned below {PRUNED_AT:g}": {"at": "nodes", "prune_threshold": PRUNED_AT},
        f"best {CUT} nodes": {"nodes": CUT},
    }
    entries = [
        Entry(trained.method(f"{series}, k {k}", k=k, gamma=gamma, **options), series, k)
        for k in range(1, 7)
        for series, options in shapes.items()
        if trained.config.prune_rank or "prune_threshold" not in options
    ]
    return grid_of([trained], f"Children a node, gamma={gamma}", entries, x_label="tokens taken from each stream (k)")


@study.figure(needs=("sets",))
def figure_11(ask: Asked) -> Grid:
    """Layers that streams go through (Ns): a set trained for each."""
    sets = read_sets(ask.sets)
    entries = [e for s in sets for e in s.chain_and_cut(f", {s.config.msa_layers} layers", s.config.msa_layers)]
    return grid_of(sets, "Layers that streams go through", entries, x_label="MSA layers (Ns)")


def beside(ask: Asked, other: str, label: str, title: str, **settings: Any) -> Grid:
    """Another set beside ``--set``, each as a chain and as a small tree; no other part of the two may differ.

    Args:
        other: its folder.
        label: what it is called.
        settings: of the engine.
    """
    usual, changed = TrainedSet.read(str(ask.set)), TrainedSet.read(other)
    shapes = [(s.config.mode, s.config.gamma, s.config.msa_layers) for s in (usual, changed)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"set {other}", f"it is {changed.line}, {ask.set} is {usual.line}", "train both alike")
    entries = [*usual.chain_and_cut(", as usual", "as usual"), *changed.chain_and_cut(f", {label}", label)]
    entries = [replace(e, method=replace(e.method, settings={**e.method.settings, **settings})) for e in entries]
    return grid_of([usual, changed], title, entries, x_label="streams")


@study.figure(needs=("set", "rotated"))
def figure_12a(ask: Asked) -> Grid:
    """Value rotation in place of stream embeddings; on torch, since the compiled layers rotate no values."""
    config = TrainedSet.read(str(ask.rotated)).config
    if config.value_rotation is None:
        raise ConfigError(f"set {ask.rotated}", "it has stream embeddings", "train it with identity='rotation'")
    return beside(ask, str(ask.rotated), "values rotated", "Value rotation", kernels="torch")


@study.figure(needs=("set", "own_mlp"))
def appendix_h2(ask: Asked) -> Grid:
    """Streams that go through an adapter in place of the MLP."""
    adapter = TrainedSet.read(str(ask.own_mlp)).config.adapter
    if adapter is None or MLP not in adapter.linears:
        raise ConfigError(f"set {ask.own_mlp}", "its streams have the target's MLP", f"train it with {MLP} in linears")
    return beside(ask, str(ask.own_mlp), "MLP replaced", "An adapter in place of the MLP")


@study.figure(needs=("set",))
def figure_12b(ask: Asked) -> Grid:
    """Sampling at temperature 1 from the likeliest tokens."""
    trained, cells = TrainedSet.read(str(ask.set)), {"temperatures": (1.0,), "top_ks": SWEPT_TOP_KS}
    label, entries = "likeliest tokens sampled from (top-k)", trained.chain_and_cut()
    return grid_of([trained], "Sampling at temperature 1", entries, x_label=label, cell="top_k", cells=cells)


@study.figure(needs=("set",))
def figure_18(ask: Asked) -> Grid:
    """Requests at once: the best path alone, a tree at any size, and the budget that the engine chooses."""
    trained = TrainedSet.read(str(ask.set))
    entries = [
        Entry(trained.method("best path", chain=True), "best path"),
        Entry(trained.method("tree", k=3, nodes=CUT, best_path_batch=10**6), f"best {CUT} nodes"),
        Entry(trained.method("auto", k=3, nodes=USUAL, budget="auto"), "auto budget"),
    ]
    shape = {"x_label": "batch size", "cell": "batch", "cells": {"batches": SWEPT_BATCHES}, "log_x": True}
    return grid_of([trained], "Requests at once", entries, prompts=max(SWEPT_BATCHES), **shape)


@study.figure(needs=("set",))
def table_4(ask: Asked) -> Grid:
    """The target as it is stored and in int8, each over its own plain decoding."""
    trained = TrainedSet.read(str(ask.set))
    dtypes = {"as stored": "auto", "int8": "int8"}
    entries = [e for shown, dtype in dtypes.items() for e in trained.chain_and_cut(f", {shown}", shown, dtype=dtype)]
    metrics = ("call_reduction", "speedup", "tokens_per_s")
    return grid_of([trained], "Target in int8", entries, x_label="weights of the target", plots=metrics)


@study.figure(needs=("set",))
def appendix_e1(ask: Asked) -> Grid:
    """Streams that draft (gamma), from one to all that were trained."""
    trained = TrainedSet.read(str(ask.set))
    counts = range(1, trained.config.gamma + 1)
    entries = [entry for gamma in counts for entry in trained.chain_and_cut(f", gamma {gamma}", gamma, gamma=gamma)]
    return grid_of([trained], "Streams that draft", entries, x_label="streams (gamma)")


@study.figure(needs=("set",))
def appendix_g1(ask: Asked) -> Grid:
    """The threshold of the pruning in mid-pass, streams on every node and at the frontier."""
    trained = TrainedSet.read(str(ask.set))
    trained.require_pruning()
    tree = trained.tree(3)
    series = {at: f"streams on {at}" if len(trained.places) > 1 else "pruned" for at in trained.places}
    entries = [
        Entry(trained.method(f"threshold {t:g} ({at})", at=at, prune_threshold=t, **tree), label, t)
        for at, label in series.items()
        for t in SWEPT_THRESHOLDS
    ]
    title = f"Pruning threshold, tree of k=3, gamma={tree['gamma']}"
    return grid_of([trained], title, entries, x_label="threshold", log_x=True, plots=PRUNING)


@study.figure(needs=("sets",))
def section_2_3(ask: Asked) -> Grid:
    """The layer before which trees are pruned, which is the one before which streams begin: a set trained for each."""
    sets, entries = read_sets(ask.sets), []
    for trained in sets:
        trained.require_pruning()
        tree, layer = trained.tree(3), trained.config.insertion
        pruned = {"prune_threshold": PRUNED_AT, **tree}
        entries += [
            Entry(trained.method(f"whole tree, layer {layer}", at="nodes", **tree), "whole tree", layer),
            Entry(trained.method(f"pruned, layer {layer}", at="nodes", **pruned), f"pruned below {PRUNED_AT:g}", layer),
        ]
    title = "Layer before which trees are pruned"
    return grid_of(sets, title, entries, x_label="pruning layer (N - Ns)", plots=PRUNING)


# -- shared mode beside plain fine-tuning (table 3)

ADAPTER, STREAMS = "adapter", "streams"  # the two sets of an application
NOT_SHIPPED = ("e2e", "dialogsum")  # tasks whose prompts need --data


def application_grid(task: str, folders: Mapping[str, str]) -> Grid:
    """The adapter without and with look-ups; the streams without drafts, as a chain, as trees, and left alone.

    Args:
        task: after which the application is named.
        folders: of `STREAMS`, and of `ADAPTER` where speed-ups are to be over it.

    Raises:
        ConfigError: an unknown task, or a set of another kind.
    """
    known_tasks([task])
    configs = {name: read_config(Path(resolve_folder(folder))) for name, folder in folders.items()}
    for name, config in configs.items():
        if config.mode != "shared" or bool(config.gamma) != (name == STREAMS):
            wanted = "name a shared set with " + ("streams" if name == STREAMS else "adapters alone (gamma 0)")
            raise ConfigError(f"{task}={folders[name]}", f"a {config.mode} set with {config.gamma} streams", wanted)

    def drafts(name: str, budget: int | str | None = None, **shape: Any) -> Method:
        settings = {"budget": StreamsConfig(**shape).num_nodes(configs[STREAMS].gamma) if budget is None else budget}
        text = written(STREAMS, shape)
        return Method(name=f"{STREAMS}, {name}", drafter=text, settings=settings, application=STREAMS)

    methods = [
        Method(name=ADAPTER, application=ADAPTER),
        Method(name=f"{ADAPTER}, ngram", drafter="ngram", application=ADAPTER),
        drafts(PLAIN, 0),
        drafts("chain", chain=True),
        *(drafts(f"best {nodes}", k=3, nodes=nodes) for nodes in (8, CUT)),
        drafts("auto budget", "auto", k=3, nodes=CUT),
    ]
    methods = [method for method in methods if method.application in folders]
    return Grid(
        title=f"Shared streams beside a plain adapter: {task}",
        entries=[Entry(method, str(method.application)) for method in methods],
        applications=folders,
        cells={"workloads": (TASK_WORKLOADS[task],)},
        over=methods[0].name,
    )


@study.table(needs=("streams",), takes=("adapter", "scored"), prompts=10, repeats=3)
def table_3(ask: Asked) -> Iterator[Table | None]:
    """Shared streams beside plain fine-tuning with the same adapters: speed, task score, extra parameters."""
    for alone in {*ask.adapter} - {*ask.streams}:
        raise ConfigError(f"application {alone}", "only one of its two sets is named", "add its --streams")
    sets = {ADAPTER: ask.adapter, STREAMS: ask.streams}
    tasks = [task for task in ask.streams if ask.data or not ask.quick or task not in NOT_SHIPPED] or [*ask.streams]
    grids = {task: application_grid(task, {s: sets[s][task] for s in sets if task in sets[s]}) for task in tasks}
    for grid in grids.values():
        grid.config(ask)
    yield None
    limits: dict[str, Any] = {"limit": ask.scored, "seed": ask.seed}
    rows, values, reports = [], [], []
    for task, grid in grids.items():
        # Drafts change no answer, so each set is asked once.
        llm = LLM(ask.model, drafter="streams", applications=dict(grid.applications), **ask.llm)
        scores = {a: evaluate(llm, [task], ask.data, application=a, **limits)[0].scores for a in grid.applications}
        trained = {a: StreamSet.load(resolve_folder(folder)) for a, folder in grid.applications.items()}
        counts = {a: sum(found.parameters_by_part().values()) for a, found in trained.items()}
        extra = counts[STREAMS] - counts[ADAPTER] if ADAPTER in counts else None
        reports.append(measure(grid, ask, ask.out / "table_3" / task))
        for line in lines_of(grid, reports[-1]):
            more = {"scores": scores[line.series], "extra_parameters": extra if line.series == STREAMS else 0}
            values.append({**asdict(line), "task": task, **more})
            speedup = "1" if line.method == grid.over else line.bracketed
            row = [task, line.method, speedup, say.number(line.tokens_per_s), say.length(line.call_reduction)]
            scored = ", ".join(f"{name} {100 * value:.1f}" for name, value in means(scores[line.series]).items())
            count = f"{extra:,}" if extra and line.series == STREAMS else say.NOTHING
            rows.append([*row, scored, count, line.exact])
    speed = ("speed-up", "tokens/s", "mean accepted tokens")
    yield Table(
        title="Shared streams beside plain adapters",
        head=("application", "method", *speed, "score", "extra parameters", "ids exact"),
        parts={"": rows},
        values={"scored": ask.scored, "lines": values},
        remarks=[f"{task} is left out: its prompts need --data" for task in ask.streams if task not in tasks],
        how=how(reports[0], [f"scores are of {ask.scored} prompts of each task at most, greedy"]),
        same=all(found.passed for report in reports for found in report.exactness),
    )


# -- parameters (table 3, appendix N.1)

PUBLISHED = (  # name, d_model, vocabulary, parameters of streams and of Medusa heads, for gamma = 4 and r = 8 (N.1)
    ("Mistral-Instruct-7B", 4096, 32000, 8.2e4, 5.9e8),
    ("Phi-3-Instruct-3.8B", 3072, 32064, 6.1e4, 4.3e8),
    ("Llama2-7B", 4096, 32000, 8.2e4, 5.9e8),
)


def overhead(target: str, gamma: int, rank: int, d: int, vocab: int, heads: int, **known: Any) -> dict[str, Any]:
    """What is added to a target, by the formulas, and what is known of it otherwise.

    Streams: gamma d + 2 r d for embeddings and the early exit of rank r (section 2); adapters are counted apart. A
    Medusa head (Cai et al. 2024, section 2.1): a residual block d d + d and an unembedding d V.
    """
    formula, medusa = gamma * d + 2 * rank * d, heads * (d * d + d + d * vocab)
    given = {"counted": None, "published": None, "start": None, "adapters": None, "medusa_published": None, **known}
    both = ((formula, given["published"]), (medusa, given["medusa_published"]))
    agrees = all(said is None or f"{ours:.1e}" == f"{said:.1e}" for ours, said in both)
    agrees = agrees and given["counted"] in (None, formula)
    return {"target": target, "formula": formula, **given, "medusa": medusa, "agrees": agrees}


def overhead_of_set(trained: StreamSet, target: str) -> dict[str, Any]:
    """A trained set's own parameters."""
    config, parts = trained.config, trained.parameters_by_part()
    embedded = config.gamma if config.value_rotation is None else 0  # rotated values need no embeddings
    known = {"counted": parts["embeddings"] + parts["prune"], "start": parts["start"], "adapters": parts["adapters"]}
    shape = (config.prune_rank, config.d_model, config.vocab_size)
    return overhead(target, embedded, *shape, config.gamma, **known)


@study.table(needs=("set",))
def table_3_parameters(ask: Asked) -> Iterator[Table | None]:
    """Parameters that a set adds, by formula and by count, beside Medusa heads for the same target."""
    trained = StreamSet.load(resolve_folder(str(ask.set)))
    found = [overhead_of_set(trained, trained.config.target or str(ask.set))]
    for name, d, vocab, streams, medusa in PUBLISHED:
        found.append(overhead(name, 4, 8, d, vocab, 4, published=streams, medusa_published=medusa))
    same = all(one["agrees"] for one in found)
    heads = {"start": "start map", "medusa": "Medusa heads", "medusa_published": "Medusa, published"}
    names = ("formula", "counted", "published", "start", "adapters", "medusa", "medusa_published")
    yield None
    yield Table(
        title="Parameters beside the target's",
        head=("target", *(heads.get(name, name) for name in names)),
        parts={"": [[one["target"], *(_count(one[name]) for name in names)] for one in found]},
        values={"overhead": found},
        remarks=[] if same else ["the counts are not those of the formulas"],
        same=same,
    )


def _count(value: float | None) -> str:
    shown = f"{value:,}" if isinstance(value, int) else f"{value or 0:.1E}".replace("E+0", "E")
    return say.NOTHING if value is None else shown


# -- how near stream states come to the true later states (figure 5)


def states(ask: Asked, trained: TrainedSet) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Mean cosine similarities with main row t + j, of stream j of row t and of main row t itself.

    The target answers prompts greedily; over prompts and answers, teacher-forced, states are compared in float32.

    Returns:
        [1 + Ns, gamma] of streams, the same of main rows (before the first of the streams' layers, then after each),
        and how many prompts, and rows with streams, are behind them.
    """
    apps: dict[str, Any] = {"drafter": "streams", "budget": 0, "applications": {trained.application: trained.folder}}
    llm = LLM(ask.model, **(apps if trained.application else {}), **ask.llm)
    prompts: list[list[int]] = []
    for task in ask.names:
        workload = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
        prompts += encoded_prompts(llm, workload, ask.max_new_tokens)[0]
    params = SamplingParams(temperature=0, max_tokens=ask.max_new_tokens)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    answers = [output.outputs[0].token_ids for output in llm.generate(given, params, application=trained.application)]
    examples = [
        Example(np.array([*ids, *said], dtype=np.int32), len(ids)) for ids, said in zip(prompts, answers, strict=True)
    ]
    batch = collate([[example] for example in examples], max(len(e.tokens) for e in examples))
    network = Network.load(llm.folder, frozen=True)
    streams, main = similarity(network, StreamSet.load(resolve_folder(trained.folder)), batch)
    return streams, main, {"prompts": len(prompts), "rows": sum(map(len, answers))}


@study.figure(needs=("set",), tasks="sql,e2e,gsm8k", prompts=12, max_new_tokens=64)
def figure_5(ask: Asked) -> Iterator[Table | None]:
    """Cosine similarity of stream states to the true later states, layer by layer."""
    trained = TrainedSet.read(str(ask.set))
    facts: dict[str, Any] = {"model": ask.model, "set": ask.set, "tasks": ask.names}
    yield None
    streams, main, counts = states(ask, trained)
    gamma, layers = trained.config.gamma, [*range(trained.config.insertion, trained.config.num_layers + 1)]
    lines = {f"stream {j + 1}": streams[:, j].tolist() for j in range(gamma)}
    lines |= {f"main state, {j + 1} before": main[:, j].tolist() for j in range(gamma)}
    series = [
        Series(label=label, x=layers, y=y, colour=i % gamma % len(COLOURS), dashed=i >= gamma)
        for i, (label, y) in enumerate(lines.items())
    ]
    ordered = [series[i] for j in range(gamma) for i in (j, gamma + j)]
    title = "Stream states and the true later states"
    axes = Panel(title=title, series=ordered, x_label="layers passed", y_label="cosine similarity", columns=gamma)
    facts |= {"max_new_tokens": ask.max_new_tokens, "seed": ask.seed, **counts}
    rows = zip(layers, *lines.values(), strict=True)
    yield Table(
        title="Cosine similarity of stream states to the true later states",
        head=("layers passed", *lines),
        parts={"": [[str(n), *(f"{value:.3f}" for value in row)] for n, *row in rows]},
        values={**facts, "layers": layers, "streams": streams.tolist(), "main": main.tolist()},
        how=[[f"{name}: {value}" for name, value in facts.items()]],
        plots={".svg": lambda path: figures.lines([axes], path, width=1.7)},
    )


# -- attention over few keys (appendix H.1)

CONTEXTS = (256, 1024, 1900)
STEPS = 40  # of each kind
QUICK_STEPS = 2
FEW = 64  # keys that a stream attends to (appendix H.1)
DRAFTS = (8, 32)  # nodes


@study.table(needs=("set",), repeats=STEPS, quick={"repeats": QUICK_STEPS})
def appendix_h1(ask: Asked) -> Iterator[Table | None]:
    """Time of a fused step, streams on every node, that attend to all keys or to those with the highest weights."""
    trained = TrainedSet.read(str(ask.set))
    if trained.application:
        raise CapabilityError(f"set {ask.set}", "main rows of a shared set see streams", "name a lossless set")
    method = f"streams:{trained.folder},at=nodes,k={max(DRAFTS)},nodes={max(DRAFTS)}"
    llm = LLM(
        ask.model, **ask.llm | {"drafter": method, "max_sequences": 1, "budget": max(DRAFTS), "kernels": "native"}
    )
    yield None
    streams = StreamSet.load(resolve_folder(trained.folder), dtype=llm.decoder.dtype)
    fit = [n for n in CONTEXTS if n + max(DRAFTS) < llm.decoder.config.max_position]
    found = [few_keys_cost(llm, streams, n, d, ask.repeats) for n in fit for d in DRAFTS]
    shown = ("all_ms", "few_ms", "saved_ms", "ratio")
    yield Table(
        title=f"A fused step whose streams attend to {FEW} keys of their main row, or to all",
        head=("context", "nodes", "stream rows", "all keys, ms", f"{FEW} keys, ms", "saved, ms", "ratio"),
        parts={
            "": [[*(str(c[n]) for n in ("context", "nodes", "rows")), *(f"{c[n]:.2f}" for n in shown)] for c in found]
        },
        values={"machine": machine.describe(ask.device).as_dict(), "costs": found},
        how=[
            [
                trained.line,
                f"the fastest of {ask.repeats} steps of each kind in turns",
                machine.describe(ask.device).line(),
            ]
        ],
    )


def few_keys_cost(llm: LLM, streams: StreamSet, context: int, drafted: int, repeats: int) -> dict[str, Any]:
    """Lowest ms of the compiled call with and without the limit, in turns; K and V are random numbers.

    Args:
        context: keys before the root.
        drafted: nodes of the draft, a tree of two children a node.
    """
    pool, rows = llm.engine.pool, streams.config.gamma * (drafted + 1)
    for part in (*pool.k, *pool.v):
        part.normal_()
    cache = pool.open()
    cache.reserve(context + drafted + 1)
    carriers = [CarrierRows(0, 0, streams.config.gamma, drafted, (), range(drafted + 1))]
    ways = {most: Riding(streams, carriers, 3, pool.scratch(rows), most=most) for most in (None, FEW)}
    times: dict[int | None, list[float]] = {most: [] for most in ways}
    for _ in range(repeats):
        for most, riding in ways.items():
            began = perf_counter()
            fused_pass(llm, cache, context, drafted, riding)
            times[most].append(1e3 * (perf_counter() - began))
    cache.release()
    every, few = min(times[None]), min(times[FEW])
    saved = {"all_ms": every, "few_ms": few, "saved_ms": every - few, "ratio": few / every}
    return {"context": context, "nodes": drafted, "rows": rows, **saved}


def fused_pass(llm: LLM, cache: SequenceCache, context: int, drafted: int, riding: Riding) -> None:
    """One compiled call that verifies a tree behind ``context`` keys and reads its streams."""
    rows, stack = drafted + 1, llm.decoder.stack
    assert stack is not None
    parents, depths = [(n - 1) // 2 for n in range(1, rows)], [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    slots, span = (cache.slots(first, context + rows) for first in (context, 0))
    listed = slots if isinstance(slots, slice) else slots.tolist()
    spans, every = [RowSpan(0, rows, context, span, parents)], range(rows)
    places = [context + depth for depth in depths]
    asked = Pass([8 + n for n in every], places, listed, spans, every)
    stack.decide_streams(asked, riding, llm.engine.pool)


# -- segment attention (appendix I)

SEGMENT = {"gamma": 4, "layers": 4, "rank": 8, "rows": 4, "length": 512, "prompt": 128, "steps": 3, "limit": 0}
QUICK_SEGMENT = {"rows": "1", "length": "128", "prompt": "32", "steps": "1", "segments": "naive+all+32"}


def segment_task(given: Mapping[str, str]) -> dict[str, Any]:
    """What is trained on: ``rows`` of ``length`` tokens, of which ``prompt`` carry no streams, in ``steps`` timed ones,
    after one of a single row that is not; ``limit``: keys that a stream attends to, 0 for all; ``segments``: carriers
    of each, all at once, or naive: one dense attention.

    Raises:
        ConfigError: an unknown setting, or a value that leaves nothing to measure.
    """
    words = {"mode": "lossless", "segments": "naive+all+512+128", **given}
    ways = words.pop("segments").split("+")
    task: dict[str, Any] = {"mode": words.pop("mode"), **SEGMENT, "segments": ways}
    for name, text in (*words.items(), *(("segments", way) for way in ways if way not in ("naive", "all"))):
        if name not in task or not text.isdecimal() or (not int(text) and name != "prompt"):
            remedy = f"give 1 or more of {', '.join(task)}"
            raise ConfigError(f"--segment {name}={text}", "nothing would be measured", remedy)
        task |= {name: int(text)} if name in SEGMENT else {}
    if task["prompt"] >= task["length"] - 1:
        raise ConfigError(f"prompt={task['prompt']}", "no token is left to draft for", "give a shorter one")
    return task


@study.table(takes=("segment",), model="random:12x384x1024x8192", quick={"segment": QUICK_SEGMENT})
def appendix_i(ask: Asked) -> Iterator[Table | None]:
    """Memory and speed of a training step: one dense attention, all carriers at once, segment by segment."""
    task = segment_task(ask.segment)
    yield None
    with materialised(ask.model) as folder:
        how_run = (str(resolve_folder(folder)), task, ask.device, ask.threads)
        # Each in a process of its own: resident memory never falls within one, so a later way would hide behind an
        # earlier one's peak.
        found = [apart(segment_cost, way, *how_run) for way in task["segments"]]
    facts = machine.describe(ask.device).as_dict() | ({"threads": ask.threads} if ask.threads else {})
    shown = ("peak_mib", "step_s", "low_s", "high_s", "tokens_per_s")
    yield Table(
        title=f"A training step of {task['rows']} rows of {task['length']} tokens, {ask.model}, {task['mode']}",
        head=("segment", "peak MiB", "step s", "lowest", "highest", "tokens/s"),
        parts={"": [[cost["way"], *(say.number(cost[name]) for name in shown)] for cost in found]},
        values={"machine": facts, "task": task, "costs": found},
        how=[[f"{task['gamma']} streams over {task['layers']} layers", machine.describe(ask.device).line()]],
    )


def segment_cost(way: str, folder: str, task: Mapping[str, Any], device: str, threads: int | None) -> dict[str, Any]:
    """Measure one way in this process, which should be a fresh one.

    Returns:
        Peak memory over that before the steps in MiB (None where the system does not tell), so the network, the set
        and torch itself are not in it; median, lowest and highest seconds a step; tokens of the batch a second; and
        the loss of the untrained set: the same for every way, up to rounding.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    network = Network.load(Path(folder), device, frozen=True)
    shape = {name: task[name] for name in ("mode", "gamma", "layers", "rank")}
    segment, few = int(way) if way.isdecimal() else None, task["limit"] or None
    options = StreamOptions(**shape, attention_limit=few, segment=segment)
    shapes = linear_shapes(network.config)
    trained = StreamSet.fresh(options.config(network), shapes, torch.Generator().manual_seed(0))
    recipe = StreamRecipe(network, trained.to(device), options)
    tokens = np.random.default_rng(0).integers(0, network.config.vocab_size, (task["rows"], task["length"]))
    rows = [[Example(row, task["prompt"])] for row in tokens.astype(np.int32)]  # of one document each
    batch, memory = collate(rows, task["length"]).to(torch.device(device)), Memory(torch.device(device))
    _step(recipe, batch.rows(0, 1), way)  # libraries allocate what they keep
    can_peak, before = memory.reset_peak(), memory.held()
    times, losses = [], []
    for _ in range(task["steps"]):
        began = perf_counter()
        losses.append(_step(recipe, batch, way))
        times.append(perf_counter() - began)
    peak, middle = memory.peak() if can_peak else None, median(times)
    mib = None if peak is None or before is None else (peak - before) / 2**20
    speed = {"step_s": middle, "low_s": min(times), "high_s": max(times), "tokens_per_s": batch.num_tokens / middle}
    return {"way": way, "peak_mib": mib, **speed, "loss": losses[0]}


def _step(recipe: StreamRecipe, batch: TokenBatch, way: str) -> float:
    """Forward and backward, in bf16 as training does. The naive way keeps the scores of all rows by all rows."""
    recipe.module.zero_grad(set_to_none=True)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        if way == "naive":
            with sdpa_kernel(SDPBackend.MATH):
                loss = recipe.eager_loss(batch)
        else:
            loss = recipe.loss(batch, StepContext(0, torch.Generator().manual_seed(0)))[0]
    loss.backward()
    return float(loss.detach())  # waits for a GPU


if __name__ == "__main__":
    study.main()
