"""States of the target: the layers asked for, and a cache on disk that changes no loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit import examples, largest_file, losses, network, write_target

from paceline.core.errors import ConfigError
from paceline.training.data import SourceSpec, collate
from paceline.training.features import CacheSize, FeatureCache, OnlineFeatures, capture, open_cache
from paceline.training.job import Job, prepare
from paceline.training.trainer import Phase, StepContext, TrainConfig

DRAFT = {"layers": 1, "d_model": 16, "d_ff": 24, "heads": 2, "kv_heads": 2, "vocab_size": 300, "context": 128}
PHASES = (Phase(until=0.5, rows=4, length=48), Phase(rows=2, length=96))


def job(data: Path, target: Path, out: Path, **changes: Any) -> Job:
    settings = {"steps": 4, "warmup": 1, "precision": "fp32", "log_every": 1, "evaluate_every": 0, "accumulate": 2}
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
    return Job(**values | changes)


def train(made: Job) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """Losses, what was said, and the weights in the end."""
    said: list[str] = []
    run = prepare(made, (), said.append)
    run.run()
    return losses(made.out), said, {n: p.data for n, p in run.trained.items()}


# ---- online


def test_capture_gives_the_states_after_the_layers_asked_for() -> None:
    target, batch = network(frozen=True), collate([examples(2), examples(1, seed=4)], 96)
    _, inputs = target.run(target.embed(batch.tokens, batch.positions), 0, 3, batch)
    found = capture(target, batch, (0, 1, -1, 2))
    assert torch.equal(found[0], inputs[1])
    assert torch.equal(found[1], inputs[2])
    assert torch.equal(target.final(found[-1]), target(batch))
    assert torch.equal(found[2], found[-1])


def test_capture_runs_no_layer_above_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = network(frozen=True), collate([examples(2)], 96)
    ran: list[int] = []
    finish = type(target).finish_layer
    monkeypatch.setattr(
        type(target),
        "finish_layer",
        lambda self, i, *rest: ran.append(i) or finish(self, i, *rest),  # type: ignore[func-returns-value]
    )
    capture(target, batch, (0, -2))
    assert ran == [0, 1]


@pytest.mark.parametrize("taps", [(), (3,), (-4,)])
def test_capture_refuses_layers_that_there_are_not(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="Name layers between -3 and 2"):
        capture(network(frozen=True), collate([examples(1)], 48), taps)


# ---- the cache


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_with_a_cache_are_those_without(precision: str, data: Path, target: Path, tmp_path: Path) -> None:
    config = {"precision": precision}
    online, said, weights = train(job(data, target, tmp_path / "online", config=config))
    assert said == []
    cache = tmp_path / "cache"
    made, said, _ = train(job(data, target, tmp_path / "made", config=config, cache=cache))
    read, again, same = train(job(data, target, tmp_path / "read", config=config, cache=cache))
    assert made == read == online
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert "bytes" in said[0] and "are free" in said[0]
    assert again == []
    assert sorted(p.name for p in cache.iterdir()) == ["cache.json", "rows.npy", "states-00000.bin"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_size_said_is_the_size_written(dtype: Any, data: Path, target: Path, tmp_path: Path) -> None:
    """bf16 takes half; cut into several files, whose limits fall within batches, a cache is read as before."""
    whole, _, _ = train(job(data, target, tmp_path / "whole"))
    found, said, _ = train(job(data, target, tmp_path / "made", cache=tmp_path / "cache", cache_dtype=dtype))
    states = tmp_path / "cache" / "states-00000.bin"
    index = json.loads((tmp_path / "cache" / "cache.json").read_text("utf-8"))
    row = index["d_model"] * (4 if dtype == "fp32" else 2)
    assert states.stat().st_size == sum(index["shards"]) * row
    assert f" {states.stat().st_size:,} bytes" in said[0]
    assert (found == whole) == (dtype == "fp32")
    assert found == pytest.approx(whole, rel=1e-3)
    cut = [31, 50, 7, index["shards"][0] - 88]
    left = states.read_bytes()
    for number, tokens in enumerate(cut):
        (states.parent / f"states-{number:05d}.bin").write_bytes(left[: tokens * row])
        left = left[tokens * row :]
    (states.parent / "cache.json").write_text(json.dumps(index | {"shards": cut}), encoding="utf-8")
    again, _, _ = train(job(data, target, tmp_path / "cut", cache=tmp_path / "cache", cache_dtype=dtype))
    assert again == found


def test_a_resumed_run_reads_the_cache_where_it_stopped(data: Path, target: Path, tmp_path: Path) -> None:
    whole, _, _ = train(job(data, target, tmp_path / "whole"))
    parts = job(data, target, tmp_path / "parts", cache=tmp_path / "cache")
    prepare(parts).run(stop_after=3)
    run = prepare(parts)
    assert run.resume()
    run.run()
    assert losses(tmp_path / "parts") == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": {"seed": 1}}, "seed"),
        ({"config": {"precision": "bf16"}}, "precision"),
        ({"config": {"steps": 5}}, "steps"),
        ({"phases": (Phase(rows=4, length=48),)}, "phases"),
        ({"prompt_weight": 0.5}, "prompt_weight"),
        ({"cache_dtype": "bf16"}, "dtype"),
        ({"target": "other"}, "target"),
        ({"sources": "other"}, "data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cache_of_another_run_is_refused(
    change: dict[str, Any], named: str, data: Path, target: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    prepare(job(data, target, tmp_path / "first", cache=cache))
    if "target" in change:
        change, target = {}, write_target(tmp_path / "other", data, seed=9)
    if "sources" in change:
        change = {"sources": [SourceSpec(file=str(data))]}
    with pytest.raises(ConfigError, match=f"of another run: its {named} is"):
        prepare(job(data, target, tmp_path / "second", cache=cache, **change))


def test_rows_that_the_cache_was_not_made_of_are_refused(data: Path, target: Path, tmp_path: Path) -> None:
    run = prepare(job(data, target, tmp_path / "out", cache=tmp_path / "cache"))
    cache = run.recipe.features  # type: ignore[attr-defined]
    batch = next(run._batches())
    context = StepContext(0, torch.Generator())
    wanted = OnlineFeatures(run.recipe.target).final(batch, context)  # type: ignore[attr-defined]
    assert torch.equal(cache.final(batch, context), wanted)
    second = StepContext(0, torch.Generator(), first_row=1)
    assert torch.equal(cache.final(batch.rows(1, 2), second), wanted[_of_second_row(batch)])
    batch.tokens[0, 3] += 1
    with pytest.raises(ConfigError, match="batch 0 is another"):
        cache.final(batch, context)


def _of_second_row(batch: Any) -> slice:
    counts = (batch.weights > 0).sum(1)
    return slice(int(counts[0]), int(counts[:2].sum()))


def test_damage_is_told(data: Path, target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = job(data, target, tmp_path / "out", cache=cache)
    prepare(made)
    shard = cache / "states-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="states-00000.bin is missing or cut"):
        prepare(made)
    (cache / "cache.json").unlink()
    with pytest.raises(ConfigError, match="holds no cache"):
        prepare(made)
    assert shard.is_file()  # what is there is somebody's


def test_a_disk_that_is_too_small_is_told_before_a_byte_is_written(
    data: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    said: list[str] = []
    with pytest.raises(ConfigError, match="it takes .* bytes .* are free.*--cache-dtype bf16"):
        prepare(job(data, target, tmp_path / "out", cache=tmp_path / "deep" / "cache"), (), said.append)
    assert len(said) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_no_cache(data: Path, target: Path, tmp_path: Path) -> None:
    made = job(data, target, tmp_path / "out", cache=tmp_path / "cache")
    with largest_file(20_000), pytest.raises(ConfigError, match="it cannot be written .* is removed"):
        prepare(made)
    assert list(tmp_path.iterdir()) == []
    prepare(made)  # with room again
    assert (tmp_path / "cache" / "cache.json").is_file()


def test_an_interruption_leaves_no_cache(tmp_path: Path) -> None:
    frozen, batch = network(frozen=True), collate([examples(2)], 96)

    def batches() -> Any:
        yield batch
        if counted:
            raise KeyboardInterrupt
        counted.append(1)

    counted: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        open_cache(tmp_path / "c", {}, "fp32", frozen, batches, torch.no_grad, lambda text: None)
    assert counted
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_weight_takes_no_place(tmp_path: Path) -> None:
    frozen = network(frozen=True)
    batch = collate([examples(2), []], 96)
    assert CacheSize.of([batch], 32, "fp32").total_bytes == int((batch.weights > 0).sum()) * 32 * 4
    cache = open_cache(tmp_path / "c", {"a": 1}, "fp32", frozen, lambda: [batch], torch.no_grad, lambda text: None)
    assert cache.final(batch.rows(1, 2), StepContext(0, torch.Generator(), 0, 1)).shape == (0, 32)
    with pytest.raises(ConfigError, match="its a is 1, this run's 2"):
        FeatureCache(tmp_path / "c", {"a": 2, "dtype": "fp32"})


def test_a_recipe_that_reads_no_states_takes_no_cache(data: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no states that a cache could hold"):
        prepare(job(data, target, tmp_path / "out", kind="streams", options={}, cache=tmp_path / "cache"))
