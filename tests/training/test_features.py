"""What the target says: online, and from a cache on disk that is made once, document by document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit import examples, losses, network, write_target

from paceline.core.errors import ConfigError
from paceline.train import cache as caching
from paceline.train.cache import RECORDS
from paceline.train.data import SourceSpec, collate
from paceline.train.features import OnlineFeatures, needed_states
from paceline.train.job import TrainingJob, prepare
from paceline.train.registry import KINDS
from paceline.train.trainer import Phase, TrainConfig, plan

DRAFT = {"layers": 1, "d_model": 16, "d_ff": 24, "heads": 2, "kv_heads": 2}
PHASES = (Phase(until=0.5, rows=4, length=48), Phase(rows=2, length=96))


def job(data: Path, target: Path, out: Path, **changes: Any) -> TrainingJob:
    settings = {"steps": 4, "warmup": 1, "precision": "fp32", "evaluate_every": 0}
    values: dict[str, Any] = {
        "kind": "draft_model",
        "options": DRAFT,
        "config": TrainConfig(**settings | changes.pop("config", {})),
        "phases": PHASES,
        "sources": [SourceSpec(file=str(data)), SourceSpec(file=str(data.parent / "story.txt"))],
        "prompt_weight": 0.1,
        "target": target,
        "out": out,
    }
    return TrainingJob(**values | changes)


def train(made: TrainingJob) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """Losses, what was said, and the weights in the end."""
    said: list[str] = []
    run = prepare(made, say=said.append)
    run.run()
    return losses(made.out), said, {n: p.data for n, p in run.trained.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_online_gives_the_likeliest_tokens() -> None:
    target, batch = network(frozen=True), collate([examples(2), examples(1, seed=4)], 96, 0.5)
    hidden = target(batch)[batch.weights > 0]
    found = OnlineFeatures(target, 5).targets(batch)
    p, ids = target.logits(hidden).double().softmax(-1).topk(5)
    assert torch.equal(found.ids, ids)
    wanted = torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1).log()
    torch.testing.assert_close(found.log_probs.double(), wanted, rtol=2**-11, atol=1e-6)  # float16


def test_states_are_kept_where_a_recipe_reads_them(
    data: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie apart from a cache without them, which stays as it was."""
    made = job(data, target, tmp_path / "out", cache=tmp_path / "cache", config={"steps": 2})
    prepare(made)
    before = contents(tmp_path / "cache")
    monkeypatch.setitem(KINDS, "draft_model", replace(KINDS["draft_model"], states=True))
    said: list[str] = []
    run = prepare(made, say=said.append)
    assert len(said) > 1
    assert all(contents(tmp_path / "cache")[name] == held for name, held in before.items())
    cache, network = run.recipe.features, run.recipe.target  # type: ignore[attr-defined]
    batches = [batch for _, batch in plan(run.mixture, run.phases, run.config.steps)]
    for batch in batches:
        needed = needed_states(batch)
        found, wanted = cache.states(batch), OnlineFeatures(network).states(batch)
        torch.testing.assert_close(found[needed], wanted[needed], rtol=2**-8, atol=1e-4)  # bfloat16
        assert not found[~needed].any()
    for held in tmp_path.glob(f"cache/boxes-*/{RECORDS}"):
        with held.open("r+b") as file:
            file.write(bytes(held.stat().st_size))
    with pytest.raises(ConfigError, match="it has lost records"):
        for batch in batches:
            cache.states(batch)
    with pytest.raises(ValueError, match="in no cache"):
        cache.states(collate([examples(2)], 96))


@pytest.mark.parametrize(
    "change", [{"config": {"precision": "bf16"}}, {"target": "other"}, {"phases": PHASES[:1]}], ids=str
)
def test_what_says_something_else_lies_apart(change: dict[str, Any], data: Path, target: Path, tmp_path: Path) -> None:
    """Another target, precision, count or cut of the documents is scored anew, beside what is there."""
    cache = tmp_path / "cache"
    prepare(job(data, target, tmp_path / "first", cache=cache))
    kept = contents(cache)
    if "target" in change:
        change, target = {}, write_target(tmp_path / "other", data, seed=9)
    if "phases" in change:
        change = {"phases": (Phase(rows=4, length=48),)}
    said: list[str] = []
    prepare(job(data, target, tmp_path / "second", cache=cache, **change), say=said.append)
    assert "tokens to score" in said[0]
    assert len(contents(cache)) == 2 * len(kept)
    assert kept.items() <= contents(cache).items()


def test_a_killed_run_leaves_a_cache_to_go_on_with(
    data: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in later and later writes: what counts as scored is right, the rest is made by the next run."""
    monkeypatch.setattr(caching, "BATCH_TOKENS", 200)
    whole, _, _ = train(job(data, target, tmp_path / "whole", cache=tmp_path / "one"))
    written: list[Path] = []
    plainly = caching._write

    def dying(path: Path, at: int, data: bytes) -> None:
        written.append(path)
        if len(written) == 3 * (stops + 1):
            plainly(path, at, data[: len(data) // 2 if stops % 2 else -1])
            raise KeyboardInterrupt
        plainly(path, at, data)

    cache, stops = tmp_path / "cache", 0
    while stops < 100:
        with monkeypatch.context() as patched:
            patched.setattr(caching, "_write", dying)
            written.clear()
            try:
                prepare(job(data, target, tmp_path / "out", cache=cache))
                break
            except KeyboardInterrupt:
                stops += 1
    assert stops > 2
    found, said, _ = train(job(data, target, tmp_path / "out", cache=cache))
    assert said == []
    assert found == pytest.approx(whole, rel=1e-5)


def test_damage_is_repaired_or_told(data: Path, target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = job(data, target, tmp_path / "out", cache=cache)
    run = prepare(made)
    records = next(cache.glob(f"boxes-*/{RECORDS}"))
    whole, size = records.read_bytes(), records.stat().st_size
    for damage in (bytes(size), whole[: size // 2]):  # holes, as a power cut leaves them; a file that was cut
        records.write_bytes(damage)
        said: list[str] = []
        prepare(made, say=said.append)
        assert "tokens to score" in said[0] and records.read_bytes() == whole
    (records.with_name("made.json")).write_text("{}")
    with pytest.raises(ConfigError, match="is not part of a cache"):
        prepare(made)
    assert records.is_file()  # what is there is somebody's
    assert run.step == 0
