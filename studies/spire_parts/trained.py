"""What training by k passes costs beside a plain network of the same size (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import numpy as np
import torch
from kit.study import Table
from torch import Tensor

from paceline.bench import machine
from paceline.papers.spire.recipe import OMEGA, SpireOptions, SpireRecipe, build
from paceline.train.data import Example, TokenBatch, collate
from paceline.train.losses import TargetHidden, mixed
from paceline.train.network import Network
from paceline.train.registry import BuildContext
from paceline.weights.source import load_tokenizer, resolve_folder
from spire_parts.common import DEPTH, SpireFlags, study, verdict

WANTED = 0.8  # of the plain network's tokens a second
SIZES = ((12, 384), (4, 1024))  # rows and their length: the phases of zoo/recipes/spire.toml


def batch_of(rows: int, length: int, vocab: int, seed: int) -> TokenBatch:
    """Random tokens, each row a document: what a step takes does not depend on them."""
    draw = np.random.default_rng(seed)
    made = [[Example(tokens=draw.integers(0, vocab, length, dtype=np.int32), prompt=0)] for _ in range(rows)]
    return collate(made, length)


def plain_loss(network: Network, target: Network, batch: TokenBatch, omega: float) -> Tensor:
    """The mixed loss of a network of the same size that sees its own layers' inputs: one pass, all tokens."""
    with torch.no_grad():
        says = target(batch).flatten(0, 1)
    kept = (batch.weights > 0).flatten()
    hidden = network(batch).flatten(0, 1)[kept]
    whole = TargetHidden(says[kept], target.head_weight)
    return mixed(hidden, network.head_weight, whole, batch.weights.flatten()[kept], omega=omega)


def _timed(step: Callable[[], Tensor], module: torch.nn.Module) -> float:
    """Seconds of a loss and its gradients."""
    module.zero_grad(set_to_none=True)
    began = perf_counter()
    step().backward()
    return perf_counter() - began


@study.table(needs=("here",), repeats=5, quick={"repeats": 1})
def training_throughput(ask: SpireFlags) -> Iterator[Table | None]:
    """Tokens a second of training by k passes, over those of a plain network of the same size with the same loss."""
    folder = resolve_folder(ask.model)
    yield None
    target = Network.load(folder, frozen=True)
    options = SpireOptions(depth=DEPTH)
    recipe = build(options, BuildContext(target=target, target_folder=folder, tokenizer=load_tokenizer(folder)))
    rows, values = [], []
    for count, length in ((2, 64),) if ask.quick else SIZES:
        batch = batch_of(count, length, target.config.vocab_size, ask.seed)
        times = _times(recipe, target, batch, ask.repeats, OMEGA)
        tokens = count * length
        whole = times["plain"] / times["k passes"]
        alone = (times["plain"] - times["target"]) / (times["k passes"] - times["target"])
        rows.append(
            [f"{count} x {length:,}", *(f"{tokens / times[name]:,.0f}" for name in ("k passes", "plain"))]
            + [f"{whole:.2f}", f"{alone:.2f}"]
        )
        values.append({"rows": count, "length": length, "seconds": times, "whole": whole, "draft_alone": alone})
    yield Table(
        title=f"Training throughput of k = {DEPTH} passes beside a plain network of the same size",
        head=("batch", "k passes, tokens/s", "plain, tokens/s", "ratio", "ratio without the target's pass"),
        parts={"": rows},
        values={"batches": values, "machine": machine.describe(ask.device)},
        remarks=[verdict(f"batch {r[0]}: {r[3]}, {WANTED} wanted", float(r[3]) >= WANTED) for r in rows]
        + ["a step is a loss and its gradients; both run the frozen target on the batch, medians of steps in turns"],
    )


def _times(recipe: SpireRecipe, target: Network, batch: TokenBatch, repeats: int, omega: float) -> dict[str, float]:
    """Median seconds of a step of each kind, in turns; the first turn is not counted."""
    network, found = recipe.module.network, {"k passes": [], "plain": [], "target": []}  # type: ignore[var-annotated]
    generator = torch.Generator().manual_seed(0)
    for turn in range(repeats + 1):
        taken = {
            "k passes": _timed(lambda: recipe.loss(batch, generator)[0], recipe.module),
            "plain": _timed(lambda: plain_loss(network, target, batch, omega), recipe.module),
        }
        began = perf_counter()
        with torch.no_grad():
            target(batch)
        taken["target"] = perf_counter() - began
        for name, seconds in taken.items():
            found[name] += [seconds] if turn else []
    return {name: median(each) for name, each in found.items()}
