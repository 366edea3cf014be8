"""Two servers on a Ray cluster, by Ray Serve: the ids of one process, a rolling update, and the end."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any

import httpx2 as httpx
import pytest
from kits.server import free_port

from paceline import LLM, SamplingParams

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

PROMPT = "Once upon a time there was a little"
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
LONG = 300.0  # seconds: an end of waiting that no test reaches


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two hosts of one core."""
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in settings.items():
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


def streamed_ids(client: httpx.Client, **options: Any) -> list[int]:
    """Return the ids of a stream that ends as it should."""
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True, **options}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or []]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_replicas_answer_alike_through_a_rolling_update_and_end_after_their_requests(cluster: Any) -> None:
    import ray
    from ray import serve

    from paceline.serve.replicas import APPLICATION, application

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids = LLM("paceline-small", exact=True, max_model_len=256).generate([PROMPT], greedy)[0].outputs[0].token_ids
    stop, answered, errors, port = Event(), set[str](), list[BaseException](), free_port()
    llm = {"exact": True, "max_model_len": 2048}
    served = application(
        {"model": "paceline-small", "llm": llm, "serve": {"no_keys": True}, "deployment": {"num_replicas": 2}}
    )
    ray.init(address=cluster.address, log_to_driver=False)
    http_options = {"host": "127.0.0.1", "port": port, "request_timeout_s": None}
    serve.start(proxy_location="HeadOnly", http_options=http_options)
    serve.run(served, name=APPLICATION)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG)

    def ask() -> None:
        try:
            while not stop.is_set():
                answer = client.post("/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["token_ids"] == ids
                answered.add(answer.headers["x-paceline-replica"])
                assert streamed_ids(client) == ids
        except BaseException as error:
            errors.append(error)

    def until(count: int) -> None:
        end = time.monotonic() + LONG
        while not errors and len(answered) < count:
            assert time.monotonic() < end
            time.sleep(0.1)

    clients = [Thread(target=ask) for _ in range(4)]
    for one in clients:
        one.start()
    until(2)

    def home(session: str) -> str:
        answer = client.post("/v1/completions", json=BODY, headers={"x-session-id": session})
        return str(answer.headers["x-paceline-replica"])

    homes = {f"s{number}": home(f"s{number}") for number in range(16)}
    assert set(homes.values()) == answered
    assert {session: home(session) for session in homes} == homes
    metrics = client.get("/metrics").text
    assert set(re.findall(r'generation_tokens_total{.*replica="(.*?)"', metrics)) == answered
    serve.run(served, name=APPLICATION)
    until(4)
    stop.set()
    for one in clients:
        one.join()
    assert errors == [] and len(answered) == 4

    long: list[list[int]] = []
    begun = Thread(target=lambda: long.append(streamed_ids(client, max_tokens=1900, speculation=False)))
    begun.start()
    time.sleep(1.0)
    serve.delete(APPLICATION)
    begun.join()
    assert [len(found) for found in long] == [1900]
    serve.shutdown()
