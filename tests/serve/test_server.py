"""One live server, many clients: ids, streams, refusals, an engine that dies, a drain."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from kits.server import LiveServer, live_server

from paceline import LLM, ConfigError, SamplingParams
from paceline.serve.config import ServeConfig

DRAFTER = "hybrid:grammar+prediction+ngram"
PROMPT = "one two three one two three one two"
CHAT = [{"role": "user", "content": "Tell me of the sea."}]


def extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"return_token_ids": True, **fields}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}])
def test_completions_give_the_offline_ids(
    client: openai.OpenAI, offline: LLM, fields: dict[str, Any], stream: bool
) -> None:
    expected = offline.generate(PROMPT, SamplingParams(max_tokens=40, **fields))[0].outputs[0]
    answer: Any = client.completions.create(
        model="paceline-small", prompt=PROMPT, max_tokens=40, stream=stream, **fields, **extra()
    )
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    assert [token for choice in choices for token in choice.token_ids] == expected.token_ids
    assert "".join(choice.text for choice in choices) == expected.text
    assert choices[-1].finish_reason == expected.finish_reason
    assert choices[0].prompt_token_ids == offline.tokenizer.encode(PROMPT)


SAMPLING: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "least": {"min_tokens": 20, "stop": ["e"], "include_stop_str_in_output": True},
    "ends": {"stop_token_ids": [*range(300, 700)]},
    "bias": {"logit_bias": {"17": 9.0}, "ignore_eos": True},
    "special": {"skip_special_tokens": False},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_every_way_to_sample_gives_the_offline_ids(server: LiveServer, offline: LLM, name: str) -> None:
    fields = {"temperature": 1, "seed": 5, "max_tokens": 30, **SAMPLING[name]}
    params = fields | ({"logit_bias": {17: 9.0}} if name == "bias" else {})
    expected = offline.generate(PROMPT, offline.default_sampling_params(**params))[0].outputs[0]
    usual = offline.default_sampling_params(temperature=1, seed=5, max_tokens=30)
    plain = offline.generate(PROMPT, usual)[0].outputs[0]
    body = {"prompt": PROMPT, "return_token_ids": True, **fields}
    [choice] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert (choice["token_ids"], choice["text"]) == (expected.token_ids, expected.text)
    assert choice["finish_reason"] == expected.finish_reason
    assert name == "special" or expected.token_ids != plain.token_ids  # the option means something here


def test_chat_gives_the_offline_ids_whole_and_streamed(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(CHAT, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    asked: dict[str, Any] = {"model": "paceline-small", "messages": CHAT, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text
    chunks: list[Any] = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}, **extra())
    )
    said = offline.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chunks[0].prompt_token_ids == offline.tokenizer.encode(said, add_special_tokens=False)
    assert not hasattr(chunks[1], "prompt_token_ids")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("choice", [False, {"max_nodes": 2}])
def test_a_request_chooses_its_speculation_and_the_ids_stay(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "paceline-small", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    usual: Any = client.completions.create(**asked, **extra())
    chosen: Any = client.completions.create(**asked, **extra(speculation=choice))
    assert chosen.choices[0].token_ids == usual.choices[0].token_ids
    assert chosen.stats["drafted"] == 0 if choice is False else len(chosen.stats["accepted_histogram"]) <= 3
    with pytest.raises(openai.BadRequestError, match="other"):
        client.completions.create(**asked, **extra(speculation={"sources": ["other"]}))


def test_samples_prompts_echo_and_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    params = offline.default_sampling_params(n=2, seed=3, max_tokens=8, logprobs=2)
    expected = [offline.generate(text, params)[0] for text in (PROMPT, "hello")]
    answer = client.completions.create(
        model="paceline-small", prompt=[PROMPT, "hello"], n=2, seed=3, max_tokens=8, logprobs=2, echo=True
    )
    assert len(answer.choices) == 4
    for choice, sample in zip(answer.choices, [s for o in expected for s in o.outputs], strict=True):
        assert choice.text.endswith(sample.text) and choice.text.strip().startswith(("one", "hello"))
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        said = [row[t].logprob for row, t in zip(sample.logprobs or [], sample.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs[-len(said) :] == pytest.approx(said, abs=1e-3)


@pytest.mark.parametrize("tokens", [False, True])
def test_an_echo_with_logprobs_has_those_of_the_prompt(client: openai.OpenAI, offline: LLM, tokens: bool) -> None:
    ids = offline.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    expected = offline.generate({"prompt_token_ids": ids}, params)[0]
    answer = client.completions.create(
        model="paceline-small", prompt=ids if tokens else PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.tokens and told.text_offset and told.top_logprobs
    rows = [*(expected.prompt_logprobs or []), *(expected.outputs[0].logprobs or [])]
    said = zip(rows, [*ids, *expected.outputs[0].token_ids], strict=True)
    values = [None if row is None else pytest.approx(row[token].logprob, abs=1e-3) for row, token in said]
    assert told.token_logprobs == values and told.top_logprobs[0] is None
    assert [len(row) in (2, 3) for row in told.top_logprobs[1:]] == [True] * (len(rows) - 1)
    shown = [(told.tokens[i], told.text_offset[i]) for i in range(len(rows)) if told.tokens[i] != "<|bos|>"]
    assert all(answer.choices[0].text[at:].startswith(text) for text, at in shown)
    assert "prompt_logprobs" not in (answer.choices[0].model_extra or {})


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_chat_logprobs_are_the_likeliest_and_the_chosen(client: openai.OpenAI, offline: LLM, most: int) -> None:
    """As many as were asked for, whichever rank the chosen token has."""
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": 1}
    answer = client.chat.completions.create(
        model="paceline-small", messages=CHAT, logprobs=True, top_logprobs=most, **asked
    )
    rows = answer.choices[0].logprobs
    expected = offline.chat(CHAT, offline.default_sampling_params(logprobs=most, **asked))[0].outputs[0]
    assert rows is not None and rows.content is not None and len(rows.content) == 24
    ranks = []
    for row, own, token in zip(rows.content, expected.logprobs or [], expected.token_ids, strict=True):
        ranks.append(own[token].rank)
        best = sorted((one.logprob for one in own.values() if one.rank <= most), reverse=True)
        assert [one.logprob for one in row.top_logprobs] == pytest.approx(best, abs=1e-3) and len(best) == most
        assert row.logprob == pytest.approx(own[token].logprob, abs=1e-3)
        assert (row.token in [one.token for one in row.top_logprobs]) == (own[token].rank <= most)
    assert {1, 2} <= {*ranks} and max(ranks) > 5


def test_a_part_of_a_character_has_no_bytes_beside_its_logprob(client: openai.OpenAI, offline: LLM) -> None:
    part = offline.tokenizer.encode("\u2603", add_special_tokens=False)[-1]
    answer = client.chat.completions.create(
        model="paceline-small", messages=CHAT, max_tokens=2, temperature=0, logprobs=True, logit_bias={str(part): 100}
    )
    rows = answer.choices[0].logprobs
    assert rows is not None and rows.content is not None
    assert [row.bytes for row in rows.content] == [None] * 2


def test_nothing_of_a_stop_string_is_streamed(client: openai.OpenAI) -> None:
    text = (
        client.completions.create(model="paceline-small", prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text
    )
    stop = text[10:14]
    chunks = client.completions.create(
        model="paceline-small", prompt=PROMPT, max_tokens=30, temperature=0, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]


def test_models_and_the_rest(server: LiveServer) -> None:
    get = {path: httpx.get(server.url + path) for path in ("/v1/models", "/v1/models/paceline-small", "/version")}
    assert get["/v1/models"].json()["data"] == [get["/v1/models/paceline-small"].json()]
    assert "paceline:spec_decode_num_draft_tokens_total" in httpx.get(f"{server.url}/metrics").text
    assert httpx.get(f"{server.url}/v1/speculation").json()["drafter"] == DRAFTER


BAD = {
    "no json": (b"{", 400),
    "deep": (b'{"prompt": ' + b"[" * 100_000, 400),
    "unknown field": (b'{"prompt": "a", "foo": 1}', 400),
    "empty prompt": (b'{"prompt": []}', 400),
    "id": (b'{"prompt": [99999999]}', 400),
    "bias": (b'{"prompt": "a", "logit_bias": {"99999999": 1}}', 400),
    "too long": (b'{"prompt": [' + b"5," * 5000 + b"5]}", 400),
    "streamed echo": (b'{"prompt": "a", "logprobs": 1, "echo": true, "stream": true}', 400),
    "source": (b'{"prompt": "a", "speculation": {"sources": ["nonesuch"]}}', 400),
    "schema": (
        b'{"prompt": "a", "structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}}',
        400,
    ),
    "model": (b'{"prompt": "a", "model": "other"}', 404),
    "large": (b'{"prompt": "' + b"a" * 5_000_000 + b'"}', 413),
}


PARAMS = {"unknown field": "foo", "empty prompt": "prompt", "id": "prompt", "too long": "prompt", "bias": "logit_bias"}
PARAMS |= {"source": "speculation", "schema": None}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_refused_in_words(server: LiveServer, name: str) -> None:
    body, status = BAD[name]
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    if name in PARAMS:
        assert error["param"] == PARAMS[name]


def test_other_paths_methods_types_and_hosts(server: LiveServer) -> None:
    json_type = {"content-type": "application/json"}
    for answer, status in (
        (httpx.post(f"{server.url}/v1/embeddings", json={}), 404),
        (httpx.get(f"{server.url}/v1/completions"), 405),
        (httpx.post(f"{server.url}/v1/completions", content=b"a=1", headers={"content-type": "text/plain"}), 415),
        (httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example:80"}), 400),
        (httpx.post(f"{server.url}/v1/completions", content=iter([b"a" * 3_000_000] * 2), headers=json_type), 413),
    ):
        assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, stream: bool) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1800, "ignore_eos": True, "stream": stream, "temperature": 1})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: load(server)["running"] == 1)
    until(lambda: load(server) == {"server_load": 0, "running": 0, "waiting": 0}, 1.0)


def test_a_client_that_reads_late_gets_all_and_its_next_request_is_answered_behind(server: LiveServer) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 30,
        "n": 16,
        "ignore_eos": True,
        "temperature": 1,
        "seed": 3,
        "logprobs": 20,
    }
    parts = []
    for more in ({"stream": True, "speculation": {"trace": True}}, {"max_tokens": 1, "n": 1}):
        data = json.dumps(body | more).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
        parts.append(f"{head}content-type: application/json\r\n\r\n".encode() + data)
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((host, int(port)))
        one.sendall(b"".join(parts))
        until(lambda: load(server)["running"] > 0)
        until(lambda: load(server)["running"] == 0, 60.0)
        one.settimeout(10)
        said = b""
        while not said.endswith(b"}") or b"data: [DONE]" not in said:
            said += one.recv(65536)
    streamed, _, last = said.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(said) > 400_000 and last.startswith(b"HTTP/1.1 200 OK\r\n")
    texts = dict.fromkeys(range(16), "")
    for line in streamed.splitlines():
        if line.startswith(b"data: {"):
            [choice] = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == [choice["text"] for choice in whole["choices"]]


def load(server: LiveServer) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{server.url}/load").json()
    return found


def until(holds: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


# A stopped one is given up by its heartbeat, which tests/distributed/test_worker.py has in a second instead of ten.
@pytest.mark.parametrize("signal_", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_streams_go_on_where_the_engine_dies_or_hangs(
    server: LiveServer, client: openai.OpenAI, offline: LLM, signal_: signal.Signals
) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 120}
    expected = offline.generate(PROMPT, offline.default_sampling_params(ignore_eos=True, **params))[0].outputs[0]
    before = server.engine_pid
    ids: list[int] = []
    text, hit = "", False
    for chunk in client.completions.create(
        model="paceline-small", prompt=PROMPT, stream=True, **params, **extra(ignore_eos=True)
    ):
        choice: Any = chunk.choices[0]
        ids += choice.token_ids
        text += choice.text
        if len(ids) > 20 and not hit:
            os.kill(before, signal_)
            hit = True
    assert hit and (ids, text) == (expected.token_ids, expected.text)
    assert server.engine_pid != before


def test_the_process_that_speaks_http_is_small_and_has_no_torch(server: LiveServer) -> None:
    process = Path(f"/proc/{server.process.pid}")
    status = (process / "status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) < 200_000
    assert "libtorch" not in (process / "maps").read_text()


def test_keys_are_asked_for_and_a_drain_lets_streams_end_and_takes_no_more(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with live_server("--api-key-file", str(keys), "--drafter", "none") as server:
        for path in ("/", "/playground.css", "/playground.js", "/playground.svg"):  # it needs none, and loads no more
            answer = httpx.get(server.url + path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//", answer.text)
            assert "innerHTML" not in answer.text and "style=" not in answer.text
        refused = httpx.get(f"{server.url}/v1/models")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        begun = threading.Event()

        def follow() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        thread = threading.Thread(target=follow)
        thread.start()
        assert begun.wait(20)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, headers=headers)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        thread.join(30)
        assert "data: [DONE]" in lines
        assert server.process.wait(10) in (0, -signal.SIGTERM)


def test_a_ggufs_id_is_its_file_name() -> None:
    names = [ServeConfig().name_of(model) for model in ("/models/a.Q4_1.gguf", "smollm2-135m", "/models/folder")]
    assert names == ["a.Q4_1.gguf", "smollm2-135m", "/models/folder"]
    assert ServeConfig(served_model_name="b").name_of("a.gguf") == "b"


def test_what_cannot_be_served_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be had"):
            ServeConfig(port=port).listen()
    with pytest.raises(ConfigError, match="no keys"):
        ServeConfig(host="0.0.0.0").keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        ServeConfig(api_key_file="/nowhere").keys()
    command = [sys.executable, "-m", "paceline", "serve", "paceline-small", "--port", "0", "--drafter", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "nothing" in done.stderr and "base_url" not in done.stderr
