"""Check that every method produced plain decoding's token ids, prompt by prompt.

Token ids are compared one by one, and so are lengths, reasons for ending, and the order of the prompts: an output is
identical or it is a failure. Where passes round by their width (torch's kernels in 16 bits) two outputs may part at a
near tie of the target's own scores: ids are compared there only if somebody judges the differences, as studies do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.verification import DEFAULT_VERIFIER, VERIFIERS
from .records import OWN, Cell, Exactness, Method, Report, Trial
from .summary import Summary


def count_tokens(tokens: int, what: str) -> str:
    """Return ``one token short``, ``2 tokens short``."""
    return f"{'one token' if tokens == 1 else f'{tokens} tokens'} {what}"


def difference(reference: Sequence[int], other: Sequence[int], ends: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """Describe how an output differs from the reference; nothing where they are equal.

    Args:
        reference, other: ids that came out.
        ends: the reasons for ending, of both.

    Returns:
        ``what``, and where there is one the ``position`` in the output, the ``expected`` token and the one that it
        ``got``; empty where the two are identical.
    """
    at = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    if at is not None:
        return {"what": "wrong token", "position": at, "expected": reference[at], "got": other[at]}
    end, surplus = min(len(reference), len(other)), len(other) - len(reference)
    if surplus < 0:
        return {"what": count_tokens(-surplus, "short"), "position": end, "expected": reference[end]}
    if surplus > 0:
        return {"what": count_tokens(surplus, "long"), "position": end, "got": other[end]}
    same = ends[0] == ends[1]
    return {} if same else {"what": f"finish reason {ends[1]!r}, plain decoding's is {ends[0]!r}"}


def paired(reference: Sequence[Trial], other: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Return trials of one group and repeat; greedy ones are equal in every repeat, failed ones have no outputs."""
    exact = {(t.group, t.repeat): t for t in reference if t.error is None}
    any_repeat = {t.group: t for t in reversed(reference) if t.error is None and t.cell.temperature == 0}
    pairs = ((exact.get((t.group, t.repeat)) or any_repeat.get(t.group), t) for t in other if t.error is None)
    return [(base, trial) for base, trial in pairs if base is not None]


def compare_outputs(reference: Sequence[Trial], other: Sequence[Trial], finish: bool = True) -> Exactness:
    """Compare a method's outputs with the reference's in one cell, of the same prompts.

    Args:
        reference: trials of plain decoding in the cell.
        other: trials of the method in the same cell.
        finish: whether the reasons for ending are compared (a peer may have its own words).
    """
    method, plain, cell = other[0].method, reference[0].method, other[0].cell
    result = Exactness(method=method, reference=plain, cell=cell, sequences=0, identical=0)
    for base, trial in paired(reference, other):
        for i, prompt in enumerate(trial.prompts):
            ends = (base.finish[i], trial.finish[i]) if finish else ("", "")
            wrong = difference(base.outputs[i], trial.outputs[i], ends)
            result.sequences += 1
            result.identical += not wrong
            if wrong:
                result.failures.append({"prompt": prompt, "group": trial.group, "repeat": trial.repeat, **wrong})
    return result


# -- a whole report


def why_unchecked(summary: Summary, method: Method, cell: Cell, rounded: bool = False) -> str | None:
    """Return why a method's ids need not be plain decoding's in a cell; None where they must be.

    Args:
        rounded: also of passes that round by their width: somebody judges what that explains.
    """
    setting = method.settings.get("kernels", "auto")
    kernels = str(summary.report.model.get("kernels", "") if setting == "auto" else setting)
    wide = summary.dtype(method) in ("float32", "float64")
    if not rounded and kernels.startswith("torch") and not wide and method.settings.get("exact") is False:
        return "with exact=false torch's kernels round by the rows of a pass in 16 bits; float32 is compared"
    if cell.temperature == 0:
        return None
    if not method.ours:
        return f"{method.engine} draws with noise of its own"
    kind = VERIFIERS.get(verifier := method.settings.get("verifier", DEFAULT_VERIFIER))
    if kind is not None and kind.needs_q:
        return f"verifier {verifier!r} gives plain decoding's distribution, not its ids"
    return None


def check(report: Report, rounded: bool = False) -> tuple[list[Exactness], list[str]]:
    """Compare every method's ids with this engine's plain decoding of the same dtype, cell by cell.

    Plain decoding itself is held against its own first repeat, and is listed only where it does not repeat.

    Args:
        report: the run; its ``exactness`` is not read.
        rounded: as of `why_unchecked`.

    Returns:
        One entry for each method that has something to be compared with, in the order of the report; and a sentence for
        everything that has nothing to be held against, for the report's notes.
    """
    summary, results = Summary(report), []
    notes: dict[str, None] = {}
    for (cell, name), trials in summary.trials.items():
        method = summary.methods[name]
        reason, reference = why_unchecked(summary, method, cell, rounded), summary.reference(method, engine=OWN)
        compared = None
        if reason:
            notes[f"{name} at temperature {cell.temperature:g}: ids not compared; {reason}."] = None
        elif reference is None:
            dtype = summary.dtype(method)
            notes[f"{name}: ids not compared; plain decoding in {dtype} is not among the methods."] = None
        elif name == reference:
            done = [t for t in trials if t.error is None and t.cell.temperature == 0]
            first = {t.group: t for t in reversed(done)}
            again = [t for t in done if t is not first[t.group]]
            compared = compare_outputs([*first.values()], again) if again else None
            compared = None if compared and compared.passed else compared
        elif base := summary.trials.get((cell, reference)):
            compared = compare_outputs(base, trials, finish=method.ours)
        results += [compared] if compared and compared.sequences else []
    return results, list(notes)
