"""A model on a Ray cluster says what one process says; what cannot be is said in words.

All that needs a cluster is one test: it takes ten seconds to start one.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from kit.ticks import watch_ticks
from kits.tiny import ids

from paceline import LLM, CapabilityError, ConfigError, SamplingParams
from paceline.api.config import LLMConfig
from paceline.runtime.remote import HOST_LEFT, WorkerFailed

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

MODEL = "paceline-small"
SMALL: dict[str, Any] = {"max_model_len": 256, "max_sequences": 4}
PROMPTS = ["Once upon a time there was a little", "SELECT name FROM players WHERE"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAFTER = "draft_model:paceline-small-draft,depth=4"
NODE: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
TOKEN = secrets.token_hex(32)  # Ray keeps the first one, and the mode, from when it is imported
LONG = 120.0  # seconds: an end of waiting that no test comes to


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # else other processes here cost it workers
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def cluster(token: None) -> Iterator[Any]:
    """Two hosts: of one core, and of two with what is said to be a GPU."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    made.add_node(num_cpus=2, num_gpus=1, **NODE)
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster: Any, **options: Any) -> LLM:
    return LLM(MODEL, cluster=f"{cluster.address},cores=1", **SMALL, **options)


@pytest.mark.timeout(300)
def test_a_cluster_says_what_one_process_says(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = ids(LLM(MODEL, exact=True, **SMALL).generate(PROMPTS, GREEDY))
    what_has_no_room(cluster, monkeypatch)
    caplog.set_level("CRITICAL", "paceline")  # the record of a fault would keep the frames that it went through
    for part in (in_stages, straight, ahead_of_the_target, without_its_host, what_a_worker_is_refused_for):
        part(cluster, wanted)
        gc.collect()
    said = capfd.readouterr()
    assert said.out == ""


def what_has_no_room(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has = "its hosts have . cores.*, . cores"
    with monkeypatch.context() as changed:
        changed.setattr("paceline.runtime.ray_cluster.RESERVE_S", 0.5)
        with pytest.raises(ConfigError, match=f"8 workers of 1 cores: it has no room for 9 processes .*{has}"):
            on(cluster, pipeline=9)
        with pytest.raises(ConfigError, match=f"1 workers of 1 cores and 2 GPUs: it has no room for 2 .*{has}"):
            LLM(MODEL, pipeline=2, cluster="auto,cores=1,gpus=2", **SMALL)


def in_stages(cluster: Any, wanted: list[list[int]]) -> None:
    """A stage and the source: while they answer the stage is stopped and the source is killed."""
    llm = on(cluster, pipeline=2, exact=True, drafter=DRAFTER, round="pipeline,source=process")
    stage_line, round_ = llm.engine.round.stage_line, llm.engine.round  # type: ignore[attr-defined]
    (stage,), source = stage_line.workers, round_.source.sessions._worker  # type: ignore[attr-defined]
    pids, (host, other) = (os.getpid(), stage.pid, source.pid), (stage.host, source.host)
    assert host and other and len({*pids}) == 3

    def on_tick(tick: Any) -> None:
        if len(ticks) == 8:
            os.kill(stage.pid, signal.SIGSTOP)
            os.kill(source.pid, signal.SIGKILL)

    ticks = watch_ticks(round_, on_tick)
    assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
    (fault,) = stage_line.faults
    assert f"worker stage 0 (pid {pids[1]} on {host}) hangs: " in fault and round_.failure is None
    assert source.faults[0] == f"worker draft (pid {pids[2]} on {other}) died: its process has ended"


def straight(cluster: Any, wanted: list[list[int]]) -> None:
    """Frames from stage to stage."""
    llm = on(cluster, pipeline=3, exact=True)
    assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
    assert llm.engine.round.stage_line.faults == []  # type: ignore[attr-defined]


def ahead_of_the_target(cluster: Any, wanted: list[list[int]]) -> None:
    """The mirror round's drafter there."""
    llm = on(cluster, drafter=DRAFTER, round="mirror,kappa=2,rollout=process")
    outputs = llm.generate(PROMPTS, GREEDY)
    assert ids(outputs) == wanted and sum(output.stats.accepted for output in outputs) > 5


def what_a_worker_is_refused_for(cluster: Any, wanted: list[list[int]]) -> None:
    from paceline.runtime.ray_cluster import ClusterHosts
    from paceline.runtime.remote import Remote, Timeouts
    from paceline.runtime.stage_worker import stage_spec

    config = LLMConfig(model=MODEL, pipeline=2, exact=True, cluster="auto,cores=1")
    hosts, part = ClusterHosts(config), {"start": 0, "stop": 6, "slots": 512}
    spec = stage_spec(config, 0, part, hosts.placement("cpu", None), config.resolve())
    other = replace(spec, expected=replace(spec.expected, instructions="others"))
    worker = Remote(other, Timeouts(start_s=LONG), hosts.launch(0))
    wrong = r"worker stage 0 on \d.*: its instructions is .*, and others is expected. Use hosts with the same kind"
    with pytest.raises(CapabilityError, match=wrong):
        worker.start()
    worker.stop()


def without_its_host(cluster: Any, wanted: list[list[int]]) -> None:
    """The host of a stage leaves: where no other one is left requests end in words, until one comes."""
    from paceline.runtime import ray_cluster

    llm = LLM(MODEL, pipeline=2, exact=True, cluster="auto,cores=1,gpus=1", **SMALL)
    stage_line: Any = llm.engine.round.stage_line  # type: ignore[attr-defined]
    (away,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(ray_cluster, "PLACED_S", 1.0)
        cluster.remove_node(away)
        with pytest.raises(WorkerFailed, match="has no host: none is left with 1 cores and 1 GPUs that nobody uses"):
            llm.generate(PROMPTS, GREEDY)
    assert stage_line.faults[0].endswith(HOST_LEFT)
    cluster.add_node(num_cpus=2, num_gpus=1, **NODE)
    assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
    assert all("has no host" in fault for fault in stage_line.faults[1:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": ""}, "it is not an address"),
        ({"cluster": "here"}, "address is not an address"),
        ({"cluster": "auto,place=far"}, "place"),
        ({"cluster": "auto,cores=0"}, "cores must be 1 or more"),
        ({"cluster": "auto", "pipeline": None, "tensor_parallel": 2}, "neither stages nor a drafter have a process"),
        ({"cluster": "auto", "pipeline": "2,cores=<0,1>"}, "the cluster chooses the cores"),
    ],
)
def test_what_does_not_fit_a_cluster(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLMConfig(model=MODEL, **{"pipeline": 2, **options})


def test_where_nobody_answers_no_cluster_is_joined(token: None) -> None:
    import ray

    with pytest.raises(ConfigError, match="cannot join it .*refused"):
        LLM(MODEL, pipeline=2, cluster="127.0.0.1:1", **SMALL)
    assert not ray.is_initialized()


def test_a_cluster_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(CapabilityError, match="RAY_AUTH_MODE=token"):
        LLM(MODEL, pipeline=2, cluster="127.0.0.1:6379", **SMALL)
