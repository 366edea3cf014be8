"""What a live server shows of its speculation: in answers, in streams, and its answers to nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kits.server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "one two three one two three one two"
CHAT = [{"role": "user", "content": "Tell me of the sea."}]
ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PATHS = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    options = ("--drafter", "hybrid:ngram+suffix", "--budget", "8")
    limits = ("--request-s", "2", "--max-model-len", "160")
    with live_server(*options, *limits, "--metrics-names", "vllm") as made:
        yield made


def ask(server: LiveServer, path: str, **fields: Any) -> Any:
    answer = httpx.post(server.url + path, json={**PATHS[path], **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: LiveServer, path: str, **fields: Any) -> list[Any]:
    body = {**PATHS[path], **ASKED, **fields, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [httpx.Response(200, text=line).json() for line in lines]


def test_metrics_and_speculation_of_a_live_server(server: LiveServer) -> None:
    ask(server, "/v1/completions", n=2, temperature=1, seed=1)
    for _ in range(2):  # look-ups remember the first answer
        events(server, "/v1/chat/completions")
    said = httpx.get(f"{server.url}/metrics")
    assert said.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {
        (sample.name, sample.labels.get("source")): sample.value
        for family in text_string_to_metric_families(said.text)
        for sample in family.samples
        if sample.labels.get("le") in (None, "+Inf")
    }
    first, between = (
        values[f"vllm:{name}_seconds_count", None] for name in ("time_to_first_token", "inter_token_latency")
    )
    assert 0 < first < between
    assert (
        values["vllm:request_queue_time_seconds_count", None] == values["vllm:e2e_request_latency_seconds_count", None]
    )
    assert values["paceline:source_accepted_tokens_total", "suffix"] > 0
    found = httpx.get(f"{server.url}/v1/speculation").json()
    off = {"state": "off: nothing of any request is kept, and nothing is learned"}
    assert found["engine"]["speculation"]["learning"] == off
    assert found["max_nodes"] == 8 and found["engine"]["speculation"]["sources"] == ["ngram", "suffix"]
    assert (stats := found["engine"]["stats"])["accepted"] == values["vllm:spec_decode_num_accepted_tokens_total", None]
    assert sum(part["accepted"] for part in stats["sources"].values()) == stats["accepted"] > 0


def test_whatever_is_sent_is_answered_in_form(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    fuzz: Any = import_module("fuzz_server")
    found = fuzz.Fuzzer(server.url).run(70, 25.0)
    assert not found.wrong and found.cases >= 50
    paths = {name.split()[1] for name in found.statuses}
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/v1/responses"} <= paths
    assert {200, 400, 415} <= set().union(*found.statuses.values())


def test_a_model_without_a_template_for_tools_says_so(server: LiveServer) -> None:
    body = {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "now"}}], "max_tokens": 2}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert found.status_code == 400 and "--chat-template" in found.json()["error"]["message"]
