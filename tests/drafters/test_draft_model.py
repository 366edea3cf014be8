"""A draft model's trees: their shapes, their scores against a draft that computes everything anew, their K/V."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.draft import paths_of, text, view, want
from kits.tiny import VOCAB, assemble, draft_model, full_logits, run, tiny_config, tiny_decoder

from paceline import LLM
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.drafters.base import SequenceView
from paceline.drafters.draft_model import DraftModel, DraftModelConfig
from paceline.drafters.sessions import ROOT
from paceline.network.loader import resolve_folder

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"depth": 4},
    "static": {"branching": "3x2x1"},
    "static_late": {"branching": "1x1x3"},
    "dynamic": {"topk": 3, "depth": 4, "nodes": 7},
    "dynamic_wide": {"topk": 4, "depth": 3},
}


def bound(drafter: DraftModel, sequences: int = 4, tokens: int = 2000) -> DraftModel:
    drafter.bind(tiny_decoder().info("tiny"), sequences, tokens, CPU)
    return drafter


def log_q(drafter: DraftModel, tokens: list[int]) -> torch.Tensor:
    """[V] what the draft says after ``tokens``, everything computed anew."""
    return full_logits(drafter.decoder, tokens)[-1].log_softmax(0)


def check_scores(drafter: DraftModel, sequence: SequenceView, found: dict[tuple[int, ...], float]) -> None:
    """Every node's score is the sum of what a fresh draft gives: its K/V is that of its path and of no other."""
    for path, score in found.items():
        before = found.get(path[:-1], 0.0)
        fresh = float(log_q(drafter, [*sequence.tokens, *path[:-1]])[path[-1]])
        assert score == pytest.approx(before + fresh, abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_fit_and_the_k_v_follows_what_was_accepted(shape: str) -> None:
    """A conversation: some sequences rest, some may draft nothing, any path is accepted, then a token of any kind."""
    draw = random.Random(7)
    drafter = bound(draft_model(noise=0.0, **SHAPES[shape]))
    views = [view(text(n, n), key=n) for n in (1, 18, 37)]
    accepted = set()
    for step in range(16):
        present = views if step % 3 else [v for v in views if draw.random() < 0.7]
        if not present:
            continue
        budgets = [draw.choice([0, 1, 2, 5, 64]) for _ in present]
        depths = [draw.choice([0, 1, 3, 64]) if step == 4 else 64 for _ in present]
        tree = drafter.propose(want(present, budgets, depths))
        tree.check()
        assert [row[0] for row in tree.tokens] == [v.tokens[-1] for v in present]
        for b, sequence in enumerate(present):
            found = paths_of(tree, b)
            assert len(found) <= budgets[b] and max(map(len, found), default=0) <= depths[b]
            assert bool(found) == (budgets[b] > 0 and depths[b] > 0)
            check_scores(drafter, sequence, found)
            path = draw.choice([(), *found])
            accepted.add(len(path))
            sequence.tokens += [*path, draw.randrange(VOCAB)]
        drafter.model.pool.check_integrity()
    assert accepted >= {0, 1, 2}
    drafter.release([v.key for v in views] + [99])  # a key that was never seen is no fault
    drafter.model.pool.check_idle()


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.startswith("dynamic")])
def test_a_dynamic_tree_is_the_best_of_all_paths_that_the_rule_visits(shape: str) -> None:
    options = SHAPES[shape]
    drafter = bound(draft_model(**options))
    sequence = view(text(21))
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    visited: dict[tuple[int, ...], float] = {}
    for _ in range(options["depth"]):
        fresh: dict[tuple[int, ...], float] = {}
        for path, score in frontier.items():
            best = log_q(drafter, [*sequence.tokens, *path]).topk(options["topk"])
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                fresh[(*path, token)] = score + value
        visited |= fresh
        frontier = dict(sorted(fresh.items(), key=lambda item: -item[1])[: options["topk"]])
    size = options.get("nodes", options["topk"] * options["depth"])
    wanted = dict(sorted(visited.items(), key=lambda item: -item[1])[:size])
    found = paths_of(drafter.propose(want([sequence], size)))
    assert found.keys() == wanted.keys()
    assert all(found[path] == pytest.approx(wanted[path], abs=1e-9) for path in wanted)


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_accepted_nodes_are_not_computed_again(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = bound(draft_model(**SHAPES[shape]))
    sequence = view(text(30))
    found = paths_of(drafter.propose(want([sequence])))
    path = max(found, key=lambda p: (len(p), found[p]))
    sequence.tokens += [*path, 5]
    rows: list[int] = []
    embed = drafter.decoder.embed
    monkeypatch.setattr(drafter.decoder, "embed", lambda batch: rows.append(len(batch.tokens)) or embed(batch))
    drafter.propose(want([sequence]))
    assert rows[0] == 2  # the leaf, which was never expanded, and the token after it


def test_a_ranked_away_node_that_comes_true_is_known_too() -> None:
    """What was expanded and then cut from the tree still has its K/V."""
    drafter = bound(draft_model(topk=3, depth=3, nodes=9))
    sequence = view(text(25))
    kept = paths_of(drafter.propose(want([sequence], 2)))
    session = drafter.model.follow(sequence)
    nodes = [node for node in session.nodes.values() if node.row >= 0 and node.parent == ROOT]
    hidden = [node.token for node in nodes if (node.token,) not in kept]
    assert hidden
    before = session.cache.committed
    sequence.tokens += [hidden[0], 5]
    drafter.model.follow(sequence)
    assert session.cache.committed == before + 1
    check_scores(drafter, sequence, paths_of(drafter.propose(want([sequence]))))


def test_a_full_pool_ends_drafting_for_one_sequence_and_no_other() -> None:
    drafter = bound(draft_model(depth=4), sequences=1, tokens=64)
    long, short = view(text(80), key=1), view(text(30, 1), key=2)
    tree = drafter.propose(want([long, short]))
    assert tree.counts == [5, 1]
    tree = drafter.propose(want([short]))  # still none
    assert tree.counts == [1]
    drafter.release([1])
    short.tokens += [4, 9]
    tree = drafter.propose(want([short]))
    assert tree.counts == [5]
    check_scores(drafter, short, paths_of(tree))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_draft_stops_at_the_end_of_its_context_and_stays_sound(shape: str) -> None:
    drafter = bound(draft_model(target={"config": tiny_config(max_position=32)}, **SHAPES[shape]))
    sequence, other = view(text(28), key=1), view(text(5), key=2)
    for length in range(28, 38):
        sequence.tokens[:] = text(length)
        tree = drafter.propose(want([sequence, other]))
        assert max(map(len, paths_of(tree, 0)), default=0) <= max(0, 32 - length)
        assert tree.counts[1] > 1
        other.tokens += [3]
    drafter.model.pool.check_integrity()


def test_a_short_context_is_said_at_the_start_and_in_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(resolve_folder("paceline-small-draft"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    for drafter, off in ((f"draft_model:{folder}", True), (f"hybrid:suffix+draft_model:{folder}", False)):
        caplog.clear()
        llm = LLM("paceline-small", drafter=drafter, budget=4, max_model_len=128, kv_memory="16MB", max_sequences=2)
        assert "'draft_model' has 32 positions" in caplog.text
        for tokens, long in ((48, True), (8, False)):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            [found] = llm.generate(["Hello"], params)
            assert found.stats.drafted and ("has 32 positions" in str(found.stats.off_reason)) == (off and long)


def test_a_small_budget_cuts_the_first_level_before_the_draw() -> None:
    """Cut afterwards, the draft would lose its q, and rejection would refuse it."""
    drafter = bound(draft_model(branching="3x2", proposes="sampled"))
    tree = drafter.propose(want([view(text(9), temperature=1)], 2))
    assert tree.counts == [3] and tree.q is not None


def test_sampled_drafts_carry_the_distribution_they_were_drawn_from() -> None:
    drafter = bound(draft_model(branching="2x2", proposes="sampled"))
    sequence = view(text(12), temperature=0.9, top_k=9)
    tree = drafter.propose(want([sequence]))
    assert tree.q is not None
    inner = [(0, ())] + [(n + 1, p) for n, p in enumerate(paths_of(tree)) if len(p) == 1]
    for node, path in inner:
        logits = full_logits(drafter.decoder, [*sequence.tokens, *path])[-1:]
        fresh = sequence.sampler.probs(logits, torch.tensor([path]) if path else None)[0]
        torch.testing.assert_close(tree.q[0, node].double(), fresh.double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"branching": "2x2"}, {"branching": "3x2x1"}, {"depth": 3}])
@pytest.mark.parametrize("budget", [None, 1, 2])
def test_rejection_takes_every_draw(options: dict[str, Any], budget: int | None) -> None:
    """With top_k=1 only one child is possible, and what comes out is greedy: nothing impossible may be drawn."""
    params = SamplingParams(temperature=0.8, top_k=1, max_tokens=24, ignore_eos=True, seed=1)
    requests = [(text(n, n), params) for n in (3, 20)]
    plain = run(assemble(), requests)
    drafter = draft_model(proposes="sampled", **options)
    engine = assemble(drafter, verifier="rejection", budget=budget)
    drafted = run(engine, requests)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.stats.accepted for o in drafted) > 0


