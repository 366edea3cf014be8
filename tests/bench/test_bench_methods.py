"""Methods as a user writes them."""

from __future__ import annotations

import pytest

from paceline.bench.methods import (
    default_methods,
    parse_method,
    parse_methods,
    with_plain,
)
from paceline.bench.records import Method
from paceline.core.errors import ConfigError

DRAFT = "paceline-small-draft"
PEER = Method(name="vllm/plain", engine="vllm", drafter="plain")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", Method(name="plain", drafter="none")),
        ("none", Method(name="plain", drafter="none")),
        ("ngram", Method(name="ngram", drafter="ngram")),
        ("ngram,depth=4", Method(name="ngram,depth=4", drafter="ngram,depth=4")),
        ("fast=ngram,depth=4;budget=8", Method(name="fast", drafter="ngram,depth=4", settings={"budget": 8})),
        (
            "ngram ; exact=true; dtype=float32",
            Method(name="ngram;exact=true;dtype=float32", drafter="ngram", settings={"exact": True}, dtype="float32"),
        ),  # noqa: E501
        (f"hybrid:{DRAFT},dtype=int8", Method(name="hybrid,dtype=int8", drafter=f"hybrid:{DRAFT},dtype=int8")),
        (
            f"both=hybrid:suffix;depth=9;max_tokens=0+draft_model:{DRAFT};topk=2,nodes=8;budget=6",
            Method(
                name="both",
                drafter=f"hybrid:suffix;depth=9;max_tokens=0+draft_model:{DRAFT};topk=2,nodes=8",
                settings={"budget": 6},
            ),
        ),
        (f"x=draft_model:{DRAFT},depth=3", Method(name="x", drafter=f"draft_model:{DRAFT},depth=3")),
        ("ngram;round=serial", Method(name="ngram;round=serial", drafter="ngram", round="serial")),
        ("ngram;budget=none", Method(name="ngram;budget=none", drafter="ngram", settings={"budget": None})),
    ],
)
def test_a_method_is_read(text: str, wanted: Method) -> None:
    assert parse_method(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no drafter"),
        ("x=", "names no drafter"),
        ("ngrm", "did you mean 'ngram'"),
        ("ngram,dept=3", "did you mean 'depth'"),
        ("ngram,depth=0", "depth must be 1 or more"),
        ("ngram;bugdet=3", "did you mean 'budget'"),
        ("ngram;exact=maybe", "no value for exact"),
        (f"hybrid:{DRAFT};bugdet=3", "did you mean 'budget'"),
        (f"hybrid:suffix;k=3+draft_model:{DRAFT}", "suffix has no option 'k'"),
        ("ngram;budget", "not a name and a value"),
        ("ngram;budget=1;budget=2", "there twice"),
        ("ngram;round=mirro", "no round 'mirro'"),
        ("ngram;threads=2", "no setting 'threads'"),
        ("plain;budget=4", "means nothing without a drafter"),
        ("hybrid", "needs parts"),
        ("llama.cpp/plain", "studies/peers.py"),
    ],
)
def test_a_bad_method_is_refused_with_a_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="(?i)" + message):
        parse_method(text)


def test_names_that_clash_become_the_texts() -> None:
    methods = parse_methods([f"draft_model:{DRAFT}", "draft_model:other", "ngram"])
    assert [m.name for m in methods] == [f"draft_model:{DRAFT}", "draft_model:other", "ngram"]
    with pytest.raises(ConfigError, match="two methods called 'ngram'"):
        parse_methods(["ngram", "ngram"])


def test_default_methods_are_what_fits_the_model() -> None:
    names = [m.name for m in default_methods("paceline-small", "float32")]
    heads = ["draft_model", "eagle", "lyanna", "medusa", "spire", "streams"]
    assert names == ["plain", "ngram", "suffix", *heads, "hybrid"]
    assert [m.name for m in default_methods("smollm2-135m")] == ["plain", "ngram", "suffix", "eagle", "medusa"]
    assert {m.dtype for m in default_methods("paceline-small", "float32")} == {"float32"}
    assert default_methods("stretch:paceline-small,times=8") == default_methods("paceline-small")
    assert [m.name for m in default_methods("some/folder")] == ["plain", "ngram", "suffix"]


def test_plain_decoding_is_added_where_it_is_missing() -> None:
    assert [m.name for m in with_plain(parse_methods(["ngram"]))] == ["plain", "ngram"]
    assert [m.name for m in with_plain(parse_methods(["ngram", "plain"]))] == ["ngram", "plain"]
    mixed = with_plain(parse_methods(["ngram", "suffix;dtype=float32"]))
    assert [(m.name, m.dtype) for m in mixed[:2]] == [("plain dtype=auto", "auto"), ("plain dtype=float32", "float32")]
    assert [m.name for m in with_plain([PEER])] == ["plain", "vllm/plain"]


def test_settings_are_checked_without_a_model() -> None:
    parse_method("ngram;budget=4")
    with pytest.raises(ConfigError, match="budget"):
        parse_method("ngram;budget=-1")
