"""Methods as a user writes them."""

from __future__ import annotations

import pytest

from paceline.bench.methods import default_methods, parse_method, parse_methods
from paceline.core.errors import ConfigError

DRAFT = "paceline-small-draft"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no drafter"),
        ("ngrm", "did you mean 'ngram'"),
        ("ngram,depth=0", "depth must be 1 or more"),
        ("ngram;bugdet=3", "did you mean 'budget'"),
        (f"hybrid:suffix;k=3+draft_model:{DRAFT}", "suffix has no option 'k'"),
        ("ngram;budget=1;budget=2", "there twice"),
        ("ngram;threads=2", "no setting 'threads'"),
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
    assert [m.name for m in default_methods("some/folder")] == ["plain", "ngram", "suffix"]
