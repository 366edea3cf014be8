"""Structured output beside its schemas: JSON Schema's official suite, and forced tool calls of random schemas.

    python tools/try_schemas.py suite JSON-Schema-Test-Suite/tests/draft2020-12
    python tools/try_schemas.py calls http://127.0.0.1:8000 --count 1000

``suite``: each schema is refused with a reason or enforced, and of the suite's values no invalid one may be accepted.
``calls``: a running server must call a tool, whose schema is drawn anew each time, and each call must be valid. The
server needs a chat template for tools (``--chat-template``). Ends with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema

AT_ONCE = 8
ENUM = ["red", "green", "blue", "it's", 'a "b"', "é", "日本", "a\nb"]


def suite(folder: Path, model: str) -> int:
    """How many invalid values were accepted."""
    from paceline import LLM
    from paceline.core.errors import ConfigError
    from paceline.core.grammar import Grammar

    engine = LLM(model, threads=1).engine
    grammars, seen = engine.grammars, Counter[str]()
    assert grammars is not None
    words = grammars._vocabulary()  # its own way to split a text
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            try:
                grammar = Grammar("json_schema", json.dumps(group["schema"]))
                grammars.matcher(grammar)
            except ConfigError as error:
                seen["refused"] += 1
                seen["refused without a reason"] += not error.wrong
                continue
            seen["enforced"] += 1
            for test in group["tests"]:
                text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
                ids = words.tokenize_str(text)
                matcher = grammars.matcher(grammar)
                accepted = matcher.within([], [ids])[0] and bool(matcher(ids)[engine.limits.eos_ids[0]])
                seen[f"{'valid' if test['valid'] else 'INVALID'}, {'accepted' if accepted else 'not accepted'}"] += 1
                if accepted and not test["valid"]:
                    print(f"accepted: {file.name}: {group['description']}: {test['description']}: {text[:200]}")
    for name, count in sorted(seen.items()):
        print(f"{count:6} {name}")
    return seen["INVALID, accepted"] + seen["refused without a reason"] + (not seen["enforced"])


def schema(draw: random.Random, deep: int = 2) -> dict[str, Any]:
    """A random schema of what tools take, which ends."""
    kind = draw.choice(["integer", "boolean", "enum", "string", "pattern", "null", *(["object", "array"] * bool(deep))])
    if kind == "enum":
        return {"enum": draw.sample([*ENUM, 1, None, True], draw.randint(1, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{1,4}$", r"^\d\d:\d\d$", "^(yes|no)$"])}
    if kind == "integer":
        low = draw.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 8)}
    if kind == "array":
        return {"type": "array", "items": schema(draw, deep - 1), "maxItems": draw.randint(0, 3)}
    return arguments(draw, deep - 1) if kind == "object" else {"type": kind}


def arguments(draw: random.Random, deep: int = 2) -> dict[str, Any]:
    """A random object's schema."""
    names = draw.sample(["city", "unit", "count", "a b", "ü", "x-y", "deep"], draw.randint(0, 4))
    required = [name for name in names if draw.random() < 0.7]
    own = {name: schema(draw, deep) for name in names}
    return {"type": "object", "properties": own, "required": required, "additionalProperties": False}


def calls(url: str, count: int, seed: int, seconds: float) -> int:
    """How many calls were not valid; asked for `AT_ONCE` at once, as many as there is time for."""
    until = time.monotonic() + seconds

    def ask(number: int) -> str | None:
        return _call(client, random.Random(f"{seed}/{number}"), number) if time.monotonic() < until else None

    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        found = Counter(filter(None, pool.map(ask, range(count))))
    for name, times in found.most_common(20):
        print(f"{times:6} {name}")
    return found.total() - found["valid"] or int(not found)


def _call(client: httpx.Client, draw: random.Random, number: int) -> str:
    """Ask for one call; "valid", or what is wrong."""
    schemas = {f"tool_{at}": arguments(draw) for at in range(draw.randint(1, 3))}
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    named = {"type": "function", "function": {"name": draw.choice([*schemas])}}
    body = {"messages": [{"role": "user", "content": f"Do number {number}."}], "tools": tools, "max_tokens": 900}
    body |= {"tool_choice": draw.choice(["required", named]), "parallel_tool_calls": False}
    body |= {"temperature": draw.choice([0, 1, 1.5]), "seed": number, "speculation": draw.choice([True, False])}
    answer = client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    choice = answer.json()["choices"][0]
    try:
        [call] = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    except (KeyError, ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__} ({choice['finish_reason']}): {str(error)[:120]} {answer.text[:300]}"
    return "valid"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    of_suite = parts.add_parser("suite")
    of_suite.add_argument("folder", type=Path)
    of_suite.add_argument("--model", default="paceline-small")
    of_calls = parts.add_parser("calls")
    of_calls.add_argument("url")
    of_calls.add_argument("--count", type=int, default=1000)
    of_calls.add_argument("--seed", type=int, default=0)
    of_calls.add_argument("--seconds", type=float, default=3600.0, help="time after which no more are asked for")
    asked = parser.parse_args()
    if asked.part == "suite":
        return int(suite(asked.folder, asked.model) > 0)
    return int(calls(asked.url, asked.count, asked.seed, asked.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
