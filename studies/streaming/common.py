"""What all parts share: the study, its options, trained sets and their methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit.grid import show
from kit.study import Entry, Grid, Options, Study, asked

from paceline.bench.records import Method
from paceline.core.errors import CapabilityError, ConfigError
from paceline.papers.streaming.drafter import StreamsConfig
from paceline.papers.streaming.model import StreamConfig, read_config
from paceline.weights import zoo
from paceline.weights.source import resolve_folder

Value = TypeVar("Value")
FULL_TREE = 128  # most drafted nodes of a tree that is verified whole
USUAL = 32  # most nodes, where the engine chooses the budget
CUT = 16  # nodes of the tree that stands for a usual setting
PRUNED_AT = 0.01  # the threshold that stands for a usual setting
SHIPPED = {"sql": "paceline-small-sql", "e2e": "paceline-small-e2e"}
ONCE = {"prompts": 2, "repeats": 1, "scored": 8}  # how often things are done where it is to be quick
PRUNING = ("call_reduction", "speedup", "upper_row_layers")  # metrics that tell what pruning does
CHOOSE = "speedup"  # by which half of the prompts chooses a setting; the other half reports


@dataclass(frozen=True, kw_only=True)
class StreamingFlags(Options):
    """What this study can be asked beside what all can."""

    set: str | None = asked(None, "Trained set of streams.", "FOLDER")
    sets: dict[str, str] = asked({}, "Sets with streams through so many layers.", "LAYERS=FOLDER")
    streams: dict[str, str] = asked({}, "Shared set with streams for a task (sql, e2e, ..).", "TASK=FOLDER")
    adapter: dict[str, str] = asked({}, "Adapter without streams for the same task.", "TASK=FOLDER")
    draft: str | None = asked(None, "Draft model beside streams. Default: the zoo's for the target.", "MODEL")
    tasks: str = asked("sql,e2e", "sql, e2e, gsm8k, dialogsum, or any workload's name.", "NAME,..")
    k: int = asked(3, "Children of a node, of figure_13's tree.", "N")
    nodes: int | None = asked(None, "Most nodes of figure_13's tree, best first; the full tree if not given.", "N")
    batches: str = asked("1,2,4,8,16", "Requests at once, of figure_18.", "N,..")
    scored: int = asked(200, "Prompts of each task whose answers are scored; 0 of table_5: none.", "N")
    segment: dict[str, str] = asked({}, "Of appendix_i: rows=4, length=512, segments=naive+all+128, ..", "KEY=VALUE")

    def few(self, values: Sequence[Value]) -> Sequence[Value]:
        """What is swept; the first two where it is to be quick."""
        return values[:2] if self.quick else values

    @property
    def draft_model(self) -> str:
        """``draft``, or the zoo's.

        Raises:
            CapabilityError: none is given, and the zoo has none for the target.
        """
        found = self.draft or zoo.weights("draft_model", self.model)
        if found is None:
            raise CapabilityError(f"a draft model for {self.model}", "the zoo has none", "add --draft MODEL")
        return found


study = Study(
    "Speculative Streaming: the paper's tables and figures, measured on this machine.",
    StreamingFlags,
    quick={"set": "paceline-small-streams", "streams": SHIPPED, "tasks": "sql", "max_new_tokens": 12, **ONCE},
)


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
            options: of `StreamsConfig`; streams usually ride at the frontier, if they can. ``budget``, ``dtype`` and
                ``verifier`` are the method's.
        """
        options = {"at": self.places[-1], **options}
        dtype, budget = options.pop("dtype", "auto"), options.pop("budget", None)
        verifier = {"verifier": options.pop("verifier")} if "verifier" in options else {}
        size = StreamsConfig(path=self.folder, **options).num_nodes(options.get("gamma") or self.config.gamma)
        return Method(
            name=name,
            drafter=written("streams" if self.application else f"streams:{self.folder}", options),
            settings={"budget": size if budget is None else budget, **verifier},
            dtype=dtype,
            application=self.application,
        )

    def chain_and_cut(self, where: str = "", x: float | str | None = None, **options: Any) -> list[Entry]:
        """A chain, and a tree of the best `CUT` nodes."""
        return [
            Entry(self.method(f"chain{where}", k=1, **options), "chain", x),
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
        values={"sets": [{"folder": s.folder, **asdict(s.config)} for s in sets]},
        **more,
    )
