"""Training of streams: every way of computing them agrees, gradients stay where they belong, runs resume exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.dense_streams import eager_loss, eager_streams
from kits.tiny import tiny_config
from toolkit import dialogues, louder, seeded
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.model.adapters import linear_shapes
from paceline.model.rope import RopeTables
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.multistream import lossless_streams, main_pass, shared_pass
from paceline.papers.streaming.recipe import StreamRecipe, StreamsOptions, build
from paceline.train.carriers import choose_carriers
from paceline.train.data import TokenBatch
from paceline.train.features import TOP
from paceline.train.network import Network
from paceline.train.registry import BuildContext
from paceline.weights.files import fingerprint

GAMMA = 3


def make_network(dtype: torch.dtype = torch.float64, **changes: Any) -> Network:
    network = Network(tiny_config(num_layers=4, windows=(None, None, 8, None), **changes), frozen=True)
    network.init_weights(3)
    network = louder(network).to(dtype)
    assert network.config.rope is not None
    network._ropes = RopeTables(network.config.rotations, dtype, torch.device("cpu"))
    return network


def make_recipe(network: Network, noise: float = 0.3, **options: Any) -> StreamRecipe:
    """With random adapters, so that no delta is zero."""
    chosen = StreamsOptions(**{"gamma": GAMMA, "layers": 2, "rank": 4, "prune_rank": 3, **options})
    generator = torch.Generator().manual_seed(5)
    trained = StreamSet.fresh(chosen.config(network), linear_shapes(network.config), generator)
    for parameter in trained.parameters():
        parameter.data.add_(noise * torch.randn(parameter.shape, generator=generator))
    return StreamRecipe(network, trained.to(network.head_weight.dtype), chosen)


def gradients(recipe: StreamRecipe, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    recipe.module.zero_grad()
    loss, _ = recipe.loss(batch, seeded())
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in recipe.module.named_parameters() if p.grad is not None}


FORMS: list[dict[str, Any]] = [{"mode": "lossless"}, {"mode": "shared"}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_streams_equal_the_dense_reference(form: dict[str, Any]) -> None:
    recipe, batch = make_recipe(make_network(), **form), dialogues()
    network, trained = recipe.network, recipe.module
    carriers = choose_carriers(batch)
    main, streams, _ = eager_streams(network, trained, batch, carriers)
    if form["mode"] == "lossless":
        found = main_pass(network, batch, 2)
        final, own = found.final, lossless_streams(network, trained, found, carriers)[0]
    else:
        run = shared_pass(network, trained, batch, carriers)
        final, own = run.final, run.streams
    real = (batch.documents >= 0).flatten()
    torch.testing.assert_close(final[real], main[real], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own, streams, rtol=1e-10, atol=1e-10)
    assert streams.std(1).mean() > 0.05  # streams differ from each other


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_loss_and_gradients_equal_autograd_through_the_dense_reference(form: dict[str, Any]) -> None:
    """Eq. 6 written out: weights of each stream's mean, targets 1 + j on, and the early exit's loss."""
    network, batch = make_network(), dialogues()
    recipe = make_recipe(network, **form)
    loss, found = gradients(recipe, batch)
    recipe.module.zero_grad()
    wanted = dense_loss(recipe, batch)
    torch.testing.assert_close(eager_loss(recipe, batch), wanted, rtol=1e-9, atol=1e-9)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
    for name, parameter in recipe.module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


def dense_loss(recipe: StreamRecipe, batch: TokenBatch) -> Tensor:
    network, trained = recipe.network, recipe.module
    carriers = choose_carriers(batch)
    main, streams, before = eager_streams(network, trained, batch, carriers)
    width = batch.tokens.shape[1]
    log_q = network.logits(streams).log_softmax(-1)
    log_p = network.logits(main).log_softmax(-1)
    alpha_0, alpha_j = recipe.options.factors
    losses: list[list[Tensor]] = [[] for _ in range(GAMMA + 1)]
    for row, flat in enumerate(carriers.index.tolist()):
        b, t = divmod(flat, width)
        for j in range(1, GAMMA + 1):
            at = t + 1 + j
            if at < width and batch.documents[b, at] == batch.documents[b, t]:
                losses[j].append(-log_q[row, j - 1, batch.tokens[b, at]])
    for flat in batch.weights.flatten().nonzero()[:, 0].tolist():
        losses[0].append(-log_p[flat, batch.tokens.flatten()[flat + 1]])
    total = sum(alpha_j * torch.stack(found).mean() for found in losses[1:])
    if alpha_0:
        total = total + alpha_0 * torch.stack(losses[0]).mean()
    assert trained.prune_map is not None
    early = network.logits(network.final(trained.prune_map(before.detach()[carriers.index])))
    return total + torch.nn.functional.cross_entropy(early, batch.tokens.flatten()[carriers.index + 1])


@pytest.mark.parametrize("options", [{"distill": 1.0}, {"distill": 0.4}], ids=str)
def test_distillation_is_the_divergence_from_the_main_row_ahead(options: dict[str, Any]) -> None:
    """By hand: w KL(p at t + j || q_j at t) + (1 - w) CE, also of the likeliest tokens alone (rounded to float16)."""
    network, batch = make_network(), dialogues()
    recipe = make_recipe(network, prune_rank=0, **options)
    loss, figures = recipe.loss(batch, seeded())
    main, streams, _ = eager_streams(network, recipe.module, batch, choose_carriers(batch))
    log_p, log_q = (network.logits(x).log_softmax(-1) for x in (main, streams))
    losses: list[list[Tensor]] = [[] for _ in range(GAMMA)]
    entropies: list[list[Tensor]] = [[] for _ in range(GAMMA)]
    others: list[list[Tensor]] = [[] for _ in range(GAMMA)]  # -log q(y | others)
    for row, flat in enumerate(choose_carriers(batch).index.tolist()):
        for j in range(1, GAMMA + 1):
            b, at = flat // 32, flat % 32 + j + 1
            if at < 32 and batch.documents[b, at] == batch.documents[b, flat % 32]:
                p, q = log_p[flat + j], log_q[row, j - 1]
                entropies[j - 1].append(-q[batch.tokens[b, at]])
                ids = p.topk(TOP).indices
                own, p, q = -q, *(torch.cat((x[ids], (1 - x[ids].exp().sum()).log()[None])) for x in (p, q))
                among = own[batch.tokens[b, at]] + q[-1] if batch.tokens[b, at] not in ids else q.new_zeros(())
                others[j - 1].append(among)
                losses[j - 1].append((p.exp() * (p - q)).sum())
    means, hard = ([torch.stack(part).mean() for part in each] for each in (losses, entropies))
    among = sum(torch.stack(part).mean() for part in others)
    wanted = options["distill"] * (sum(means) + among) + (1 - options["distill"]) * sum(hard)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0.0)
    assert figures["kl"] == pytest.approx(torch.stack(means).mean().item(), rel=1e-3)
    if options["distill"] < 1:
        assert [figures[f"stream_{j}"] for j in range(1, GAMMA + 1)] == pytest.approx([x.item() for x in hard])


def build_context(folder: Path, network: Network | None, init: Path | None = None) -> BuildContext:
    return BuildContext(target=network, target_folder=folder, tokenizer=None, seed=4, init=init)


def test_the_kind_builds_a_fresh_set_for_its_target(tmp_path: Path) -> None:
    network = make_network(torch.float32)
    network.save(tmp_path / "toy", {"model_type": "llama"}, torch.float32)
    options = StreamsOptions(gamma=2, layers=1, rank=4)
    recipe, again = (build(options, build_context(tmp_path / "toy", network)) for _ in range(2))
    config = recipe.module.config
    assert (config.target, config.gamma, config.msa_layers) == ("toy", 2, 1)
    assert config.fingerprint == fingerprint(tmp_path / "toy")
    assert all(torch.equal(a, b) for a, b in zip(recipe.module.parameters(), again.module.parameters(), strict=True))
    adapters = recipe.module.adapters
    assert adapters is not None
    assert all(not up.any() for up in adapters.up.values())  # every delta begins as 0
    recipe.export(tmp_path / "set")
    more = build(options, build_context(tmp_path / "toy", network, tmp_path / "set"))
    stored = [value.to(torch.bfloat16).float() for value in recipe.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(stored, more.module.parameters(), strict=True))
    with pytest.raises(ConfigError, match="its gamma is 2, this run's 3"):
        wider = StreamsOptions(gamma=3, layers=1, rank=4)
        build(wider, build_context(tmp_path / "toy", network, tmp_path / "set"))
    with pytest.raises(ConfigError, match="its adapter is"):
        fewer = StreamsOptions(gamma=2, layers=1, rank=3)
        build(fewer, build_context(tmp_path / "toy", network, tmp_path / "set"))
    weighed = replace(build_context(tmp_path / "toy", network), prompt_weight=0.5)
    with pytest.raises(ConfigError, match=r"prompt_weight=0.5.*main rows have no loss.*Leave prompt_weight out"):
        build(options, weighed)
    shared = StreamsOptions(mode="shared", gamma=2, layers=1, rank=4)
    build(shared, replace(build_context(tmp_path / "toy", network), prompt_weight=0.5))
    with pytest.raises(ConfigError, match="no target"):
        build(options, build_context(tmp_path, None))
