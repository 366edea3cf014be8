"""Whether every method said what plain decoding said: ids against ids, prompt by prompt.

Token ids are compared one by one, and so are lengths, reasons for ending, and the order of the prompts: an output is
identical or it is a failure. Where passes round by their width (torch's kernels in 16 bits) two outputs may part at a
near tie of the target's own scores: ids are compared there only if somebody judges the differences, as studies do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..rounds.verification import DEFAULT_VERIFIER, VERIFIERS
from .records import OWN, Cell, Exactness, Method, Report, Trial
from .summary import Summary


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong with one sequence, or what explains it."""

    what: str
    explained: bool = False
    position: int | None = None  # in the output
    expected: int | None = None  # the reference's token
    got: int | None = None  # the method's
    gap: float | None = None  # how far the token in question lies below the best score; in logits over temperature
    tolerance: float | None = None  # there

    def as_dict(self) -> dict[str, Any]:
        """What is known, ready for JSON."""
        names = ("what", "position", "expected", "got", "gap", "tolerance")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class OutputIds:
    """What came out for one prompt."""

    ids: Sequence[int]
    finish: str


def count_tokens(tokens: int, what: str) -> str:
    """``one token short``, ``2 tokens short``."""
    return f"{'one token' if tokens == 1 else f'{tokens} tokens'} {what}"


