"""Stretched models: the tokens of the model that they are made of, at the price of more layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.native import MISSING
from kits.tiny import (
    assemble,
    draft_model,
    full_logits,
    run,
    streams,
    tiny_adapters,
    tiny_application,
    tiny_config,
    tiny_decoder,
    tiny_streams,
)
from torch import Tensor

from paceline import LLM, ConfigError, SamplingParams, zoo
from paceline.core.model_spec import ModelSpec, parse_model
from paceline.drafters.ngram import NgramConfig
from paceline.engine import calibration
from paceline.network.adapters import LINEARS, AdapterConfig
from paceline.network.base import Taps
from paceline.network.decoder import Decoder
from paceline.network.loader import load_model, resolve_folder
from paceline.network.native_linear import NativeLinear
from paceline.network.streams import StreamSet

TIMES = 3
KINDS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quant": "int8"},
    "compiled float32": {"dtype": torch.float32, "compiled": True},
    "compiled bfloat16": {"dtype": torch.bfloat16, "compiled": True},
    "compiled int8": {"dtype": torch.bfloat16, "quant": "int8", "compiled": True, "exact": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms and biases": {"qk_norm": True, **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)},
}
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9], [*range(9, 90)]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)


@cache
def decoder_of(kind: str, times: int = 1, shape: str = "plain") -> Decoder:
    if KINDS[kind].get("compiled") and MISSING:
        pytest.skip(MISSING)
    return tiny_decoder(replace(tiny_config(**SHAPES[shape]), stretch=times), **KINDS[kind])


def answers(decoder: Decoder, drafter: Any = None, **options: Any) -> list[tuple[list[int], int, int, int]]:
    """Ids, passes, drafted and accepted tokens of every prompt, greedy and sampled."""
    names = options.pop("named", None)
    engine = assemble(drafter, decoder=decoder, max_model_len=200, **options)
    asked = [(prompt, params) for params in (GREEDY, SAMPLED) for prompt in PROMPTS]
    outputs = run(engine, asked, names and [names[i % len(names)] for i in range(len(asked))])
    assert engine.round.failure is None
    return [(o.outputs[0].token_ids, o.stats.passes, o.stats.drafted, o.stats.accepted) for o in outputs]


# -- the same tokens


@pytest.mark.parametrize("shape", SHAPES)
@each_kind
def test_the_logits_are_the_model_s(kind: str, shape: str) -> None:
    tokens = [*range(5, 60)]
    own, stretched = (full_logits(decoder_of(kind, times, shape), tokens) for times in (1, TIMES))
    assert torch.equal(own, stretched) and own.std() > 0.1


@each_kind
def test_greedy_and_sampled_ids_are_the_model_s(kind: str) -> None:
    own, stretched = (answers(decoder_of(kind, times), NgramConfig(), budget=4) for times in (1, TIMES))
    assert own == stretched
    assert len({tuple(ids) for ids, *_ in own}) > len(PROMPTS) and sum(accepted for *_, accepted in own) > 0


@each_kind
def test_layers_that_add_something_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail."""
    fill = Decoder._fill_added

    def wrong(decoder: Decoder) -> None:
        fill(decoder)
        for layer in decoder.added:
            layer.out.weight.data[0] = 0.1

    monkeypatch.setattr(Decoder, "_fill_added", wrong)
    if KINDS[kind].get("compiled") and MISSING:
        pytest.skip(MISSING)
    other = tiny_decoder(replace(tiny_config(), stretch=2), **KINDS[kind])
    assert not torch.equal(full_logits(other, [*range(5, 60)]), full_logits(decoder_of(kind), [*range(5, 60)]))


# -- at the price of more layers


