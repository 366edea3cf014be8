"""A prompt asked after `LLM.forget` is answered as if it were the first, wherever the drafter keeps answers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.bench import measure

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPT = "def read_lines(path):\n"
PLACES = {
    "in this round": {"drafter": "suffix", "budget": 8},
    "in a part of a hybrid": {"drafter": "hybrid:suffix+ngram", "budget": 8},
    "in sessions": {"drafter": "suffix,depth=6", "round": "mirror,kappa=2"},
    "in sessions of look-ups": {"drafter": "hybrid:suffix;depth=6+ngram;depth=6", "round": "mirror,kappa=2"},
    "in sessions beside a model": {
        "drafter": "hybrid:suffix;depth=6+draft_model:paceline-small-draft;depth=6",
        "round": "mirror,kappa=2",
    },
    "in another process": {"drafter": "suffix,depth=6", "round": "mirror,kappa=2,rollout=process"},
    "in a pipeline's source": {"drafter": "suffix", "round": "pipeline,stages=2"},
}


def answered(llm: LLM) -> tuple[list[int], int]:
    """The answer, and how many of its tokens were drafted."""
    [output] = llm.generate(PROMPT, GREEDY)
    stats = output.stats
    assert stats.off_reason is None
    return output.outputs[0].token_ids, stats.accepted


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_an_earlier_answer_is_found(place: str) -> None:
    llm = LLM("paceline-small", threads=1, max_model_len=256, **PLACES[place])
    first = answered(llm)
    llm.forget()
    assert answered(llm) == first
    said, accepted = answered(llm)
    assert said == first[0] and accepted > first[1]  # without forgetting, the answer is drafted from itself


def test_k_v_of_a_prompt_is_computed_anew() -> None:
    llm = LLM("paceline-small-draft", threads=1, max_model_len=256)
    computed = []
    for forgets in (False, False, True):
        if forgets:
            llm.forget()
        cache = llm.engine.pool.open(list(range(20, 120)))
        computed.append(cache.committed)
        cache.release()
        llm.generate({"prompt_token_ids": list(range(20, 120))}, GREEDY)
    assert computed[0] == computed[2] == 0 < computed[1]


def test_ask_begins_with_it() -> None:
    llm = LLM("paceline-small-draft", threads=1, max_model_len=256, drafter="suffix", budget=8)
    ids = llm.tokenizer.encode(PROMPT)
    counts = [measure.ask(llm, [ids], GREEDY)[0][0].stats.passes for _ in range(3)]
    assert len({*counts}) == 1
    [again] = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert again.stats.passes < counts[0]


# -- who times requests

ASKS = {"generate", "chat", "stream", "submit"}
CLOCKS = {"perf_counter", "monotonic", "time"}
# `lend` of the SPIRe study forgets, and puts the K/V of prompts there that it computed; `begin` of the bench's runner
# is one of the two.
BEGINS = {"forget", "lend", "begin"}
UNFORGOTTEN = {
    ("studies/specpipe_parts/real.py", "ran"): "each prompt is asked once, in a process of its own",
    ("studies/specpipe_parts/costs.py", "costs_of"): "ticks are timed, of an engine of its own with a draft model",
    ("studies/spire_parts/answers.py", "answer"): "its one caller forgets and lends before each",
    ("studies/spire_parts/throughput.py", "decode_speed"): "K/V of prompts is lent on purpose, and nobody looks up",
    ("studies/serving.py", "run"): "each prompt is asked once of the engine, as of the server",
    ("tools/two_hosts.py", "killed"): "a pause is timed, in a process of its own that asks once",
    ("tools/server_chaos.py", "_follow"): "the longest wait is looked for, whatever earlier requests left",
    ("studies/kit/peer_workers/transformers_worker.py", "generate"): "a peer that keeps nothing",
}
TIMED = [*ROOT.glob("src/paceline/bench/**/*.py"), *ROOT.glob("src/paceline/cli/*.py"), *ROOT.glob("tools/*.py")]
TIMED += [*ROOT.glob("studies/**/*.py"), *ROOT.glob("examples/*.py")]


def careless(source: str) -> list[str]:
    """Functions that ask for answers and look at a clock, and do not begin with forgetting."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        called = {
            getattr(node.func, "attr", getattr(node.func, "id", ""))
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
        }
        if called & ASKS and called & CLOCKS and not called & BEGINS:
            found.append(function.name)
    return found


def test_who_times_a_request_forgets_the_ones_before() -> None:
    found = {
        (str(path.relative_to(ROOT)), name) for path in TIMED for name in careless(path.read_text(encoding="utf-8"))
    }
    assert found == {*UNFORGOTTEN}


def test_the_check_finds_who_does_not() -> None:
    timed = "def timed(llm):\n    began = perf_counter()\n    llm.generate([])\n    return perf_counter() - began\n"
    assert careless(timed) == ["timed"]
    assert careless(timed.replace("    began", "    llm.forget()\n    began", 1)) == []
