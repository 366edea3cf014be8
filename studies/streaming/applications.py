"""Shared mode beside plain fine-tuning (table 3), and the parameters that a set adds (table 3, appendix N.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.grid import how, split_lines
from kit.scores import TASK_WORKLOADS, evaluate, known_tasks, means
from kit.study import Entry, Grid, Table, measure

from paceline.api.llm import LLM
from paceline.bench import report as say
from paceline.bench.records import PLAIN, Method
from paceline.core.errors import ConfigError
from paceline.papers.streaming.drafter import StreamsConfig
from paceline.papers.streaming.model import StreamSet, read_config
from paceline.weights.source import resolve_folder
from streaming.common import CHOOSE, CUT, StreamingFlags, study, written

BASE, ADAPTER, STREAMS = "base model", "adapter", "streams"  # who answers: the target, or a set of an application
NOT_SHIPPED = ("e2e", "dialogsum")  # tasks whose prompts need --data
TWO_MODEL_DEPTH = 4  # tokens that the draft model drafts, as many as there are streams


def application_grid(task: str, folders: Mapping[str, str], draft: str) -> Grid:
    """The adapter without drafts, with look-ups and a draft model; the streams without drafts, as a chain, as trees,
    and left alone.

    Args:
        task: after which the application is named.
        folders: of `STREAMS`, and of `ADAPTER` where speed-ups are to be over it.
        draft: the draft model.

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
        Method(
            name=f"{ADAPTER}, draft model",
            drafter=written(f"draft_model:{draft}", {"depth": TWO_MODEL_DEPTH}),
            settings={"budget": TWO_MODEL_DEPTH},
            application=ADAPTER,
        ),
        drafts(PLAIN, 0),
        drafts("chain", k=1),
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
        choose=CHOOSE,
    )


@study.table(needs=("streams",), takes=("adapter", "scored", "draft"), prompts=10, repeats=3)
def table_3(ask: StreamingFlags) -> Iterator[Table | None]:
    """Shared streams beside plain fine-tuning with the same adapters, and the base: speed, score, parameters."""
    for alone in {*ask.adapter} - {*ask.streams}:
        raise ConfigError(f"application {alone}", "only one of its two sets is named", "add its --streams")
    sets = {ADAPTER: ask.adapter, STREAMS: ask.streams}
    tasks = [task for task in ask.streams if ask.data or not ask.quick or task not in NOT_SHIPPED] or [*ask.streams]
    draft = ask.draft_model if ask.adapter else ""  # it drafts for adapters alone
    grids = {task: application_grid(task, {s: sets[s][task] for s in sets if task in sets[s]}, draft) for task in tasks}
    for grid in grids.values():
        grid.config(ask)
    yield None
    rows, reports, said = [], [], []
    values: list[dict[str, Any]] = []
    chosen_on: list[dict[str, Any]] = []
    for task, grid in grids.items():
        scores = scores_of(ask, task, grid.applications)
        trained = {a: StreamSet.load(resolve_folder(folder)) for a, folder in grid.applications.items()}
        counts = {a: sum(found.parameters_by_part().values()) for a, found in trained.items()}
        extra = counts[STREAMS] - counts[ADAPTER] if ADAPTER in counts else None
        reports.append(measure(grid, ask, ask.out / "table_3" / task))
        lines, choosing, split = split_lines(grid, reports[-1])
        said += split
        rows.append([task, f"{BASE}, plain", *[say.NOTHING] * 4, scored(scores[BASE]), *[say.NOTHING] * 3])
        values.append({"task": task, "method": BASE, "scores": scores[BASE]})
        for line in lines:
            own = scores[line.series]
            more: dict[str, Any] = {"scores": own, "parameters": counts[line.series]}
            more["extra_parameters"] = extra if line.series == STREAMS else 0
            values.append({**asdict(line), "task": task, **more})
            speedup = "1" if line.method == grid.over else line.bracketed
            row = [task, line.method, "yes" if line.chosen else "", speedup, say.number(line.tokens_per_s)]
            count = f"{extra:,}" if extra and line.series == STREAMS else say.NOTHING
            numbers = [count, f"{counts[line.series]:,}", line.exact]
            rows.append([*row, say.length(line.call_reduction), scored(own), *numbers])
        chosen_on += [{**asdict(line), "task": task} for line in choosing]
    speed = ("speed-up", "tokens/s", "mean accepted tokens")
    yield Table(
        title="Shared streams beside plain adapters",
        head=("application", "method", "chosen", *speed, "score", "extra parameters", "with adapters", "ids exact"),
        parts={"": rows},
        values={"scored": ask.scored, "lines": values, "chosen_on": chosen_on},
        remarks=[f"{task} is left out: its prompts need --data" for task in ask.streams if task not in tasks],
        how=how(reports[0], [f"scores are of {ask.scored} prompts of each task at most, greedy", *dict.fromkeys(said)]),
        same=all(found.passed for report in reports for found in report.exactness),
    )


