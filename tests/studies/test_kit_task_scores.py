"""Task scores against examples worked out by hand."""

from __future__ import annotations

import sys
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.task_scores import (
    TASKS,
    RougeTokenizer,
    _scorer,
    bootstrap_interval,
    exact_match,
    final_number,
    normal_sql,
    rouge,
    same_number,
    score_task,
)

from paceline.core.errors import CapabilityError, ConfigError

rouge_1, rouge_2, rouge_l, rouge_lsum = map(rouge, ("rouge1", "rouge2", "rougeL", "rougeLsum"))
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9)


# -- SQL


@pytest.mark.parametrize(
    "one, other",
    [
        (" SELECT a FROM t WHERE b = 1", "select a from t where b=1"),
        ("SELECT  a\nFROM\tt ;", "SELECT a FROM t"),
        ("SELECT COUNT(a) FROM t", "select count ( a ) from t;"),
        ("SELECT a FROM t WHERE b = 'x'", 'SELECT a FROM t WHERE b = "x"'),
        ("SELECT a FROM t WHERE b = 'it''s'", 'SELECT a FROM t WHERE b = "it\'s"'),
        ("a>=1", "A >= 1"),
    ],
)
def test_sql_that_matches(one: str, other: str) -> None:
    assert exact_match(one, other) == exact_match(other, [one]) == 1.0


@pytest.mark.parametrize(
    "one, other",
    [
        ('WHERE b = "X"', 'WHERE b = "x"'),  # case inside quotes
        ('WHERE b = "x  y"', 'WHERE b = "x y"'),  # white space inside quotes
        ("WHERE b = 1", 'WHERE b = "1"'),  # quotes or none
        ("SELECT a, b", "SELECT b, a"),
        ("SELECT a", "SELECT a FROM t"),
        ("ab", "a b"),
        ("a > = 1", "a >= 1"),
        ('WHERE b = "x;"', 'WHERE b = "x"'),
        ("", "SELECT a"),
    ],
)
def test_sql_that_does_not_match(one: str, other: str) -> None:
    assert exact_match(one, other) == exact_match(other, one) == 0.0


def test_sql_normal_form() -> None:
    assert (
        normal_sql(" SELECT Max(A.b) FROM T WHERE c='O''Neil' ;; ") == 'select max ( a.b ) from t where c = "O\'Neil"'
    )
    assert normal_sql('b = "open') == 'b = " open'  # a quote without its partner is a token


@given(st.text(max_size=40))
def test_sql_normal_form_is_stable(text: str) -> None:
    assert normal_sql(normal_sql(text)) == normal_sql(text)


def test_sql_takes_any_reference() -> None:
    assert exact_match("SELECT b", ["SELECT a", "SELECT B"]) == 1.0


# -- ROUGE


def test_rouge_tokens() -> None:
    assert RougeTokenizer().tokenize("The Café's 2-star_menu!") == ["the", "café", "s", "2", "star", "menu"]


def test_rouge_of_lin_2004() -> None:
    """The paper's own example (section 3.1): S1 against S2 and S3, and S4."""
    wanted = "police killed the gunman"
    assert rouge_l("police kill the gunman", wanted) == 0.75
    assert rouge_l("the gunman kill police", wanted) == 0.5
    assert rouge_l("the gunman police killed", wanted) == 0.5
    assert rouge_2("police kill the gunman", wanted) == rouge_2("the gunman kill police", wanted) == 1 / 3
    assert rouge_2("the gunman police killed", wanted) == 2 / 3


def test_union_lcs_of_lin_2004() -> None:
    """Section 3.2: r = w1 w2 w3 w4 w5; c1 = w1 w2 w6 w7 w8, c2 = w1 w3 w8 w9 w5: the union is w1 w2 w3 w5."""
    said, wanted = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    assert rouge_lsum(said, wanted) == pytest.approx(2 * (4 / 5) * (4 / 10) / (4 / 5 + 4 / 10))
    assert rouge_l(said, wanted) == pytest.approx(2 * 4 / (10 + 5))  # w1 w2 w3 w5 across the line break


def test_rouge_clips_repeated_words() -> None:
    assert rouge_1("the the the the", "the cat") == pytest.approx(2 * 1 / (4 + 2))
    # One "the" said is in common with both sentences wanted, and counts once: recall 1/2, precision 1.
    assert rouge_lsum("the.", "the. the.") == pytest.approx(2 * 1 / (1 + 2))


def test_rouge_lsum_goes_by_sentence() -> None:
    """Swapped sentences keep LSum and lose L."""
    assert rouge_lsum("C d. A b.", "a b. c d.") == 1.0
    assert rouge_l("C d. A b.", "a b. c d.") == 0.5


