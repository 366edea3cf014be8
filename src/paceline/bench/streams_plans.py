"""What is run to measure Speculative Streaming: the component ablation, and sweeps over one setting each.

A plan is a set of methods and cells for `bench.run`, with the place of every method in a table or a plot. All methods
of a plan answer the same prompts in one interleaved run, beside plain decoding.

Source: Speculative Streaming, figures 10 to 13 and 18, table 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..drafters.streams import StreamsConfig
from ..target.loader import resolve_folder
from ..target.streams import StreamConfig, read_config
from .methods import with_plain
from .quality import TASK_WORKLOADS
from .records import Method
from .run import BenchConfig

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

Metric = str  # a field of `streams_report.Line`
DEFAULT_METRICS: tuple[Metric, ...] = ("call_reduction", "speedup")


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
    def places(self) -> tuple[str, ...]:
        """Where its streams can ride: main rows of a shared set need theirs on every node."""
        return ("nodes",) if self.application else ("nodes", "frontier")

    def method(self, name: str, **options: Any) -> Method:
        """The drafter with these options and a draft budget that lets its whole tree through.

        Args:
            options: of `StreamsConfig`; ``budget`` and ``dtype`` are the method's.
        """
        dtype, budget = options.pop("dtype", "auto"), options.pop("budget", None)
        options = {k: v for k, v in options.items() if v is not None}
        size = StreamsConfig(path=self.folder, **options).num_nodes(options.get("gamma") or self.config.gamma)
        head = "streams" if self.application else f"streams:{self.folder}"
        written = ",".join([head, *(f"{k}={_written(v)}" for k, v in options.items())])
        settings = {"budget": size if budget is None else budget}
        return Method(name=name, drafter=written, settings=settings, dtype=dtype, application=self.application)

    def tree(self, k: int, gamma: int | None = None, most: int = FULL_TREE) -> dict[str, int]:
        """``k`` and the most streams with which a full tree has at most ``most`` nodes."""
        wanted = self.config.gamma if gamma is None else gamma
        fits = [g for g in range(1, wanted + 1) if sum(k**i for i in range(1, g + 1)) <= most]
        return {"k": k, "gamma": max(fits, default=1)}


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method and its place in the plot."""

    method: Method
    series: str
    x: float | str | None = None  # None: the cell's own value of `Plan.cell`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, and how it is shown."""

    name: str
    title: str
    entries: tuple[Entry, ...]
    sets: tuple[TrainedSet, ...]
    x_label: str = ""
    cell: str = ""  # the field of a cell that is swept
    cells: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # changes of `BenchConfig`
    metrics: tuple[Metric, ...] = DEFAULT_METRICS
    log_x: bool = False
    prompts: int = 0  # at least so many are needed

    def bench_config(self, values: Mapping[str, Any]) -> BenchConfig:
        """The run of this plan.

        Args:
            values: fields of `BenchConfig` that are the user's: model, workloads, prompts, ..
        """
        applications = {s.application: s.folder for s in self.sets if s.application}
        methods = with_plain([entry.method for entry in self.entries], applications)
        asked = {"title": self.title, **values, **self.cells}
        asked["prompts"] = max(int(values.get("prompts", 0)), self.prompts)
        return BenchConfig(methods=tuple(methods), applications=applications, **asked)


def workload_of(task: str) -> str:
    """The workload of a task: a name of `quality.TASK_WORKLOADS`, or a workload's own."""
    return TASK_WORKLOADS.get(task, task)


# -- the ablation (fig. 13)


def ablation(trained: TrainedSet, k: int = 3, nodes: int | None = None) -> Plan:
    """Chain, whole tree, tree pruned in mid-pass, tree cut by its own scores; each wherever streams can ride.

    Args:
        k: children of a node.
        nodes: most of a tree, the best by the streams' own scores; None: the full tree of as many streams as fit.
    """
    tree: dict[str, Any] = dict(trained.tree(k)) if nodes is None else {"k": k, "nodes": nodes}
    gamma = tree.get("gamma", trained.config.gamma)
    shapes: list[tuple[str, str, dict[str, Any]]] = [("chain", "chain", {"chain": True}), ("tree", "tree", tree)]
    shapes += [("pruned", f"threshold {_written(t)}", {**tree, "prune_threshold": t}) for t in THRESHOLDS]
    size = StreamsConfig(**tree).num_nodes(gamma)
    counts = [count for count in COUNTS if count < size]
    shapes += [("pruned", f"count {count}", {**tree, "prune_count": count}) for count in counts]
    shapes += [("cut", f"best {count}", {"k": k, "nodes": count}) for count in COUNTS if count < size]
    if not trained.config.prune_rank:
        shapes = [shape for shape in shapes if shape[0] != "pruned"]
    entries = [
        Entry(method=trained.method(label + (FRONTIER if at == "frontier" else ""), at=at, **options), series=family)
        for at in trained.places
        for family, label, options in shapes
    ]
    usual = trained.method("auto budget", budget="auto", at=trained.places[-1], k=k, nodes=USUAL)
    return Plan(
        name="ablation",
        title=f"Speculative streams: what each component is worth ({trained.config.mode} set, tree of k={k}, "
        f"gamma={gamma}{'' if nodes is None else f', {size} nodes'}, of {trained.config.gamma} trained)",
        entries=(*entries, Entry(method=usual, series="auto")),
        sets=(trained,),
    )


