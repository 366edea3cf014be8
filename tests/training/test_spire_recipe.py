"""SPIRe in training: k passes over every k-th prefix are what drafts do; what is learned; the recipe's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.spire import drafts_by_hand, memory_of
from kits.tiny import VOCAB
from safetensors import safe_open
from toolkit import job, network, packed, seeded, write_data, write_target

from paceline.api.llm import LLM
from paceline.core.sampling import SamplingParams
from paceline.papers.spire.model import SpireShape, read_shape
from paceline.papers.spire.prefixes import Blocks, run_blocks
from paceline.papers.spire.recipe import SpireModule, SpireRecipe
from paceline.train.job import finish as write
from paceline.train.job import prepare, run
from paceline.train.network import Network, take_layers

WHOLE = (None, None, None)
OPTIONS = {"layers": 1, "window": 6, "depth": 3}
VARIANTS: dict[str, dict[str, Any]] = {"spire": {}, "narrow": {"window": 2}, "deep": {"depth": 7}}


def shape_of(**values: Any) -> SpireShape:
    return SpireShape(**{"layers": 2, "window": 9, "sinks": 2} | values)


def recipe(held_out: Any = None, hot: torch.Tensor | None = None) -> SpireRecipe:
    target, shape = network(2, frozen=True, windows=WHOLE), shape_of()
    draft = network(1, num_layers=2, windows=WHOLE[:2])
    take_layers(draft, target, (1, 2))
    return SpireRecipe(SpireModule(draft, shape), target, shape, {}, held_out or {}, hot)


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_are_drafts_row_by_row(variant: str) -> None:
    """The rows of every pass, against section 3.3 one row at a time, over their document alone."""
    offset, shape, data = len(variant) % 4, shape_of(**VARIANTS[variant]), packed(0.5)
    draft, target = (network(seed, num_layers=n, windows=WHOLE[:n]).double() for seed, n in ((4, 2), (5, 3)))
    w = memory_of(shape)
    with torch.no_grad():
        _, inputs = target.run(target.embed(data.tokens), 0, 3, data)
        y = [*inputs[1:], target.run(target.embed(data.tokens), 0, 3, data)[0]]
        blocks = Blocks.of(data, shape.depth, offset)
        memory = w.double()
        found = run_blocks(draft, memory, shape, data, blocks, inputs[-2:])
        assert len(found) == shape.depth and all(x.isfinite().all() for x in found)
        checked, depths = 0, set()
        for b in range(2):
            for number, start in enumerate(blocks.places[:, 0].tolist()):
                document, position = int(data.documents[b, start]), int(data.positions[b, start])
                length = int(blocks.there[b, number].sum())
                if document < 0 or position == 0 or (number + b) % 3:
                    continue
                own = (data.documents[b] == document).nonzero()[:, 0]
                tokens = data.tokens[b, own].tolist()
                states = [layer[b, own] for layer in y]
                path = tokens[position + 1 : position + length]
                wanted = drafts_by_hand(draft.decoder, memory, shape, states, tokens[: position + 1], path)
                for step, state in enumerate(wanted):
                    torch.testing.assert_close(found[step][b, number], state, rtol=1e-8, atol=1e-9)
                checked += len(wanted)
                depths.add(len(wanted))
        assert checked >= 20 and shape.depth in depths


@pytest.mark.parametrize("hot", [None, torch.arange(0, VOCAB, 3)], ids=["all", "hot"])
def test_the_loss_is_its_formula(hot: torch.Tensor | None) -> None:
    """MixedLoss (3.4), over the rows of all passes at once; of hot tokens both sides are normed over these alone."""
    data, made = packed(0.5), recipe(hot=hot)
    tokens = slice(None) if hot is None else hot
    with torch.no_grad():
        loss, figures = made.loss(data, seeded())
        offset = int(torch.randint(4, (1,), generator=seeded()))
        past, final = made.know(data)
        rows = [*made._rows(data, offset, past)]
        hidden, places = torch.cat([r.hidden for r in rows]), torch.cat([r.places for r in rows])
        weights = torch.cat([r.weights for r in rows])
        log_q = made.module.network.logits(hidden)[:, tokens].log_softmax(-1)
        p = made.target.logits(final.flatten(0, 1)[places])[:, tokens].softmax(-1)
        each = -0.5 * (p * log_q).sum(-1) - 0.5 * torch.minimum(p, log_q.exp()).sum(-1)
        assert float(loss) == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-4)
    assert [*figures] == [f"loss_{step}" for step in (1, 2, 3, 4)]
    # every row with a weight is in one pass or the other, but those whose block begins at a document's first token
    length = data.tokens.shape[1]
    assert set(places.tolist()) < {i for i in range(2 * length) if data.weights.flatten()[i] > 0}
    assert len(set(places.tolist())) == len(places) > 60


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("spire")
    data = write_data(folder)
    return data, write_target(folder / "target", data)


def test_what_is_trained_drafts(places: tuple[Path, Path], tmp_path: Path) -> None:
    data, target = places
    one = job("spire", data, target, tmp_path / "out", options=OPTIONS)
    trained = run(one)
    folder = write(one, trained)
    shape = read_shape(folder)
    assert (shape.layers, shape.window, shape.depth) == (1, 6, 3) and len(shape.fingerprint) == 64
    prompts = ["What colour is box 3?", "The red box stands beside the other boxes. The"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
    plain = LLM(str(target), dtype="float32").generate(prompts, params)
    llm = LLM(str(target), dtype="float32", drafter=f"spire:{folder}", budget=3)
    found = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
    assert llm.engine.round.failure is None and all(o.stats.drafted for o in found)
    begun: Any = prepare(job("spire", data, target, tmp_path / "again", options=OPTIONS, init=folder)).recipe
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert all(name.startswith("model.layers.") for name in names)
        stored = tensors.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(begun.module.network.layers[0].down.weight, stored.float())
    assert torch.equal(begun.module.network.decoder.embedding, Network.load(target).decoder.embedding)
