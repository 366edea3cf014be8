"""Streams with gradients over whole rows say what streams say token by token in the engine: one set, both paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kits.tiny import _draw, assemble, run, streams, tiny_application, tiny_config, tiny_decoder, tiny_streams
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.draft.base import StepFeatures
from paceline.model.rope import RopeTables
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.recipe import StreamRecipe, StreamsOptions
from paceline.train.carriers import choose_carriers
from paceline.train.data import Example, TokenBatch, collate
from paceline.train.network import Network

PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8, 9]]  # the first is longer than the window of the middle layer
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SETS: dict[str, dict[str, Any]] = {"plain": {"layers": 2}, "shallow": {"layers": 1, "gamma": 2}}


def network() -> Network:
    """The trainable form of `tiny_decoder`, in float64."""
    made = Network(tiny_config(), frozen=True).to(torch.float64)
    assert made.config.rope is not None
    made._ropes = RopeTables(made.config.rotations, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in made.decoder.named_parameters():
        parameter.data.copy_(_draw(name, parameter.shape, generator))
    return made


def told_by_engine(
    trained: StreamSet, shared: bool, **options: Any
) -> tuple[list[list[int]], dict[tuple[int, int], Tensor]]:
    """Answers to `PROMPTS`, and stream logits [gamma, V] by (request, position of the main row)."""
    decoder = tiny_decoder(tiny_config())
    drafter: Any = streams(trained=None if shared else trained, k=10, nodes=14, **options)
    found: dict[tuple[int, int], Tensor] = {}
    requests: dict[tuple[int, ...], int] = {tuple(p): i for i, p in enumerate(PROMPTS)}
    observe = drafter.observe

    def listen(step: StepFeatures) -> None:
        for view, logits in zip(step.sequences, step.levels, strict=True):
            if logits is not None:
                request = requests[tuple(view.tokens[: view.prompt_len])]
                found[request, len(view.tokens) - 2] = logits.clone()
        observe(step)

    drafter.observe = listen
    apps = [tiny_application("one", decoder, trained)] if shared else []
    engine = assemble(drafter, decoder=decoder, applications=apps)
    outputs = run(engine, [(p, GREEDY) for p in PROMPTS], ["one" if shared else None] * len(PROMPTS))
    assert engine.round.failure is None
    assert sum(o.stats.accepted for o in outputs) > 0
    return [[*p, *o.outputs[0].token_ids] for p, o in zip(PROMPTS, outputs, strict=True)], found


def packed(texts: list[list[int]]) -> TokenBatch:
    """All requests in one row, one after the other."""
    examples = [Example(np.array(t, dtype=np.int32), len(p)) for t, p in zip(texts, PROMPTS, strict=True)]
    return collate([examples], sum(map(len, texts)) + 3)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_training_computes_what_decoding_computes(name: str, mode: Any) -> None:
    trained = tiny_streams(mode=mode, **SETS[name])
    texts, found = told_by_engine(trained, mode == "shared")
    batch = packed(texts)
    gamma = trained.config.gamma
    recipe = StreamRecipe(network(), trained, StreamsOptions(mode=mode, gamma=gamma, layers=SETS[name]["layers"]))
    carriers = choose_carriers(batch)
    final, rows = recipe._outputs(batch, carriers)
    starts = np.cumsum([0, *map(len, texts[:-1])]).tolist()
    place = {flat: i for i, flat in enumerate(carriers.index.tolist())}
    logits = recipe.network.logits(rows)
    compared = 0
    for (request, position), wanted in found.items():
        row = place.get(starts[request] + position)
        if row is not None:
            torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-9)
            compared += 1
    assert compared >= 12
    says = recipe.network.logits(final).argmax(-1)
    following = batch.tokens.flatten()[carriers.index + 1]
    assert torch.equal(says[carriers.index], following)  # greedy answers are the main rows' own words
