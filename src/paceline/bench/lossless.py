"""Whether every method said what plain decoding said: ids against ids, prompt by prompt.

Token ids are compared one by one, and so are lengths, reasons for ending, and the order of the prompts. In
float32 and wider, and with ``exact=True``, an output is identical or it is a failure.

In bf16 and fp16 a pass over many rows may round otherwise than a pass over one, and where the target's two best
tokens nearly tie, plain decoding and a method may part. Such a difference is *explained* if the target itself
says so: run once over the prompt and the method's output (teacher-forced), it gives both tokens of the first
difference a score within the tolerance of the best, and every later token of the method too; and the output ends
where the request's stop rules end it. Everything else is a failure. What is missing at the end or is one token
too much is never explained: no rounding makes it.

The tolerance is measured, not assumed. `pass_spread` is the largest change of any logit between passes of one row
and passes of many, with this model in this build. Two tokens can move by that much in opposite directions, so the
tolerance is twice the spread: 0 where a row's bits do not depend on its neighbours (the compiled kernels), and
then a difference in bf16 is a failure like any other. It is never more than `ULPS` units in the last place of the
row's largest logit, so that a pass that is simply wrong cannot widen what excuses it.

With a temperature the same is said of the noised scores: the token is their argmax, and the noise is a function of
seed and position, so that two methods part at a near tie of scores alone.

Peers have kernels of their own. Their difference is no failure of this engine: it is counted in the same way, at
the tolerance of `ULPS`, and shown as agreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.request import StopChecker
from ..core.sampling import SamplingParams, SequenceSampler
from ..engine.tokens import texts_of
from ..kv.pool import KVPool
from ..llm import LLM
from ..rounds.verification import DEFAULT_VERIFIER, VERIFIERS
from ..target.decoder import Decoder
from ..target.packing import RowPacker
from .records import PLAIN, Cell, Exactness, Method, Report, Trial

# The largest change of a logit that was measured between passes of one row and of many, with torch's kernels on two
# models: 4 units in the last place of bf16 and 30 of float32 (sums of a thousand products in another order). Twice
# that, since both candidates can move. fp16 has three bits more than bf16 and the same sums, kept in float32.
ULPS: Mapping[torch.dtype, float] = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 64, torch.float64: 64}
ROUNDED = (torch.bfloat16, torch.float16)  # where a difference may be explained
SPREAD_SAMPLES = 4  # sequences that the spread is measured on
SPREAD_WIDTHS = (5, 512)  # rows of the passes that are held against passes of one row
_PASS_ROWS = 512  # rows of a teacher-forced pass at most


# -- the target's own word


@torch.inference_mode()
def teacher_forced(
    decoder: Decoder, prompt: Sequence[int], output: Sequence[int], rows: int = _PASS_ROWS
) -> Tensor:  # [len(output), V]
    """Logits from which the target would have chosen each token of ``output``, the ones before it given.

    Args:
        decoder: the target.
        prompt: token ids, at least one.
        output: token ids that came out.
        rows: rows of a pass at most; the prompt's last token and the output are cut into such passes.

    Returns:
        [len(output), V] float32 or wider: row i says what follows the prompt and ``output[:i]``.
    """
    tokens = [*prompt, *output][: len(prompt) + len(output) - 1]  # nothing was chosen after the last
    if not output:
        return torch.empty(0, decoder.config.vocab_size, device=decoder.device)
    shape = decoder.config
    pool = KVPool(shape.num_layers, shape.num_kv_heads, shape.head_dim, len(tokens), decoder.dtype, decoder.device)
    cache = pool.open(reuse=False)
    wanted = len(prompt) - 1  # row of the first logits
    found = []
    for start, stop in [*_ranges(0, wanted, _PASS_ROWS), *_ranges(wanted, len(tokens), rows)]:
        cache.reserve(stop - start)
        packer = RowPacker(decoder, decoder.device)
        packer.add(
            tokens[start:stop],
            range(start, stop),
            [-1] * (stop - start),
            slots=cache.slots(start, stop),
            keys=cache.slots(0, stop),
            num_keys=stop,
            prefix=start,
        )
        state = decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, pool)
        if start >= wanted:
            found.append(decoder.logits(state))
        pool.commit([(cache, range(stop - start))])
    return torch.cat(found)


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    return ((i, min(i + size, stop)) for i in range(start, stop, size))


def pass_spread(decoder: Decoder, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The largest change of any logit between passes of one row and passes of many.

    Args:
        decoder: the target.
        texts: prompt ids and output ids of a few sequences.
    """
    largest = 0.0
    for prompt, output in texts:
        alone = teacher_forced(decoder, prompt, output, rows=1)
        for width in SPREAD_WIDTHS:
            change = (teacher_forced(decoder, prompt, output, rows=width) - alone).abs()
            largest = max(largest, float(change.max()) if change.numel() else 0.0)
    return largest


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Units in the last place of ``dtype`` at the magnitudes of ``values``, any shape, in float64."""
    _, exponent = torch.frexp(values.double())  # value = m 2^exponent, 0.5 <= |m| < 1
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps, dtype=torch.float64), exponent - 1)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far from the best score a token may lie where passes of different widths round differently.

    ``min(ulps in the last place of the row's largest logit, most)``; 0 explains nothing.
    """

    dtype: torch.dtype
    ulps: float
    most: float = float("inf")  # in logits

    @classmethod
    def none(cls, dtype: torch.dtype) -> Tolerance:
        """Identical or failed."""
        return cls(dtype=dtype, ulps=0)

    @classmethod
    def measured(cls, decoder: Decoder, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tolerance:
        """Twice the decoder's `pass_spread` on these texts, `ULPS` at most."""
        return cls(dtype=decoder.dtype, ulps=ULPS[decoder.dtype], most=2 * pass_spread(decoder, texts))

    @classmethod
    def foreign(cls, dtype: torch.dtype) -> Tolerance:
        """For other kernels than ours, whose spread is not measured: `ULPS`."""
        return cls(dtype=dtype, ulps=ULPS[dtype])

    def of_rows(self, logits: Tensor) -> Tensor:
        """[n] float64 from raw logits [n, V]."""
        largest = logits.abs().amax(dim=-1)
        return (self.ulps * ulp(largest, self.dtype)).clamp(max=self.most)


# -- one sequence


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one sequence was asked."""

    prompt_ids: Sequence[int]
    params: SamplingParams  # with a seed, where the temperature is above 0
    sample_index: int = 0


AskedOf = Callable[[Trial, int], Asked]  # (trial, index of the prompt in its group) -> what was asked


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
class Said:
    """What came out for one prompt."""

    ids: Sequence[int]
    finish: str


class Judge:
    """Decides whether the target could have said what a method said.

    Args:
        llm: the target as the reference ran it: same weights, dtype and kernels.
        tolerance: what counts as a near tie.
        finish: whether outputs must end where the stop rules of this engine end them.
    """

    def __init__(self, llm: LLM, tolerance: Tolerance, finish: bool = True) -> None:
        self.tolerance = tolerance
        self._llm = llm
        self._finish = finish
        self._texts = texts_of(llm.tokenizer)

    def look(self, asked: Asked, reference: Said, other: Said, at: int) -> Finding:
        """Judge an output that parts from the reference at position ``at``, where both have a token."""
        here = Finding(what="wrong token", position=at, expected=reference.ids[at], got=other.ids[at])
        impossible = self._impossible(asked, reference, other)
        if impossible:
            return replace(here, what=impossible)
        logits = teacher_forced(self._llm.decoder, asked.prompt_ids, other.ids)  # [T, V]
        scores = self._scores(asked, logits, other.ids)  # [T, V]
        heat = 1.0 if asked.params.greedy else asked.params.temperature
        allowed = (self.tolerance.of_rows(logits) / heat).tolist()  # [T]
        best = scores.amax(dim=-1)
        behind = (best - scores.gather(-1, torch.tensor(other.ids, device=scores.device)[:, None])[:, 0]).tolist()
        behind_reference = float(best[at] - scores[at, reference.ids[at]])
        here = replace(here, gap=_shown(max(behind[at], behind_reference)), tolerance=allowed[at])
        if allowed[at] == 0 or behind[at] > allowed[at]:
            return here
        if behind_reference > allowed[at]:
            return replace(here, what="plain decoding's own token is not the target's choice")
        return self._rest(other, at, behind, allowed) or self._ending(asked, other) or _near_tie(here)

    def _impossible(self, asked: Asked, reference: Said, other: Said) -> str | None:
        """What the target could not even be asked about."""
        shape = self._llm.decoder.config
        strange = [i for i in (*reference.ids, *other.ids) if not 0 <= i < shape.vocab_size]
        if strange:
            return f"token id {strange[0]}, and the vocabulary has {shape.vocab_size}"
        too_long = len(asked.prompt_ids) + len(other.ids) - shape.max_position
        return _count(too_long, "long: the model's context ends before") if too_long > 0 else None

    def _rest(self, other: Said, at: int, behind: Sequence[float], allowed: Sequence[float]) -> Finding | None:
        """The first token behind position ``at`` that lies too far below the best."""
        wrong = next((i for i in range(at + 1, len(behind)) if behind[i] > allowed[i]), None)
        if wrong is None:
            return None
        return Finding(
            what=f"wrong token behind a difference at {at} that a near tie explains",
            position=wrong,
            got=other.ids[wrong],
            gap=_shown(behind[wrong]),
            tolerance=allowed[wrong],
        )

    def _scores(self, asked: Asked, logits: Tensor, output: Sequence[int]) -> Tensor:
        """[T, V]: what the engine takes the argmax of, at every position of the output."""
        params = asked.params
        if params.seed is None and not params.greedy:
            raise ConfigError(
                f"judging an output at temperature {params.temperature}",
                "its noise is a function of the seed, and none is given",
                "give the seed that the request ran with",
            )
        sampler = SequenceSampler(
            params,
            asked.prompt_ids,
            seed=params.seed or 0,
            sample_index=asked.sample_index,
            vocab_size=logits.shape[-1],
            eos_ids=self._llm.engine.limits.eos_ids,
        )
        first = len(asked.prompt_ids)
        positions = list(range(first, first + len(output)))
        before = torch.full((len(output), len(output)), -1, dtype=torch.int64)  # row i: output[:i]
        lower = torch.ones_like(before, dtype=torch.bool).tril(-1)
        before = torch.where(lower, torch.tensor(output)[None, :], before)
        return sampler.scores(logits, before.to(logits.device), positions).double()

    def _ending(self, asked: Asked, said: Said) -> Finding | None:
        """Where the output does not end as the stop rules say; those of this engine, so not for a peer."""
        what = self._wrong_end(asked, said) if self._finish else None
        return None if what is None else Finding(what=what, position=len(said.ids) - 1)

    def _wrong_end(self, asked: Asked, said: Said) -> str | None:
        limits = self._llm.engine.limits
        room = limits.max_model_len - len(asked.prompt_ids)
        most = room if asked.params.max_tokens is None else min(asked.params.max_tokens, room)
        skip = asked.params.skip_special_tokens
        stream = self._texts.stream(asked.prompt_ids, skip) if self._texts else None
        kept, finish, _ = StopChecker(asked.params, limits.eos_ids, most, stream).feed(said.ids)
        if kept < len(said.ids):
            return _count(len(said.ids) - kept, "long: the stop rules end it before")
        if finish is None:
            return "short: no stop rule ends it here"
        return None if finish == said.finish else f"ended as {said.finish!r}, and the stop rules say {finish!r}"


def _near_tie(here: Finding) -> Finding:
    return replace(here, what="near tie", explained=True)


def _shown(gap: float) -> float | None:
    """A gap for JSON, which has no infinity: a token that a rule excludes has none."""
    return gap if isfinite(gap) else None


def _count(tokens: int, what: str) -> str:
    return f"{'one token' if tokens == 1 else f'{tokens} tokens'} {what}"


def compare_sequence(
    reference: Said, other: Said, explain: Callable[[int], Finding] | None = None, finish: bool = True
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
        return Finding(what=_count(-surplus, "short"), position=end, expected=reference.ids[end])
    if surplus > 0:
        return Finding(what=_count(surplus, "long"), position=end, got=other.ids[end])
    if finish and other.finish != reference.finish:
        return Finding(what=f"finish reason {other.finish!r}, plain decoding's is {reference.finish!r}")
    return None


# -- all trials of one method in one cell


Explain = Callable[[Trial, int, Said, Said, int], Finding]
"""(trial, index of the prompt in its group, reference's output, trial's output, first difference) -> verdict"""


def explained_by(judge: Callable[[], Judge], asked: AskedOf) -> Explain:
    """What `compare_outputs` wants, from a judge that is made at the first difference: most runs have none."""
    made = cache(judge)
    return lambda trial, i, reference, other, at: made().look(asked(trial, i), reference, other, at)


def compare_outputs(
    reference: Sequence[Trial], other: Sequence[Trial], explain: Explain | None = None, finish: bool = True
) -> Exactness:
    """A method's outputs against the reference's in one cell.

    Trials are paired by group and repeat, prompts within them by id, and their order must be the same. Trials
    that failed have no outputs; they are counted where errors are.

    Args:
        reference: trials of plain decoding in the cell.
        other: trials of the method in the same cell.
        explain: judges differences (see `explained_by`); without it none is explained.
        finish: whether the reasons for ending are compared (a peer may have its own words).

    Raises:
        ConfigError: trials of several methods or cells, or none that pair.
    """
    method, cell = _one_of(other)
    plain, _ = _one_of(reference, cell)
    found = Exactness(method=method, reference=plain, cell=cell, sequences=0, identical=0)
    for base, trial in _paired(reference, other):
        for prompt, finding in _compare_group(base, trial, explain, finish):
            _count_in(found, trial, prompt, finding)
    if not found.sequences:
        raise ConfigError(
            f"comparing {method!r} with {plain!r}", "no trial of one pairs with a trial of the other", "run both"
        )
    return found


def _count_in(found: Exactness, trial: Trial, prompt: str, finding: Finding | None) -> None:
    found.sequences += 1
    if finding is None:
        found.identical += 1
        return
    if finding.tolerance is not None:
        found.tolerance = max(found.tolerance or 0.0, finding.tolerance)
    if finding.explained:
        found.explained += 1
    else:
        found.failures.append({"prompt": prompt, "group": trial.group, "repeat": trial.repeat, **finding.as_dict()})


def _one_of(trials: Sequence[Trial], cell: Cell | None = None) -> tuple[str, Cell]:
    kinds = {(trial.method, trial.cell) for trial in trials}
    if len(kinds) != 1 or cell not in (None, trials[0].cell):
        raise ConfigError(
            f"comparing trials of {len(kinds)} kinds", "one method in one cell is compared at a time", "see check()"
        )
    return kinds.pop()


def _paired(reference: Sequence[Trial], other: Sequence[Trial]) -> Iterator[tuple[Trial, Trial]]:
    """Trials of one group and repeat; greedy ones fall back to another repeat, whose ids are the same."""
    exact = {(t.group, t.repeat): t for t in reference if t.error is None}
    any_repeat = {t.group: t for t in reversed(reference) if t.error is None and t.cell.temperature == 0}
    for trial in other:
        base = exact.get((trial.group, trial.repeat)) or any_repeat.get(trial.group)
        if base is not None and trial.error is None:
            yield base, trial


def _compare_group(
    base: Trial, trial: Trial, explain: Explain | None, finish: bool
) -> Iterator[tuple[str, Finding | None]]:
    """What is found of each prompt of the trial, in its order."""
    malformed = _malformed(base, trial)
    if malformed is not None:
        yield from ((prompt, Finding(what=malformed)) for prompt in trial.prompts or base.prompts)
        return
    said = {p: Said(ids, end) for p, ids, end in zip(base.prompts, base.outputs, base.finish, strict=True)}
    for i, prompt in enumerate(trial.prompts):
        tokens, expected = trial.prompt_tokens[i], base.prompt_tokens[i]
        if prompt != base.prompts[i]:
            yield prompt, Finding(what=f"prompts in another order: {base.prompts[i]!r} belongs here")
        elif tokens != expected:
            yield prompt, Finding(what=f"another prompt: of {tokens} tokens, plain decoding's has {expected}")
        else:
            other = Said(trial.outputs[i], trial.finish[i])
            look = partial(explain, trial, i, said[prompt], other) if explain else None
            yield prompt, _named(compare_sequence(said[prompt], other, look, finish), prompt, other, said)


def _malformed(base: Trial, trial: Trial) -> str | None:
    """Why the prompts of two trials cannot be paired at all."""
    for name in ("outputs", "finish", "prompt_tokens"):
        for which in (base, trial):
            if len(getattr(which, name)) != len(which.prompts):
                return f"{which.method} has {len(getattr(which, name))} {name} for {len(which.prompts)} prompts"
    if len(set(trial.prompts)) < len(trial.prompts):
        return f"prompt {Counter(trial.prompts).most_common(1)[0][0]!r} is listed twice"
    if set(trial.prompts) != set(base.prompts):
        return f"other prompts: {sorted(set(trial.prompts) ^ set(base.prompts))} are in one of the two alone"
    return None


def _named(finding: Finding | None, prompt: str, other: Said, said: Mapping[str, Said]) -> Finding | None:
    """A failure that another prompt's output explains, by that name."""
    if finding is None or finding.explained:
        return finding
    owner = next((p for p, s in said.items() if p != prompt and other.ids and list(s.ids) == list(other.ids)), None)
    if owner is None:
        return finding
    return replace(finding, what=f"outputs in another order: this is the output of prompt {owner!r}")


# -- a whole report


@dataclass(slots=True)
class _Run:
    """The trials of a report by cell and method, and its methods by name."""

    report: Report
    methods: dict[str, Method] = field(init=False)
    trials: dict[tuple[Cell, str], list[Trial]] = field(init=False)

    def __post_init__(self) -> None:
        self.methods = {method.name: method for method in self.report.methods}
        self.trials = {}
        for trial in self.report.trials:
            self.trials.setdefault((trial.cell, trial.method), []).append(trial)

    def dtype(self, method: Method) -> str:
        """``auto`` is the checkpoint's."""
        return str(self.report.model.get("dtype", "auto")) if method.dtype == "auto" else method.dtype

    def reference(self, method: Method) -> Method | None:
        """This engine's plain decoding in the method's dtype, of the same application; the one with the most settings
        in common."""
        same = [
            m
            for m in self.methods.values()
            if _is_plain(m) and self.dtype(m) == self.dtype(method) and m.application == method.application
        ]
        if method in same:
            return method
        keys = ("exact", "kernels", "attention", "threads", "device")  # what the bits of a row may depend on
        shared = {m.name: sum(m.settings.get(k) == method.settings.get(k) for k in keys) for m in same}
        return min(same, key=lambda m: (-shared[m.name], m.name != PLAIN), default=None)


def _is_plain(method: Method) -> bool:
    return method.engine == "paceline" and method.plain


def why_unchecked(method: Method, cell: Cell) -> str | None:
    """Why a method's ids cannot be plain decoding's in a cell, by design; None where they must be."""
    if cell.temperature == 0:
        return None
    if method.engine != "paceline":
        return f"{method.engine} draws with noise of its own"
    verifier = method.settings.get("verifier", DEFAULT_VERIFIER)
    kind = VERIFIERS.get(verifier)
    if kind is not None and kind.needs_q:
        return f"verifier {verifier!r} gives plain decoding's distribution, not its ids"
    return None


def unchecked(report: Report) -> list[str]:
    """One sentence for everything in the report that `check` has nothing to hold against, for its notes."""
    run = _Run(report)
    notes: dict[str, None] = {}
    for cell, name in run.trials:
        method = run.methods[name]
        reason = why_unchecked(method, cell)
        if reason:
            notes[f"{name} at temperature {cell.temperature:g}: ids not compared; {reason}."] = None
        elif run.reference(method) is None:
            notes[f"{name}: ids not compared; plain decoding in {run.dtype(method)} is not among the methods."] = None
    return list(notes)


def check(report: Report, llm_of: Callable[[Method], LLM], asked: AskedOf) -> list[Exactness]:
    """Every method's ids against this engine's plain decoding of the same dtype, cell by cell.

    Plain decoding itself is held against its own first repeat, and is listed only where it does not repeat.

    Args:
        report: the run; its ``exactness`` is not read.
        llm_of: the target as a plain method of the report ran it; called when a difference is to be judged.
        asked: the prompt's ids and the parameters behind each sequence of a trial.

    Returns:
        One entry for each method that has something to be compared with, in the order of the report.
    """
    run = _Run(report)
    judges: dict[tuple[str, bool, bool], Judge] = {}
    found = []
    for (cell, name), trials in run.trials.items():
        method = run.methods[name]
        reference = run.reference(method)
        if reference is None or why_unchecked(method, cell):
            continue
        base = run.trials.get((cell, reference.name), [])
        if method == reference:
            found += _against_itself(trials)
        elif any(_paired(base, trials)):
            own = method.engine == "paceline"
            judge = partial(_judge, judges, method, reference, llm_of, base, asked)
            # The judge runs the base model: it has no word on what an application says.
            explain = explained_by(judge, asked) if method.application is None else None
            found.append(compare_outputs(base, trials, explain, finish=own))
    return found


def _judge(
    made: dict[tuple[str, bool, bool], Judge],
    method: Method,
    reference: Method,
    llm_of: Callable[[Method], LLM],
    base: Sequence[Trial],
    asked: AskedOf,
) -> Judge:
    """The judge of a method: one serves all that are held against one reference with one kind of tolerance."""
    own = method.engine == "paceline"
    exact = bool(method.settings.get("exact")) and bool(reference.settings.get("exact"))
    key = (reference.name, own, exact)
    if key not in made:
        llm = llm_of(reference)
        done = [(trial, i) for trial in base if trial.error is None for i in range(len(trial.prompts))]
        texts = [(asked(trial, i).prompt_ids, trial.outputs[i]) for trial, i in done[:SPREAD_SAMPLES]]
        made[key] = Judge(llm, own_tolerance(llm, exact, texts) if own else Tolerance.foreign(llm.decoder.dtype), own)
    return made[key]


def own_tolerance(llm: LLM, exact: bool, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tolerance:
    """What this engine's methods are allowed: nothing where they must be identical, else what is measured.

    Args:
        llm: the target of the reference.
        exact: whether both sides ran with ``exact=True``.
        texts: prompt ids and output ids to measure on; the first `SPREAD_SAMPLES` are used.
    """
    if exact or llm.decoder.dtype not in ROUNDED:
        return Tolerance.none(llm.decoder.dtype)
    return Tolerance.measured(llm.decoder, texts[:SPREAD_SAMPLES])


def _against_itself(trials: Sequence[Trial]) -> list[Exactness]:
    """Repeats of greedy plain decoding against its first, where they are not the same."""
    done = [t for t in trials if t.error is None and t.cell.temperature == 0]
    first = {t.group: t for t in reversed(done)}
    again = [t for t in done if t is not first[t.group]]
    if not again:
        return []
    found = compare_outputs(list(first.values()), again)
    return [] if found.passed else [found]


# -- on its own


def verify_method(
    plain: LLM,
    method: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> Exactness:
    """Answer the prompts with both and compare.

    Args:
        plain: the target without a drafter.
        method: the same target with one.
        prompts: token ids of each.
        params: for all prompts; with a seed, where the temperature is above 0.

    Raises:
        ConfigError: a temperature without a seed, or more than one sample.
    """
    if params.n != 1 or (params.seed is None and not params.greedy):
        raise ConfigError(
            f"comparing outputs with n={params.n}, seed={params.seed}",
            "one sample is compared, and both runs need the same noise",
            "use n=1, and give a seed where the temperature is above 0",
        )
    cell = Cell(
        workload="prompts",
        batch=len(prompts),
        temperature=params.temperature,
        max_new_tokens=params.max_tokens or 0,
        ignore_eos=params.ignore_eos,
    )
    base, other = (_answers(name, llm, cell, prompts, params) for name, llm in ((PLAIN, plain), ("method", method)))
    exact = plain.config.exact and method.config.exact

    def judge() -> Judge:
        return Judge(plain, own_tolerance(plain, exact, list(zip(prompts, base.outputs, strict=True))))

    def asked(trial: Trial, index: int) -> Asked:
        return Asked(prompt_ids=prompts[index], params=params)

    return compare_outputs([base], [other], explained_by(judge, asked))


def _answers(name: str, llm: LLM, cell: Cell, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Trial:
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    return Trial(
        method=name,
        cell=cell,
        group=0,
        repeat=0,
        prompts=[f"prompt {i}" for i in range(len(prompts))],
        prompt_tokens=[len(output.prompt_token_ids) for output in outputs],
        outputs=[output.outputs[0].token_ids for output in outputs],
        finish=[str(output.outputs[0].finish_reason) for output in outputs],
        wall_ms=max(output.stats.elapsed_ms for output in outputs),
        ttft_ms=[output.stats.ttft_ms or 0.0 for output in outputs],
    )