def test_no_node_is_spent_on_what_the_rules_forbid() -> None:
    for options in ({"branching": "3x1"}, {"topk": 3, "depth": 2, "nodes": 6}):
        drafter = bound(draft_model(**options))
        tree = drafter.propose(want([view(text(9), temperature=0.8, top_k=2)]))
        first = [p for p in paths_of(tree) if len(p) == 1]
        assert len(first) == 2, options


@pytest.mark.parametrize("width", [VOCAB - 6, VOCAB + 8])
def test_heads_of_one_family_may_be_padded_differently(width: int) -> None:
    """The text has 90 pieces; target and draft pad their heads each in its own way."""
    tokenizer = SimpleNamespace(get_vocab=lambda: {f"piece{i}": i for i in range(VOCAB - 6)})
    decoder = tiny_decoder(tiny_config(vocab_size=width))
    for proposes in ("coupled", "point", "sampled"):
        drafter = DraftModel(
            DraftModelConfig(model="other", depth=3, proposes=proposes),
            SimpleNamespace(decoder=decoder, tokenizer=tokenizer, name="other"),
        )
        drafter.bind(tiny_decoder().info("tiny", tokenizer), 4, 1000, CPU)
        plain, ruled = view(text(8, 2)[:8], key=1), view(text(9), key=2, temperature=0.9, presence_penalty=0.5)
        plain.tokens[:] = [t % 90 for t in plain.tokens]
        ruled.tokens[:] = [t % 90 for t in ruled.tokens]
        tree = drafter.propose(want([plain, ruled]))
        assert tree.counts == [4, 4]
        assert max(map(max, tree.tokens)) < min(width, VOCAB)