def scores_of(ask: StreamingFlags, task: str, applications: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Scores of the base model (`BASE`) and of every application on one task.

    Drafts change no answer, so each is asked once.

    Raises:
        ConfigError: see `evaluate`.
    """
    limits: dict[str, Any] = {"limit": ask.scored, "seed": ask.seed}
    llm = LLM(ask.model, drafter="streams" if applications else "none", applications=dict(applications), **ask.llm)
    names = {BASE: None, **{name: name for name in applications}}
    return {name: evaluate(llm, [task], ask.data, application=a, **limits)[0].scores for name, a in names.items()}


def scored(scores: Mapping[str, float]) -> str:
    """``exact_match 35.0 [29.7, 40.3]``, in percent, with 95% bootstrap intervals."""
    parts = []
    for name, value in means(scores).items():
        ends = [f"{100 * scores[end]:.1f}" for end in (f"{name}_low", f"{name}_high") if end in scores]
        parts.append(f"{name} {100 * value:.1f}" + (f" [{', '.join(ends)}]" if ends else ""))
    return ", ".join(parts)


# -- parameters (table 3, appendix N.1)

PUBLISHED: tuple[
    dict[str, Any], ...
] = (  # gamma = 4 and r = 8 (N.1): parameters of streams and of Medusa heads, beside each model's shape
    {"name": "Mistral-Instruct-7B", "d": 4096, "vocab": 32000, "qkv": 6144, "ff": 14336, "said": (8.2e4, 5.9e8)},
    {"name": "Phi-3-Instruct-3.8B", "d": 3072, "vocab": 32064, "qkv": 9216, "ff": 8192, "said": (6.1e4, 4.3e8)},
    {"name": "Llama2-7B", "d": 4096, "vocab": 32000, "qkv": 12288, "ff": 11008, "said": (8.2e4, 5.9e8)},
)
MSA_LAYERS, RANK = 4, 8  # that the paper recommends (appendix M)


def lossless_adapters(d: int, qkv: int, ff: int) -> int:
    """Parameters of the stream adapters of a lossless set as the paper recommends it, on all linears of a layer."""
    linears = ((d, qkv), (d, d), (d, 2 * ff), (ff, d))
    return MSA_LAYERS * RANK * sum(inputs + outputs for inputs, outputs in linears)


def overhead(target: str, gamma: int, rank: int, d: int, vocab: int, heads: int, **known: Any) -> dict[str, Any]:
    """What is added to a target, by the formulas, and what is known of it otherwise.

    Streams: gamma d + 2 r d for embeddings and the early exit of rank r (section 2); adapters are counted apart. A
    Medusa head (Cai et al. 2024, section 2.1): a residual block d d + d and an unembedding d V.
    """
    formula, medusa = gamma * d + 2 * rank * d, heads * (d * d + d + d * vocab)
    unknown = dict.fromkeys(("counted", "published", "adapters", "in_all", "medusa_published"))
    given = {**unknown, **known}
    if given["in_all"] is None and given["adapters"] is not None:
        given["in_all"] = formula + given["adapters"]
    both = ((formula, given["published"]), (medusa, given["medusa_published"]))
    agrees = all(said is None or f"{ours:.1e}" == f"{said:.1e}" for ours, said in both)
    agrees = agrees and given["counted"] in (None, formula)
    return {"target": target, "formula": formula, **given, "medusa": medusa, "agrees": agrees}


def overhead_of_set(trained: StreamSet, target: str) -> dict[str, Any]:
    """A trained set's own parameters."""
    config, parts = trained.config, trained.parameters_by_part()
    known = {"counted": parts["embeddings"] + parts["prune"], "adapters": parts["adapters"]}
    known |= {"in_all": sum(parts.values())}
    shape = (config.prune_rank, config.d_model, config.vocab_size)
    return overhead(target, config.gamma, *shape, config.gamma, **known)


@study.table(needs=("set",))
def table_3_parameters(ask: StreamingFlags) -> Iterator[Table | None]:
    """Parameters that a set adds, by formula and by count, beside Medusa heads for the same target."""
    trained = StreamSet.load(resolve_folder(str(ask.set)))
    found = [overhead_of_set(trained, trained.config.target or str(ask.set))]
    for model in PUBLISHED:
        shape = model["d"], model["vocab"], 4
        said: dict[str, Any] = dict(zip(("published", "medusa_published"), model["said"], strict=True))
        said["adapters"] = lossless_adapters(model["d"], model["qkv"], model["ff"])
        found.append(overhead(model["name"], 4, RANK, *shape, **said))
    same = all(one["agrees"] for one in found)
    heads = {"in_all": "with adapters", "medusa": "Medusa heads"}
    heads["medusa_published"] = "Medusa, published"
    names = ("formula", "counted", "published", "adapters", "in_all", "medusa", "medusa_published")
    yield None
    yield Table(
        title="Parameters beside the target's",
        head=("target", *(heads.get(name, name) for name in names)),
        parts={"": [[one["target"], *(_count(one[name]) for name in names)] for one in found]},
        values={"overhead": found},
        remarks=[
            "with adapters: what a lossless set adds; a shared one has adapters that plain fine-tuning has as well",
            *([] if same else ["the counts are not those of the formulas"]),
        ],
        same=same,
    )


def _count(value: float | None) -> str:
    shown = f"{value:,}" if isinstance(value, int) else f"{value or 0:.1E}".replace("E+0", "E")
    return say.NOTHING if value is None else shown
