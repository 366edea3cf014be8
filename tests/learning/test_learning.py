"""Learning beside an engine: what is kept, how a drafter takes over and returns, what is refused. No token changes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from toolkit import write_data, write_target

from paceline import LLM, SamplingParams
from paceline.adapt import learner
from paceline.adapt.learning import files, serving
from paceline.adapt.learning.store import RequestStore, ServedRequest
from paceline.core.errors import CapabilityError, ConfigError
from paceline.train.data import SourceSpec
from paceline.train.job import TrainingJob, finish, prepare
from paceline.train.trainer import Phase, TrainConfig

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write_target(folder / "tiny-target", write_data(folder))


def head(folder: Path, target: Path, seed: int) -> Path:
    """An EAGLE head that was trained for two steps."""
    run = TrainingJob(
        kind="eagle",
        options={"depth": 3},
        config=TrainConfig(steps=2, seed=seed, evaluate_every=0, warmup=1),
        phases=[Phase(rows=2, length=64)],
        sources=[SourceSpec(file=str(target.parent / "boxes.jsonl"))],
        target=target,
        out=folder,
    )
    trainer = prepare(run)
    trainer.run()
    return finish(run, trainer)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, target: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("heads")
    return [head(folder / str(seed), target, seed) for seed in (1, 2)]


@pytest.fixture
def make(
    target: Path, heads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Makes an `LLM` that learns, whose learner is a process that does nothing."""
    monkeypatch.setattr(serving.Learning, "_start", lambda self: None)
    made: list[LLM] = []

    def one(**options: Any) -> LLM:
        given = {"drafter": f"hybrid:suffix+eagle:{heads[0]}", "learn": str(tmp_path / "learn"), "threads": 1}
        made.append(LLM(str(target), **(given | options)))
        return made[-1]

    yield one
    for llm in made:
        if llm.learning is not None:
            llm.learning.close()


def ask(llm: LLM, count: int = 1, **options: Any) -> list[int]:
    said: list[int] = []
    for i in range(count):
        for chunk in llm.stream({"prompt_token_ids": [5, 6, 7, 8 + i % 5]}, PARAMS, **options):
            said += chunk.token_ids
    return said


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)


def kept_in(folder: Path, count: int) -> list[ServedRequest]:
    """The kept requests, as soon as there are so many: they are written after their ends."""
    store = RequestStore(folder / files.REQUESTS)
    wait_for(lambda: len(store.numbers()) == count)
    return store.read(store.numbers())


def put(folder: Path, number: int, weights: Path) -> None:
    """An offer, as the learner makes it."""
    learner.offer(folder, number, weights, {"was": 1.0, "is": 2.0, "requests": 9})


def test_requests_are_kept_as_ids_but_for_those_that_are_not_to_be(make: Callable[..., LLM], tmp_path: Path) -> None:
    llm = make()
    said = ask(llm)
    ask(llm, store=False)
    (kept,) = kept_in(tmp_path / "learn", 1)
    assert (kept.prompt, kept.answer) == ([5, 6, 7, 8], said)
    told = llm.describe_learning()
    assert (told["requests_kept"], told["requests_left_out"]) == (1, 1) and told["state"].startswith("on: token ids")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "learn").iterdir()}
    assert modes == {files.REQUESTS: 0o700, files.TASK: 0o600, files.DRAFTERS: 0o700}
    assert (tmp_path / "learn").stat().st_mode & 0o777 == 0o700


def test_a_drafter_takes_over_in_the_middle_of_a_request_and_no_token_changes(
    make: Callable[..., LLM], target: Path, heads: list[Path], tmp_path: Path
) -> None:
    plain = ask(LLM(str(target), threads=1), 3)
    llm = make()
    stream = llm.stream({"prompt_token_ids": [5, 6, 7, 8]}, PARAMS)
    said = list(next(stream).token_ids)
    put(tmp_path / "learn", 1, heads[1])
    wait_for(lambda: llm.learning._ready)
    for chunk in stream:
        said += chunk.token_ids
    assert said == plain[:12] and llm.describe_learning()["drafter"] == 1
    assert ask(llm, 3) == plain and llm.engine.round.failure is None
    later = make()  # a server that starts again goes on with it
    wait_for(lambda: later.learning._ready)
    assert ask(later, 3) == plain and later.describe_learning()["drafter"] == 1


