"""What a request may have, how long it may take, and how many there may be."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from kits.server import live_server
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from paceline.serve.config import ServeConfig
from paceline.serve.connections import HEAD_BYTES, Connection
from paceline.serve.generation import check_params
from paceline.serve.guard import Guard
from paceline.serve.http import CONNECTION, APIError, EventStream, Strict, Write, read

HELLO = PlainTextResponse("hello")


@contextmanager
def listening(header_s: float) -> Iterator[int]:
    """A port at which connections have so much time for their headers."""
    config = uvicorn.Config(
        HELLO,
        http=partial(Connection, header_s=header_s),  # type: ignore[arg-type]
        lifespan="off",
        log_level="critical",
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as one:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [one]})
        thread.start()
        try:
            yield one.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[int, Any]:
    """Status and error of what a connection answers before it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        for part in parts:
            one.sendall(part)
            time.sleep(pause_s)
        said = b""
        while part := one.recv(65536):
            said += part
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_headers_that_come_too_late_too_large_or_are_none() -> None:
    with listening(0.3) as port:
        begin = time.monotonic()
        status, error = talk(port, b"GET / HTTP/1.1\r\nhost: a\r\n")
        assert status == 408 and "0.3 s" in error["message"] and 0.2 < time.monotonic() - begin < 3
        assert talk(port, b"")[0] == 408
        assert talk(port, b"GET / HTTP/1.1\r\n", *[b"a: " + b"b" * 9000 + b"\r\n"] * 8, pause_s=0.002)[0] == 431
        assert talk(port, b"\0\0\0\r\n\r\n")[0] == 400
        assert HEAD_BYTES < 8 * 9000


def test_headers_in_time_and_a_connection_that_is_used_again() -> None:
    with listening(0.3) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(3):
            assert client.get("/").text == "hello"
            time.sleep(0.2)  # in all longer than the headers of one request may take
        with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / ")
            said = b""
            while part := one.recv(65536):
                said += part
            assert b"hello" in said and b"408" in said  # the second one does not come


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"n": 3}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"grammar": {"kind": "regex", "text": "ä" * 5}}, "structured_outputs"),
    ],
)
def test_what_a_request_may_ask_for(params: dict[str, Any], name: str) -> None:
    config = ServeConfig(max_n=2, max_logprobs=2, max_schema_bytes=9)
    with pytest.raises(APIError, match="2 or less|9 bytes") as refused:
        check_params(config, params)
    assert (refused.value.status, refused.value.param) == (400, name)
    fewer = {"n": 2, "logprobs": 2, "prompt_logprobs": 0, "grammar": {"kind": "regex", "text": "ä" * 4}}
    check_params(config, fewer)


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
    """To our own connection, and by ASGI to another server's."""
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
    extensions = {CONNECTION: {"write": sent.append}} if own else {}
    asyncio.run(stream({"type": "http", "extensions": extensions}, receive, send))
    assert sent[1] == b"data: 1\n\n" and sent[-2:] == [b"data: 2\n\n", b""] and ended == [True]
    assert len(sent) > 4 and {*sent[2:-2]} == {b": keep-alive\n\n"}


def test_a_request_ends_at_its_deadline_and_a_drain_at_its_own() -> None:
    body = {"prompt": "one two", "max_tokens": 1800, "ignore_eos": True, "temperature": 1, "seed": 1}
    limits = ("--request-s", "0.4", "--drain-s", "0.1", "--max-logprobs", "2", "--default-max-tokens", "5")
    with live_server(*limits, "--drafter", "none") as server:
        asked = httpx.post(f"{server.url}/v1/completions", json=body | {"logprobs": 3})
        assert asked.status_code == 400 and asked.json()["error"]["param"] == "logprobs"
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}
        asked = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
        assert asked.status_code == 400 and asked.json()["error"]["param"] == "top_logprobs"
        asked = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": chat["messages"], "ignore_eos": True})
        assert asked.json()["usage"]["completion_tokens"] == 5
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
        assert "the server ends" in left[-1]["error"]["message"]
        assert server.process.wait(10) in (0, -signal.SIGTERM)
