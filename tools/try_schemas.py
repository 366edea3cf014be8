"""Structured output beside its schemas: JSON Schema's official suite, random schemas, and forced tool calls of them.

    python tools/try_schemas.py suite JSON-Schema-Test-Suite/tests/draft2020-12
    python tools/try_schemas.py grid --count 2000 --drafters 3
    python tools/try_schemas.py calls http://127.0.0.1:8000 --count 1000

``suite``: each schema is refused with a reason or enforced, and of the suite's values no invalid one may be accepted.
``grid``: answers under random schemas, ``--at-once`` in a batch and the first of them alone, greedy and sampled: each
is valid, and has the ids of plain decoding with every drafter and round.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema

AT_ONCE = 8
GRID = {
    "serial": "grammar suffix ngram hybrid:grammar+suffix draft_model:paceline-small-draft eagle medusa lyanna spire "
    "magicdec hybrid:grammar+paceline-small-draft",
    "fused": "streams",
    "mirror": "suffix ngram draft_model:paceline-small-draft",
    "pipeline,stages=3": "suffix ngram draft_model:paceline-small-draft",
}
GRID_TOKENS = 600  # the longest answer that a random schema may have
GRID_MIB = (160, 5)  # of each engine's K/V, and for each answer in a batch; in float64, one request of the longest
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


def grid(model: str, dtype: str, count: int, at_once: int, drafters: int, nodes: int, seed: int, seconds: float) -> int:
    """How many answers were wrong; as many batches of schemas as there is time for.

    Args:
        model: an embedded one, for which the zoo has all drafters of `GRID`.
        dtype: of its weights and activations; in float64 rounding is too small to change a token, so that passes are
            as wide as they come.
        count: schemas.
        at_once: of them in a batch.
        drafters: of `GRID`, drawn anew for each batch; the batch is asked of each.
        nodes: most of a draft.
        seed: of schemas, drafters and samples.
        seconds: time after which no batch begins.
    """
    from paceline import LLM

    same: dict[str, Any] = {"dtype": dtype, "exact": dtype != "float64", "threads": 1}
    same["kv_memory"] = f"{GRID_MIB[0] + GRID_MIB[1] * at_once}MiB"
    plain = LLM(model, **same)
    pairs = [(round_, drafter) for round_, names in GRID.items() for drafter in names.split()]
    found, until = Counter[str](), time.monotonic() + seconds
    with suppress(KeyboardInterrupt):  # it ends with what it has
        for first in range(seed, seed + count, at_once):
            if time.monotonic() > until:
                break
            draw = random.Random(first)
            engines = {
                f"{drafter}, {round_}": LLM(model, **same, share=plain, drafter=drafter, round=round_, budget=nodes)
                for round_, drafter in draw.sample(pairs, drafters)
            }
            found += _batch(plain, engines, [arguments(draw) for _ in range(min(at_once, seed + count - first))], first)
            print(f"{found['schemas']} schemas", file=sys.stderr, flush=True)
    for name, times in sorted(found.items()):
        print(f"{times:6} {name}")
    return sum(times for name, times in found.items() if name.startswith("WRONG")) + (not found["schemas"])


def _batch(plain: Any, engines: dict[str, Any], schemas: list[dict[str, Any]], seed: int) -> Counter[str]:
    """What came of some schemas with some drafters."""
    from paceline import SamplingParams
    from paceline.core.grammar import Grammar

    found = Counter({"schemas": len(schemas)})
    prompts = [f"Record {seed + at} as JSON:" for at in range(len(schemas))]
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=GRID_TOKENS,
                grammar=Grammar("json_schema", json.dumps(s)),
            )
            for s in schemas
        ]
        expected = [answer.outputs[0] for answer in plain.generate(prompts, params)]
        for wanted, one in zip(schemas, expected, strict=True):
            wrong = _invalid(one.text, wanted) if one.finish_reason == "stop" else one.finish_reason
            found[f"WRONG, plain: {wrong}: {json.dumps(wanted)}" if wrong else "valid"] += 1
        for name, engine in engines.items():
            answers = [*engine.generate(prompts, params), *engine.generate(prompts[:1], params[:1])]
            for at, answer in enumerate(answers):
                number, ids = at % len(schemas), answer.outputs[0].token_ids
                same = ids == expected[number].token_ids
                case = f"{json.dumps(schemas[number])} {temperature=} {ids}, plain {expected[number].token_ids}"
                found[f"same ids, {name}" if same else f"WRONG ids, {name}, batch at {at}: {case}"] += 1
                found[f"accepted drafts, {name}"] += answer.stats.accepted
    return found


def _invalid(text: str, wanted: dict[str, Any]) -> str:
    """Why a text is not what a schema wants; empty: it is."""
    try:
        jsonschema.validate(json.loads(text), wanted)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


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
    of_grid = parts.add_parser("grid")
    of_grid.add_argument("--model", default="paceline-small")
    of_grid.add_argument("--dtype", default="bfloat16")
    of_grid.add_argument("--count", type=int, default=2000)
    of_grid.add_argument("--at-once", type=int, default=AT_ONCE, help="schemas in a batch")
    of_grid.add_argument("--drafters", type=int, default=3, help="of all, drawn for each batch of schemas")
    of_grid.add_argument("--nodes", type=int, default=8, help="most of a draft")
    of_grid.add_argument("--seed", type=int, default=0, help="of the first schema; another run goes on behind it")
    of_grid.add_argument("--seconds", type=float, default=3600.0, help="time after which no batch begins")
    of_calls = parts.add_parser("calls")
    of_calls.add_argument("url")
    of_calls.add_argument("--count", type=int, default=1000)
    of_calls.add_argument("--seed", type=int, default=0)
    of_calls.add_argument("--seconds", type=float, default=3600.0, help="time after which no more are asked for")
    asked = parser.parse_args()
    if asked.part == "suite":
        return int(suite(asked.folder, asked.model) > 0)
    if asked.part == "grid":
        sizes = (asked.count, asked.at_once, asked.drafters, asked.nodes)
        return int(grid(asked.model, asked.dtype, *sizes, asked.seed, asked.seconds) > 0)
    return int(calls(asked.url, asked.count, asked.seed, asked.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
