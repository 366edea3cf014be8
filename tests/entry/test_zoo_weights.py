"""A trained drafter that is named without weights gets those that the zoo has for the model in use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kit.mirror_watch import watch

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.api.assembly.drafting import drafter_of
from paceline.api.config import LLMConfig
from paceline.bench.measure import Builder
from paceline.bench.methods import parse_method
from paceline.core.errors import ConfigError
from paceline.draft import registry
from paceline.draft.registry import DrafterConfig
from paceline.weights import zoo

MODEL, DRAFT = "paceline-small", "paceline-small-draft"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
NAMED = {
    "lyanna": "lyanna:paceline-small-lyanna",
    "eagle,depth=3": "eagle:paceline-small-eagle,depth=3",
    "medusa": "medusa:paceline-small-medusa",
    "spire": "spire:paceline-small-spire",
    "streams,nodes=8": "streams:paceline-small-streams,nodes=8",
    "draft_model,dtype=int8": "draft_model:paceline-small-draft,dtype=int8",
    "hybrid:suffix;depth=6+lyanna;depth=3": "hybrid:suffix;depth=6+lyanna:paceline-small-lyanna;depth=3",
    "hybrid:suffix + draft_model": "hybrid:suffix+draft_model:paceline-small-draft",
    "hybrid:suffix+streams;nodes=8": "hybrid:suffix+streams:paceline-small-streams;nodes=8",
    "hybrid:paceline-small-draft": "hybrid:paceline-small-draft",
    "lyanna:elsewhere": "lyanna:elsewhere",
    "ngram": "ngram",
}


def meant(model: str, drafter: str | DrafterConfig) -> DrafterConfig | None:
    return drafter_of(LLMConfig(model=model, drafter=drafter))


def parts(config: Any) -> Any:
    return getattr(config, "chosen", config)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, threads=1)


@pytest.mark.parametrize("text", NAMED)
@pytest.mark.parametrize("model", [MODEL, str(zoo.find(MODEL))])
def test_it_means_the_one_of_the_model(text: str, model: str) -> None:
    assert parts(meant(model, text)) == parts(registry.parse(NAMED[text]))


def test_everywhere(llm: LLM) -> None:
    async def answer() -> Any:
        async with AsyncLLM(MODEL, drafter="medusa", budget=4, threads=1, max_model_len=256) as model:
            return await model.generate("def f(x):", GREEDY)

    assert asyncio.run(answer()).stats.drafted > 0
    own = Builder(MODEL, "cpu", 1).llm(parse_method("medusa"))
    assert own.engine.round.drafter.spec.name == "medusa"  # type: ignore[attr-defined]


def test_the_zoos_exits_are_the_mirror_rounds(llm: LLM) -> None:
    """Where they lie behind these layers; more outcomes are then prepared for than with the target's own head."""
    reused, texts = {}, ["SELECT name FROM", "The sea", "def f(x):", '{"name": "', "Once upon a time", "User: What is"]
    for options, trained in (("", True), (",exit=5", False), (",heads=own", False)):
        given = {"drafter": "draft_model", "round": f"mirror,kappa=1{options}", "share": llm, "budget": 4}
        mirror, counts = LLM(MODEL, **given, threads=1, max_model_len=256), list[int]()
        round_: Any = mirror.engine.round
        watch(round_, lambda verdict, counts=counts: counts.append(verdict.reused))
        assert (round_.exit.heads is not None) == trained
        mirror.generate(texts, SamplingParams(temperature=0, max_tokens=64))
        reused[options] = sum(counts)
    assert reused[""] > reused[",heads=own"], reused


def test_streams_of_applications_are_meant_where_there_are_any() -> None:
    applied = LLMConfig(model=MODEL, drafter="streams", applications={"sql": "paceline-small-sql"})
    assert drafter_of(applied) == registry.parse("streams")


@pytest.mark.parametrize("text", ["lyanna", "hybrid:suffix+lyanna;depth=2"])
def test_where_the_zoo_has_none_the_error_says_what_fits(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(DRAFT, drafter=text)
    error = caught.value
    assert error.subject == f"drafter='lyanna' for {DRAFT}" and "the zoo has none" in error.wrong
    assert error.remedy.endswith(": ngram, suffix, prediction, grammar, magicdec") and "lyanna:FOLDER" in error.remedy


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (
            "draft_model:{head}",
            "{head} holds weights of the drafter 'eagle', not a model. Write drafter='eagle:{head}'",
        ),
        ("draft_model:paceline-small-eagle", "weights of the drafter 'eagle', not a model. Write drafter='eagle:pacel"),
        ("draft_model:paceline-small-spire", "weights of the drafter 'spire', not a model. Write drafter='spire:pacel"),
        ("draft_model:paceline-small-sql", "Write drafter='streams:paceline-small-sql', or give it as an application."),
        ("eagle:paceline-small-draft", "small-draft holds a model. Write drafter='draft_model:paceline-small-draft'."),
        ("hybrid:suffix+eagle:paceline-small-draft", "small-draft holds a model. Write drafter='draft_model:paceline"),
        ("lyanna:paceline-small-eagle", "holds weights of the drafter 'eagle'. Write drafter='eagle:paceline-small-e"),
    ],
)
def test_weights_of_another_drafter_are_named_with_their_own(
    drafter: str, words: str, llm: LLM, tmp_path: Path
) -> None:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        LLM(MODEL, share=llm, drafter=drafter.format(head=tmp_path), threads=1)
    assert words.format(head=tmp_path) in str(error.value)
