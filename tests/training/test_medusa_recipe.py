"""Training of Medusa's heads: hit rates are counted, and what is exported drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit import examples, heads, job, louder, network

from paceline.core.errors import ConfigError
from paceline.draft.medusa.heads import CONFIG_FILE, WEIGHTS_FILE, load, read_config
from paceline.train.data import collate
from paceline.train.features import OnlineFeatures
from paceline.train.job import finish, prepare
from paceline.train.recipes.heads import RANKS, HeadOptions, choose_anchors
from paceline.train.recipes.medusa import MedusaRecipe, of_anchors
from paceline.train.registry import BuildContext
from paceline.weights.files import fingerprint

K = 3


def make_recipe(held_out: Any = None) -> MedusaRecipe:
    target, made = louder(network(3, frozen=True)), heads(5)
    given = BuildContext(target=target, target_folder=None, tokenizer=None, held_out=held_out or {})
    return MedusaRecipe("medusa", made, HeadOptions(depth=K), given, of_anchors(made), alpha=0.0)


def test_hit_rates_are_those_of_the_held_out_answers() -> None:
    batch = collate([examples(3), examples(2, seed=4)], 110)
    recipe = make_recipe(held_out={"all": [batch]})
    target, states = recipe.target, OnlineFeatures(recipe.target).states(batch)
    says = target.logits(target.final(states)).argmax(-1)
    hits, rows = torch.zeros(K, RANKS), torch.zeros(K)
    for b, t in (divmod(at, 110) for at in choose_anchors(batch).index.tolist()):
        made = target.logits(recipe.module(target.final(states[b, t][None]))[0])
        for j in range(K):
            at = t + j + 1  # whose next token head j aims at
            if at + 1 < 110 and batch.documents[b, at + 1] == batch.documents[b, t]:
                hits[j] += made[j].topk(RANKS).indices == says[b, at]
                rows[j] += 1
    rates = recipe.hit_rates()
    assert torch.allclose(torch.tensor(rates), hits / rows[:, None], atol=1e-4)
    assert recipe.evaluate()["acceptance/all/1"] == pytest.approx(rates[0][0], abs=1e-4)
    assert make_recipe().hit_rates() == ()


def test_a_run_gives_heads_for_its_target(data: Path, target: Path, tmp_path: Path) -> None:
    config, two = {"steps": 6, "evaluate_every": 3, "learning_rate": 1e-2}, {"depth": 2}
    run = job("medusa", data, target, tmp_path / "run", config, options=two, cache=tmp_path / "cache")
    trainer = prepare(run)
    trainer.run()
    result = finish(run, trainer)
    assert {p.name for p in result.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, "training.json"}
    config = read_config(result)
    assert config is not None and (config.heads, config.target) == (2, target.name)
    assert config.fingerprint == fingerprint(target) and len(config.accuracies) == 2
    made = load(result, torch.float32)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, trainer.trained[name].to(torch.bfloat16).float()) and parameter.any()
    again = prepare(job("medusa", data, target, tmp_path / "again", options=two, init=result))
    assert torch.equal(again.trained["weight"].data, made.get_parameter("weight").data)
    with pytest.raises(ConfigError, match="heads is 2"):
        prepare(job("medusa", data, target, tmp_path / "other", init=result, options={"depth": 3}))
