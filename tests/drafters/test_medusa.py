"""Medusa: static trees by hit rates, heads in both forms, and drafts from the state in front of the root."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.draft import view, want
from kits.medusa import HEADS, medusa, random_heads, states
from kits.native import needs_kernels
from kits.tiny import tiny_config, tiny_decoder
from safetensors.torch import save_file

from paceline.core.errors import CapabilityError, ConfigError
from paceline.draft.base import StepFeatures
from paceline.draft.levels import best_levels
from paceline.draft.medusa import MedusaConfig, MedusaDrafter
from paceline.draft.medusa.drafter import HeadPass, static_trees
from paceline.draft.medusa.heads import Heads, load
from paceline.model.decoder import Decoder

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quant": "int8", "exact": True},
}
CONFIG = tiny_config(head_dim=16)
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9]]


@pytest.mark.parametrize("nodes", [1, 5, 12, 40])
def test_static_trees_are_those_with_the_best_products_of_hit_rates(nodes: int):
    rates = [[0.6, 0.2, 0.05], [0.5, 0.1, 0.1], [0.4, 0.3, 0.01]]
    for depth, tree in enumerate(static_trees(rates, nodes), start=1):
        every = sorted(
            (math.prod(rates[i][rank] for i, rank in enumerate(path)), path)
            for levels in range(1, depth + 1)
            for path in itertools.product(range(3), repeat=levels)
        )
        paths: list[tuple[int, ...]] = [()]
        for rank, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*paths[parent], rank))
        products = [math.prod(rates[i][rank] for i, rank in enumerate(path)) for path in paths[1:]]
        assert len({*paths}) == len(paths) == 1 + min(nodes, len(every))
        assert products == sorted(products, reverse=True)
        best = sorted((product for product, _ in every), reverse=True)[: len(products)]
        assert products == pytest.approx(best)


def decoder_of(kind: str, compiled: bool = True) -> Decoder:
    return tiny_decoder(CONFIG, **KINDS[kind], compiled=compiled)


@pytest.mark.parametrize("own", [False, True])
def test_head_j_is_the_formula(own: bool):
    decoder, heads = tiny_decoder(CONFIG), random_heads(CONFIG, own=own)
    raw = states(decoder, PROMPTS[1])[-1]
    x = decoder.handle().final(raw)
    found = HeadPass(heads, decoder.handle(), HEADS).logits(raw)
    assert heads.weight is not None
    shared = decoder.head_product
    for j in range(HEADS):
        inner = x @ heads.weight[j].T + heads.bias[j]
        made = x + inner * inner.sigmoid()
        right = shared(made) if heads.own is None else made @ heads.own[j].T
        assert torch.allclose(found[:, j], right, atol=1e-9)
        assert torch.allclose(heads(x)[:, j], made)


@needs_kernels
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("proposes", "rules"), [("point", {}), ("coupled", {"temperature": 1.1, "top_k": 9, "top_p": 0.8})]
)
def test_the_compiled_call_says_what_its_parts_say(kind: str, own: bool, proposes: Any, rules: dict[str, Any]):
    decoder = decoder_of(kind)
    drafter = medusa(random_heads(CONFIG, own=own), decoder.dtype, proposes=proposes)
    drafter.bind(decoder.info("tiny"), 8, 100, torch.device("cpu"))
    assert drafter._pass is not None and drafter._pass.native is not None
    views = [view(prompt, key, seed=key, **rules) for key, prompt in enumerate(PROMPTS)]
    for seen in views:
        shown = states(decoder, seen.tokens[:-1] or [3])[-1]
        seen.tokens[:] = seen.tokens if len(seen.tokens) > 1 else [3, *seen.tokens]
        drafter.observe(StepFeatures([seen], [[]], {-1: shown}, [slice(0, len(shown))], [0]))

    def levels(some: list[Any]) -> list[Any]:
        return best_levels([*zip(some, drafter._said(some), strict=True)], drafter._k, proposes == "coupled")

    together = levels(views)
    alone = [levels([seen])[0] for seen in views]
    assert together == alone  # the rows of others change no bit
    drafter._pass.native = None
    for (tokens, log_q), (right, scores) in zip(together, levels(views), strict=True):
        assert tokens == right
        assert torch.allclose(torch.tensor(log_q), torch.tensor(scores), atol=1e-4, equal_nan=True)


def told(drafter: MedusaDrafter, seen: Any, first: int, count: int) -> None:
    values = torch.arange(first, first + count, dtype=torch.float64)[:, None].expand(-1, CONFIG.d_model)
    drafter.observe(StepFeatures([seen], [[]], {-1: values}, [slice(0, count)], [first]))


def bound(**options: Any) -> MedusaDrafter:
    drafter = medusa(random_heads(CONFIG), **options)
    drafter.bind(tiny_decoder(CONFIG).info("tiny"), 8, 100, torch.device("cpu"))
    return drafter


def test_only_the_state_in_front_of_the_root_is_drafted_from():
    drafter, seen = bound(), view(PROMPTS[0])
    last = len(seen.tokens) - 1  # the root, which has no state yet

    def nodes() -> int:
        request = want([seen])
        count = len(drafter.draft(request)[0])
        assert request.passes == (count > 0)
        return count

    assert nodes() == 0  # nothing was seen
    told(drafter, seen, 0, last - 1)
    assert nodes() == 0  # in mid-prompt
    told(drafter, seen, last - 1, 1)
    assert nodes() == 24
    seen.tokens.append(5)
    assert nodes() == 0  # a pass without states lay in between
    told(drafter, seen, last, 1)
    assert nodes() == 24
    told(drafter, seen, last + 1, 0)
    assert nodes() == 0 and not drafter._last
    told(drafter, seen, last, 1)
    drafter.release([seen.key])
    assert nodes() == 0


def published(folder: Path, heads: Heads, pickled: bool, prefix: str = "", blocks: int = 1) -> Path:
    """As the Medusa repository saves heads."""
    assert heads.weight is not None and heads.own is not None
    values = {}
    for j in range(heads.config.heads):
        for block in range(blocks):
            values[f"{prefix}{j}.{block}.linear.weight"] = heads.weight[j].half().contiguous()
            values[f"{prefix}{j}.{block}.linear.bias"] = heads.bias[j].half().contiguous()
        values[f"{prefix}{j}.{blocks}.weight"] = heads.own[j].half().contiguous()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}))
    if pickled:
        torch.save(values, folder / "medusa_lm_head.pt")
    else:
        save_file(values, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.parametrize(("pickled", "prefix"), [(True, ""), (False, "medusa_head.")])
def test_published_heads_are_read(tmp_path: Path, pickled: bool, prefix: str):
    heads = random_heads(CONFIG, own=True)
    found = load(published(tmp_path / "heads", heads, pickled, prefix), torch.float64)
    assert found.config == replace(heads.config, target="lmsys/vicuna-7b-v1.3")
    for name, value in heads.named_parameters():
        assert torch.equal(found.get_parameter(name), value.half().double())
    drafter = MedusaDrafter(MedusaConfig(path="x"), found)
    assert drafter.spec.default_budget == 24


def test_what_are_no_heads_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds neither"):
        load(tmp_path, torch.float32)
    torch.save(
        {"0.0.linear.weight": torch.zeros(4, 4), "0.1.weight": torch.zeros(9, 4)}, tmp_path / "medusa_lm_head.pt"
    )
    with pytest.raises(ConfigError, match=r"0\.0\.linear\.bias is missing"):
        load(tmp_path, torch.float32)
    torch.save({"model.weight": torch.zeros(4, 4)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="a tensor called"):
        load(tmp_path, torch.float32)
    torch.save([print], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="not tensors alone"):
        load(tmp_path, torch.float32)
    several = published(tmp_path / "several", random_heads(CONFIG, own=True), True, blocks=2)
    with pytest.raises(CapabilityError, match="several blocks"):
        load(several, torch.float32)
