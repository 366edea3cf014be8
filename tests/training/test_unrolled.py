"""Drafters of states in training: unrolled as they are used, and what they are to say. Recipes, options and files,
too."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from kit.token_info import eager
from kits.eager_losses import eager_mse_cross_entropy
from kits.state import steps_by_hand
from kits.tiny import VOCAB, tiny_config
from safetensors.torch import load_file
from toolkit import examples, heads, job, network, packed, seeded
from torch import Tensor

from paceline.core.errors import CapabilityError, ConfigError
from paceline.draft.eagle.model import EagleFacts, EagleModel
from paceline.draft.fit import tokenizer_mark
from paceline.draft.medusa.heads import Heads
from paceline.draft.states.head import layer_json
from paceline.papers.lyanna.model import LyannaModel, LyannaShape
from paceline.train.data import collate
from paceline.train.features import TOP, last_states, likeliest
from paceline.train.job import prepare
from paceline.train.recipes.heads import ALPHA, Ahead, HeadRecipe, LayerOptions, choose_anchors, unroll
from paceline.train.recipes.heads_start import start_from_target
from paceline.train.recipes.medusa import DECAY, of_anchors
from paceline.train.registry import BuildContext
from paceline.weights.source import load_tokenizer

LAYER = layer_json(tiny_config())


def lyanna(seed: int = 1, **shape: Any) -> LyannaModel:
    values: dict[str, Any] = {"layer": LAYER, "rank": 5}
    made = LyannaModel.fresh(LyannaShape(**values | shape), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, value in made.named_parameters():  # else norms, gain and blank say nothing
            if value.ndim == 1:
                value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
    return made


def eagle(seed: int = 1) -> EagleModel:
    return EagleModel.fresh(LAYER, EagleFacts(), torch.Generator().manual_seed(seed))


MODELS = {"lyanna": lambda: lyanna(), "no first token": lambda: lyanna(first_token=False), "eagle": eagle}


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_drafting_row_by_row(name: str) -> None:
    model, data = MODELS[name]().double(), packed()
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(*data.tokens.shape, 32, generator=draw, dtype=torch.float64)
    table = torch.randn(VOCAB, 32, generator=draw, dtype=torch.float64)
    anchors = choose_anchors(data)
    with torch.no_grad():
        states = unroll(model, features, data, anchors, 3, lambda tokens: F.embedding(tokens, table))
        for number, at in enumerate(anchors.index.tolist()):
            b, t = divmod(at, data.tokens.shape[1])
            own = data.documents[b] == data.documents[b, t]
            first = int(own.nonzero()[0])
            wanted = steps_by_hand(model, features[b, own], data.tokens[b, own], t - first, 3, table)
            ends = int(own.sum()) - (t - first)  # steps whose input token is the text's
            for step in range(min(3, ends - 1)):
                torch.testing.assert_close(states[step][number], wanted[step], rtol=1e-9, atol=1e-10)
    assert len({int(p) for p in anchors.positions}) > 10


def recipe(
    model: Any, target: Any = None, held_out: Any = None, hot: Tensor | None = None, depth: int = 3, **options: Any
) -> HeadRecipe:
    target = target or network(2, frozen=True)
    given = BuildContext(target=target, target_folder=None, tokenizer=None, held_out=held_out or {}, hot=hot)
    predict = of_anchors(model) if isinstance(model, Heads) else partial(unroll, model)
    return HeadRecipe("states", model, LayerOptions(depth=depth), given, predict, **options)


@pytest.mark.parametrize("form", ["lyanna", "no token-info", "eagle", "medusa"])
def test_the_loss_is_its_formula(form: str) -> None:
    """Value and gradients against the dense formula, whole bias rows and all (sections 4.1 and 5.1)."""
    made = {"lyanna": lyanna, "no token-info": lambda: lyanna(rank=0), "eagle": eagle, "medusa": heads}[form]
    model, target, data = made().double(), network(2, frozen=True).double(), packed(0.3)
    alpha, decay = (0.0, DECAY) if form == "medusa" else (ALPHA, 1.0)
    own = recipe(model, target, alpha=alpha, decay=decay)
    loss, figures = own.loss(data, seeded())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    true = target.final(last_states(target, data))
    anchors = choose_anchors(data)
    states = own.predict(true, data, anchors, 3, target.embed)
    total = 0.0
    for step, state in enumerate(states, 1):
        ahead = Ahead.of(data, anchors.index, step)
        logits = state @ target.head_weight.t()
        info = getattr(model, "info", None)
        if info is not None:
            logits = logits + eager(info, target.embed(ahead.tokens))
        aim = true.flatten(0, 1)[ahead.rows]
        said = likeliest(target, aim, TOP)
        eye = torch.eye(VOCAB, dtype=torch.float64)
        part = eager_mse_cross_entropy(state, aim, logits, eye, said, ahead.weights, alpha=alpha)
        total = total + part * decay ** (step - 1) / sum(decay**n for n in range(3))
        parts = alpha * figures[f"mse_{step}"] + figures[f"ce_{step}"]
        assert math.isclose(parts, float(part.detach()), rel_tol=1e-6)
    torch.testing.assert_close(loss, total, rtol=1e-9, atol=0)
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in target.parameters())


def test_a_saved_lyanna_is_the_one_that_was_trained(tmp_path: Path) -> None:
    made = lyanna()
    made.save(tmp_path, torch.float32)
    found = LyannaModel.load(tmp_path)
    assert found.shape == made.shape
    assert found.tensors().keys() == made.tensors().keys()
    assert all(torch.equal(value, found.tensors()[name]) for name, value in made.tensors().items())
    made.save(tmp_path)
    half = LyannaModel.load(tmp_path)
    assert torch.equal(half.head.fc.weight, made.head.fc.weight.bfloat16().float())


def test_published_heads_are_read(tmp_path: Path) -> None:
    """Of EAGLE and EAGLE-2: with a bias in some, the target's embedding beside the layer, and no facts of ours."""
    from safetensors.torch import save_file

    made = eagle()
    values = {**made.head.tensors(), "fc.bias": torch.ones(32), "embed_tokens.weight": torch.randn(VOCAB, 32)}
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LAYER.items() if k != "model_type"}))
    found = EagleModel.load(tmp_path)
    assert torch.equal(found.head.fc.bias, torch.ones(32)) and torch.equal(
        found.embedding, values["embed_tokens.weight"]
    )
    save_file({"midlayer.x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CapabilityError, match="EAGLE-3 head"):
        EagleModel.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="convert it once"):
        EagleModel.load(tmp_path)


def broken(folder: Path, change: Any) -> None:
    """A saved drafter whose tensors ``change`` edits."""
    from safetensors.torch import load_file, save_file

    lyanna().save(folder, torch.float32)
    values = load_file(folder / "lyanna.safetensors")
    change(values)
    save_file(values, folder / "lyanna.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("fc.weight"), "fc.weight is missing"),
        (lambda v: v.update(more=torch.ones(1)), "more has no place"),
        (lambda v: v.update({"fc.weight": torch.ones(2, 2)}), r"fc.weight is \(2, 2\)"),
        (lambda v: v.update({"fc.weight": v["fc.weight"] * torch.nan}), "fc.weight holds NaN"),
    ],
)
def test_broken_weights_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    broken(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        LyannaModel.load(tmp_path)


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_run_with_a_cache_is_the_run_without(kind: str, data: Path, target: Path, tmp_path: Path) -> None:
    from paceline.train.job import finish as write
    from paceline.train.job import run

    two = {"depth": 2}
    made = [
        job(kind, data, target, tmp_path / n, options=two, cache=c) for n, c in (("a", None), ("b", tmp_path / "c"))
    ]
    results = []
    for one in made:
        trained = run(one)
        results.append(write(one, trained))
    log = [[json.loads(x)["loss"] for x in (one.out / "log.jsonl").read_text("utf-8").splitlines()] for one in made]
    assert log[0] == pytest.approx(log[1], rel=2e-3)  # the cache keeps states in bfloat16
    load = LyannaModel.load if kind == "lyanna" else EagleModel.load
    found: Any = load(results[0])
    facts = found.shape if kind == "lyanna" else found.facts
    assert facts.steps == 2 and facts.target == target.name and len(facts.fingerprint) == 64
    if kind == "lyanna":
        assert facts.tokenizer == tokenizer_mark(load_tokenizer(target))
    again = prepare(job(kind, data, target, tmp_path / "d", options=two, init=results[0]))
    begun = dict(again.recipe.module.named_parameters())  # type: ignore[attr-defined]
    assert torch.equal(begun["head.fc.weight"].data, found.head.fc.weight)


@pytest.mark.parametrize("make", [eagle, lyanna])
def test_a_head_starts_from_its_target(make: Any) -> None:
    """Its predicted states are near the target's from the start, those of a random head are not."""
    target = network(2, frozen=True)
    text = [collate([examples(3, seed), examples(3, seed + 1)], 110, 0.0) for seed in range(0, 16, 2)]
    found = []
    for start in (False, True):
        model = make()
        if start:
            start_from_target(model.head, target, iter(text))
        own = recipe(model, target, depth=1)
        found.append(own.loss(packed(), seeded())[1]["mse_1"])
    assert found[1] < 0.3 * found[0]


def test_a_start_that_cannot_be_is_refused(data: Path, target: Path, tmp_path: Path) -> None:
    biased = network(2, frozen=True, qkv_bias=True)
    with pytest.raises(CapabilityError, match=r"start=target: its last layer has .*bias.*: a head's layer is Llama's"):
        start_from_target(eagle().head, biased, iter([packed()]))
    made = prepare(job("eagle", data, target, tmp_path / "out", options={"depth": 2, "start": "target"}))
    model: Any = made.recipe.module  # type: ignore[attr-defined]
    gates = {n: v for n, v in load_file(target / "model.safetensors").items() if n.endswith("gate_proj.weight")}
    assert torch.equal(model.head.tensors()["layers.0.mlp.gate_proj.weight"], gates[max(gates)].float())
