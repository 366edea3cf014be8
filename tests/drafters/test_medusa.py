"""Medusa: static trees by hit rates, heads in both forms, and drafts from the state in front of the root."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.draft import view, want
from kits.medusa import HEADS, medusa, random_heads, states, taught_heads
from kits.native import needs_kernels
from kits.tiny import assemble, run, streams, tiny_config, tiny_decoder, tiny_streams
from safetensors.torch import save_file

from paceline import LLM, native
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.drafters.base import DrafterSpec, StepFeatures
from paceline.drafters.hybrid import Hybrid, HybridConfig
from paceline.drafters.levels import best_levels
from paceline.drafters.medusa import MedusaConfig, MedusaDrafter
from paceline.drafters.medusa.drafter import HeadPass, filled, static_trees
from paceline.drafters.medusa.heads import CONFIG_FILE, WEIGHTS_FILE, Heads, HeadsConfig, load
from paceline.drafters.registry import DrafterContext
from paceline.drafters.suffix import SuffixConfig
from paceline.engine.budget import DraftBudget
from paceline.network.decoder import Decoder
from paceline.network.native_drafts import NativeHeads

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quant": "int8", "exact": True},
}
CONFIG = tiny_config(head_dim=16)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9]]
FOLDER = "paceline-small"


# -- the static tree


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


def test_a_tree_is_filled_with_the_tokens_of_the_moment_and_their_own_scores():
    (tree,) = static_trees([[0.6, 0.2]], 2)
    assert (tree.tokens, tree.parents) == ([0, 1], [0, 0])
    tree = static_trees([[0.6, 0.2], [0.5, 0.3]], 6)[1]
    levels = [[7, 8], [17, 18]], [[-0.1, -3.0], [-0.5, -math.inf]]
    made = filled(tree, *levels, 9)
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for token, parent, score in zip(made.tokens, made.parents, made.log_scores, strict=True):
        paths[*[*paths][parent], token] = score
    assert paths == {(): 0.0, (7,): -0.1, (7, 17): pytest.approx(-0.6), (8,): -3.0, (8, 17): -3.5}  # 18 is forbidden
    assert len(filled(tree, *levels, 2)) == 2


def test_hit_rates_never_rise_and_are_guessed_where_none_are_known():
    shape = {"heads": 2, "d_model": 8, "vocab_size": 9}
    known = HeadsConfig(**shape, accuracies=((0.5, 0.6, 0.0), (0.3, 0.2, 0.1)))
    assert known.hit_rates(2) == [[0.5, 0.5], [0.3, 0.2]] and known.hit_rates(9)[0] == [0.5, 0.5, 1e-6]
    guessed = HeadsConfig(**shape).hit_rates(3)
    assert [len(row) for row in guessed] == [3, 3]
    assert all(a > b for row in guessed for a, b in itertools.pairwise(row)) and guessed[0][0] > guessed[1][0]


# -- the heads


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


def test_two_narrow_matrices_are_one():
    heads = random_heads(CONFIG, rank=5)
    x = torch.randn(4, CONFIG.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inner = (x @ heads.matrices().T).unflatten(1, (HEADS, -1)) + heads.bias
    assert torch.allclose(heads(x), x[:, None] + inner * inner.sigmoid())
    assert heads.down is not None and heads.matrices().shape == (HEADS * CONFIG.d_model, CONFIG.d_model)


@needs_kernels
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("proposes", ["point", "coupled"])
@pytest.mark.parametrize(
    "rules", [{}, {"temperature": 0.8}, {"temperature": 1.1, "top_k": 9, "top_p": 0.8}], ids=["greedy", "warm", "cut"]
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
        drafter.observe(StepFeatures([seen], [[]], [0], [[]], {-1: shown}, [slice(0, len(shown))], [0]))

    def levels(some: list[Any]) -> list[Any]:
        return best_levels([*zip(some, drafter._said(some), strict=True)], drafter._k, proposes == "coupled")

    together = levels(views)
    alone = [levels([seen])[0] for seen in views]
    assert together == alone  # the rows of others change no bit
    drafter._pass.native = None
    for (tokens, log_q), (right, scores) in zip(together, levels(views), strict=True):
        assert tokens == right
        assert torch.allclose(torch.tensor(log_q), torch.tensor(scores), atol=1e-4, equal_nan=True)


# -- the drafter


def told(drafter: MedusaDrafter, seen: Any, first: int, count: int) -> None:
    values = torch.arange(first, first + count, dtype=torch.float64)[:, None].expand(-1, CONFIG.d_model)
    drafter.observe(StepFeatures([seen], [[]], [0], [[]], {-1: values}, [slice(0, count)], [first]))


def bound(**options: Any) -> MedusaDrafter:
    drafter = medusa(random_heads(CONFIG), **options)
    drafter.bind(tiny_decoder(CONFIG).info("tiny"), 8, 100, torch.device("cpu"))
    return drafter


def test_only_the_state_in_front_of_the_root_is_drafted_from():
    drafter, seen = bound(), view(PROMPTS[0])
    last = len(seen.tokens) - 1  # the root, which has no state yet

    def nodes() -> int:
        request = want([seen])
        count = drafter.propose(request).counts[0] - 1
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


def test_budgets_and_depths_are_kept():
    drafter, views = bound(nodes=30), [view(PROMPTS[0], key) for key in range(6)]
    for seen in views[:-1]:
        told(drafter, seen, 0, len(seen.tokens) - 1)
    tree = drafter.propose(want(views, [0, 1, 7, 99, 99, 99], [9, 9, 2, 1, 9, 9]))
    counts, depths = tree.counts, tree.depths()
    assert counts == [1, 2, 8, 11, 31, 1]  # of the 4th, the ten tokens of the first head
    assert [max(row) for row in depths] == [0, 1, 2, 1, 3, 0]
    assert drafter.spec == DrafterSpec(
        name="medusa",
        taps=(-1,),
        network=True,
        level_logits=True,
        proposes="coupled",
        default_budget=30,
        tree=True,
    )


def test_a_chain_and_fewer_heads():
    chain = bound(topk=1)
    assert (chain.spec.default_budget, chain.spec.tree) == (HEADS, False)
    assert max(map(max, bound(depth=2).propose(want([view([3, 4])])).depths())) == 0
    assert len(bound(depth=2).trees) == 2
    with pytest.raises(ConfigError, match="more than the 3 heads"):
        bound(depth=4)


# -- in the engine


@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_kernels) for k in KINDS])
@pytest.mark.parametrize("options", [{}, {"topk": 1}, {"proposes": "point"}], ids=str)
def test_compiled_answers_are_plain_ones(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """In a tight pool, in chunks, with prefix hits; drafts are accepted, and come from one compiled call a step."""
    calls: list[int] = []
    best = NativeHeads.best
    monkeypatch.setattr(NativeHeads, "best", lambda *a, **o: calls.append(len(a[1])) or best(*a, **o))
    decoder, jobs = decoder_of(kind), [(prompt, rule) for prompt in PROMPTS for rule in (GREEDY, WARM)]
    drafter = medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))), decoder.dtype, **options)
    tight = {"max_batch_rows": 60, "max_sequences": 5, "kv_tokens": 144, "block_size": 4}
    engine = assemble(drafter, decoder=decoder, **tight)
    outputs = [*run(engine, jobs), *run(engine, jobs)]
    assert engine.round.failure is None  # type: ignore[attr-defined]
    right = [run(assemble(decoder=decoder), [job])[0].outputs[0].token_ids for job in jobs]
    assert [o.outputs[0].token_ids for o in outputs] == right * 2
    for name in ("preemptions", "cached_prompt_tokens"):
        assert any(getattr(o.stats, name) for o in outputs), name
    assert sum(o.stats.accepted for o in outputs) > 15 and max(calls) > 1
    assert not drafter._last


class Pulse(DraftBudget):
    """No drafts for three steps, then drafts for two."""

    def __init__(self) -> None:
        self.steps = 0

    def plan(self, sequences: Sequence[Any], batch_size: int) -> list[int]:
        self.steps += 1
        return [6 if self.steps % 5 > 2 else 0] * len(sequences)


def test_drafts_go_on_at_once_after_a_rest(monkeypatch: pytest.MonkeyPatch):
    """States are taken while nothing is drafted: the first step after a rest has those that it needs."""
    heads = taught_heads(CONFIG, tuple(map(tuple, PROMPTS)))
    drafter, decoder = medusa(heads), tiny_decoder(CONFIG)
    engine = assemble(drafter, decoder=decoder)
    budget: Any = Pulse()
    engine.budget = engine.scheduler.budget = budget
    proposed: list[tuple[int, int]] = []
    propose = drafter.propose

    def watched(request: Any) -> Any:
        tree = propose(request)
        proposed.extend((budget.steps, count) for count in tree.counts)
        return tree

    monkeypatch.setattr(drafter, "propose", watched)
    outputs = run(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    right = [run(assemble(decoder=decoder), [(prompt, GREEDY)])[0].outputs[0].token_ids for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in outputs] == right
    assert {step % 5 for step, _ in proposed} == {3, 4} and all(count > 1 for _, count in proposed)
    assert sum(o.stats.accepted for o in outputs) > 5


def test_it_is_a_part_of_a_hybrid_like_others():
    decoder = tiny_decoder(CONFIG)
    parts = [SuffixConfig(depth=6).build(DrafterContext()), medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))))]
    hybrid = Hybrid(HybridConfig(parts="suffix+medusa:tiny"), parts)
    assert (hybrid.spec.taps, hybrid.spec.past, hybrid.spec.network, hybrid.spec.level_logits) == (
        (-1,),
        0,
        True,
        False,
    )
    jobs = [(prompt, rule) for prompt in PROMPTS for rule in (GREEDY, WARM)]
    engine = assemble(hybrid, decoder=decoder)
    outputs = run(engine, jobs)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    right = [o.outputs[0].token_ids for o in run(assemble(decoder=decoder), jobs)]
    assert [o.outputs[0].token_ids for o in outputs] == right
    assert sum(o.stats.sources["medusa"].accepted for o in outputs) > 5


@pytest.mark.parametrize("way", ["float64", "compiled", "part by part"])
@pytest.mark.parametrize("at", ["frontier", "nodes"])
def test_it_drafts_beside_streams_in_the_targets_own_pass(way: str, at: Any, monkeypatch: pytest.MonkeyPatch):
    """Whichever way the pass runs, the states shown are those of the tokens in front of the roots."""
    compiled = way != "float64"
    if compiled and native.unavailable():
        pytest.skip("no compiled kernels")
    dtype = torch.float32 if compiled else torch.float64
    decoder = tiny_decoder(CONFIG, dtype=dtype, compiled=compiled)
    trained = tiny_streams(CONFIG, dtype=dtype, layers=1)
    heads = medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))), dtype, nodes=6)
    beside = streams(trained=trained, k=4, nodes=8, at=at)
    hybrid = Hybrid(HybridConfig(parts="medusa:tiny+streams:tiny"), [heads, beside])
    shown: dict[tuple[int, int], torch.Tensor] = {}
    observe = heads.observe

    def watched(step: StepFeatures) -> None:
        for b, rows in enumerate(step.hidden_rows):
            for i in range(rows.start, rows.stop):
                shown[step.sequences[b].key, step.first[b] + i - rows.start] = step.hidden[-1][i]
        observe(step)

    monkeypatch.setattr(heads, "observe", watched)
    engine = assemble(hybrid, decoder=decoder, max_batch_rows=40)
    engine.round.compiled = way == "compiled"  # type: ignore[attr-defined]
    jobs = [(prompt, rule) for prompt in PROMPTS for rule in (GREEDY, WARM)]
    outputs = run(engine, jobs)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    right = [run(assemble(decoder=decoder), [job])[0].outputs[0].token_ids for job in jobs]
    assert [o.outputs[0].token_ids for o in outputs] == right
    sources = [o.stats.sources for o in outputs]
    assert sum(own["medusa"].accepted for own in sources if "medusa" in own) > 5
    assert sum(own["streams"].drafted for own in sources if "streams" in own) > 5
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    whole = [states(decoder, text)[-1] for text in texts]
    assert len(shown) > 8 * 20
    for (key, position), state in shown.items():
        assert torch.allclose(state, whole[key][position], atol=1e-9 if way == "float64" else 1e-6)


# -- files


def saved(folder: Path, heads: Heads | None = None, **changes: Any) -> Path:
    heads = heads or random_heads(CONFIG, size=0.5)
    heads.config = replace(heads.config, **changes)
    heads.save(folder, torch.float32)
    return folder


def test_what_was_saved_is_loaded(tmp_path: Path):
    for rank in (0, 5):
        heads = random_heads(CONFIG, rank=rank, accuracies=((0.5, 0.2),) * HEADS, target="tiny", fingerprint="ab")
        found = load(saved(tmp_path / str(rank), heads), torch.float32)
        assert found.config == heads.config
        assert all(torch.equal(a, b.float()) for a, b in zip(found.parameters(), heads.parameters(), strict=True))
        assert not any(parameter.requires_grad for parameter in found.parameters())


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


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_are_read(tmp_path: Path, pickled: bool, prefix: str):
    heads = random_heads(CONFIG, own=True)
    found = load(published(tmp_path / "heads", heads, pickled, prefix), torch.float64)
    assert found.config == replace(heads.config, target="lmsys/vicuna-7b-v1.3")
    for name, value in heads.named_parameters():
        assert torch.equal(found.get_parameter(name), value.half().double())
    drafter = MedusaDrafter(MedusaConfig(path="x"), found)
    assert drafter.spec.default_budget == 24


def _broken(place: Path, what: str) -> None:
    config = json.loads((place / CONFIG_FILE).read_text())
    if what == "no weights":
        (place / WEIGHTS_FILE).unlink()
    elif what == "no JSON":
        (place / CONFIG_FILE).write_text("{")
    elif what == "a list":
        (place / CONFIG_FILE).write_text("[1]")
    elif what == "truncated":
        data = (place / WEIGHTS_FILE).read_bytes()
        (place / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])
    else:
        changes: dict[str, dict[str, Any]] = {
            "format": {"format": 9},
            "unknown": {"colour": 1},
            "heads": {"heads": 4},
            "text": {"heads": "3"},
            "width": {"d_model": 48},
            "rates": {"accuracies": [[0.5]]},
            "rate": {"accuracies": [[2.0]] * HEADS},
            "words": {"accuracies": [["a"]] * HEADS},
            "number": {"accuracies": 3},
            "rank": {"rank": 99},
        }
        (place / CONFIG_FILE).write_text(json.dumps(config | changes[what]))


@pytest.mark.parametrize(
    "what",
    ["no weights", "no JSON", "a list", "truncated", "format", "unknown", "heads", "text", "width", "rates", "rate"]
    + ["words", "number", "rank"],
)
def test_broken_folders_are_refused(tmp_path: Path, what: str):
    _broken(saved(tmp_path), what)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, torch.float32)
    assert len(str(caught.value)) < 600


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


def test_nan_is_no_weight(tmp_path: Path):
    heads = random_heads(CONFIG)
    heads.bias.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match="bias holds NaN"):
        load(saved(tmp_path, heads), torch.float32)


@pytest.mark.parametrize(("change", "words"), [({"d_model": 48}, "d_model=48"), ({"vocab_size": 99}, "vocab_size=99")])
def test_heads_of_another_target_are_refused_at_start_up(change: dict[str, int], words: str):
    drafter = medusa(random_heads(CONFIG, own=True, **change))
    with pytest.raises(CapabilityError, match=words):
        drafter.bind(tiny_decoder(CONFIG).info("tiny"), 4, 100, torch.device("cpu"))


def test_an_llm_drafts_with_heads_and_refuses_those_of_other_weights(tmp_path: Path):
    shape = {"heads": 2, "d_model": 384, "vocab_size": 8192}
    Heads.fresh(HeadsConfig(**shape, target=FOLDER)).save(tmp_path / "fits")
    Heads.fresh(HeadsConfig(**shape, target="another", fingerprint="ab")).save(tmp_path / "other")
    prompt, greedy = {"prompt_token_ids": [0, 70, 300, 4000, 5, 6]}, SamplingParams(temperature=0, max_tokens=12)
    llm = LLM(FOLDER, drafter=f"medusa:{tmp_path / 'fits'},nodes=6", budget=6, kv_memory="64MiB")
    (drafted,) = llm.generate([prompt], greedy)
    (plain,) = LLM(FOLDER, kv_memory="64MiB").generate([prompt], greedy)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids and drafted.stats.drafted
    with pytest.raises(CapabilityError, match="whose weights differ"):
        LLM(FOLDER, drafter=f"medusa:{tmp_path / 'other'}")