def test_a_draft_that_reads_other_pieces_is_refused() -> None:
    pieces = {f"piece{i}": i for i in range(VOCAB)}
    swapped = pieces | {"piece3": 4, "piece4": 3}
    drafter = draft_model()
    drafter.tokenizer = SimpleNamespace(get_vocab=lambda: swapped)
    target = tiny_decoder().info("tiny", SimpleNamespace(get_vocab=lambda: pieces))
    with pytest.raises(CapabilityError, match="2 token ids mean different pieces .*id 3: 'piece3' in the target"):
        drafter.bind(target, 4, 100, CPU)
    narrow = DraftModel(
        DraftModelConfig(model="x"),
        SimpleNamespace(decoder=tiny_decoder(tiny_config(vocab_size=40)), tokenizer=None, name="x"),
    )
    with pytest.raises(CapabilityError, match="40 tokens against 96"):
        narrow.bind(target, 4, 100, CPU)


def test_a_coupled_draft_of_the_target_itself_is_right_everywhere() -> None:
    """Same model, same noise: every drafted token is what the target says."""
    params = SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True, seed=5)
    for options in ({"depth": 4}, {"topk": 2, "depth": 4}):
        (output,) = run(assemble(draft_model(noise=0.0, proposes="coupled", **options)), [(text(11), params)])
        assert output.stats.passes == 1 + -(-24 // 5)
    (output,) = run(assemble(draft_model(noise=0.0, proposes="point", depth=4)), [(text(11), params)])
    assert output.stats.passes > 1 + -(-24 // 5)  # the likeliest token is another matter


@pytest.mark.parametrize(
    "options",
    [
        {"branching": "2x2", "topk": 2},
        {"nodes": 5},
        {"proposes": "sampled", "topk": 2},
        {"branching": "2xbig"},
        {"branching": "0x2"},
        {"branching": "16x16x2"},
    ],
)
def test_shapes_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DraftModelConfig(model="m", **options)
