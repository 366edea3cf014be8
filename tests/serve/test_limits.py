"""How long a request may take, who may ask, and what a server leaves: its log, what it learns from, its last words."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from kits.server import LiveServer, live_server
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from paceline.adapt.learning import files
from paceline.adapt.learning.store import RequestStore
from paceline.serve.config import ServeConfig
from paceline.serve.guard import Guard
from paceline.serve.http import TRANSPORT, APIError, EventStream, Strict, Write, read

HELLO = PlainTextResponse("hello")


def test_a_body_that_does_not_come_and_a_client_that_leaves_meanwhile() -> None:
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}

    async def nothing() -> Any:
        await asyncio.sleep(10)

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(APIError, match=r"0\.05 s") as late:
        asyncio.run(read(Request(scope, nothing), Strict, 0.05))
    assert late.value.status == 408
    with pytest.raises(ClientDisconnect):
        asyncio.run(read(Request(scope, leaves), Strict, 10))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LLM.example:80", 200),
        ("evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("", 400),
    ],
)
def test_the_name_that_a_server_is_called_by(host: str, status: int) -> None:
    guard = Guard(HELLO, ServeConfig(allowed_hosts=["llm.example"]), [])

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://localhost") as client:
            return await client.get("/", headers={"host": host})

    answer = asyncio.run(ask())
    assert answer.status_code == status and ("--allowed-hosts" in answer.text) == (status == 400)


@pytest.mark.parametrize("own", [True, False])
def test_a_stream_without_events_is_kept_alive_by_comments(own: bool) -> None:
    """To uvicorn's connection, and by ASGI to another server's."""
    sent, ended = list[bytes](), list[bool]()

    async def events(write: Write) -> None:
        write(b"data: 1\n\n")
        await asyncio.sleep(0.12)
        write(b"data: 2\n\n")

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    stream = EventStream(events, lambda: ended.append(True), keep_alive_s=0.03)
    transport = SimpleNamespace(is_closing=lambda: False, write=lambda data: sent.append(data.split(b"\r\n")[1]))
    asyncio.run(stream({"type": "http", TRANSPORT: transport if own else None}, receive, send))
    assert sent[1] == b"data: 1\n\n" and sent[-2:] == [b"data: 2\n\n", b""] and ended == [True]
    assert len(sent) > 4 and {*sent[2:-2]} == {b": keep-alive\n\n"}


def test_a_request_ends_at_its_deadline_a_drain_at_its_own_and_a_log_says_what_was_done(tmp_path: Path) -> None:
    body = {"prompt": "one two", "max_tokens": 1800, "ignore_eos": True, "temperature": 1, "seed": 1}
    with live_server("--request-s", "0.4", "--drain-s", "0.1", "--drafter", "suffix", log=tmp_path / "log") as server:
        url = f"{server.url}/v1/completions"
        begin = time.monotonic()
        done = httpx.post(url, json=body).json()
        assert 0.3 < time.monotonic() - begin < 3
        assert done["choices"][0]["finish_reason"] == "length" and 1 < done["usage"]["completion_tokens"] < 1800
        assert done["choices"][0]["stop_reason"] == "deadline"
        httpx.post(url, json=body | {"max_tokens": 4})
        httpx.post(f"{server.url}/v1/messages", json=body)
        assert shut_down(server, body, signal.SIGTERM)[-1] == "data: [DONE]"
        assert server.process.wait(10) in (0, -signal.SIGTERM)
    log = (tmp_path / "log").read_text()
    first, ready, model, drafter, playground, base, *requests = log.splitlines()
    assert first == "loading paceline-small" and ready.startswith("ready in ") and model.endswith(" paceline-small")
    assert "suffix" in drafter and playground.endswith(f" {server.url}/") and base.endswith(f" {server.url}/v1")
    assert re.fullmatch(r"POST /v1/completions 200, \d+ tokens, \d\.\d\d a pass", requests[0])
    assert re.fullmatch(r"POST /v1/completions 200, 4 tokens, \d\.\d\d a pass", requests[1])
    assert requests[2] == "POST /v1/messages 400"
    assert re.fullmatch(r"POST /v1/completions 200, \d+ tokens, not finished", requests[3]) and len(requests) == 4


def shut_down(server: LiveServer, body: dict[str, Any], number: signal.Signals) -> list[str]:
    """Return what comes of a stream in whose middle the server gets a signal."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(number)
        rest = [line for line in lines if line]
    assert "the server is shutting down" in rest[-2]
    return rest


def test_a_server_that_learns_keeps_requests_that_do_not_refuse_it_and_ctrl_c_ends_a_stream(tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    with live_server("--learn", str(folder), "--drafter", "eagle", "--budget", "4") as server:
        messages = [{"role": "user", "content": "Hello"}]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("completions", {"prompt": "SELECT", "max_tokens": 6, "return_token_ids": True}),
            ("completions", {"prompt": "SELECT", "max_tokens": 6, "store": False}),
            ("chat/completions", {"messages": messages, "max_tokens": 6, "store": False}),
            ("chat/completions", {"messages": messages, "max_tokens": 6, "store": True}),
            ("responses", {"input": "Hello", "max_output_tokens": 6, "store": False}),
        ]
        said = [httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).json() for path, body in asked]
        told = httpx.get(f"{server.url}/v1/speculation").json()["engine"]["speculation"]["learning"]
        assert (told["requests_kept"], told["requests_left_out"]) == (2, 4)  # the warm-up is one of them
        assert str(told["state"]).startswith("on: token ids of requests are kept")
        store = RequestStore(folder / files.REQUESTS)
        until = time.monotonic() + 60
        while len(store.numbers()) < 2 and time.monotonic() < until:  # they are written after their ends
            time.sleep(0.05)
        assert store.read(store.numbers())[0].answer == said[0]["choices"][0]["token_ids"]
        shut_down(server, {"prompt": "one", "max_tokens": 1800, "ignore_eos": True, "store": False}, signal.SIGINT)
        assert server.process.wait(10) == 130
