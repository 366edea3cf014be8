"""A draft model's trees: their shapes, their scores against a draft that computes everything anew, their K/V."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.draft import paths_of, text, view, want
from kits.tiny import VOCAB, assemble, draft_model, full_logits, run, tiny_config, tiny_decoder

from paceline import LLM
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.draft.draft_model import DraftModel, DraftModelConfig
from paceline.weights.source import resolve_folder

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
    found = paths_of(drafter.draft(want([sequence], size)))
    assert found.keys() == wanted.keys()
    assert all(found[path] == pytest.approx(wanted[path], abs=1e-9) for path in wanted)


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
    [tree] = drafter.draft(want([view(text(9), temperature=1)], 2))
    assert len(tree) == 2 and tree.q


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
        trees = drafter.draft(want([plain, ruled]))
        assert [len(tree) for tree in trees] == [3, 3]
        assert max(max(tree.tokens) for tree in trees) < min(width, VOCAB)


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