@each_kind
def test_added_layers_have_weights_and_keys_of_their_own(kind: str) -> None:
    own, stretched = decoder_of(kind), decoder_of(kind, TIMES)
    assert stretched.num_layers == own.num_layers == 3 and stretched.config.depth == 9
    head = own.config.vocab_size * own.config.d_model * (1 if own.quant else own.dtype.itemsize)
    assert stretched.pass_bytes - head == TIMES * (own.pass_bytes - head)
    layers = [getattr(layer, name, None) for layer in stretched.in_order() for name in LINEARS]
    products = [*layers, stretched.head_product] if stretched.stack is None else stretched.stack.weights.products
    assert len(products) == 9 * 4 + 1 and len({_address(product) for product in products}) == len(products)
    keys = _cache(stretched, [*range(5, 60)])
    assert len(keys) == 9
    for index in range(3):
        first, *added = keys[index * TIMES : (index + 1) * TIMES]
        assert torch.equal(added[0], added[1])  # they read the same state with the same weights
        assert not torch.equal(first, added[0]) and (added[0] != 0).any()


def _address(product: Any) -> int:
    """Where a product's weight lies."""
    inner = getattr(product, "inner", product)
    if isinstance(inner, NativeLinear):
        return inner.packed.data_ptr()
    weight = inner.packed if hasattr(inner, "packed") else inner.weight
    return id(weight) if weight.is_mkldnn else weight.data_ptr()