def test_the_last_good_one_returns_where_fewer_tokens_are_accepted(
    make: Callable[..., LLM], target: Path, heads: list[Path], tmp_path: Path
) -> None:
    plain = ask(LLM(str(target), threads=1), 4)
    llm = make()
    learning = llm.learning
    learning._accepted[0] = serving.deque([3.0] * serving.WINDOW, maxlen=serving.WINDOW)
    put(tmp_path / "learn", 1, heads[1])
    wait_for(lambda: learning._ready)
    assert ask(llm) == plain[:12]
    learning._accepted[1] = serving.deque([2.9] * serving.WINDOW, maxlen=serving.WINDOW)
    ask(llm, store=False)
    assert learning.describe()["drafter"] == 1  # within a tenth
    learning._accepted[1] = serving.deque([2.0] * serving.WINDOW, maxlen=serving.WINDOW)
    assert ask(llm, 4) == plain
    assert (learning.describe()["drafter"], learning.describe()["returned"]) == (0, 1)
    assert files.read(tmp_path / "learn" / files.REFUSED) == [1]
    task = files.read(tmp_path / "learn" / files.TASK)
    assert learner.serving(tmp_path / "learn", task) == (0, heads[0])  # what is learned on from


def test_poisoned_offers_are_refused_and_what_serves_goes_on(
    make: Callable[..., LLM], target: Path, heads: list[Path], tmp_path: Path
) -> None:
    """Weights that are NaN, cut, or another model's; an offer that is no JSON."""
    plain, llm = ask(LLM(str(target), threads=1), 2), make()
    put(tmp_path / "learn", 1, heads[1])
    wait_for(lambda: llm.learning._ready)
    place = tmp_path / "learn" / files.DRAFTERS
    for number, spoil in enumerate((lambda data: data[:-50], lambda data: data[:-64] + b"\xff" * 64), 2):
        put(tmp_path / "learn", number, heads[1])
        file = place / str(number) / "model.safetensors"
        file.write_bytes(spoil(file.read_bytes()))
    wait_for(lambda: llm.learning._tried == 3)
    (tmp_path / "learn" / files.OFFER).write_text("{")
    time.sleep(0.3)
    assert ask(llm, 2) == plain and llm.engine.round.failure is None
    assert llm.describe_learning()["drafter"] == 1


def test_what_cannot_learn_is_refused_at_the_start(make: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"no head that learns from states. Draft with eagle or lyanna"):
        make(drafter="suffix")
    with pytest.raises(CapabilityError, match="no head"):
        make(drafter=None)
    make()
    other = json.loads((tmp_path / "learn" / files.TASK).read_text()) | {"fingerprint": "another"}
    (tmp_path / "learn" / files.TASK).write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="learned in for another model"):
        make()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        make(learn=str(tmp_path / "file"))


def test_the_learner_learns_checks_and_offers(
    make: Callable[..., LLM], heads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round on requests that all say the same: it gets better, offers, and leaves no copy of the ids behind."""
    llm, folder = make(), tmp_path / "learn"
    for _ in range(60):
        llm.learning.store.add([5, 6, 7, 8], [9, 10, 11, 12, 13, 9, 10, 11, 12, 13] * 4)
    task = files.read(folder / files.TASK) | {"rate": 5e-3}
    monkeypatch.setattr(learner, "STEPS_A_REQUEST", 1.0)
    served = kept_in(folder, 60)
    assert learner.learn(folder, task, served) == served[-24].number - 1
    found = files.read(folder / files.OFFER)
    assert found["number"] == 1 and found["is"] > found["was"] and found["requests"] == 36
    assert not (folder / "round").exists()
    assert {p.stat().st_mode & 0o077 for p in (folder / files.DRAFTERS / "1").iterdir()} <= {0o044, 0}
    wait_for(lambda: llm.learning._ready)
    ask(llm)
    assert llm.describe_learning()["last_check"] == {"was": found["was"], "is": found["is"], "requests": 36}
    torch.set_num_threads(1)


def test_a_learner_that_dies_is_started_again_and_ends_with_the_server(
    target: Path, heads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it comes back; no request hears of it."""
    monkeypatch.setattr(serving, "AGAIN_S", 0.1)
    llm = LLM(str(target), drafter=f"eagle:{heads[0]}", learn=str(tmp_path / "learn"), threads=1)
    learning = llm.learning
    wait_for(lambda: learning._process is not None)
    plain = ask(LLM(str(target), threads=1))
    pids = {learning._process.pid}
    for _ in range(2):
        learning._process.kill()
        assert ask(llm) == plain
        wait_for(lambda: learning._process.pid not in pids and learning._process.poll() is None)
        pids.add(learning._process.pid)
    assert learning.starts == len(pids) == 3
    state = Path(f"/proc/{learning._process.pid}/stat")
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    learning.close()
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
