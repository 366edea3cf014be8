"""Grammars: what is refused, and that masks are those of a parser that read the text from its beginning."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
import torch
from kits.grammars import SCHEMA

from paceline import LLM
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.grammar import LONGEST, Grammar
from paceline.core.sampling import SamplingParams
from paceline.engine.grammar import Grammars


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("paceline-small")


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return llm.engine.grammars


def drawn(llm: LLM, grammars: Grammars, grammar: Grammar, seed: int) -> tuple[list[int], str]:
    """Ids that the grammar allows, up to its end, drawn evenly; and their text."""
    draw, ids = random.Random(seed), []
    eos = llm.engine.limits.eos_ids[0]
    while len(ids) < 300:
        matcher = grammars.matcher(grammar)  # from the beginning for each token
        token = draw.choice(matcher(ids).nonzero()[:, 0].tolist())
        if token == eos:
            return ids, llm.tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(4))
def test_what_a_schema_allows_is_valid(llm: LLM, grammars: Grammars, seed: int) -> None:
    _, text = drawn(llm, grammars, Grammar("json_schema", json.dumps(SCHEMA)), seed)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_masks_do_not_depend_on_what_was_asked_before(llm: LLM, grammars: Grammars) -> None:
    """One matcher, led over the prefixes of several texts in any order, and one from the beginning each time."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    texts = [drawn(llm, grammars, grammar, seed)[0] for seed in range(3)]
    places = [ids[:n] for ids in texts for n in range(0, len(ids) + 1, 3)]
    places += [[*places[5], 7, 8], [llm.engine.limits.eos_ids[0]], [*texts[0], *llm.engine.limits.eos_ids, 5]]
    random.Random(3).shuffle(places)
    wanderer = grammars.matcher(grammar)
    for place in places:
        assert torch.equal(wanderer(place), grammars.matcher(grammar)(place)), place
        assert wanderer.forced(place, 8) == grammars.matcher(grammar).forced(place, 8)
        branches = [[], [5], texts[0][len(place) :], texts[1][len(place) :]]
        assert wanderer.within(place, branches) == grammars.matcher(grammar).within(place, branches)


def test_what_is_forced_follows_whatever_is_chosen(llm: LLM, grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar("json_schema", json.dumps(SCHEMA)))
    forced = matcher.forced([], 16)
    assert llm.tokenizer.decode(forced).startswith('{"name":') and matcher.forced([], 2) == forced[:2]
    assert matcher.forced([], 0) == []
    ids, _ = drawn(llm, grammars, Grammar("choice", '["perhaps"]'), 0)
    assert llm.tokenizer.decode(grammars.matcher(Grammar("choice", '["perhaps"]')).forced([], 99)) == "perhaps" and ids


KINDS: dict[str, tuple[Grammar, str]] = {
    "regex": (Grammar("regex", "[a-c]{2,4}[0-9]"), r"[a-c]{2,4}[0-9]"),
    "choice": (Grammar("choice", '["yes", "no \\"2\\""]'), r'yes|no "2"'),
    "lark": (Grammar("lark", 'start: "a" b*\nb: "-" /[xyz]/'), r"a(-[xyz])*"),
    "structural_tag": (
        Grammar(
            "structural_tag",
            json.dumps(
                {"structures": [{"begin": "<f=k>", "schema": {"enum": [1, 22]}, "end": "</f>"}], "triggers": ["<f"]}
            ),
        ),
        r"(?s)((?!<f).|<f=k>(1|22)</f>)*",
    ),
}


@pytest.mark.parametrize("kind", ["regex", "choice", "lark"])
def test_every_kind_says_what_it_means(llm: LLM, grammars: Grammars, kind: str) -> None:
    grammar, pattern = KINDS[kind]
    for seed in range(3):
        _, text = drawn(llm, grammars, grammar, seed)
        jsonschema.validate(text, {"pattern": f"^(?:{pattern})$"})


def test_a_structural_tag_binds_behind_its_trigger(llm: LLM, grammars: Grammars) -> None:
    matcher = grammars.matcher(KINDS["structural_tag"][0])

    def allows(text: str) -> bool:
        return matcher.within([], [llm.tokenizer.encode(text, add_special_tokens=False)])[0]

    assert allows("well <f=k>22</f> and 3") and allows("no tag")
    assert not allows("well <f=j>") and not allows("<f=k>3</f>")


WRONG: dict[str, tuple[str, str, str]] = {
    "no JSON": ("json_schema", "{", "not JSON"),
    "no schema": ("json_schema", "3", "a schema is an object"),
    "an unknown keyword": ("json_schema", '{"type": "object", "uniqueItems": true, "not": {"a": 1}}', "not"),
    "nothing meets it": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum .5. is greater"),
    "a pattern": ("regex", "[a-", "unclosed"),
    "no list": ("choice", '{"a": 1}', "a list of texts"),
    "an empty choice": ("choice", "[]", "a list of texts"),
    "lark": ("lark", "start: nothing_known", "unknown name"),
    "no structures": ("structural_tag", "{}", "structures and triggers"),
    "no trigger": (
        "structural_tag",
        '{"structures": [{"begin": "<g", "schema": {}, "end": ""}], "triggers": ["<f"]}',
        "trigger",
    ),
    "endless": ("json_schema", '{"$ref": "#"}', "no text meets it"),
    "no mask": ("lark", 'start: "x" t "y"\nt[lazy]: /[a-z]*/', "has_lowest_match[^<]*$"),
    "too deep": ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_met_is_refused(llm: LLM, grammars: Grammars, case: str) -> None:
    kind, text, says = WRONG[case]
    grammar = Grammar(kind, text)  # type: ignore[arg-type]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ConfigError, match=says):
            llm.generate("a", SamplingParams(grammar=grammar))
    assert not llm.engine.live


def test_grammars_that_are_none() -> None:
    for given, says in (
        ({"kind": "yaml", "text": "a"}, "no such kind"),
        ({"kind": "regex"}, "empty"),
        ({"kind": "regex", "text": "a" * (LONGEST + 1)}, "at most"),
        ({"kind": "regex", "text": 3}, "it is a text"),
        ({"text": "a"}, "a kind and a text"),
        ("a+", "a kind and a text"),
    ):
        with pytest.raises(ConfigError, match=says):
            SamplingParams(grammar=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ignore_eos"):
        SamplingParams(grammar=Grammar("json_object"), ignore_eos=True)
    assert SamplingParams(grammar={"kind": "regex", "text": "a"}).grammar == Grammar("regex", "a")  # type: ignore[arg-type]


def test_a_model_without_what_it_takes() -> None:
    with pytest.raises(CapabilityError, match="no tokenizer"):
        Grammars(None, 100, [1]).matcher(Grammar("regex", "a"))
    with pytest.raises(CapabilityError, match="ends an answer"):
        Grammars(object(), 100, []).matcher(Grammar("regex", "a"))