# -- sweeps


def _usual(trained: TrainedSet, name: str, **options: Any) -> Method:
    return trained.method(name, **{"at": trained.places[-1], **options})


def by_gamma(trained: TrainedSet) -> Plan:
    """Streams that draft, from one to all that were trained."""
    entries = []
    for gamma in range(1, trained.config.gamma + 1):
        chain = _usual(trained, f"chain, gamma {gamma}", chain=True, gamma=gamma)
        cut = _usual(trained, f"best {CUT}, gamma {gamma}", k=3, nodes=CUT, gamma=gamma)
        entries += [
            Entry(method=chain, series="chain", x=gamma),
            Entry(method=cut, series=f"best {CUT} nodes", x=gamma),
        ]
    return _plan(trained, "gamma", "Streams that draft", "streams (gamma)", entries)


def by_k(trained: TrainedSet) -> Plan:
    """Children a node: the whole tree, the tree pruned in mid-pass, and the tree cut by its own scores (fig. 10)."""
    gamma = min(3, trained.config.gamma)
    entries = []
    for k in range(1, 7):
        shapes: list[tuple[str, dict[str, Any]]] = [
            ("whole tree", {"at": "nodes"}),
            (f"pruned below {PRUNED_AT:g}", {"at": "nodes", "prune_threshold": PRUNED_AT}),
            (f"best {CUT} nodes", {"at": trained.places[-1], "nodes": CUT}),
        ]
        for series, options in shapes:
            if "prune_threshold" in options and not trained.config.prune_rank:
                continue
            method = trained.method(f"{series}, k {k}", k=k, gamma=gamma, **options)
            entries.append(Entry(method=method, series=series, x=k))
    return _plan(trained, "k", f"Children a node, gamma={gamma}", "tokens taken from each stream (k)", entries)


def by_threshold(trained: TrainedSet) -> Plan:
    """The threshold of the pruning in mid-pass."""
    _require_pruning(trained)
    tree = trained.tree(3)
    entries = [
        Entry(
            method=trained.method(f"threshold {t:g} ({at})", at=at, prune_threshold=t, **tree),
            series=f"streams on {at}" if len(trained.places) > 1 else "pruned",
            x=t,
        )
        for at in trained.places
        for t in SWEPT_THRESHOLDS
    ]
    plan = _plan(trained, "threshold", f"Pruning threshold, tree of k=3, gamma={tree['gamma']}", "threshold", entries)
    return replace(plan, log_x=True, metrics=("call_reduction", "speedup", "upper_row_layers"))


def by_top_k(trained: TrainedSet) -> Plan:
    """Sampling at temperature 1 from the likeliest tokens (fig. 12b)."""
    entries = [
        Entry(method=_usual(trained, "chain", chain=True), series="chain"),
        Entry(method=_usual(trained, f"best {CUT}", k=3, nodes=CUT), series=f"best {CUT} nodes"),
    ]
    plan = _plan(trained, "temperature", "Sampling at temperature 1", "likeliest tokens sampled from (top-k)", entries)
    return replace(plan, cell="top_k", cells={"temperatures": (1.0,), "top_ks": SWEPT_TOP_KS})


def by_batch(trained: TrainedSet) -> Plan:
    """Requests at once: the best path alone, a tree at any size, and the budget that the engine chooses (fig. 18)."""
    entries = [
        Entry(method=_usual(trained, "best path", chain=True), series="best path"),
        Entry(method=_usual(trained, "tree", k=3, nodes=CUT, best_path_batch=10**6), series=f"best {CUT} nodes"),
        Entry(method=_usual(trained, "auto", k=3, nodes=USUAL, budget="auto"), series="auto budget"),
    ]
    plan = _plan(trained, "batch", "Requests at once", "batch size", entries)
    swept = {"batches": SWEPT_BATCHES}
    return replace(plan, cell="batch", cells=swept, prompts=max(SWEPT_BATCHES), log_x=True)