def test_rouge_takes_the_best_reference() -> None:
    wanted = ["a b", "a b c d"]
    assert rouge_1("a b c", wanted) == pytest.approx(6 / 7)  # against 4/5
    assert rouge_2("a b c", wanted) == pytest.approx(4 / 5)  # 2 of 2 and 3; against 2/3
    assert rouge_l("a b c", wanted) == rouge_lsum("a b c", wanted) == pytest.approx(6 / 7)


@pytest.mark.parametrize("measure", TASKS["e2e"].values())
def test_rouge_of_empty_texts_is_zero(measure) -> None:
    assert measure("", "a b") == measure("a b", "...") == measure("", "") == 0.0


@given(WORDS, WORDS)
def test_rouge_is_bounded_and_symmetric(one: list[str], other: list[str]) -> None:
    first, second = " ".join(one), " ".join(other)
    for measure in (rouge_l, rouge_1, rouge_2):
        assert 0 <= measure(first, second) <= 1
        assert measure(first, second) == measure(second, first)
    assert 0 <= rouge_lsum(first, second) <= 1
    assert rouge_lsum(first, second) == rouge_l(first, second) <= rouge_1(first, second)  # one sentence each


@given(WORDS.filter(lambda words: len(words) > 1))
def test_rouge_of_equal_texts_is_one(words: list[str]) -> None:
    text = " ".join(words)
    assert all(measure(text.upper(), text) == 1.0 for measure in TASKS["e2e"].values())


def test_rouge_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    _scorer.cache_clear()
    with pytest.raises(CapabilityError, match=r"rouge-score is missing.*paceline\[bench\]"):
        score_task("e2e", ["a"], ["a"])
    assert score_task("sql", ["a"], ["a"]) == {"exact_match": 1.0}


# -- GSM8K


@pytest.mark.parametrize(
    "text, number",
    [
        ("She makes 9 * 2 = $18.\n#### 18", "18"),
        ("#### 1,234.50 dollars for 3 eggs", "1234.50"),
        ("#### 3\nAnother try: 5\n#### 4", "4"),
        ("so 16 - 3 = 13 and 13*2=26 dollars.", "26"),
        ("The answer is -$5", "-5"),
        ("10-3", "3"),
        ("it is .5", "0.5"),
        ("she has 7 #### nothing", "7"),
        ("It cost 80,000.", "80000"),
    ],
)
def test_final_number(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


def test_final_number_may_be_missing() -> None:
    assert final_number("none at all ####") is None
    assert same_number("none", "none") == 0.0


def test_same_number_goes_by_value() -> None:
    assert same_number("so #### 18.00", "#### 18") == 1.0
    assert same_number("18", "#### 19") == 0.0


# -- tasks


def test_score_task_is_the_mean() -> None:
    found = score_task("sql", ["SELECT a", "SELECT b", "x", "y"], ["select a", ["z", "select b"], "z", "z"])
    assert found == {"exact_match": 0.5}
    assert score_task("gsm8k", ["4", "5"], ["#### 4", "#### 6"]) == {"accuracy": 0.5}


def test_score_task_rouge() -> None:
    found = score_task("e2e", ["a b c", "x"], [["a b", "a b c d"], "y"])
    assert found == pytest.approx({"rouge1": 3 / 7, "rouge2": 2 / 5, "rougeL": 3 / 7, "rougeLsum": 3 / 7})


def test_intervals_surround_the_mean_and_repeat() -> None:
    outputs = ["1"] * 60 + ["2"] * 40
    found = score_task("gsm8k", outputs, ["1"] * 100, intervals=True)
    assert found == score_task("gsm8k", outputs, ["1"] * 100, intervals=True)
    assert found["accuracy"] == 0.6
    # Normal approximation: 0.6 +- 1.96 sqrt(0.24 / 100) = 0.504 to 0.696.
    assert found["accuracy_low"] == pytest.approx(0.504, abs=0.02)
    assert found["accuracy_high"] == pytest.approx(0.696, abs=0.02)


def test_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([1.0] * 9) == (1.0, 1.0)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="Known are sql"):
        score_task("poems", ["a"], ["a"])
    with pytest.raises(ConfigError, match="2 outputs and 1 references"):
        score_task("sql", ["a", "b"], ["a"])
    with pytest.raises(ConfigError, match="no output"):
        score_task("sql", [], [])
    with pytest.raises(ConfigError, match="prompt 1 has no reference"):
        score_task("sql", ["a", "b"], ["a", []])
    with pytest.raises(ConfigError, match="nothing to draw"):
        bootstrap_interval([1.0], resamples=0)
