"""Training of early exits: the loss is its formula, figures are counted, what is exported says the same in a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import VOCAB, tiny_decoder
from safetensors.torch import load_file, save_file
from toolkit import dialogues, job, louder, network, seeded

from paceline.core.errors import CapabilityError, ConfigError
from paceline.papers.mirror.exits import CONFIG_FILE, WEIGHTS_FILE, ExitHeads, ExitsConfig, exit_of, load
from paceline.papers.mirror.exits_recipe import DISTILL, ExitRecipe
from paceline.train.data import TokenBatch
from paceline.train.job import finish, prepare
from paceline.weights.files import fingerprint

LAYERS = (1, 2)


def make_config(**changes: Any) -> ExitsConfig:
    shape = network().config
    known = {"num_layers": shape.num_layers, "d_model": shape.d_model, "vocab_size": VOCAB}
    return ExitsConfig(**{"layers": LAYERS, **known, **changes})


def make_recipe(held_out: Any = None) -> ExitRecipe:
    target = louder(network(3, frozen=True))
    heads = ExitHeads.fresh(make_config(), torch.Generator().manual_seed(5))
    heads.up.data.normal_(std=0.3, generator=torch.Generator().manual_seed(6))
    return ExitRecipe(heads, target, held_out)


def logits_at(recipe: ExitRecipe, batch: TokenBatch, layer: int) -> torch.Tensor:
    """[B, T, V] of an exit, or of the target behind its last layer, as one would write it first."""
    target, heads = recipe.target, recipe.module
    hidden = target.run(target.embed(batch.tokens), 0, layer, batch)[0]
    if layer in LAYERS:
        place = LAYERS.index(layer)
        hidden = hidden + (hidden @ heads.down[place].T).relu() @ heads.up[place].T
    return target.logits(target.final(hidden))


@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_the_loss_is_its_formula(prompt_weight: float) -> None:
    recipe, batch = make_recipe(), dialogues(prompt_weight)
    loss, figures = recipe.loss(batch, seeded())
    says = logits_at(recipe, batch, recipe.target.config.num_layers).log_softmax(-1)
    right = torch.zeros(())
    for layer in LAYERS:
        log_q = logits_at(recipe, batch, layer).log_softmax(-1)
        ce = -log_q.gather(-1, batch.targets[..., None])[..., 0]
        kl = (says.exp() * (says - log_q)).sum(-1)
        right = right + ((DISTILL * kl + (1 - DISTILL) * ce) * batch.weights).sum() / batch.weights.sum() / len(LAYERS)
        mean = (ce * batch.weights).sum() / batch.weights.sum()
        assert figures[f"ce_{layer}"] == pytest.approx(float(mean.detach()), rel=1e-4)
    assert torch.allclose(loss, right, rtol=1e-4)
    found = torch.autograd.grad(loss, [*recipe.module.parameters()])
    wanted = torch.autograd.grad(right, [*recipe.module.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert a.any() and torch.allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_trained_exit_says_in_the_target_what_it_said_in_training(tmp_path: Path) -> None:
    decoder = tiny_decoder(dtype=torch.float32)
    c = decoder.config
    config = make_config(num_layers=c.num_layers, d_model=c.d_model, vocab_size=c.vocab_size, target="tiny")
    heads = ExitHeads.fresh(config, torch.Generator().manual_seed(1))
    heads.up.data.normal_(generator=torch.Generator().manual_seed(3))
    heads.save(tmp_path, torch.float32)
    hidden = torch.randn(5, c.d_model, generator=torch.Generator().manual_seed(2))
    made = exit_of(tmp_path, decoder, LAYERS[1], "tiny")
    wanted = decoder.read(hidden + (hidden @ heads.down[1].T).relu() @ heads.up[1].T)
    assert made.layer == LAYERS[1] and torch.allclose(made.logits(hidden), wanted, rtol=1e-5)
    assert sum(p.numel() for p in heads.parameters()) == len(LAYERS) * c.d_model**2
    with pytest.raises(CapabilityError, match="they lie after layers 1, 2"):
        exit_of(tmp_path, tiny_decoder(dtype=torch.float32), 3, "tiny")
    for change in ({"num_layers": 5}, {"vocab_size": 7}):
        ExitHeads.fresh(make_config(**{**config.__dict__, **change})).save(tmp_path / "other")
        with pytest.raises(CapabilityError, match="trained for tiny"):
            exit_of(tmp_path / "other", decoder, 1, "tiny")


def test_tensors_that_are_missing_or_hold_nan_are_refused(tmp_path: Path) -> None:
    ExitHeads.fresh(make_config()).save(tmp_path)
    values = load_file(tmp_path / WEIGHTS_FILE)
    for bad, why in (({"down": values["down"]}, "up is missing"), (values | {"up": values["up"] * torch.nan}, "NaN")):
        save_file(bad, tmp_path / WEIGHTS_FILE)
        with pytest.raises(ConfigError, match=why):
            load(tmp_path, torch.float32)
    with pytest.raises(ConfigError, match="there is no such folder"):
        load(tmp_path / "nowhere", torch.float32)


def test_a_run_gives_exits_of_its_target(data: Path, target: Path, tmp_path: Path) -> None:
    config = {"steps": 20, "warmup": 2, "evaluate_every": 20, "learning_rate": 1e-2}
    made = job("exits", data, target, tmp_path / "run", config)
    trainer = prepare(made)
    before = trainer.recipe.evaluate()["accuracy/boxes/1"]
    trainer.run()
    result = finish(made, trainer)
    assert {p.name for p in result.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, "training.json"}
    heads = load(result, torch.float32)
    facts = heads.config.layers, heads.config.target, heads.config.fingerprint
    assert facts == ((1,), target.name, fingerprint(target))
    assert trainer.recipe.evaluate()["accuracy/boxes/1"] > before
    again = prepare(job("exits", data, target, tmp_path / "again", init=result))
    assert torch.equal(again.trained["down"].data, heads.down.data)
    assert not any(p.requires_grad for p in trainer.recipe.target.parameters())
