"""What training and its data say: curves (figure 5), sparse token-info (table 2), coverage of hot tokens (figure 7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from kit import figures
from kit.figures import Panel, Series
from kit.study import Table
from kit.token_info import eager
from torch import Tensor

from lyanna_parts.common import STEPS, LyannaFlags, fastest, study, verdict
from paceline.bench import machine
from paceline.core.errors import ConfigError
from paceline.papers.lyanna.model import LyannaModel
from paceline.papers.lyanna.token_info import TokenInfo
from paceline.train.data import Encoder, TokenBatch, load_source
from paceline.train.job import held_out, occurrences
from paceline.train.network import Network
from paceline.train.recipe import RecipeFile, locate, read_recipe
from paceline.train.recipes.states import UnrolledRecipe, UnrollOptions
from paceline.train.trainer import LOG
from paceline.weights.loader import load_tokenizer, read_config, resolve_folder

RESULT = "result"  # of a run: what users load
KINDS = {"acceptance": "the likeliest token", "acceptance_top4": "one of the four likeliest"}
HOT = 0.25  # share of the vocabulary (section 6.1)
COVERED = 0.94  # of occurrences, in figure 7
LOOKED_UP = (1, 4, 16)  # rows: the root's, a level's, those of four sequences
TIMES = 200
LOTS = 4096  # of drawn rows
MANY = 40  # points of a line from which on they have no marks
CHUNK = 512  # rows of the collapsed table made at a time
DENSE, SPARSE, AT_LOAD = "dense", "sparse", "sparse at load only"

# -- logs


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a training run wrote down."""

    loss: dict[int, float]  # by step
    accuracy: dict[str, dict[int, list[float]]]  # kind -> training step -> [STEPS] means over domains


