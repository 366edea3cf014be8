"""Task scores from texts: exact match for SQL, ROUGE for generated sentences, accuracy for GSM8K, tests for HumanEval.

Every score is a mean over outputs of a value between 0 and 1, higher is better. Where an output has several
references the best one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, TypeAlias

import torch

from kit.run_code import passes
from paceline.core.errors import CapabilityError, ConfigError

References: TypeAlias = "str | Sequence[str]"
Score: TypeAlias = "Callable[[str, References], float]"  # of one output, 0 to 1
_SQL = re.compile(r""" "(?:[^"]|"")*" | '(?:[^']|'')*' | \w+(?:\.\w+)* | <= | >= | <> | != | \S """, re.VERBOSE)
_WORD = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?])\s+")
_NUMBER = re.compile(r"(?<![\d)])-?\$?\d[\d,]*(?:\.\d+)?|\.\d+")


# -- exact match for SQL


def normal_sql(text: str) -> str:
    """A query in the form in which two of them are compared.

    The rule: between tokens white space does not count, so ``a=1`` is ``a = 1``; outside of quotes case does not
    count; single and double quotes are the same and what is inside is kept as it is; semicolons at the end do not
    count. Order, aliases and redundant brackets do: equal queries that are written differently do not match.
    """
    tokens = [_normal_token(token) for token in _SQL.findall(text)]
    while tokens and tokens[-1] == ";":
        tokens.pop()
    return " ".join(tokens)


def _normal_token(token: str) -> str:
    quote = token[0]
    if len(token) < 2 or quote not in "\"'":
        return token.lower()
    inner = token[1:-1].replace(quote * 2, quote)  # SQL doubles a quote to write it inside
    return '"' + inner.replace('"', '""') + '"'


def exact_match(output: str, references: References) -> float:
    """1 where the output equals a reference by `normal_sql`, else 0."""
    said = normal_sql(output)
    return float(any(said == normal_sql(reference) for reference in _several(references)))


# -- ROUGE


class RougeTokenizer:
    """Lower-cased runs of letters and digits of any script, not stemmed; rouge-score's own knows ASCII alone."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return _WORD.findall(text.lower())


def rouge(kind: str) -> Score:
    """ROUGE F-measure of the package rouge-score, precision and recall weighted alike; the best reference counts.

    Source: Lin 2004. rouge1 and rouge2 (section 2): n-grams in common; rougeL (section 3.1): longest common
    subsequence of the texts as wholes; rougeLsum (section 3.2): union of those of each pair of sentences, where a
    sentence ends at a line break or at ``.``, ``!`` or ``?`` before white space (the package alone: at line breaks).

    Args:
        kind: rouge1, rouge2, rougeL or rougeLsum.

    Raises:
        CapabilityError: when a text is scored, where the package is missing.
    """

    def score(output: str, references: References) -> float:
        wanted = [_by_lines(reference) for reference in _several(references)]
        return float(_scorer(kind).score_multi(wanted, _by_lines(output))[kind].fmeasure)

    return score


@cache
def _scorer(kind: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        remedy = "get it: pip install rouge-score"
        raise CapabilityError("ROUGE scores", "the package rouge-score is missing", remedy) from error
    return RougeScorer([kind], tokenizer=RougeTokenizer())


def _by_lines(text: str) -> str:
    """One sentence a line, which is how rouge-score tells them apart."""
    return _SENTENCE_END.sub("\n", text)


# -- GSM8K


def final_number(text: str) -> Decimal | None:
    """The answer of a worked solution: the number that follows the last ``####``, else the last number there is.

    Thousands separators and a dollar sign are left out; None where there is no number.
    """
    _, mark, answer = text.rpartition("####")
    stated = _NUMBER.search(answer) if mark else None
    found = [stated.group()] if stated else _NUMBER.findall(text)
    return Decimal(re.sub("[,$]", "", found[-1])) if found else None


def same_number(output: str, references: References) -> float:
    """1 where the final number of the output is that of a reference, else 0."""
    said = final_number(output)
    return float(said is not None and any(said == final_number(reference) for reference in _several(references)))


# -- HumanEval


def passes_tests(output: str, references: References) -> float:
    """1 where the function that an output ends passes, else 0; runs what was generated: see `kit.run_code`.

    Args:
        references: the text before the output, and the tests behind it.
    """
    before, tests = _several(references)
    return float(passes(before, output, tests))


# -- tasks


_ROUGE = {kind: rouge(kind) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")}

TASKS: dict[str, dict[str, Score]] = {  # name -> what is measured on its outputs
    "sql": {"exact_match": exact_match},
    "e2e": _ROUGE,
    "dialogsum": _ROUGE,
    "gsm8k": {"accuracy": same_number},
    "humaneval": {"pass@1": passes_tests},
}


def score_task(
    name: str,
    outputs: Sequence[str],
    references: Sequence[References],
    *,
    intervals: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, float]:
    """Mean scores of a task's outputs.

    Args:
        name: one of `TASKS`.
        outputs: one text a prompt.
        references: the accepted text or texts of each.
        intervals: also give the ends of 95% intervals, as ``NAME_low`` and ``NAME_high``: percentiles of the mean
            over ``resamples`` bootstrap samples of the prompts, drawn from ``seed``.

    Raises:
        ConfigError: an unknown task, no output, other numbers of outputs and references, or a prompt without any.
    """
    _check_pairs(name, outputs, references)
    result = {}
    for score, measure in TASKS[name].items():
        values = [measure(output, wanted) for output, wanted in zip(outputs, references, strict=True)]
        result[score] = sum(values) / len(values)
        if intervals:
            result[f"{score}_low"], result[f"{score}_high"] = bootstrap_interval(values, resamples, seed)
    return result


def bootstrap_interval(values: Sequence[float], resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Ends of the 95% percentile bootstrap interval of the mean (Efron 1979).

    Raises:
        ConfigError: no value, or fewer than 1 resample.
    """
    if not values or resamples < 1:
        asked = f"an interval from {len(values)} values and {resamples} resamples"
        raise ConfigError(asked, "there is nothing to draw from", "give at least 1 of each")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (resamples, len(values)), generator=generator)
    means = torch.tensor(values, dtype=torch.float64)[drawn].mean(dim=1)  # [resamples]
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _several(references: References) -> Sequence[str]:
    return [references] if isinstance(references, str) else references


def _check_pairs(name: str, outputs: Sequence[str], references: Sequence[References]) -> None:
    if name not in TASKS:
        raise ConfigError(f"task {name!r}", "no score is known for it", f"known are {', '.join(TASKS)}")
    asked = f"scores of {name}"
    if len(outputs) != len(references):
        wrong = f"there are {len(outputs)} outputs and {len(references)} references"
        raise ConfigError(asked, wrong, "give one entry a prompt")
    if not outputs:
        raise ConfigError(asked, "there is no output", "give at least one prompt")
    bare = next((i for i, wanted in enumerate(references) if not _several(wanted)), None)
    if bare is not None:
        raise ConfigError(asked, f"prompt {bare} has no reference", "leave it out, or give its answer")
