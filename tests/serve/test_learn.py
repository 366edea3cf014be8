"""A server that learns: what it says about it, what it keeps, and what it does not."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2 as httpx
from kits.server import live_server

from paceline.adapt.learning import files
from paceline.adapt.learning.store import RequestStore


def post(url: str, path: str, **body: object) -> dict[str, object]:
    answer = httpx.post(f"{url}{path}", json={"model": "paceline-small", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def learning(url: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{url}/v1/speculation").json()["engine"]["speculation"]["learning"]
    return found


def test_requests_are_kept_unless_they_say_store_false(tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    with live_server("--learn", str(folder), "--drafter", "eagle", "--budget", "4") as server:
        said = post(server.url, "/v1/completions", prompt="SELECT", max_tokens=6, return_token_ids=True)
        post(server.url, "/v1/completions", prompt="SELECT", max_tokens=6, store=False)
        messages = [{"role": "user", "content": "Hello"}]
        post(server.url, "/v1/chat/completions", messages=messages, max_tokens=6, store=False)
        post(server.url, "/v1/chat/completions", messages=messages, max_tokens=6, store=True)
        post(server.url, "/v1/responses", input="Hello", max_output_tokens=6, store=False)
        told = learning(server.url)
        assert (told["requests_kept"], told["requests_left_out"]) == (2, 4)  # the warm-up is one of them
        assert str(told["state"]).startswith("on: token ids of requests are kept")
        store = RequestStore(folder / files.REQUESTS)
        until = time.monotonic() + 60
        while len(store.numbers()) < 2 and time.monotonic() < until:  # they are written after their ends
            time.sleep(0.05)
        first, _ = store.read(store.numbers())
        choices = said["choices"]
        assert isinstance(choices, list) and first.answer == choices[0]["token_ids"]
