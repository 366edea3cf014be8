"""Tau by depth, by the teacher-forced estimator on the target's own text.

At each start of a draft, tokens a round are 1 + sum over j of the products of min(1, q/p) at the next j tokens of the
text. On text that the target drew at temperature 1 the mean is unbiased for sampled drafts under rejection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kit import figures
from kit.figures import Panel, Series
from kit.study import Table

from paceline.papers.spire.model import read_shape
from paceline.papers.spire.recipe import SpireModule, SpireRecipe, load_draft
from paceline.train.data import Encoder, SourceSpec, TokenBatch, load_source
from paceline.train.job import held_out
from paceline.train.network import Network, take_layers
from paceline.weights.source import load_tokenizer, read_config, resolve_folder
from spire_parts.common import SPIRE, BoundedMean, Floats, SpireFlags, mean_of, path_of, ratio_of, study

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
    take_layers(module.network, target, range(len(target.layers))[-shape.layers :])
    load_draft(module, shape, place)
    shape = shape if depth is None else replace(shape, depth=depth)
    recipe = SpireRecipe(module, target, shape, {}, {})
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


@study.figure(needs=("spire", "drawn"), takes=("starts",))
def tau_by_depth(ask: SpireFlags) -> Iterator[Table | None]:
    """Tau by depth, k = 1 to 8, by the teacher-forced estimator."""
    for file in ask.drawn.values():
        path_of(file)
    folders = {SPIRE: str(ask.spire)}
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
