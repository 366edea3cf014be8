"""What each technique brings (figure 5), and tau by depth, by the teacher-forced estimator on the target's own text.

At each start of a draft, tokens a round are 1 + sum over j of the products of min(1, q/p) at the next j tokens of the
text. On text that the target drew at temperature 1 the mean is unbiased for sampled drafts under rejection. Starts are
the same for all drafts, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kit import figures
from kit.figures import Panel, Series
from kit.study import Table

from paceline.core.errors import ConfigError
from paceline.papers.spire.model import read_shape
from paceline.papers.spire.recipe import SpireModule, SpireOptions, SpireRecipe, load_draft
from paceline.train.data import Encoder, SourceSpec, TokenBatch, load_source
from paceline.train.job import held_out
from paceline.train.network import Network
from paceline.weights.loader import load_tokenizer, read_config, resolve_folder
from spire_parts.common import DEPTH, SPIRE, BoundedMean, Floats, SpireFlags, mean_of, path_of, ratio_of, study

LENGTH, ROWS = 512, 4  # of a row; rows of a batch
DEEPEST = 8
ESTIMATE = "tau: 1 + sum of products of min(1, q/p), teacher-forced over text that the target drew at T=1"
PAIRED = "intervals: 95%, bootstrap over rows of the text, the same ones for all drafts"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of each row of the text: sums over the starts in it of the tokens a round at depth 1, 2, .., and the starts."""

    sums: Floats  # [rows, depth]
    starts: Floats  # [rows]

    def mean(self, depth: int = 0) -> BoundedMean:
        """Tau at a depth; 0: the deepest."""
        return mean_of(*ratio_of(np.stack([self.sums[:, depth - 1], self.starts], 1)))

    def over(self, other: Estimate) -> BoundedMean:
        """By how much tau is higher than another's at the deepest."""
        if not np.array_equal(self.starts, other.starts):
            raise ConfigError("a paired difference", "the drafts have other starts", "train them for the same depth")
        return mean_of(*ratio_of(np.stack([self.sums[:, -1] - other.sums[:, -1], self.starts], 1)))


