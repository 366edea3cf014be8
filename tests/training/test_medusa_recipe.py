"""Training of Medusa's heads: the loss is its formula, hit rates are counted, and what is exported drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.tiny import VOCAB
from toolkit import network

from paceline.core.errors import ConfigError
from paceline.draft.medusa.heads import CONFIG_FILE, WEIGHTS_FILE, Heads, HeadsConfig, load, read_config
from paceline.train.carriers import generated
from paceline.train.data import Example, SourceSpec, TokenBatch, collate
from paceline.train.features import OnlineFeatures
from paceline.train.job import TrainingJob, finish, prepare
from paceline.train.recipes.medusa import DECAY, RANKS, MedusaOptions, MedusaRecipe
from paceline.train.trainer import Phase, TrainConfig
from paceline.weights.files import fingerprint

K = 3


def example(length: int, prompt: int, seed: int) -> Example:
    return Example(np.random.default_rng(seed).integers(8, VOCAB, length).astype(np.int32), prompt)


def make_batch(prompt_weight: float = 0.0) -> TokenBatch:
    """Dialogues and texts, two documents in a row, padding; answers shorter than the heads are many."""
    rows = [[example(17, 6, 0), example(11, 0, 1)], [example(24, 9, 2), example(5, 4, 3)]]
    return collate(rows, 32, prompt_weight)


def make_recipe(noise: float = 0.2, held_out: Any = None, **options: Any) -> MedusaRecipe:
    """With random parameters, so that no head is the identity."""
    target = network(3, frozen=True)
    for name, parameter in target.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(8.0)
    shape = {"heads": K, "d_model": target.config.d_model, "vocab_size": VOCAB, "rank": options.get("rank", 0)}
    draw = torch.Generator().manual_seed(5)
    heads = Heads.fresh(HeadsConfig(**shape), draw)
    for parameter in heads.parameters():
        parameter.data.add_(noise * torch.randn(parameter.shape, generator=draw))
    return MedusaRecipe(heads, target, MedusaOptions(heads=K, **options), held_out)


def context(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(recipe: MedusaRecipe, batch: TokenBatch) -> torch.Tensor:
    """The loss as one would write it first: document by document, row by row, head by head."""
    o, target = recipe.options, recipe.target
    states = OnlineFeatures(target).states(batch)
    says = target.logits(target.final(states)).log_softmax(-1)
    sums, weights = torch.zeros(K), torch.zeros(K)
    for b, t in generated(batch).nonzero().tolist():
        made = recipe.module(target.final(states[b, t][None]))[0]
        for j in range(K):
            at = t + j + 1  # whose next token head j aims at
            if at + 1 >= batch.tokens.shape[1] or batch.documents[b, at + 1] != batch.documents[b, t]:
                continue
            log_q = target.logits(made[j]).log_softmax(-1)
            weight = batch.weights[b, at]
            kl = (says[b, at].exp() * (says[b, at] - log_q)).sum()
            sums[j] += weight * (o.distill * kl - (1 - o.distill) * log_q[batch.tokens[b, at + 1]])
            weights[j] += weight
    scale = torch.tensor([DECAY**j for j in range(K)])
    return (scale * sums / weights).sum() / scale.sum()


@pytest.mark.parametrize("options", [{}, {"distill": 0.0}, {"distill": 1.0}, {"rank": 4}], ids=str)
@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_the_loss_is_its_formula(options: dict[str, Any], prompt_weight: float) -> None:
    recipe, batch = make_recipe(**options), make_batch(prompt_weight)
    loss, figures = recipe.loss(batch, context())
    right = dense(recipe, batch)
    assert torch.allclose(loss, right, rtol=1e-4)
    assert [*figures] == [f"{name}_{j}" for name in ("kl", "ce") for j in range(1, K + 1)]
    found = torch.autograd.grad(loss, [*recipe.module.parameters()])
    wanted = torch.autograd.grad(right, [*recipe.module.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


def test_hit_rates_are_those_of_the_held_out_answers() -> None:
    batch = make_batch()
    recipe = make_recipe(held_out={"all": [batch]})
    target, states = recipe.target, OnlineFeatures(recipe.target).states(batch)
    says = target.logits(target.final(states)).argmax(-1)
    hits, rows = torch.zeros(K, RANKS), torch.zeros(K)
    for b, t in generated(batch).nonzero().tolist():
        made = target.logits(recipe.module(target.final(states[b, t][None]))[0])
        for j in range(K):
            at = t + j + 1
            if at + 1 < batch.tokens.shape[1] and batch.documents[b, at + 1] == batch.documents[b, t]:
                hits[j] += made[j].topk(RANKS).indices == says[b, at]
                rows[j] += 1
    rates = recipe.calibrated().accuracies
    assert torch.allclose(torch.tensor(rates), hits / rows[:, None], atol=1e-4)
    figures = recipe.evaluate()
    assert figures["agreement/all/1"] == pytest.approx(rates[0][0], abs=1e-4)
    assert {"accepted/all", "accepted_top3/all", "loss/all/stream_1"} <= {*figures}
    assert make_recipe().calibrated().accuracies == ()


def job(data: Path, target: Path, out: Path, **changes: Any) -> TrainingJob:
    config = TrainConfig(steps=6, warmup=1, precision="fp32", log_every=1, evaluate_every=3, learning_rate=1e-2)
    values: dict[str, Any] = {
        "kind": "medusa",
        "options": {"heads": 2},
        "config": config,
        "phases": [Phase(rows=4, length=48)],
        "sources": [SourceSpec(file=str(data))],
        "held_out": [SourceSpec(file=str(data), domain="boxes")],
        "target": target,
        "out": out,
    }
    return TrainingJob(**values | changes)


def test_a_run_gives_heads_for_its_target(data: Path, target: Path, tmp_path: Path) -> None:
    made = job(data, target, tmp_path / "run", options={"heads": 2, "top": 8}, cache=tmp_path / "cache")
    trainer = prepare(made)
    trainer.run()
    result = finish(made, trainer)
    assert {p.name for p in result.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, "training.json"}
    config = read_config(result)
    assert config is not None and (config.heads, config.target) == (2, target.name)
    assert config.fingerprint == fingerprint(target) and len(config.accuracies) == 2
    heads = load(result, torch.float32)
    for name, parameter in heads.named_parameters():
        assert torch.equal(parameter, trainer.trained[name].to(torch.bfloat16).float()) and parameter.any()
    again = prepare(job(data, target, tmp_path / "again", init=result))
    assert torch.equal(again.trained["weight"].data, heads.get_parameter("weight").data)
    for changes, words in (({"heads": 3}, "heads is 2"), ({"heads": 2, "rank": 4}, "rank is 0")):
        with pytest.raises(ConfigError, match=words):
            prepare(job(data, target, tmp_path / "other", init=result, options=changes))
