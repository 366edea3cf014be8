"""Send a running server what its forms allow, what they forbid, and torn bodies.

    paceline serve --request-s 1 &
    python tools/fuzz_server.py http://127.0.0.1:8000 --cases 20000

schemathesis makes the requests. Of every answer: it comes in time, its status is none of a fault in the server, and an
error has the form of OpenAI's API, or on Anthropic's paths of that. Ends with status 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic.json_schema import models_json_schema
from schemathesis import Case, GenerationMode

from paceline.serve.app import POSTS
from paceline.serve.models import GETS

TIMEOUT_S = 20.0
ANTHROPIC = "/v1/messages"  # the paths below it have another form of errors
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [*HealthCheck],
    "phases": [Phase.explicit, Phase.generate],
}


@dataclass
class Found:
    """What came of all cases."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)  # by method and path
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def cases(self) -> int:
        """How many were sent."""
        return sum(map(Counter.total, self.statuses.values()))


def error_in_form(path: str, body: Any) -> bool:
    """Whether an error's body is what clients of this path expect."""
    if not isinstance(body, dict) or not isinstance(body.get("error"), dict):
        return False
    error = body["error"]
    words = isinstance(error.get("message"), str) and error["message"] != "" and isinstance(error.get("type"), str)
    if path.startswith(ANTHROPIC):
        return words and body.get("type") == "error"
    return words and set(error) == {"message", "type", "param", "code"}


def fault(path: str, answer: requests.Response) -> str:
    """What is wrong with an answer; empty: nothing."""
    kind = answer.headers.get("content-type", "")
    if answer.status_code == 503:
        return "" if answer.headers.get("retry-after") else "503 without Retry-After"
    if answer.status_code >= 500:
        return "a fault in the server"
    if answer.status_code == 429 and not answer.headers.get("retry-after"):
        return "429 without Retry-After"
    if answer.status_code >= 400:
        try:
            return "" if error_in_form(path, answer.json()) else "an error in another form"
        except ValueError:
            return "an error that is no JSON"
    if answer.status_code not in (200, 204):
        return "a status of no use"
    if kind.startswith("application/json"):
        try:
            answer.json()
        except ValueError:
            return "JSON that cannot be read"
    if kind.startswith("text/event-stream"):
        lines = [line for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
        done = b"data: [DONE]" in lines or b"message_stop" in answer.content or b"response." in answer.content
        return "" if done else "a stream without an end"
    return ""


def description() -> dict[str, Any]:
    """The server's endpoints and forms, as OpenAPI has them."""
    place, one = "#/components/schemas/{model}", {"name": "model", "in": "path", "required": True}
    responses = {"default": {"description": "an answer"}}
    paths: dict[str, Any] = {}
    for path in GETS:
        given_in = [one | {"schema": {"type": "string"}}] if "{model" in path else []
        paths[path.replace(":path", "")] = {"get": {"parameters": given_in, "responses": responses}}
    for path, (form, _) in POSTS.items():
        content = {"application/json": {"schema": {"$ref": place.format(model=form.__name__)}}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": responses}}
    kinds: Any = [(form, "validation") for form, _ in POSTS.values()]
    schemas = models_json_schema(kinds, ref_template=place)[1]["$defs"]
    head = {"openapi": "3.1.0", "info": {"title": "Paceline", "version": "1"}}
    return {**head, "paths": paths, "components": {"schemas": schemas}}


class Fuzzer:
    """Sends cases and judges answers.

    Args:
        url: of the server.
        seed: of all that is drawn.
    """

    def __init__(self, url: str, seed_: int = 0) -> None:
        self.found = Found()
        self._url, self._seed, self._session = url, seed_, requests.Session()
        self._schema = schemathesis.openapi.from_dict(description())

    def run(self, cases: int, seconds: float) -> Found:
        """Send so many cases, or as many as there is time for, in turns of all operations."""
        operations = [one.ok() for one in self._schema.get_all_operations()]
        plans = [(one, self._asked(one), 8 if one.method == "post" else 1) for one in operations]
        until, turn = time.monotonic() + seconds, 0
        some = max(1, min(20, cases // sum(weight for _, _, weight in plans)))
        while True:
            for operation, asked, weight in plans:
                if self.found.cases >= cases or time.monotonic() > until:
                    return self.found
                self._send(operation, asked, some * weight, self._seed + turn)
            turn += 1

    def _asked(self, operation: Any) -> st.SearchStrategy[dict[str, Any]]:
        """Arguments of `requests.Session.request`."""
        made = [
            operation.as_strategy(generation_mode=mode).map(lambda case: case.as_transport_kwargs(base_url=self._url))
            for mode in (GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE])
        ]
        return st.one_of(*made, self._torn(operation)) if operation.method == "post" else made[0]

    def _torn(self, operation: Any) -> st.SearchStrategy[dict[str, Any]]:
        """Bodies that were valid, with bytes cut out or put in; types of content that are none of JSON's."""

        def tear(case: Case, at: int, cut: int, put: bytes, kind: str) -> dict[str, Any]:
            body = json.dumps(case.body, default=str).encode()
            place = at % (len(body) + 1)
            return {
                "method": operation.method,
                "url": self._url + operation.path,
                "headers": {"content-type": kind},
                "data": body[:place] + put + body[place + cut :],
            }

        valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        cuts, put = st.integers(0, 8), st.binary(max_size=8)
        return st.builds(tear, valid, st.integers(0, 400), cuts, put, st.sampled_from(TYPES))

    def _send(self, operation: Any, asked: st.SearchStrategy[dict[str, Any]], count: int, number: int) -> None:
        @seed(number)
        @settings(max_examples=count, **SETTINGS)
        @given(asked)
        def send(one: dict[str, Any]) -> None:
            body = one.get("json", one.get("data"))
            self._judge(operation, lambda: self._session.request(**one, timeout=TIMEOUT_S), body)

        send()

    def _judge(self, operation: Any, ask: Callable[[], requests.Response], body: Any) -> None:
        began, name = time.monotonic(), f"{operation.method} {operation.path}"
        counts = self.found.statuses.setdefault(name, Counter())
        try:
            answer = ask()
            counts[answer.status_code] += 1
            why = fault(operation.path, answer)
            said = f"{answer.status_code} {answer.text[:200]}"
        except requests.Timeout:
            counts[0] += 1
            why, said = f"no answer within {TIMEOUT_S:g} s", ""
        except requests.RequestException as error:
            counts[0] += 1
            why, said = "a connection that broke", str(error)[:200]
        if why:
            self.found.wrong.append(f"{name}: {why}: {body!r:.300} -> {said}")
        self.found.slowest_s = max(self.found.slowest_s, time.monotonic() - began)


TYPES = ("application/json", "application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded", "")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time after which no more are sent")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = Fuzzer(asked.url.rstrip("/"), asked.seed).run(asked.cases, asked.seconds)
    for name, counts in sorted(found.statuses.items()):
        print(f"{name:40} {dict(sorted(counts.items()))}")
    print(f"{found.cases} cases, slowest {found.slowest_s:.2f} s, {len(found.wrong)} wrong")
    for line in found.wrong[:40]:
        print("wrong:", line)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
