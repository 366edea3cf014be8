"""What a request may have, how long it may take, and how many there may be."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from kits.server import live_server
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

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


def test_a_request_ends_at_its_deadline_and_a_drain_at_its_own() -> None:
    body = {"prompt": "one two", "max_tokens": 1800, "ignore_eos": True, "temperature": 1, "seed": 1}
    limits = ("--request-s", "0.4", "--drain-s", "0.1")
    with live_server(*limits, "--drafter", "none") as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}
        asked = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
        assert asked.status_code == 400 and asked.json()["error"]["param"] == "top_logprobs"
        begin = time.monotonic()
        done = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert 0.3 < time.monotonic() - begin < 3
        assert done["choices"][0]["finish_reason"] == "length" and 1 < done["usage"]["completion_tokens"] < 1800
        assert done["choices"][0]["stop_reason"] == "deadline"
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            left = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "the server is shutting down" in left[-1]["error"]["message"]
        assert server.process.wait(10) in (0, -signal.SIGTERM)
