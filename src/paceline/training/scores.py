"""Task scores from texts: exact match for SQL, ROUGE for generated sentences, accuracy for GSM8K.

Every score is a mean over outputs of a value between 0 and 1, higher is better. Where an output has several
references the best one counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

import torch

from ..core.errors import ConfigError

References: TypeAlias = "str | Sequence[str]"
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


def rouge_tokens(text: str) -> list[str]:
    """Lower-cased runs of letters and digits (of any script). No stemming: ROUGE's Porter option is left out."""
    return _WORD.findall(text.lower())


def rouge_n(output: str, references: References, n: int) -> float:
    """ROUGE-N F-measure: n-grams in common, each counted at most as often as in either text.

    Source: Lin 2004, section 2, with precision and recall weighted alike; the best reference counts.
    """
    said = _ngrams(rouge_tokens(output), n)
    return max(_overlap_f(said, _ngrams(rouge_tokens(reference), n)) for reference in _several(references))


def rouge_l(output: str, references: References) -> float:
    """ROUGE-L F-measure: longest common subsequence of the texts as wholes.

    Source: Lin 2004, section 3.1 (eq. 2 to 4 with beta = 1); the best reference counts.
    """
    said = rouge_tokens(output)
    wanted = [rouge_tokens(reference) for reference in _several(references)]
    return max(_f_measure(len(_common(tokens, said)), len(said), len(tokens)) for tokens in wanted)


def rouge_lsum(output: str, references: References) -> float:
    """ROUGE-LSum F-measure: union of the longest common subsequences, sentence by sentence.

    Source: Lin 2004, section 3.2 (eq. 5 to 7 with beta = 1). A sentence ends at a line break or at ``.``, ``!`` or
    ``?`` before white space. As in ROUGE-1.5.5 a token counts at most as often as it is in either text, so that
    precision and recall stay below 1. The best reference counts.
    """
    said = _sentences(output)
    return max(_summary_f(said, _sentences(reference)) for reference in _several(references))


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _overlap_f(said: Counter[tuple[str, ...]], wanted: Counter[tuple[str, ...]]) -> float:
    return _f_measure((said & wanted).total(), said.total(), wanted.total())


def _f_measure(common: int, said: int, wanted: int) -> float:
    """Harmonic mean of common / said and common / wanted; 0 where nothing is in common."""
    return 2 * common / (said + wanted) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    tokens = (rouge_tokens(sentence) for sentence in _SENTENCE_END.split(text))
    return [sentence for sentence in tokens if sentence]


def _summary_f(said: list[list[str]], wanted: list[list[str]]) -> float:
    """Union of what each wanted sentence has in common with each sentence said, clipped by both texts' counts."""
    hits: Counter[str] = Counter()
    for sentence in wanted:
        places = {place for other in said for place in _common(sentence, other)}
        hits.update(sentence[place] for place in places)
    said_counts, wanted_counts = Counter(_flat(said)), Counter(_flat(wanted))
    return _f_measure((hits & said_counts).total(), said_counts.total(), wanted_counts.total())


def _flat(sentences: list[list[str]]) -> Iterator[str]:
    return (token for sentence in sentences for token in sentence)


def _common(first: Sequence[str], second: Sequence[str]) -> list[int]:
    """Places in ``first`` of one longest common subsequence with ``second``."""
    lengths = _common_lengths(first, second)
    i, j, places = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif lengths[i - 1][j] >= lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return places[::-1]


def _common_lengths(first: Sequence[str], second: Sequence[str]) -> list[list[int]]:
    """[len(first) + 1][len(second) + 1] lengths of the longest common subsequence of the beginnings."""
    lengths = [[0] * (len(second) + 1)]
    for a in first:
        above, row = lengths[-1], [0]
        for j, b in enumerate(second):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        lengths.append(row)
    return lengths


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


# -- tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is measured on the outputs of a task."""

    description: str
    scores: dict[str, Callable[[str, References], float]]  # name -> score of one output


_ROUGE: dict[str, Callable[[str, References], float]] = {
    "rouge1": lambda output, references: rouge_n(output, references, 1),
    "rouge2": lambda output, references: rouge_n(output, references, 2),
    "rougeL": rouge_l,
    "rougeLsum": rouge_lsum,
}

TASKS: dict[str, Task] = {
    "sql": Task(description="exact match of SQL queries", scores={"exact_match": exact_match}),
    "e2e": Task(description="ROUGE F-measures of sentences", scores=_ROUGE),
    "dialogsum": Task(description="ROUGE F-measures of summaries", scores=_ROUGE),
    "gsm8k": Task(description="accuracy of the final number", scores={"accuracy": same_number}),
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
    task = _task(name)
    _check_pairs(name, outputs, references)
    result = {}
    for score, measure in task.scores.items():
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


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ConfigError(f"task {name!r}", "no score is known for it", f"known are {', '.join(TASKS)}")
    return TASKS[name]


def _check_pairs(name: str, outputs: Sequence[str], references: Sequence[References]) -> None:
    asked = f"scores of {name}"
    if len(outputs) != len(references):
        wrong = f"there are {len(outputs)} outputs and {len(references)} references"
        raise ConfigError(asked, wrong, "give one entry a prompt")
    if not outputs:
        raise ConfigError(asked, "there is no output", "give at least one prompt")
    bare = next((i for i, wanted in enumerate(references) if not _several(wanted)), None)
    if bare is not None:
        raise ConfigError(asked, f"prompt {bare} has no reference", "leave it out, or give its answer")
