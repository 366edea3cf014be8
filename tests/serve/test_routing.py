"""Which replica a request goes to, without a cluster."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from paceline.cli import USER_ERROR, app
from paceline.core.errors import ConfigError
from paceline.serve import replicas
from paceline.serve.config import ServeConfig
from paceline.serve.metrics import merged
from paceline.serve.routing import BLOCK, Loads, Routes, RoutingKey, beginnings, sessions_of, wanted

NAMES = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(NAMES, 0.0)


def text(number: int, length: int = 4 * BLOCK) -> str:
    return f"{number}: ".ljust(length, f"{number % 7}")


def test_what_decides_is_read_from_any_form() -> None:
    def found(body: object, session: str | None = None) -> RoutingKey:
        return wanted(json.dumps(body).encode(), session)

    assert found({"prompt": "abc", "prompt_cache_key": "k"}) == RoutingKey("k", "abc")
    assert found({"prompt": "abc", "prompt_cache_key": "k"}, "s").session == "s"
    assert found({"prompt": "abc", "prompt_cache_key": 7}) == RoutingKey(None, "abc")
    chat = found({"messages": [{"role": "user", "content": "hello"}], "system": "be kind", "max_tokens": 7})
    assert chat.text.startswith("be kind") and "hello" in chat.text and "7" not in chat.text
    assert found({"prompt": [1, 2]}).text == "[1, 2]"
    for odd in (b'{"prompt": "cut o', b"\xff\xfe", b"", b"[1]"):
        assert wanted(odd, None) == RoutingKey(None, odd.decode("latin-1"))


def test_beginnings_are_shared_as_far_as_texts_are() -> None:
    one, other = beginnings("x" * 3 * BLOCK + "y"), beginnings("x" * 2 * BLOCK + "z" * BLOCK)
    assert len(one) == len(other) == 3 and one[:2] == other[:2] and one[2] != other[2]
    assert beginnings("x" * (BLOCK - 1)) == []
    assert len(set(beginnings("x" * 9 * BLOCK))) == 9


def test_a_session_stays_and_only_those_of_a_lost_replica_move() -> None:
    routes, sessions = Routes(), [RoutingKey(f"s{number}", "") for number in range(400)]
    first = [routes.choose(one, IDLE) for one in sessions]
    assert first == [Routes().choose(one, IDLE) for one in sessions]
    assert min(Counter(first).values()) > 60
    left = {name: 0.0 for name in NAMES if name != "a"}
    moved = [routes.choose(one, left) for one in sessions]
    assert all(before == after for before, after in zip(first, moved, strict=True) if before != "a")
    assert len({after for before, after in zip(first, moved, strict=True) if before == "a"}) == 3


def test_each_replica_has_a_session() -> None:
    found = sessions_of(NAMES)
    assert sorted(found) == NAMES
    assert all(Routes().choose(RoutingKey(session, ""), IDLE) == name for name, session in found.items())


def test_a_prompt_goes_where_its_beginning_is_known_and_others_share() -> None:
    routes = Routes()
    homes = {number: routes.choose(RoutingKey(None, text(number)), IDLE) for number in range(40)}
    assert len(set(homes.values())) == 4
    for number, home in homes.items():
        assert routes.choose(RoutingKey(None, text(number) + f" and question {number}"), IDLE) == home


def test_nobody_gets_much_more_than_an_even_share() -> None:
    """Requests of one beginning that do not end."""
    routes, loads = Routes(), dict(IDLE)
    for _ in range(400):
        loads[routes.choose(RoutingKey(None, text(0)), loads)] += 1
    assert max(loads.values()) <= 1.25 * 100 + 1 and min(loads.values()) > 50
    loads = {"a": 90.0, "b": 3.0}
    assert {routes.choose(RoutingKey(None, ""), loads) for _ in range(3)} == {"b"}
    assert {routes.choose(RoutingKey(f"s{number}", ""), loads) for number in range(20)} == {"b"}


def test_loads_count_what_was_sent_since_a_replica_said_something() -> None:
    loads = Loads()
    said = {"a": {"open": 3, "ready": True, "at": 1}, "b": {"open": 0, "ready": True, "at": 1}, "new": {}}
    assert loads.now(said) == {"a": 3, "b": 0, "new": 0}
    loads.sent("b")
    assert loads.now(said)["b"] == 1
    said["b"] = {"open": 1, "ready": True, "at": 2}
    assert loads.now(said)["b"] == 1
    said["b"]["ready"] = False
    assert loads.now(said) == {"a": 3, "new": 0}
    assert loads.now({"b": said["b"]}) == {"b": 1}


def test_metrics_of_several_stand_together_by_name() -> None:
    said = (
        '# HELP x X.\n# TYPE x counter\nx{{replica="{0}"}} 1.0\n# HELP y Y.\n# TYPE y gauge\ny{{replica="{0}"}} 2.0\n'
    )
    lines = merged([said.format("a"), said.format("b")]).splitlines()
    assert lines == [
        *("# HELP x X.", "# TYPE x counter", 'x{replica="a"} 1.0', 'x{replica="b"} 1.0'),
        *("# HELP y Y.", "# TYPE y gauge", 'y{replica="a"} 2.0', 'y{replica="b"} 2.0'),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "replicas must be 1 or more"),
        ({"replicas": -2}, "replicas must be 1 or more"),
        ({"replicas": 3, "max_replicas": 2}, "less than --replicas 3"),
        ({"max_replicas": 2}, "--max-replicas: there is one server"),
        ({"routing": "load"}, "--routing load: there is one server"),
        ({"replicas": 2, "routing": "far"}, "routing"),
    ],
)
def test_what_cannot_be_asked_of_replicas(given: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**given)  # type: ignore[arg-type]


def test_haproxy_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/not/there/haproxy")
    wrong = replicas.on_head("127.0.0.1", 0, "/not/made")
    assert wrong is not None and wrong[1].startswith("HAProxy is not installed on the head's host")
    assert "pip install 'paceline[cluster]'" in wrong[2]


def test_replicas_need_a_cluster() -> None:
    done = CliRunner().invoke(app, ["serve", "--replicas", "2"])
    assert done.exit_code == USER_ERROR
    assert "--replicas 2: no cluster is named" in " ".join(done.stderr.split())