@torch.inference_mode()
def _cache(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """K of every layer after a pass over the tokens."""
    engine = assemble(decoder=decoder, max_model_len=200)
    run(engine, [(tokens, replace(GREEDY, max_tokens=1))])
    return [part[:, 16 : len(tokens)] for part in engine.pool.k]


def test_the_pool_and_its_memory_count_every_layer() -> None:
    own, stretched = decoder_of("float32"), decoder_of("float32", TIMES)
    assert stretched.cache_shape == (9, *own.cache_shape[1:])
    assert len(assemble(decoder=stretched).pool.k) == 9


def test_costs_that_were_measured_for_the_model_are_not_taken() -> None:
    mine, theirs = (calibration.fingerprint(decoder_of("float32", times), "torch") for times in (1, TIMES))
    assert mine != theirs and any("stretch" in said for said in mine.differs(theirs))


# -- what belongs to the model's layers


@each_kind
@pytest.mark.parametrize("layer", [0, 1, 2, -1])
def test_a_tap_names_a_layer_of_the_model(kind: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for times in (1, TIMES):
        decoder, taps = decoder_of(kind, times), Taps((layer,))
        monkeypatch.setattr(decoder, "run_layers", partial(_tapped, decoder.run_layers, taps))
        full_logits(decoder, [*range(5, 40)])
        found.append(taps.hidden[layer])
    assert torch.equal(*found)


def _tapped(run_layers: Any, taps: Taps, *given: Any) -> Any:
    return run_layers(*given, taps)


def trained(kind: str, **options: Any) -> StreamSet:
    dtype = KINDS[kind]["dtype"]
    return tiny_streams(dtype=dtype, layers=2, adapter=AdapterConfig(rank=4, layers=(1, 2)), **options)


@each_kind
@pytest.mark.parametrize("at", ["frontier", "nodes"])
def test_streams_draft_what_they_draft_on_the_model(kind: str, at: str) -> None:
    found = []
    for times in (1, TIMES):
        drafter = streams(trained=trained(kind), k=8, nodes=8, at=at)
        found.append(answers(decoder_of(kind, times), drafter, budget=8))
    assert found[0] == found[1] and sum(accepted for *_, accepted in found[0]) > 5
    assert [ids for ids, *_ in found[0]] == [ids for ids, *_ in answers(decoder_of(kind))]


@pytest.mark.parametrize("kind", ["float32", "compiled float32"])
def test_pruned_trees_are_those_of_the_model(kind: str) -> None:
    options = {"k": 3, "nodes": 12, "prune_count": 4}
    found = [
        answers(decoder_of(kind, times), streams(trained=trained(kind), **options), budget=12) for times in (1, TIMES)
    ]
    assert found[0] == found[1] and sum(accepted for *_, accepted in found[0]) > 0


@each_kind
def test_applications_answer_as_on_the_model(kind: str) -> None:
    """Adapters alone, and a shared set whose main rows attend to their streams."""
    found, dtype = [], KINDS[kind]["dtype"]
    for times in (1, TIMES):
        decoder = decoder_of(kind, times)
        sets = {"adapters": tiny_adapters(dtype=dtype), "shared": trained(kind, mode="shared")}
        applications = [tiny_application(name, decoder, made) for name, made in sets.items()]
        drafter = streams(trained=trained(kind), k=3, nodes=6)
        named = [None, "adapters", "shared"]
        found.append(answers(decoder, drafter, budget=6, applications=applications, named=named))
    assert found[0] == found[1]
    assert [ids for ids, *_ in found[0]] != [ids for ids, *_ in answers(decoder_of(kind))]


def test_a_draft_model_drafts_for_it() -> None:
    found = [answers(decoder_of("float32", times), draft_model(target={"dtype": torch.float32})) for times in (1, 2)]
    assert found[0] == found[1] and sum(accepted for *_, accepted in found[0]) > 20


# -- by name


def test_a_name_says_how_far() -> None:
    assert parse_model("paceline-small") == ModelSpec("paceline-small")
    spec = parse_model("stretch:a/b, c,times=12")
    assert spec == ModelSpec("a/b, c", 12) and parse_model(spec.text) == spec
    assert spec.label == "a/b, c, stretched 12x" and ModelSpec("x").label == ModelSpec("x").text == "x"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("stretch:paceline-small", "does not end in ,times=N"),
        ("stretch:paceline-small;times=8", "does not end in ,times=N"),
        ("stretch:paceline-small,8", "does not end in ,times=N"),
        ("stretch:paceline-small,time=8", "does not end in ,times=N"),
        ("stretch:,times=8", "names no model"),
        ("stretch:paceline-small,times=", "is no whole number"),
        ("stretch:paceline-small,times=2.5", "is no whole number"),
        ("stretch:paceline-small,times=-2", "is no whole number"),
        ("stretch:paceline-small,times=٣", "is no whole number"),
        ("stretch:paceline-small,times=99999999999", "is no whole number"),
        ("stretch:paceline-small,times=1", "times=1 is not 2 to 1024"),
        ("stretch:paceline-small,times=0", "times=0 is not 2 to 1024"),
        ("stretch:paceline-small,times=4096", "times=4096 is not 2 to 1024"),
        ("stretch:stretch:paceline-small,times=2,times=4", "is stretched already"),
        ("stretch:no-such-model-here,times=2", "no-such-model-here"),
    ],
)
def test_names_that_cannot_be_say_what_to_do(name: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(name, offline=True)
    assert wrong in str(error.value) and (name in str(error.value) or wrong in name) and error.value.remedy


def test_it_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="a stretched model is no folder"):
        resolve_folder("stretch:paceline-small,times=2")
    with pytest.raises(ConfigError, match="a stretched model is no folder"):
        LLM("paceline-small", drafter="streams:stretch:paceline-small-streams", offline=True)


def test_one_that_is_too_deep_for_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parameters take .* GiB"):
        load_model(zoo.find("paceline-small") or tmp_path, attention=None, stretch=10**6)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of 110592 bytes"):
        LLM("stretch:paceline-small,times=6", dtype="bfloat16", kv_memory="1MiB")


def test_an_embedded_model_with_its_own_drafter() -> None:
    name = "stretch:paceline-small,times=2"
    assert zoo.default_drafter(name) == zoo.default_drafter("paceline-small") is not None
    prompts = ["Once upon a time", "def add(a, b):"]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    found = {}
    for model in ("paceline-small", name):
        for drafter in (zoo.default_drafter(name), "streams:paceline-small-streams"):
            llm = LLM(model, drafter=drafter, budget=4, dtype="bfloat16", max_model_len=256, max_sequences=2)
            outputs = llm.generate(prompts, params)
            found[model, drafter] = [(o.outputs[0].token_ids, o.stats.drafted, o.stats.accepted) for o in outputs]
    for drafter in (zoo.default_drafter(name), "streams:paceline-small-streams"):
        assert found["paceline-small", drafter] == found[name, drafter]
    assert llm.decoder.config.stretch == 2 and len(llm.engine.pool.k) == 2 * llm.decoder.num_layers
