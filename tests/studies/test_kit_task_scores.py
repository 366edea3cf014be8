"""Task scores against examples worked out by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest
from kit.task_scores import exact_match, final_number, rouge

rouge_1, rouge_2, rouge_l, rouge_lsum = map(rouge, ("rouge1", "rouge2", "rougeL", "rougeLsum"))


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


def test_rouge_of_lin_2004() -> None:
    """The paper's own example (section 3.1): S1 against S2 and S3, and S4."""
    wanted = "police killed the gunman"
    assert rouge_l("police kill the gunman", wanted) == 0.75
    assert rouge_l("the gunman kill police", wanted) == 0.5
    assert rouge_l("the gunman police killed", wanted) == 0.5
    assert rouge_2("police kill the gunman", wanted) == rouge_2("the gunman kill police", wanted) == 1 / 3
    assert rouge_2("the gunman police killed", wanted) == 2 / 3


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
