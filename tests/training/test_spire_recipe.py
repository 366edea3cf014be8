"""SPIRe in training: k passes over every k-th prefix are what drafts do; what is learned; the recipe's options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from kits.spire import drafts_by_hand, memory_of
from kits.tiny import VOCAB
from safetensors import safe_open
from toolkit import examples, network, write_data, write_target

from paceline import kernels
from paceline.api.llm import LLM
from paceline.core.sampling import SamplingParams
from paceline.papers.spire.model import SpireShape, read_shape
from paceline.papers.spire.prefixes import Blocks, run_blocks
from paceline.papers.spire.recipe import SpireModule, SpireRecipe
from paceline.train.data import Example, SourceSpec, TokenBatch, collate
from paceline.train.job import TrainingJob, prepare, run
from paceline.train.job import finish as write
from paceline.train.network import Network, take_layers
from paceline.train.trainer import TrainConfig, products

WHOLE = (None, None, None)
VARIANTS: dict[str, dict[str, Any]] = {
    "spire": {},
    "no sinks": {"sinks": 0},
    "narrow": {"window": 2},
    "dense": {"window": 100},
    "deep": {"depth": 7},
    "alone": {"depth": 1},
}


def batch(prompt_weight: float = 0.5) -> TokenBatch:
    """Two rows of packed documents, some shorter than a block, and padding."""
    short = [Example(torch.randint(8, VOCAB, (n,)).numpy().astype("int32")) for n in (1, 2, 3)]
    return collate([[*examples(3, 5), *short], examples(2, 6)], 110, prompt_weight)


def shape_of(**values: Any) -> SpireShape:
    return SpireShape(**{"layers": 2, "window": 9, "sinks": 2} | values)


def recipe(held_out: Any = None, hot: torch.Tensor | None = None) -> SpireRecipe:
    target, shape = network(2, frozen=True, windows=WHOLE), shape_of()
    draft = network(1, num_layers=2, windows=WHOLE[:2])
    take_layers(draft, target, (1, 2))
    return SpireRecipe(SpireModule(draft, shape), target, shape, {}, held_out or {}, hot)


def context(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_are_drafts_row_by_row(variant: str) -> None:
    """The rows of every pass, against section 3.3 one row at a time, over their document alone."""
    offset, shape, data = len(variant) % 4, shape_of(**VARIANTS[variant]), batch()
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


def test_activations_are_those_of_the_layers_that_serve(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Under products in bfloat16, to its rounding; in float32 the training network's own."""
    if kernels.library() is None:
        pytest.skip("no compiled layers")
    made: Any = prepare(job(*places, tmp_path / "out")).recipe
    data = collate([examples(3), examples(2)], 110)
    there = data.documents >= 0
    assert made.serving is not None and not bool(there.all())
    plain, serving = made.know(data), made.serving
    with products("bf16", torch.device("cpu")):
        served = made.know(data)
    made.serving = None
    again = made.know(data)
    assert all(torch.equal(a, b) for a, b in zip((*plain[0], plain[1]), (*again[0], again[1]), strict=True))
    for own, wanted in zip((*served[0], served[1]), (*plain[0], plain[1]), strict=True):
        assert not torch.equal(own, wanted)
        torch.testing.assert_close(own[there], wanted[there], rtol=0.05, atol=0.05)
    last = serving.activations(data, (1, 1))
    assert torch.equal(*last) and not last[0][~there].any()


def test_the_loss_is_its_formula() -> None:
    """MixedLoss (3.4), over the rows of all passes at once."""
    data, made = batch(), recipe()
    with torch.no_grad():
        loss, figures = made.loss(data, context())
        offset = int(torch.randint(4, (1,), generator=context()))
        past, final = made.know(data)
        rows = [*made._rows(data, offset, past)]
        hidden, places = torch.cat([r.hidden for r in rows]), torch.cat([r.places for r in rows])
        weights = torch.cat([r.weights for r in rows])
        log_q = made.module.network.logits(hidden).log_softmax(-1)
        p = made.target.logits(final.flatten(0, 1)[places]).softmax(-1)
        each = -0.5 * (p * log_q).sum(-1) - 0.5 * torch.minimum(p, log_q.exp()).sum(-1)
        assert float(loss) == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-4)
    assert [*figures] == [f"loss_{step}" for step in (1, 2, 3, 4)]
    # every row with a weight is in one pass or the other, but those whose block begins at a document's first token
    length = data.tokens.shape[1]
    assert set(places.tolist()) < {i for i in range(2 * length) if data.weights.flatten()[i] > 0}
    assert len(set(places.tolist())) == len(places) > 60