def read_log(folder: str) -> Log:
    """The log of a run.

    Raises:
        ConfigError: there is none, it is broken, or nothing was evaluated in it.
    """
    path = Path(folder) / LOG
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        loss = {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}
        held = {int(line["step"]): line for line in lines if any(key.startswith("acceptance/") for key in line)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"name the folder that a training run had as --out; it holds {LOG}"
        raise ConfigError(f"training run {folder}", f"{path.name} cannot be read ({error})", remedy) from error
    if not held:
        wrong = f"{LOG} has no held-out acceptance"
        raise ConfigError(f"training run {folder}", wrong, "train with held-out data and evaluate_every")
    return Log(
        loss=loss,
        accuracy={kind: {step: by_step(line, kind) for step, line in held.items()} for kind in KINDS},
    )


def by_step(figures_: Mapping[str, Any], kind: str) -> list[float]:
    """[STEPS] of held-out figures, the mean over domains; 0 at a step that no domain has."""
    found = []
    for step in range(1, STEPS + 1):
        own = [float(v) for k, v in figures_.items() if k.startswith(f"{kind}/") and k.endswith(f"/{step}")]
        found.append(sum(own) / len(own) if own else 0.0)
    return found


def mean(values: Sequence[float]) -> float:
    """Over steps."""
    return sum(values) / len(values)


@study.figure(needs=("runs",))
def figure_5(ask: LyannaFlags) -> Iterator[Table | None]:
    """Training loss and held-out acceptance of each step, by training step, of several runs."""
    logs = {name: read_log(folder) for name, folder in ask.runs.items()}
    yield None
    kind = "acceptance_top4"
    rows = [
        [name, str(step), *(f"{value:.3f}" for value in values), f"{mean(values):.3f}"]
        for name, log in logs.items()
        for step, values in log.accuracy[kind].items()
    ]
    yield Table(
        title=f"Held-out acceptance while training ({KINDS[kind]}; mean over domains)",
        head=("run", "training step", *(f"step {d}" for d in range(1, STEPS + 1)), "mean"),
        parts={"": rows},
        values={"runs": {name: vars(log) for name, log in logs.items()}},
        remarks=["of the rows where every step before named the target's token, the share where this step does"],
        how=[[f"{name}: {folder}" for name, folder in ask.runs.items()]],
        plots={".svg": lambda path: figures.lines(_curves(logs, kind), path)},
    )


def _curves(logs: Mapping[str, Log], kind: str) -> list[Panel]:
    def line(name: str, points: Mapping[int, float]) -> Series:
        return Series(label=name, x=[*points], y=[*points.values()], marker="none" if len(points) > MANY else None)

    panels = [("Training loss", "loss", [line(name, log.loss) for name, log in logs.items()])]
    for d in range(STEPS):
        own = [line(name, {s: v[d] for s, v in log.accuracy[kind].items()}) for name, log in logs.items()]
        panels.append((f"Step {d + 1}", "acceptance, held out", own))
    return [Panel(title=t, series=s, x_label="training step", y_label=y) for t, y, s in panels]


# -- data


def data_of(ask: LyannaFlags) -> RecipeFile:
    """The recipe with its files found.

    Raises:
        ConfigError: a recipe or a file that is not there.
    """
    assert ask.recipe is not None and ask.corpus is not None
    return locate(read_recipe(ask.recipe), ask.corpus)


def encoder_for(ask: LyannaFlags, recipe: RecipeFile) -> tuple[Encoder, int]:
    """As the recipe's training has it, and the longest row."""
    longest = max(phase.length for phase in recipe.phases)
    return Encoder(load_tokenizer(resolve_folder(ask.model)), longest), longest


@study.figure(needs=("recipe", "corpus"))
def figure_7(ask: LyannaFlags) -> Iterator[Table | None]:
    """Share of all tokens of the training data that the most frequent ones are: what the hot quarter covers."""
    recipe = data_of(ask)
    vocab = read_config(resolve_folder(ask.model)).vocab_size
    yield None
    encoder, _ = encoder_for(ask, recipe)
    examples = [load_source(spec, encoder) for spec in recipe.sources]
    covered = occurrences(recipe.sources, examples, vocab).sort(descending=True).values.cumsum(0)
    shares = (0.01, 0.05, 0.1, HOT, 0.5, 0.75, 1.0)
    found = {share: float(covered[max(1, round(share * vocab)) - 1]) for share in shares}
    points = sorted({*range(1, vocab + 1, max(1, vocab // 200)), vocab})
    x, y = [100 * n / vocab for n in points], [float(covered[n - 1]) for n in points]
    line = Series(label="training data", x=x, y=y, marker="none")
    yield Table(
        title=f"Coverage by the most frequent of {vocab:,} tokens",
        head=("share of the vocabulary", "of all tokens in the data"),
        parts={"": [[f"{share:.0%}", f"{value:.2%}"] for share, value in found.items()]},
        values={"vocab": vocab, "covered": found, "tokens": sum(len(e.tokens) for own in examples for e in own)},
        remarks=[verdict("the hot quarter covers", found[HOT], COVERED)],
        how=[[f"data of {ask.recipe}, each source with its weight in training", f"tokenizer of {ask.model}"]],
        plots={
            ".svg": lambda path: figures.lines(
                [
                    Panel(
                        title="Token coverage",
                        series=[line],
                        x_label="most frequent tokens, % of the vocabulary",
                        y_label="share of all tokens",
                        line_at=COVERED,
                        y_from=0.0,
                    )
                ],
                path,
            )
        },
    )


# -- sparse token-info


@study.table(needs=("dense", "sparse", "recipe", "corpus"), repeats=TIMES, quick={"repeats": 3})
def table_2(ask: LyannaFlags) -> Iterator[Table | None]:
    """Token-info for all tokens, for hot ones, for hot ones at load alone: accuracy, bytes, time of a look-up."""
    logs = {name: read_log(folder) for name, folder in ((DENSE, str(ask.dense)), (SPARSE, str(ask.sparse)))}
    models = load_three(str(ask.dense), str(ask.sparse))
    recipe = data_of(ask)
    yield None
    folder = resolve_folder(ask.model)
    target = Network.load(folder, frozen=True)
    encoder, longest = encoder_for(ask, recipe)
    batches = {spec.name: held_out(load_source(spec, encoder), longest) for spec in recipe.held_out}
    final = {name: accuracy(model, target, batches) for name, model in models.items()}
    costs = {name: info_costs(info_of(m), target.decoder.embedding.data, ask.repeats) for name, m in models.items()}
    curves = {name: {s: mean(v) for s, v in log.accuracy["acceptance"].items()} for name, log in logs.items()}
    rows = [
        [f"accuracy after step {step:,}", *(_percent(curves.get(name, {}).get(step)) for name in models)]
        for step in sorted({step for curve in curves.values() for step in curve})
    ]
    rows.append(["accuracy as exported", *(_percent(mean(found)) for found in final.values())])
    for label, key, form in (
        ("bytes of the factors", "factors", "{:,.0f}"),
        ("bytes if collapsed", "collapsed", "{:,.0f}"),
        *((f"{what}, {n} rows, us", f"{key}_{n}", "{:.1f}") for n in LOOKED_UP for what, key in LOOK_UPS),
    ):
        rows.append([label, *(form.format(cost[key]) for cost in costs.values())])
    yield Table(
        title=f"Token-info for all tokens and for hot ones: {STEPS}-step mean accuracy, bytes, look-up",
        head=("", *models),
        parts={"": rows},
        values={"by_evaluation": curves, "exported": final, "costs": costs, "machine": _machine(ask)},
        remarks=[
            "accuracy: of the rows where every step before named the target's token, the share where this step does, "
            f"held out; the mean over {STEPS} steps and domains",
            f"{AT_LOAD}: the dense drafter, cut to the sparse one's hot tokens after the norm; its training is the "
            "dense one's, so it has no curve of its own",
            "a look-up is timed in torch, with its sum to the logits: the fastest of many in turns, each of other rows",
        ],
        how=[[f"dense {ask.dense}", f"sparse {ask.sparse}", f"held-out data of {ask.recipe}"]],
    )


LOOK_UPS = (("look-up by factors", "by_factors"), ("look-up, collapsed", "by_table"))


def _machine(ask: LyannaFlags) -> dict[str, Any]:
    return machine.describe(ask.device)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def load_three(dense: str, sparse: str) -> dict[str, LyannaModel]:
    """The drafters of two runs, and the dense one cut to the other's hot tokens.

    Raises:
        ConfigError: a run that is not finished, or of the wrong kind.
    """
    whole, hot = (LyannaModel.load(Path(run) / RESULT) for run in (dense, sparse))
    for name, run, model, wanted in (("--dense", dense, whole, False), ("--sparse", sparse, hot, True)):
        if model.info is None or (model.info.hot is not None) != wanted:
            words = "token-info for hot tokens alone" if wanted else "token-info for all tokens"
            raise ConfigError(f"{name} {run}", f"it has no {words}", f"name a run with {words}")
    if whole.shape.layer != hot.shape.layer or whole.shape.rank != hot.shape.rank:
        raise ConfigError(f"--sparse {sparse}", "its layer or rank is not the dense one's", "train both alike")
    tokens = info_of(hot).hot
    assert tokens is not None
    return {DENSE: whole, SPARSE: hot, AT_LOAD: whole.cut(tokens)}


def info_of(model: LyannaModel) -> TokenInfo:
    """Its token-info."""
    assert model.info is not None, "load_three has checked it"
    return model.info


def accuracy(model: LyannaModel, target: Network, batches: Mapping[str, Sequence[TokenBatch]]) -> list[float]:
    """[STEPS] held-out conditional acceptance of the likeliest token, the mean over domains."""
    recipe = UnrolledRecipe("lyanna", model, target, UnrollOptions(depth=STEPS), batches, save=model.save)
    return by_step(recipe.evaluate(), "acceptance")


@torch.no_grad()
def collapsed(info: TokenInfo, embedding: Tensor) -> Tensor:
    """[V, V] bf16 all biases, or [H, H] those of hot tokens: what the paper looks up (sections 5.1 and 6.1)."""
    tokens = torch.arange(len(embedding)) if info.hot is None else info.hot
    rows = []
    for part in tokens.split(CHUNK):
        row = eager(info, embedding[part], part)
        rows.append((row if info.hot is None else row[:, info.hot]).bfloat16())
    return torch.cat(rows)


@torch.no_grad()
def info_costs(info: TokenInfo, embedding: Tensor, repeats: int) -> dict[str, float]:
    """Bytes in bf16 of the factors and of the collapsed table, and lowest us of look-ups by both, in turns."""
    whole, right = collapsed(info, embedding), info.table().t().contiguous()
    embedding = embedding.float()
    vocab, draw = len(embedding), torch.Generator().manual_seed(0)
    place = torch.full((vocab,), -1)
    if info.hot is not None:
        place[info.hot] = torch.arange(len(info.hot))
    found: dict[str, float] = {
        "factors": sum(2.0 * p.numel() for p in info.parameters()),
        "collapsed": 2.0 * whole.numel(),
    }
    for count in LOOKED_UP:
        logits, drawn = torch.randn(count, vocab, generator=draw), _draws(vocab, count, draw)
        calls: dict[str, Callable[[], Tensor]] = {
            "by_factors": lambda: logits + info.factors(embedding[t := drawn()], t) @ right,  # noqa: B023
            "by_table": lambda: looked_up(whole, logits, drawn(), info.hot, place),  # noqa: B023
        }
        found |= {f"{name}_{count}": 1e3 * ms for name, ms in fastest(calls, repeats).items()}
    return found


def _draws(vocab: int, count: int, draw: torch.Generator) -> Callable[[], Tensor]:
    """Tokens [count], others at every call, so that rows are not those that a cache holds from the last one."""
    lots = cycle(torch.randint(0, vocab, (LOTS, count), generator=draw))
    return lambda: next(lots)


def looked_up(table: Tensor, logits: Tensor, tokens: Tensor, hot: Tensor | None, place: Tensor) -> Tensor:
    """Logits [rows, V] and the biases of ``tokens`` [rows] from a `collapsed` table.

    Args:
        hot: [H] the tokens that it is about; None: all.
        place: [V] of every token among them; -1: none.
    """
    if hot is None:
        return logits + table[tokens]
    known = place[tokens] >= 0
    bias = torch.where(known[:, None], table[place[tokens].clamp_min(0)], table.new_zeros(()))
    return logits.index_add(1, hot, bias.float())