def by_dtype(trained: TrainedSet) -> Plan:
    """The target as it is stored and in int8, each over its own plain decoding (table 4)."""
    entries = []
    for dtype, shown in (("auto", "as stored"), ("int8", "int8")):
        for series, options in (("chain", {"chain": True}), (f"best {CUT} nodes", {"k": 3, "nodes": CUT})):
            method = _usual(trained, f"{series}, {shown}", dtype=dtype, **options)
            entries.append(Entry(method=method, series=series, x=shown))
    plan = _plan(trained, "int8", "Target in int8", "weights of the target", entries)
    return replace(plan, metrics=("call_reduction", "speedup", "tokens_per_s"))


def by_layers(sets: Sequence[TrainedSet]) -> Plan:
    """Layers that streams go through: a set trained for each (fig. 11)."""
    entries = []
    for trained in sets:
        layers = trained.config.msa_layers
        chain = _usual(trained, f"chain, {layers} layers", chain=True)
        cut = _usual(trained, f"best {CUT}, {layers} layers", k=3, nodes=CUT)
        entries += [
            Entry(method=chain, series="chain", x=layers),
            Entry(method=cut, series=f"best {CUT} nodes", x=layers),
        ]
    plan = _plan(sets[0], "layers", "Layers that streams go through", "MSA layers (Ns)", entries)
    return replace(plan, sets=tuple(sets))


def by_pruning_layer(sets: Sequence[TrainedSet]) -> Plan:
    """The layer before which trees are pruned, which is the one before which streams begin: a set trained for each."""
    entries = []
    for trained in sets:
        _require_pruning(trained)
        tree, layer = trained.tree(3), trained.config.insertion
        whole = trained.method(f"whole tree, layer {layer}", at="nodes", **tree)
        pruned = trained.method(f"pruned, layer {layer}", at="nodes", prune_threshold=PRUNED_AT, **tree)
        entries += [
            Entry(method=whole, series="whole tree", x=layer),
            Entry(method=pruned, series=f"pruned below {PRUNED_AT:g}", x=layer),
        ]
    plan = _plan(sets[0], "pruning-layer", "Layer before which trees are pruned", "pruning layer (N - Ns)", entries)
    return replace(plan, sets=tuple(sets), metrics=("call_reduction", "speedup", "upper_row_layers"))


def _plan(trained: TrainedSet, name: str, title: str, x_label: str, entries: Sequence[Entry]) -> Plan:
    return Plan(
        name=name, title=f"Speculative streams: {title}", x_label=x_label, entries=tuple(entries), sets=(trained,)
    )


def _require_pruning(trained: TrainedSet) -> None:
    if not trained.config.prune_rank:
        raise ConfigError(
            f"set {trained.folder}", "it has no early exit, so it cannot prune", "train it with prune_rank=8"
        )


SWEEPS: dict[str, Callable[[TrainedSet], Plan]] = {
    "gamma": by_gamma,
    "k": by_k,
    "threshold": by_threshold,
    "temperature": by_top_k,
    "batch": by_batch,
    "int8": by_dtype,
}
SET_SWEEPS: dict[str, Callable[[Sequence[TrainedSet]], Plan]] = {
    "layers": by_layers,
    "pruning-layer": by_pruning_layer,
}


def sweep_plan(name: str, trained: TrainedSet | None, sets: Sequence[TrainedSet]) -> Plan:
    """The plan of a sweep.

    Args:
        name: of `SWEEPS` or `SET_SWEEPS`.
        trained: the set of those of `SWEEPS`.
        sets: one a value, of those of `SET_SWEEPS`.

    Raises:
        ConfigError: no such sweep, or not the sets that it is over.
    """
    if name in SWEEPS:
        if trained is None:
            raise ConfigError(f"--sweep {name}", "no trained set is named", "add --set FOLDER")
        return SWEEPS[name](trained)
    if name in SET_SWEEPS:
        if len(sets) < 2:
            raise ConfigError(
                f"--sweep {name}", f"{len(sets)} sets make no sweep", "add --sets LAYERS=FOLDER for two or more"
            )
        return SET_SWEEPS[name](sets)
    raise ConfigError(f"--sweep {name}", "there is no such sweep", f"name one of {', '.join((*SWEEPS, *SET_SWEEPS))}")


def read_sets(folders: Mapping[str, str]) -> list[TrainedSet]:
    """Trained sets by the number of layers that their streams go through, fewest first.

    Raises:
        ConfigError: a name that is not that number, or a mixture of modes.
    """
    found = [TrainedSet.read(folder, f"set{name}") for name, folder in folders.items()]
    for name, trained in zip(folders, found, strict=True):
        if name != str(trained.config.msa_layers):
            raise ConfigError(
                f"--sets {name}={trained.folder}",
                f"its streams go through {trained.config.msa_layers} layers",
                f"write {trained.config.msa_layers}={trained.folder}",
            )
    if len({trained.config.mode for trained in found}) > 1:
        raise ConfigError("--sets", "some are lossless and some are shared", "compare sets of one mode")
    return sorted(found, key=lambda trained: trained.config.msa_layers)