def test_the_loss_over_hot_tokens_is_its_formula() -> None:
    """MixedLoss between target and draft over the hot tokens alone, both normed there."""
    data, hot = batch(), torch.arange(0, VOCAB, 3)
    made = recipe(hot=hot)
    with torch.no_grad():
        loss = float(made.loss(data, context())[0])
        offset = int(torch.randint(4, (1,), generator=context()))
        past, final = made.know(data)
        rows = [*made._rows(data, offset, past)]
        hidden, places = torch.cat([r.hidden for r in rows]), torch.cat([r.places for r in rows])
        weights = torch.cat([r.weights for r in rows])
        log_q = made.module.network.logits(hidden)[:, hot].log_softmax(-1)
        p = made.target.logits(final.flatten(0, 1)[places])[:, hot].softmax(-1)
        each = -0.5 * (p * log_q).sum(-1) - 0.5 * torch.minimum(p, log_q.exp()).sum(-1)
    assert loss == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-4)
    assert abs(loss - float(recipe().loss(data, context())[0].detach())) > 0.1


def test_gradients_reach_all_of_the_draft_and_none_of_the_target() -> None:
    made = recipe()
    made.loss(batch(), context())[0].backward()
    ends = {name for name, p in made.module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert ends == {"network.decoder.embedding", "network.decoder.norm.weight", "network.decoder.head.weight"}
    assert all(p.grad is None for p in made.target.parameters())
    nothing = collate([[Example(torch.tensor([9, 9]).numpy())]], 8)
    loss, figures = recipe().loss(nothing, context())
    loss.backward()
    assert float(loss.detach()) == 0 and not figures


def test_held_out_figures_by_hand() -> None:
    data = batch()
    made = recipe(held_out={"x": [data, data]})
    found = made.evaluate()
    with torch.no_grad():
        past, final = made.know(data)
        chances, alphas = {}, {}
        for step, part in enumerate(made._rows(data, 0, past)):
            q = made.module.network.logits(part.hidden).softmax(-1)
            p = made.target.logits(final.flatten(0, 1)[part.places]).softmax(-1)
            blocks = part.kept.nonzero().tolist()
            for row, (b, number) in enumerate(blocks):
                y = part.targets[row]
                chances[b, number, step] = min(1.0, float(q[row, y] / p[row, y]))
                alphas[b, number, step] = float(torch.minimum(p[row], q[row]).sum())
    whole = {key[:2] for key in chances if all((*key[:2], step) in chances for step in range(4))}
    tau = 0.0
    for b, number in whole:
        product = 1.0
        for step in range(4):
            product *= chances[b, number, step]
            tau += product
    assert len(whole) > 10 and found["tau/x"] == pytest.approx(1 + tau / len(whole), rel=1e-5)
    for step in range(4):
        mean = sum(alphas[b, number, step] for b, number in whole) / len(whole)
        assert found[f"alpha/x/{step + 1}"] == pytest.approx(mean, rel=1e-5)
    assert F.relu(torch.tensor(found["tau/x"] - 5)) == 0


# -- from a command to a draft at work


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("spire")
    data = write_data(folder)
    return data, write_target(folder / "target", data)


def job(data: Path, target: Path | None, out: Path, **changes: Any) -> TrainingJob:
    settings = {"steps": 2, "warmup": 1, "precision": "fp32", "evaluate_every": 0}
    values: dict[str, Any] = {
        "kind": "spire",
        "options": {"layers": 1, "window": 6, "depth": 3, **changes.pop("options", {})},
        "config": TrainConfig(**settings),
        "sources": [SourceSpec(file=str(data))],
        "target": target,
        "out": out,
    }
    return TrainingJob(**values | changes)


def test_what_is_trained_drafts(places: tuple[Path, Path], tmp_path: Path) -> None:
    data, target = places
    one = job(data, target, tmp_path / "out")
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
    begun: Any = prepare(job(data, target, tmp_path / "again", init=folder)).recipe
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert all(name.startswith("model.layers.") for name in names)
        stored = tensors.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(begun.module.network.layers[0].down.weight, stored.float())
    assert torch.equal(begun.module.network.decoder.embedding, Network.load(target).decoder.embedding)