def text_of(ask: SpireFlags) -> dict[str, list[TokenBatch]]:
    """The drawn text by domain, as far as it is needed.

    Raises:
        ConfigError: a file that is not there, or one without answers.
    """
    length, rows = (LENGTH, ROWS) if not ask.quick else (64, 1)
    encoder = Encoder(load_tokenizer(resolve_folder(ask.model)), length)
    found, wanted = {}, -(-ask.starts // len(ask.drawn))
    for domain, file in ask.drawn.items():
        batches, starts = [], 0
        examples = load_source(SourceSpec(file=str(path_of(file)), domain=domain), encoder)
        for batch in held_out(examples, length, rows):
            batches.append(batch)
            starts += int((batch.weights > 0).sum())
            if starts >= wanted:
                break
        found[domain] = batches
    return found


@torch.no_grad()
def estimate(folder: str, target: Network, batches: Sequence[TokenBatch], depth: int | None = None) -> Estimate:
    """Of a trained draft, over every start in the text from which a whole draft can be judged."""
    place = resolve_folder(folder)
    shape = read_shape(place)
    module = SpireModule(Network(read_config(place), target.head_weight.device, frozen=True), shape)
    load_draft(module, shape, target, place)
    shape = shape if depth is None else replace(shape, depth=depth)
    recipe = SpireRecipe(module, target, shape, SpireOptions(), {}, {})
    sums, starts = [], []
    for batch in batches:
        total = np.zeros((len(batch.tokens), shape.depth))
        count = np.zeros(len(batch.tokens))
        known = recipe.know(batch)
        for offset in range(shape.depth):
            chances, _ = recipe.judge(batch, offset, known)
            whole = ~chances.isnan().any(1)
            tokens = (1 + chances.double().cumprod(1).cumsum(1)).where(whole[:, None], 0)  # [B * P, depth]
            total += tokens.view(len(batch.tokens), -1, shape.depth).sum(1).numpy()
            count += whole.view(len(batch.tokens), -1).sum(1).double().numpy()
        sums.append(total)
        starts.append(count)
    return Estimate(np.concatenate(sums), np.concatenate(starts))


def _judged(ask: SpireFlags, folders: Mapping[str, str], depth: int | None = None) -> dict[str, Estimate]:
    batches = [batch for own in text_of(ask).values() for batch in own]
    target = Network.load(resolve_folder(ask.model), frozen=True)
    return {name: estimate(folder, target, batches, depth) for name, folder in folders.items()}


def _check(ask: SpireFlags, folders: Mapping[str, str]) -> None:
    """Refuse what cannot be judged before anything is loaded."""
    for file in ask.drawn.values():
        path_of(file)
    depths = {read_shape(resolve_folder(folder)).depth for folder in folders.values()}
    if len(depths) > 1:
        wrong = f"they are trained for depths of {', '.join(map(str, sorted(depths)))}"
        raise ConfigError(f"drafts {', '.join(folders)}", wrong, "train all for the same depth")


@study.figure(needs=("spire", "variants", "drawn"), takes=("starts",))
def figure_5(ask: SpireFlags) -> Iterator[Table | None]:
    """Ablations: tau of drafts that were trained with one technique off, and how far below SPIRe's, paired."""
    folders = {SPIRE: str(ask.spire), **ask.variants}
    _check(ask, folders)
    yield None
    found = _judged(ask, folders)
    rows, values = [], {}
    for name, own in found.items():
        tau, less = own.mean(), own.over(found[SPIRE])
        rows.append([name, tau.text, "" if name == SPIRE else less.text])
        values[name] = {"tau": tau.listed, "difference": less.listed}
    starts = int(found[SPIRE].starts.sum())
    panel = _bars({name: own.mean() for name, own in found.items()})
    yield Table(
        title=f"Ablations at k = {DEPTH}",
        head=("draft", "tau", "difference to SPIRe"),
        parts={"": rows},
        values={"drafts": values, "starts": starts, "wanted_starts": ask.starts},
        remarks=[f"{starts:,} starts ({ask.starts:,} wanted)", ESTIMATE, PAIRED],
        how=[[f"{name}: {folder}" for name, folder in folders.items()], [f"{d}: {f}" for d, f in ask.drawn.items()]],
        plots={".svg": lambda path: figures.bars([panel], path)},
    )


def _bars(means: Mapping[str, BoundedMean]) -> Panel:
    low, high = ([getattr(mean, end) for mean in means.values()] for end in ("low", "high"))
    values = [mean.value for mean in means.values()]
    one = Series(label="tau", x=[*means], y=values, low=low, high=high)
    title = f"Tau at k = {DEPTH}, each with one technique off"
    return Panel(title=title, series=[one], x_label="tokens a round (tau)", y_label="", y_from=1.0)


@study.figure(needs=("spire", "drawn"), takes=("starts", "variants"))
def tau_by_depth(ask: SpireFlags) -> Iterator[Table | None]:
    """Tau by depth, k = 1 to 8, by the teacher-forced estimator; of SPIRe and of all variants."""
    folders = {SPIRE: str(ask.spire), **ask.variants}
    _check(ask, folders)
    yield None
    found = _judged(ask, folders, DEEPEST)
    depths = range(1, DEEPEST + 1)
    means = {name: [own.mean(k) for k in depths] for name, own in found.items()}
    series = [Series(label=name, x=[*depths], y=[m.value for m in own]) for name, own in means.items()]
    yield Table(
        title="Tau by depth (teacher-forced)",
        head=("k", *found),
        parts={"": [[str(k), *(own[k - 1].text for own in means.values())] for k in depths]},
        values={"tau": {name: [m.listed for m in own] for name, own in means.items()}},
        remarks=[ESTIMATE, PAIRED],
        plots={
            ".svg": lambda path: figures.lines(
                [Panel(title="Tau by depth", series=series, x_label="k", y_label="tau", y_from=1.0)], path
            )
        },
    )
