"""Which device each process computes on. No GPU is needed: what is tested is who is sent where."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.api.assembly.engine import load_target
from paceline.api.assembly.models import draft_device, stage_devices
from paceline.api.config import LLMConfig
from paceline.api.split import Split
from paceline.core.errors import ConfigError
from paceline.engine.base import WorkerPlace
from paceline.model.devices import share_devices
from paceline.runtime.stage_worker import place, stage_spec

MODEL = "paceline-small"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    there_are(9)
    return there_are


def split(**changes: Any) -> LLMConfig:
    return LLMConfig(model=MODEL, **{"device": "cuda", "pipeline": 4} | changes)


@pytest.mark.parametrize("available", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_processes_are_shared_evenly_and_neighbours_apart(count: int, available: int) -> None:
    found = share_devices("cuda", count, available)
    each = [found.count(f"cuda:{index}") for index in range(available)]
    assert sum(each) == count and max(each) - min(each) <= 1
    assert len(set(found)) == min(count, available)
    assert found[0] == "cuda:0" and (available == 1 or all(a != b for a, b in zip(found, found[1:], strict=False)))


def test_stages_and_their_coordinator(gpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpus(8)
    with caplog.at_level(logging.WARNING):
        placements = place(Split(stages=8), "cuda")
    assert [p.device for p in placements] == [f"cuda:{i}" for i in range(8)] and not caplog.records
    source = split().resolve()
    specs = [
        stage_spec(split(kernels="torch"), i, {"start": 0, "stop": 1, "slots": 8}, placements[i], source)
        for i in (0, 6)
    ]
    assert [spec.placement.device for spec in specs] == ["cuda:0", "cuda:6"]  # what a process is begun with
    assert stage_devices(split()) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert stage_devices(split(device="cuda:5")) == ["cuda:5"] * 4


def test_a_drafter_has_a_device_of_its_own_where_there_is_one(gpus: Any) -> None:
    alone = LLMConfig(model=MODEL, device="cuda")
    for count, beside_one, beside_four in ((1, 0, 0), (2, 1, 0), (4, 1, 0), (5, 1, 4), (8, 1, 4)):
        gpus(count)
        assert draft_device(alone, WorkerPlace()) == f"cuda:{beside_one}"
        assert draft_device(split(), WorkerPlace()) == f"cuda:{beside_four}"
    assert draft_device(split(), WorkerPlace(device="cuda:7")) == "cuda:7"
    assert draft_device(replace(alone, device="cuda:3"), WorkerPlace()) == "cuda:3"
    assert draft_device(replace(alone, device="cpu"), WorkerPlace()) == "cpu"
    assert draft_device(replace(alone, device="cpu"), WorkerPlace(device="cuda:2")) == "cuda:2"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, "device='cuda': torch .* sees 0 CUDA devices. Use device='cpu'"),
        ({"device": "cuda", "pipeline": 2}, "device='cuda': torch .* sees 0 CUDA devices. Use device='cpu'"),
        ({"round": "mirror,rollout=process,device=cuda:1"}, "device='cuda:1': torch .* sees 0 CUDA devices"),
        ({"round": "pipeline,source=process,device=gpu"}, "device='gpu': there is no such device. Use 'cpu' or 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    gpus: Any, options: dict[str, Any], said: str
) -> None:
    gpus(0)
    with pytest.raises(ConfigError, match=said):
        LLMConfig(model=MODEL, drafter="draft_model:paceline-small-draft", **options)


def test_this_process_loads_onto_the_last_device(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4)
    seen: list[str] = []

    def load(*_: Any, device: str, **__: Any) -> Any:
        seen.append(device)
        raise ConfigError("a load", "it is seen", "go on")

    monkeypatch.setattr("paceline.api.assembly.models.load_model", load)
    monkeypatch.setattr("paceline.api.assembly.memory.free_bytes", lambda device: seen.append(str(device)))
    with pytest.raises(ConfigError, match="it is seen"):
        load_target(split(), split().resolve())
    assert seen == ["cuda:3", "cuda:3"]