def compare_sequence(
    reference: OutputIds, other: OutputIds, explain: Callable[[int], Finding] | None = None, finish: bool = True
) -> Finding | None:
    """One output against the reference's.

    Args:
        reference, other: what came out.
        explain: judges a difference at a position where both have a token; without it none is explained.
        finish: whether the reasons for ending are compared.

    Returns:
        None where they are identical; else what is wrong, or what explains it.
    """
    pairs = enumerate(zip(reference.ids, other.ids, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is not None:
        found = Finding(what="wrong token", position=at, expected=reference.ids[at], got=other.ids[at])
        return explain(at) if explain else found
    surplus = len(other.ids) - len(reference.ids)
    end = min(len(reference.ids), len(other.ids))
    if surplus < 0:
        return Finding(what=count_tokens(-surplus, "short"), position=end, expected=reference.ids[end])
    if surplus > 0:
        return Finding(what=count_tokens(surplus, "long"), position=end, got=other.ids[end])
    if finish and other.finish != reference.finish:
        return Finding(what=f"finish reason {other.finish!r}, plain decoding's is {reference.finish!r}")
    return None


Explain = Callable[[Trial, int, OutputIds, OutputIds, int], Finding]
"""(trial, index of the prompt in its group, reference's output, trial's output, first difference) -> verdict"""


def compare_outputs(
    reference: Sequence[Trial], other: Sequence[Trial], explain: Explain | None = None, finish: bool = True
) -> Exactness:
    """A method's outputs against the reference's in one cell.

    Trials are paired by group and repeat, and their prompts must be the same. Trials that failed have no outputs; they
    are counted where errors are.

    Args:
        reference: trials of plain decoding in the cell.
        other: trials of the method in the same cell.
        explain: judges differences (see `Explain`); without it none is explained.
        finish: whether the reasons for ending are compared (a peer may have its own words).
    """
    found = Exactness(
        method=other[0].method, reference=reference[0].method, cell=other[0].cell, sequences=0, identical=0
    )
    exact = {(t.group, t.repeat): t for t in reference if t.error is None}
    any_repeat = {t.group: t for t in reversed(reference) if t.error is None and t.cell.temperature == 0}
    for trial in other:
        base = exact.get((trial.group, trial.repeat)) or any_repeat.get(trial.group)  # greedy ids are the same
        if base is None or trial.error is not None:
            continue
        wrong = _mismatch(base, trial)
        for i, prompt in enumerate(trial.prompts):
            finding = Finding(what=wrong) if wrong else None
            if not wrong:
                said = OutputIds(base.outputs[i], base.finish[i])
                own = OutputIds(trial.outputs[i], trial.finish[i])
                look = partial(explain, trial, i, said, own) if explain else None
                finding = compare_sequence(said, own, look, finish)
            found.sequences += 1
            if finding is None:
                found.identical += 1
                continue
            if finding.tolerance is not None:
                found.tolerance = max(found.tolerance or 0.0, finding.tolerance)
            if finding.explained:
                found.explained += 1
                continue
            found.failures.append({"prompt": prompt, "group": trial.group, "repeat": trial.repeat, **finding.as_dict()})
    return found


def _mismatch(base: Trial, trial: Trial) -> str | None:
    """Why the outputs of two trials cannot be compared, prompt by prompt."""
    for name in ("outputs", "finish", "prompt_tokens"):
        for which in (base, trial):
            if len(getattr(which, name)) != len(which.prompts):
                return f"{which.method} has {len(getattr(which, name))} {name} for {len(which.prompts)} prompts"
    if trial.prompts != base.prompts:
        return "other prompts than plain decoding's, or in another order"
    if trial.prompt_tokens != base.prompt_tokens:
        return "prompts of other lengths than plain decoding's"
    return None


# -- a whole report


Judgement = Callable[[Method, Method, Sequence[Trial], Trial, int, OutputIds, OutputIds, int], Finding]
"""(method, its reference, the reference's trials, then as `Explain`) -> verdict"""


def why_unchecked(summary: Summary, method: Method, cell: Cell, judged: bool = False) -> str | None:
    """Why a method's ids need not be plain decoding's in a cell; None where they must be.

    Args:
        judged: whether somebody judges which differences rounding explains.
    """
    asked = method.settings.get("kernels", "auto")
    kernels = str(summary.report.model.get("kernels", "") if asked == "auto" else asked)
    wide = summary.dtype(method) in ("float32", "float64")
    if not judged and kernels.startswith("torch") and not wide and not method.settings.get("exact"):
        return "torch's kernels round by the rows of a pass in 16 bits; exact=true and float32 are compared"
    if cell.temperature == 0:
        return None
    if not method.own:
        return f"{method.engine} draws with noise of its own"
    verifier = method.settings.get("verifier", DEFAULT_VERIFIER)
    kind = VERIFIERS.get(verifier)
    if kind is not None and kind.needs_q:
        return f"verifier {verifier!r} gives plain decoding's distribution, not its ids"
    if kind is not None and kind.lossy:
        return f"verifier {verifier!r} is lossy: what it gives is not the target's"
    return None


def unchecked(report: Report, judged: bool = False) -> list[str]:
    """One sentence for everything in the report that `check` has nothing to hold against, for its notes."""
    summary = Summary(report)
    notes: dict[str, None] = {}
    for cell, name in summary.trials:
        method = summary.methods[name]
        reason = why_unchecked(summary, method, cell, judged)
        if reason:
            notes[f"{name} at temperature {cell.temperature:g}: ids not compared; {reason}."] = None
        elif summary.reference(method, engine=OWN) is None:
            dtype = summary.dtype(method)
            notes[f"{name}: ids not compared; plain decoding in {dtype} is not among the methods."] = None
    return list(notes)


def check(report: Report, judge: Judgement | None = None) -> list[Exactness]:
    """Every method's ids against this engine's plain decoding of the same dtype, cell by cell.

    Plain decoding itself is held against its own first repeat, and is listed only where it does not repeat.

    Args:
        report: the run; its ``exactness`` is not read.
        judge: what is asked about each difference; without it methods whose passes round by their width are left out.

    Returns:
        One entry for each method that has something to be compared with, in the order of the report.
    """
    summary = Summary(report)
    found = []
    for (cell, name), trials in summary.trials.items():
        method = summary.methods[name]
        reference = summary.reference(method, engine=OWN)
        if reference is None or why_unchecked(summary, method, cell, judge is not None):
            continue
        base = summary.trials.get((cell, reference), [])
        if name == reference:  # of plain decoding the repeats, which are listed where they are not the first
            done = [t for t in trials if t.error is None and t.cell.temperature == 0]
            first = {t.group: t for t in reversed(done)}
            again = [t for t in done if t is not first[t.group]]
            compared = compare_outputs(list(first.values()), again) if again else None
            found += [compared] if compared and not compared.passed else []
        elif base:
            # The judge runs the base model: it has no word on what an application says.
            judged = judge is not None and method.application is None
            explain = partial(judge, method, summary.methods[reference], base) if judge and judged else None
            compared = compare_outputs(base, trials, explain, finish=method.own)
            found += [compared] if compared.sequences else []
    return found
