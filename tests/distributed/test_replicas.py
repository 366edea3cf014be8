"""Two servers behind HAProxy on a Ray cluster: where requests go, and what a client reads when one is killed."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kits.server import live_server

from paceline import LLM, SamplingParams

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

PROMPT = "Once upon a time there was a little"
LONG = 300.0  # seconds: an end of waiting that no test comes to


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two hosts of one core, on which a replica never says in time how much it has in flight."""
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "0.0001",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sessions_stay_and_a_killed_replica_ends_its_streams_in_words(cluster: Any, tmp_path: Path) -> None:
    import ray

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wanted = LLM("paceline-small", exact=True, max_model_len=256).generate([PROMPT], greedy)[0].outputs[0].token_ids
    own = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
    asked = "--replicas", "2", "--cluster", f"{cluster.address},cores=1", "--exact", "--no-spare", "--drain-s", "5"
    asked += "--max-model-len", "2048"
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    with live_server(*asked, environment=own, log=tmp_path / "log", start_s=LONG) as server:
        with httpx.Client(base_url=server.url, timeout=LONG) as client:

            def answer(session: str) -> str:
                found = client.post("/v1/completions", json=body, headers={"x-session-id": session})
                assert found.json()["choices"][0]["token_ids"] == wanted
                return found.headers["x-paceline-replica"]

            homes = {f"s{number}": answer(f"s{number}") for number in range(12)}
            assert len(set(homes.values())) == 2
            assert {session: answer(session) for session in homes} == homes
            counted = re.findall(r'generation_tokens_total{.*replica="(.*)"} (.*)', client.get("/metrics").text)
            assert set(homes.values()) == {name for name, _ in counted}
            assert sum(float(tokens) for _, tokens in counted) >= 24 * 24
            ray.init(address=cluster.address, namespace="serve", logging_level="ERROR", log_to_driver=False)
            home = ray.get_actor(f"SERVE_REPLICA::paceline#server#{homes['s0']}")
            long = body | {"max_tokens": 1900, "stream": True, "speculation": False}  # seconds long
            with client.stream("POST", "/v1/completions", json=long, headers={"x-session-id": "s0"}) as stream:
                lines = filter(None, stream.iter_lines())
                assert "token_ids" in next(lines)
                ray.kill(home, no_restart=True)
                assert [line for line in lines if "token_ids" not in line] == [
                    'data: {"error":{"message":"the replica that answered was lost: ask again",'
                    '"type":"server_error","param":null,"code":"replica_lost"}}',
                    "data: [DONE]",
                ]
            assert answer("s0") != homes["s0"]
        server.process.terminate()
        assert server.process.wait(LONG) == 0
    port = server.url.rpartition(":")[2]
    assert not Path(tempfile.gettempdir(), f"paceline-serve-{os.getuid()}-{port}").exists()
