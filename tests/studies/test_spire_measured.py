"""The measured parts of the study of SPIRe, in small: with a draft that was cut out of the target and not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import spire
import torch
from spire_parts.judged import NOISE, taus_of
from spire_parts.lent import computed

from paceline import LLM, SamplingParams, zoo
from paceline.attention.base import slot_indices
from paceline.drafters.spire.recipe import SpireOptions, build
from paceline.training.network import Network
from paceline.training.registry import BuildContext

pytest.importorskip("matplotlib")
TEXT = [{"prompt": f"Say {n}.", "completion": "one two three four five six seven " * 4} for n in range(3)]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft as it starts, one without feedback memory, and text."""
    folder, target = tmp_path_factory.mktemp("drafts"), zoo.find("paceline-small")
    assert target is not None
    network = Network.load(target, frozen=True)
    made = {}
    for name, options in (("spire", SpireOptions(ends="target")), ("bare", SpireOptions(feedback=False))):
        context = BuildContext(target=network, target_folder=target, tokenizer=None)
        made[name] = folder / name
        build(options, context).export(made[name])
    made["text"] = folder / "drawn.jsonl"
    made["text"].write_text("\n".join(map(json.dumps, TEXT)) + "\n", encoding="utf-8")
    return made


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of the one figure that is named first."""
    threads = torch.get_num_threads()
    try:
        assert spire.study.run([*arguments, "--quick", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads((out / f"{arguments[0]}.json").read_text("utf-8"))


def test_ablations_are_paired_over_the_same_starts(
    tmp_path: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire_parts.ablations.DEEPEST", 5)
    given = ("--spire", str(drafts["spire"]), "--variants", f"bare={drafts['bare']}", "--drawn", f"a={drafts['text']}")
    found = run(tmp_path, "figure_5", *given)
    assert found["starts"] > 20 and found["drafts"].keys() == {"SPIRe", "bare"}
    one, other = (found["drafts"][name]["tau"][0] for name in ("SPIRe", "bare"))
    assert min(one, other) >= 1 and found["drafts"]["SPIRe"]["difference"] == [0, 0, 0]
    assert found["drafts"]["bare"]["difference"][0] == pytest.approx(other - one)
    by_depth = run(tmp_path, "tau_by_depth", *given)["tau"]["SPIRe"]
    values = [value for value, _, _ in by_depth]
    assert len(values) == 5 and values == sorted(values) and 1 < values[0] <= 2


def test_tau_from_the_engine(tmp_path: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spire_parts.accepted.CONTEXTS", (72, 100))
    given = ("--vanilla", "paceline-small-draft", "--spire", str(drafts["spire"]))
    found = run(tmp_path, "table_1", *given, "--prompts", "1", "--max-new-tokens", "6")
    rows = found["tau"]["the target's domains"]
    assert {(row["context"], row["draft"]) for row in rows} == {
        (c, d) for c in (72, 100) for d in ("vanilla", "MagicDec", "SPIRe")
    }
    kinds = ("T=1", NOISE, "greedy")
    assert all(1 <= low <= tau <= high <= 5 for row in rows for tau, low, high in (row[kind] for kind in kinds))
    taus = taus_of(str(tmp_path / "table_1.json"))
    assert taus == {(row["draft"], row["context"]): row[NOISE][0] for row in rows} and len(taus) == 6
    assert any("MagicDec" in row["draft"] and row["greedy"][0] > 2 for row in rows)


def test_bytes_of_sparse_drafts_are_constant(
    tmp_path: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire_parts.held.CONTEXTS", (96, 160))
    given = ("--vanilla", "paceline-small-draft", "--spire", str(drafts["spire"]))
    found = run(tmp_path, "kv_bytes", *given)["bytes"]
    of = {(one["draft"], one["context"]): one for one in found}
    token = 12 * 2 * 384 * 2
    for draft, reads, holds in (("MagicDec", 65 * token, token), ("SPIRe", 65 * token // 4, 69 * token // 4)):
        assert {(of[draft, c]["pass_reads"], of[draft, c]["holds"]) for c in (96, 160)} == {(reads, holds)}
    assert of["vanilla", 160]["holds"] > 1.5 * of["vanilla", 96]["holds"]
    assert of["plain", 160]["target_holds"] >= 160 * token


def test_costs_of_this_machine(tmp_path: Path) -> None:
    """Training by k passes beside a plain network, and both tables of costs; figures themselves are luck here."""
    (only,) = run(tmp_path, "training_throughput", "--here", "--repeats", "1")["batches"]
    assert only["whole"] > 0 and only["seconds"].keys() == {"k passes", "plain", "target"}
    nodes = run(tmp_path, "budgets", "--here", "--repeats", "1")
    assert len(nodes["nodes"]) == 10 and min(nodes["law"].values()) >= 0


def test_throughput_is_predicted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spire_parts.throughput.CONTEXTS", (96, 160))
    found = run(tmp_path, "cells", "--here", "--repeats", "1")["cells"]
    places = {(one["method"], one["batch"], one["context"]) for one in found}
    assert places == {(m, b, c) for m in ("plain", "MagicDec") for b in (1, 4) for c in (96, 160)}
    assert all(one["seconds"] > 0 and one["predicted"] > 0 for one in found)
    assert {(one["method"], one["batch"], one["context"]) for one in found if one["fitted"]} == {
        ("plain", 1, 96),
        ("plain", 4, 96),
    }
    assert all(one["tau"] == 1 if one["method"] == "plain" else 1 < one["tau"] <= 5 for one in found)


def test_answers_behind_lent_prompts(tmp_path: Path, drafts: dict[str, Path]) -> None:
    """More sequences than texts; with look-ups; a method that cannot be with K/V in bytes is named."""
    given = ("answers", "--here", "--spire", str(drafts["spire"]), "--lookup", "ngram,depth=4;budget=4")
    given += ("--contexts", "96", "--batches", "1,3", "--texts", "2", "--max-new-tokens", "10")
    found = run(tmp_path / "auto", *given)["answers"]
    assert {(one["batch"], one["method"]) for one in found} == {
        (b, m) for b in (1, 3) for m in ("plain", "look-ups", "MagicDec", "SPIRe")
    }
    assert all(one["tokens_per_s"] > 0 and 1 <= one["tokens_a_pass"] <= 5 for one in found)
    assert max(one["tokens_a_pass"] for one in found if one["method"] == "MagicDec") > 2
    bytes_ = run(tmp_path / "int8", *given, "--kv", "int8")["answers"]
    assert {one["method"] for one in bytes_} == {"plain", "look-ups", "SPIRe"}
    assert "MagicDec is left out" in (tmp_path / "int8" / "answers.md").read_text("utf-8")


def test_copies_of_a_prompt_share_no_slot() -> None:
    llm = LLM("paceline-small-draft", dtype="float32", max_sequences=4)
    ids = [[8 + (n * k) % 90 for n in range(40)] for k in (1, 3)]
    lent = computed(llm, ids)
    five = lent.part(0, 5)
    five.lend(llm, 8)
    assert five.prompts[:2] == ids and len({*map(tuple, five.prompts)}) == 5
    caches = [llm.engine.pool.open(own) for own in five.prompts]
    slots = [slot for cache in caches for slot in slot_indices(cache.slots(0, cache.committed), "cpu").tolist()]
    assert [cache.committed for cache in caches] == [32] * 5 and len({*slots}) == len(slots) == 160
    first, copy = (slot_indices(caches[n].slots(0, 32), "cpu") for n in (0, 4))
    for held in (*llm.engine.pool.k, *llm.engine.pool.v):
        assert torch.equal(held[:, first], held[:, copy]) and bool(held[:, copy].abs().sum() > 0)
    for cache in caches:
        cache.release()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (found,) = llm.generate([{"prompt_token_ids": ids[1]}], params)
    assert found.stats.cached_prompt_tokens == 32
    llm.forget()
    (alone,) = llm.generate([{"prompt_token_ids": ids[1]}], params)
    assert alone.stats.cached_prompt_tokens == 0 and alone.outputs[0].token_ids == found.outputs[0].token_ids


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], drafts: dict[str, Path]) -> None:
    for arguments, wrong in (
        (["verification"], "--spire is not given"),
        (["figure_5", "--spire", str(drafts["spire"])], "--variants is not given"),
        (["tau_by_depth", "--spire", str(drafts["spire"]), "--drawn", "a=nowhere"], "there is no such file"),
        (["tau_by_depth", "--spire", str(tmp_path), "--drawn", f"a={drafts['text']}"], "it holds no spire.json"),
        (["cells"], "--here is not given"),
        (["cells", "--here", "--batches", "4,0"], "not a list of numbers above 0"),
    ):
        assert spire.study.run([*arguments, "--out", str(tmp_path)]) == 2
        assert wrong in capsys.readouterr().err
