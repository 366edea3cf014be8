"""The loop: what a step computes, what a stopped run goes on with, what is refused before work is lost."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.eager_losses import eager_cross_entropy, eager_distilled
from toolkit import examples, largest_file, network, run_until, trainer
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.train import trainer as training
from paceline.train.data import TokenBatch, collate
from paceline.train.features import TOP
from paceline.train.losses import TargetTop
from paceline.train.recipes.distillation import DistilledOptions, DraftModelRecipe
from paceline.train.trainer import CHECKPOINT, Phase, plan


def draft(seed: int = 1, **options: Any) -> DraftModelRecipe:
    return DraftModelRecipe(network(seed), network(2, frozen=True), DistilledOptions(**options), {}, {})


def test_the_step_is_adamw_on_the_weighted_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step by hand: eager loss, torch's own optimizer, decay of matrices alone."""
    monkeypatch.setattr(training, "CLIP", 1e9)
    run = trainer(tmp_path, steps=1, warmup=0)
    other = network()
    batch = next(batch for _, batch in plan(trainer(tmp_path).mixture, run.phases, run.config.steps))
    hidden, rows = other(batch), batch.weights > 0
    eager_cross_entropy(hidden[rows], other.head_weight, batch.targets[rows], batch.weights[rows]).backward()
    parameters = list(other.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=run.config.rate(0), betas=(0.9, 0.95)).step()
    run.run()
    for (name, value), wanted in zip(run.trained.items(), parameters, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-4, msg=name)  # a decay makes 1e-3


@pytest.mark.parametrize("options", [{}, {"distill": 0.0}], ids=str)
def test_a_recipe_computes_what_the_eager_formulas_say(options: dict[str, Any]) -> None:
    """Of likeliest tokens up to their rounding to float16."""
    recipe = draft(**{"distill": 0.6, **options})
    rounded = 1e-6 if options else 1e-3
    batch = collate([examples(3), examples(2, seed=5)], 96, 0.1)
    loss, _ = recipe.loss(batch, torch.Generator())
    loss.backward()
    fused = {n: p.grad.clone() for n, p in recipe.module.named_parameters() if p.grad is not None}
    recipe.module.zero_grad()
    wanted = _eager(recipe, batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=rounded)
    assert fused
    for name, parameter in recipe.module.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=rounded, msg=name)


def _eager(recipe: DraftModelRecipe, batch: TokenBatch) -> Tensor:
    rows = batch.weights > 0
    weights, o, head = batch.weights[rows], recipe.options, recipe.module.head_weight
    p, ids = recipe.target.logits(recipe.target(batch)[rows]).softmax(-1).topk(TOP)
    said = TargetTop(ids, torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1).log())
    return eager_distilled(recipe.module(batch)[rows], head, said, batch.targets[rows], weights, o.distill)


@pytest.mark.parametrize("signalled", [True, False])
def test_a_stop_ends_the_run_after_the_step_under_way(signalled: bool, tmp_path: Path) -> None:
    """A signal's is an interruption, a watcher's is none."""
    run = trainer(tmp_path)

    def watch(step: int, figures: Mapping[str, float]) -> bool:
        if step == 2 and signalled:
            signal.raise_signal(signal.SIGINT)
        return step == 2 and not signalled

    run.watch = watch
    run.run()
    assert (run.step, run.finished, run.interrupted) == (2, False, signalled)
    assert (tmp_path / CHECKPOINT).is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 5e-3}, "its learning_rate is 0.01, this run's 0.005"),
        ({"steps": 7}, "its steps is 6, this run's 7"),
        ({"recipe": draft()}, "its recipe is 'target', this run's 'draft_model'"),
        ({"phases": [Phase(rows=4, length=48)]}, "its phases is"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run_until(trainer(tmp_path), 1)
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **change).resume()
    more = trainer(tmp_path, evaluate_every=2)  # reports change no weight
    assert more.resume()


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"PK no archive")
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer(tmp_path).resume()
    assert not trainer(tmp_path / "empty").resume()


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run_until(run, 2)
    kept = (tmp_path / CHECKPOINT).read_bytes()
    run.trained["decoder.embedding"].data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="step 2: the loss is nan"):
        run.run()
    assert (tmp_path / CHECKPOINT).read_bytes() == kept


def test_a_disk_that_is_full_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run_until(run, 2)
    kept = (tmp_path / CHECKPOINT).read_bytes()
    with largest_file(100_000), pytest.raises(ConfigError, match="it cannot be written .* continues from the last"):
        run_until(run, 4)
    assert (tmp_path / CHECKPOINT).read_bytes() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == [CHECKPOINT, "log.jsonl"]
    again = trainer(tmp_path)
    assert again.resume()
    again.run()
    assert again.finished
