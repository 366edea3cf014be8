"""Lyanna and EAGLE at work: their trees against drafts that compute everything anew, their K/V, what they refuse."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from kit.token_info import eager
from kits.draft import paths, paths_of, text, view, want
from kits.native import needs_kernels
from kits.state import algorithm_1, eagle, eagle_model, lyanna, lyanna_model, states_of, steps_by_hand, taps_of
from kits.tiny import VOCAB, tiny_config, tiny_decoder

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sequence import Sequence
from paceline.draft.base import StepFeatures
from paceline.draft.eagle.drafter import EagleConfig, EagleDrafter
from paceline.draft.eagle.eagle3 import AUX, _shapes
from paceline.draft.eagle.model import EagleModel, load_head
from paceline.draft.registry import DrafterContext
from paceline.draft.states.head import layer_json
from paceline.model.decoder import Decoder
from paceline.model.rope import RopeConfig, RopeTable
from paceline.papers.lyanna.drafter import LyannaConfig
from paceline.train.network import rotate

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(120)


class Stage:
    """A target and a drafter, and texts that go on as a test says; the drafter is shown what passes would show it.

    Args:
        drafter: of tests.
        decoder: the target; default: the tiny one in float64.
    """

    def __init__(self, drafter: Any, decoder: Decoder | None = None, sequences: int = 4, tokens: int = 2000) -> None:
        self.decoder, self.drafter = decoder or tiny_decoder(), drafter
        drafter.bind(self.decoder.info("tiny"), sequences, tokens, CPU)
        self.known: dict[int, int] = {}  # by sequence: tokens whose states were shown

    def show(self, views: list[Sequence], first: int = 0) -> None:
        """The states of all tokens but the root that were not shown yet; of a new sequence from ``first`` on."""
        taps = self.drafter.spec.taps
        parts: list[dict[int, torch.Tensor]] = []
        slices, places = [], []
        for v in views:
            begin = self.known.get(v.key, first)
            raw = {layer: tap[begin:-1] for layer, tap in self.taps(v.tokens).items()}
            done, count = sum(len(part[taps[0]]) for part in parts), len(v.tokens) - 1 - begin
            slices.append(slice(done, done + count))
            parts.append(raw)
            places.append(begin)
            self.known[v.key] = len(v.tokens) - 1
        hidden = {layer: torch.cat([part[layer] for part in parts]) for layer in taps}
        none: list[list[int]] = [[] for _ in views]
        self.drafter.observe(StepFeatures(views, none, hidden, slices, places))

    @torch.inference_mode()
    def taps(self, tokens: list[int]) -> dict[int, torch.Tensor]:
        """[tokens, d] behind each layer that the drafter reads."""
        if self.drafter.spec.taps == (-1,):
            return {-1: self.states(tokens)}
        return {layer: tap for layer, tap in taps_of(self.decoder, tokens).items() if layer in self.drafter.spec.taps}

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, d] of the target, before the final norm."""
        return states_of(self.decoder, tokens, raw=True)

    @torch.inference_mode()
    def steps(self, v: Sequence, start: int, path: list[int], count: int) -> torch.Tensor:
        """[count, d] the states that the head drafts behind a text, computed anew, row by row, along ``path``."""
        model, table = self.drafter.model, self.decoder.embedding
        features = self.decoder.handle().final(self.states(v.tokens))[start:-1]
        return torch.stack(
            steps_by_hand(model, features, torch.tensor([*v.tokens[start:], *path]), len(features) - 1, count, table)
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.decoder.handle().logits(states, normed=True)


def grow(v: Sequence, tokens: list[int]) -> None:
    v.tokens.extend(tokens)
    v.sampler.commit(tokens)


def close(found: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> None:
    assert found.keys() == wanted.keys()
    for path, score in found.items():
        assert score == pytest.approx(wanted[path], abs=1e-8)


def info_table(stage: Stage) -> torch.Tensor:
    """[V, V] what every token says about its children, whole rows."""
    info = stage.drafter.model.info
    if info is None:
        return torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    return eager(info, stage.decoder.embedding.data).detach()


MODELS = {"whole": {}, "no first token": {"first_token": False}, "no token-info": {"rank": 0}}


@pytest.mark.parametrize("name", MODELS)
def test_lyannas_trees_are_algorithm_1_on_states_drawn_row_by_row(name: str) -> None:
    """A conversation: texts rest and come back, any budget; and what training unrolls is what is drafted."""
    model = lyanna_model(**MODELS[name])
    draw = random.Random(5)
    stage = Stage(lyanna(model=model, width=3, nodes=7, extra=0))
    table, views, met = info_table(stage), [view(text(n, n), key=n) for n in (2, 19, 40)], 0
    for step in range(8):
        present = views if step % 3 else [v for v in views if draw.random() < 0.7] or views[:1]
        stage.show(present)
        budgets, depths = [draw.choice([0, 1, 2, 5, 64]) for _ in present], [draw.choice([1, 2, 9]) for _ in present]
        request = want(present, budgets, depths)
        tree = stage.drafter.draft(request)
        assert request.passes == max((min(b, d, 3) for b, d in zip(budgets, depths, strict=True)), default=0)
        for b, v in enumerate(present):
            levels = min(budgets[b], depths[b], 3)
            states = stage.steps(v, 0, [0] * levels, max(1, levels))[:levels]
            whole = algorithm_1(stage.logits(states), table, v.tokens[-1], 3) if levels else {}
            best = sorted(whole, key=lambda path: -whole[path])[: min(budgets[b], 7)]
            close(paths_of(tree, b), {path: math.log(whole[path]) for path in best})
            met += len(best) > 1 and len(best[-1]) > 1
            grow(v, draw.choices(range(VOCAB), k=draw.choice([1, 1, 2, 4])))
        stage.drafter.body.pool.check_integrity()
    assert met > 3
    stage.drafter.release([v.key for v in views])
    assert stage.drafter.body.pool.idle and not stage.drafter._drafted


def test_resampling_is_algorithm_2_and_happens_once() -> None:
    """After every number of accepted tokens the kept levels behind it are biased by the token that was right."""
    seen = set()
    for accepted in range(4):
        stage = Stage(lyanna(width=3, nodes=6, extra=5))
        v = view(text(20, accepted), key=1)
        stage.show([v])
        fresh = stage.drafter.draft(want([v]))
        logits = stage.logits(stage.steps(v, 0, [0] * 3, 3))
        whole = paths_of(fresh) | {(1, 2, 3)[:accepted]: -math.inf}
        right = max((path for path in whole if len(path) == accepted), key=lambda path: whole[path])
        grow(v, [*right, 5])
        stage.show([v])
        tree = stage.drafter.draft(want([v]))[0]
        left, marks = logits[accepted + 1 :], dict(zip(paths(tree), tree.marks, strict=True))
        again = algorithm_1(left, info_table(stage), 5, 3) if len(left) else {}
        best = {*sorted(again, key=lambda path: -again[path])[:5]}
        new = stage.logits(stage.steps(v, 0, [0] * 3, 3))
        own = algorithm_1(new, info_table(stage), 5, 3)
        first = {*sorted(own, key=lambda path: -own[path])[:6]}
        assert {path for path, mark in marks.items() if mark == 0} == first
        assert {path for path, mark in marks.items() if mark == 1} == best - first
        seen.add(len(left))
        assert stage.drafter._drafted[1][0] == len(v.tokens)  # a draft's states are used once more, not twice
    assert seen == {0, 1, 2}


def eagle_2(stage: Stage, v: Sequence, topk: int, depth: int, nodes: int) -> dict[tuple[int, ...], float]:
    """Expansion and re-ranking written out: every node's state is drawn anew along its path."""
    whole: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        following = []
        for path in frontier:
            state = stage.steps(v, 0, list(path), len(path) + 1)[-1]
            best = stage.logits(state[None])[0].log_softmax(0).topk(topk)
            for token, log_q in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                whole[(*path, token)] = whole.get(path, 0.0) + log_q
                following.append((*path, token))
        frontier = sorted(following, key=lambda path: -whole[path])[:topk]
    return {path: whole[path] for path in sorted(whole, key=lambda path: -whole[path])[:nodes]}


@pytest.mark.parametrize(("topk", "depth", "nodes"), [(3, 3, 7), (1, 4, 4), (4, 2, 12)])
def test_eagles_trees_are_expanded_and_ranked_by_the_paper(topk: int, depth: int, nodes: int) -> None:
    draw = random.Random(3)
    stage = Stage(eagle(topk=topk, depth=depth, nodes=nodes))
    views = [view(text(n, n), key=n) for n in (2, 21)]
    for step in range(4):
        present = views if step % 2 else views[:1]
        stage.show(present)
        request = want(present)
        tree = stage.drafter.draft(request)
        assert request.passes == depth
        for b, v in enumerate(present):
            close(paths_of(tree, b), eagle_2(stage, v, topk, depth, nodes))
            grow(v, draw.choices(range(VOCAB), k=draw.choice([1, 2, 3])))
        stage.drafter.body.pool.check_integrity()
    stage.drafter.release([v.key for v in views])
    assert stage.drafter.body.pool.idle


def test_weights_that_no_kernel_multiplies_are_refused(tmp_path: Path):
    for storage in ("int8", "q4_0"):
        with pytest.raises(CapabilityError):
            Stage(eagle(storage=storage))  # beside float64
    with pytest.raises(CapabilityError, match="plain weights alone"):
        Stage(eagle3(write_eagle3(tmp_path / "head"), storage="int8"))


SMALL = torch.tensor([i for i in range(VOCAB) if i % 5 != 2])  # the draft's tokens


def write_eagle3(folder: Path, **changes: Any) -> Path:
    """A random head in the published layout; SGLang and SpecForge name the layers whose outputs it reads."""
    from safetensors.torch import save_file

    draw, config = torch.Generator().manual_seed(0), layer_json(tiny_config())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(SMALL)}
    config["eagle_config"] = {AUX: [0, 1, 2]}
    values = {}
    for name, shape in _shapes(tiny_config(), len(SMALL)).items():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        value = scale * torch.randn(shape, generator=draw) + (1.0 if len(shape) == 1 else 0.0)
        values[name.replace("layers.0.", "midlayer.")] = value
    values["d2t"] = SMALL - torch.arange(len(SMALL))
    values["t2d"] = torch.isin(torch.arange(VOCAB), SMALL)
    values |= changes
    folder.mkdir(exist_ok=True)
    save_file({n: v.contiguous() for n, v in values.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3(folder: Path, **options: Any) -> EagleDrafter:
    config = EagleConfig(**{"path": str(folder), "topk": 8, "nodes": 40, "depth": 3} | options)
    return EagleDrafter(config, load_head(folder), 3)


def eagle3_logits(folder: Path, decoder: Decoder, tokens: list[int], path: list[int]) -> torch.Tensor:
    """[V] after ``path`` behind a text, as the authors' code computes it, all rows anew and without a cache."""
    from safetensors.torch import load_file

    w = {n.removeprefix("midlayer."): v.double() for n, v in load_file(folder / "model.safetensors").items()}
    norm = lambda x, name: F.rms_norm(x, (32,), w[f"{name}.weight"], 1e-6)  # noqa: E731
    states = torch.cat([tap for _, tap in sorted(taps_of(decoder, tokens).items())], -1)[:-1] @ w["fc.weight"].T
    rope, config, outputs = RopeTable(RopeConfig(dim=8), torch.float64, CPU), tiny_config(), []
    fed, keys, values = [*states], [], []
    for place, following in enumerate([*tokens[1:], *path]):
        g = fed[place] if place < len(states) else outputs[-1]
        x = torch.cat((norm(decoder.embedding[following], "input_layernorm"), norm(g, "hidden_norm")))
        q, k, v = (w[f"self_attn.{n}_proj.weight"] @ x for n in "qkv")
        cos, sin = rope.rows(torch.tensor([place]))
        keys.append(rotate(k.view(1, 2, 8), (cos, sin))[0])
        values.append(v.view(2, 8))
        q = rotate(q.view(1, 4, 8), (cos, sin))[0].view(2, 2, 8)
        weights = (torch.einsum("kgd,tkd->kgt", q, torch.stack(keys)) * config.head_dim**-0.5).softmax(-1)
        mixed = torch.einsum("kgt,tkd->kgd", weights, torch.stack(values)).flatten()
        h = g + w["self_attn.o_proj.weight"] @ mixed
        inner = norm(h, "post_attention_layernorm")
        gated = F.silu(w["mlp.gate_proj.weight"] @ inner) * (w["mlp.up_proj.weight"] @ inner)
        outputs.append(h + w["mlp.down_proj.weight"] @ gated)
    whole = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    whole[SMALL] = w["lm_head.weight"] @ norm(outputs[-1], "norm")
    return whole


def test_eagle_3_heads_draft_as_their_authors_do(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head")
    decoder, drafter = tiny_decoder(), eagle3(folder, topk=2, nodes=6)
    assert drafter.spec.taps == (0, 1, 2)
    stage = Stage(drafter, decoder)
    v = view(text(12, 1), key=1)
    for _ in range(2):
        stage.show([v])
        found = paths_of(drafter.draft(want([v])))
        assert len(found) == 6 and {token for path in found for token in path} <= {*SMALL.tolist()}
        with torch.inference_mode():
            for path, score in found.items():
                log_q = eagle3_logits(folder, decoder, v.tokens, list(path[:-1])).log_softmax(0)
                assert score == pytest.approx(found.get(path[:-1], 0.0) + float(log_q[path[-1]]), abs=1e-6)
        grow(v, [3, 8])


def test_eagle_3_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head")
    with pytest.raises(CapabilityError, match="the target is not known when it is built"):
        EagleDrafter(EagleConfig(path="x"), load_head(folder))
    with pytest.raises(CapabilityError, match="inputs of layers 1, 2, 3, and the target has 2"):
        load_head(folder).taps(2)
    with pytest.raises(CapabilityError, match="neither trained on nor written"):
        EagleModel.load(folder)
    for wrong, message in (
        ({"d2t": SMALL}, "outside of the 96"),
        ({"d2t": -torch.arange(len(SMALL))}, "names a token twice"),
        ({"fc.weight": torch.ones(32, 64)}, "fc.weight is"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_head(write_eagle3(tmp_path / "wrong", **wrong))


@pytest.mark.parametrize("make", [lyanna, eagle])
def test_k_v_begins_where_states_do(make: Any) -> None:
    """Behind a prefix that was found in the cache; anew behind a hole; at the last states where nothing was drafted."""
    stage = Stage(make(past=8, nodes=6))
    v = view(text(30, 1), key=1)
    assert len(paths_of(stage.drafter.draft(want([v])))) == 0  # nothing is known of it yet
    stage.show([v], first=17)
    found = paths_of(stage.drafter.draft(want([v])))
    head = stage.logits(stage.steps(v, 17, [], 1))[0]
    bias = info_table(stage)[v.tokens[-1]] if make is lyanna else 0.0
    for path, score in found.items():
        if len(path) == 1:
            assert score == pytest.approx(float((head + bias).log_softmax(0)[path[0]]), abs=1e-8)
    assert len(paths_of(stage.drafter.draft(want([v])))) == 0  # not twice without a state in between
    grow(v, [4, 5])
    stage.known[1] += 1  # a state that nobody took
    stage.show([v])
    assert stage.drafter.body._open[1].start == 30
    assert len(paths_of(stage.drafter.draft(want([v])))) > 0
    for _ in range(700):
        v.tokens.append(3)
    stage.known[1] = 100
    stage.show([v])
    text_ = stage.drafter.body._open[1]
    assert text_.waiting == 8 and text_.seen == len(v.tokens) - 1
    assert len(paths_of(stage.drafter.draft(want([v])))) > 0


SHAPES: dict[str, Any] = {
    **{
        name: lambda shape=shape: lyanna(model=lyanna_model(**shape), nodes=9, extra=5)
        for name, shape in MODELS.items()
    },
    "point": lambda: lyanna(width=4, nodes=12, proposes="point"),
    "deep": lambda: lyanna(width=2, nodes=30, depth=6, extra=9),
    "eagle": lambda: eagle(topk=4, nodes=12, depth=4),
    "eagle chain": lambda: eagle(topk=1, nodes=5, depth=5),
    "eagle point": lambda: eagle(topk=3, nodes=7, depth=3, proposes="point"),
}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_one_compiled_call_grows_the_same_trees(name: str, dtype: torch.dtype) -> None:
    """Node for node what the parts do one by one: fresh and re-sampled, drawn and likeliest, of texts that rest."""
    decoder = tiny_decoder(dtype=dtype, compiled=True)
    whole, parts = Stage(SHAPES[name](), decoder), Stage(SHAPES[name](), decoder)
    assert whole.drafter.body.fuse is not None
    parts.drafter.body.fuse = None  # the long way, over the same layers
    draw, met, marks = random.Random(9), 0, set()
    rules = [{}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}]
    views = [[view(text(n, n), key=n, **own) for n, own in zip((2, 19, 40), rules, strict=True)] for _ in range(2)]
    for step in range(10):
        present = [i for i in range(3) if step % 3 or draw.random() < 0.7] or [0]
        trees = []
        budgets, depths = [draw.choice([0, 3, 64, 64]) for _ in present], [draw.choice([1, 9, 9]) for _ in present]
        for stage, own in zip((whole, parts), views, strict=True):
            stage.show([own[i] for i in present])
            request = want([own[i] for i in present], budgets, depths)
            trees.append((stage.drafter.draft(request), request.passes))
        (found, passes), (wanted, others) = trees
        assert passes == others
        for b in range(len(present)):
            assert paths_of(found, b) == pytest.approx(paths_of(wanted, b), rel=1e-4, abs=1e-4)
            assert sorted(found[b].marks) == sorted(wanted[b].marks)
        met += max(map(len, found)) > 2
        marks |= {mark for tree in found for mark in tree.marks}
        for i in present:
            tokens = draw.choices(range(VOCAB), k=draw.choice([1, 1, 1, 2, 4]))
            for own in views:
                grow(own[i], tokens)
        whole.drafter.body.pool.check_integrity()
    assert met > 2 and (1 in marks) == (whole.drafter.spec.name == "lyanna")


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    config = tiny_config(d_model=48, num_heads=6, num_kv_heads=2)
    wide, other = tiny_decoder(config).info("wide"), tiny_decoder(tiny_config(vocab_size=80)).info("other")
    for drafter in (lyanna(), eagle()):
        with pytest.raises(CapabilityError, match="d_model=32, wide has 48"):
            drafter.bind(wide, 1, 100, CPU)
        with pytest.raises(CapabilityError, match="vocab_size=96, other has 80"):
            drafter.bind(other, 1, 100, CPU)
    marked = lyanna_model(tokenizer="0" * 64)
    info = replace(tiny_decoder().info("tiny"), tokenizer=Pieces())
    with pytest.raises(CapabilityError, match="its tokenizer differs from tiny's"):
        lyanna(model=marked).bind(info, 1, 100, CPU)
    strange = eagle_model()
    strange.embedding = torch.zeros(VOCAB, 32)
    with pytest.raises(CapabilityError, match="its embedding is not the one of tiny"):
        eagle(model=strange).bind(tiny_decoder().info("tiny"), 1, 100, CPU)


class Pieces:
    """A tokenizer, as far as marks go."""

    def get_vocab(self) -> dict[str, int]:
        return {f"p{i}": i for i in range(VOCAB)}


@pytest.mark.parametrize("kind", [LyannaConfig, EagleConfig])
def test_a_target_with_other_weights_is_refused_when_it_is_named(kind: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    target, folder = tmp_path / "target", tmp_path / "head"
    target.mkdir()
    (target / "config.json").write_text("{}")
    save_file({"x": torch.ones(3)}, target / "model.safetensors")
    context = DrafterContext(target="tiny", target_folder=target)
    if kind is LyannaConfig:
        lyanna_model(fingerprint="1" * 64, target="first").save(folder)
    else:
        made = eagle_model()
        made.facts = replace(made.facts, fingerprint="1" * 64, target="first")
        made.save(folder)
    with pytest.raises(CapabilityError, match="trained for first, whose weights differ from those of tiny"):
        kind(path=str(folder)).build(context)
    built = kind(path=str(folder)).build(replace(context, target_folder=None))
    assert built.spec.taps == (-1,) and built.spec.network
    with pytest.raises(ConfigError, match="there is no such folder"):
        kind(path=str(tmp_path / "none")).build(context)
