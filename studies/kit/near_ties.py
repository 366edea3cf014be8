"""Whether the target itself could have said what a method said, where that is not what plain decoding said.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.api.llm import LLM
from paceline.bench import lossless
from paceline.bench.lossless import count_tokens, difference, paired
from paceline.bench.records import Exactness, Method, Report, Trial
from paceline.bench.summary import Summary
from paceline.core.errors import ConfigError
from paceline.core.request import StopChecker
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.engine.tokens import texts_of
from paceline.kv.pool import KVPool
from paceline.model.decoder import Decoder
from paceline.model.packing import RowPacker

# The largest change of a logit that was measured between passes of one row and of many, with torch's kernels on two
# models: 4 units in the last place of bf16 and 30 of float32 (sums of a thousand products in another order). Twice
# that, since both candidates can move. fp16 has three bits more than bf16 and the same sums, kept in float32.
ULPS: Mapping[torch.dtype, float] = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 64, torch.float64: 64}
ROUNDED = (torch.bfloat16, torch.float16)  # where a difference may be explained
SPREAD_SAMPLES = 4  # sequences that the spread is measured on
SPREAD_WIDTHS = (5, 512)  # rows of the passes that are held against passes of one row
RequestOf = Callable[[Trial, int], tuple[Sequence[int], SamplingParams]]
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompt ids and output ids of sequences
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
    pool = KVPool(*decoder.cache_shape, len(tokens), decoder.dtype, decoder.device)
    cache = pool.open(reuse=0)
    wanted = len(prompt) - 1  # row of the first logits
    found = []
    for start, stop in [*_ranges(0, wanted, _PASS_ROWS), *_ranges(wanted, len(tokens), rows)]:
        cache.reserve(stop - start)
        packer = RowPacker(decoder, decoder.device)
        packer.add(
            tokens[start:stop],
            range(start, stop),
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


def pass_spread(decoder: Decoder, texts: Texts) -> float:
    """The largest change of any logit between passes of one row and passes of many.

    Args:
        decoder: the target.
        texts: a few sequences.
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
    def measured(cls, decoder: Decoder, texts: Texts) -> Tolerance:
        """Twice the decoder's `pass_spread` on the first `SPREAD_SAMPLES` of these texts, `ULPS` at most."""
        most = 2 * pass_spread(decoder, texts[:SPREAD_SAMPLES])
        return cls(dtype=decoder.dtype, ulps=ULPS[decoder.dtype], most=most)

    @classmethod
    def own(cls, decoder: Decoder, exact: bool, texts: Texts) -> Tolerance:
        """For this engine: identical or failed with ``exact=True`` and in float32 and wider, else what is measured."""
        if exact or decoder.dtype not in ROUNDED:
            return cls(dtype=decoder.dtype, ulps=0)
        return cls.measured(decoder, texts)

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


def compare_sequence(reference: OutputIds, other: OutputIds, explain: Callable[[int], Finding]) -> Finding | None:
    """One output against the reference's; ``explain`` judges a difference where both have a token."""
    found = difference(reference.ids, other.ids, (reference.finish, other.finish))
    if "expected" in found and "got" in found:
        return explain(found["position"])
    return Finding(**found) if found else None


def check(report: Report, judge: NearTies) -> tuple[list[Exactness], list[str]]:
    """As `bench.lossless.check`, of passes that round by their width, too: each difference is judged."""
    summary, (found, notes) = Summary(report), lossless.check(report, rounded=True)
    for one in found:
        method, reference = summary.methods[one.method], summary.methods[one.reference]
        if method.application is not None or method.name == reference.name:
            continue  # the judge runs the base model: it has no word on what an application says
        base = summary.trials[one.cell, one.reference]
        pairs = {(t.group, t.repeat): (b, t) for b, t in paired(base, summary.trials[one.cell, one.method])}
        failures, one.failures = one.failures, []
        for failure in failures:
            said, trial = pairs[failure["group"], failure["repeat"]]
            if not {"expected", "got"} <= failure.keys():
                one.failures.append(failure)
                continue
            i = trial.prompts.index(failure["prompt"])
            plain, other = (OutputIds(t.outputs[i], t.finish[i]) for t in (said, trial))
            finding = judge(method, reference, base, trial, i, plain, other, failure["position"])
            if finding.tolerance is not None:
                one.tolerance = max(one.tolerance or 0.0, finding.tolerance)
            if finding.explained:
                one.explained += 1
            else:
                kept = {name: failure[name] for name in ("prompt", "group", "repeat")}
                one.failures.append({**kept, **finding.as_dict()})
    return found, notes


@dataclass(frozen=True, kw_only=True)
class JudgedRequest:
    """What one sequence was asked."""

    prompt_ids: Sequence[int]
    params: SamplingParams  # with a seed, where the temperature is above 0
    sample_index: int = 0


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

    def look(self, asked: JudgedRequest, reference: OutputIds, other: OutputIds, at: int) -> Finding:
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
        tie = replace(here, what="near tie", explained=True)
        return self._rest(other, at, behind, allowed) or self._ending(asked, other) or tie

    def _impossible(self, asked: JudgedRequest, reference: OutputIds, other: OutputIds) -> str | None:
        """What the target could not even be asked about."""
        shape = self._llm.decoder.config
        strange = [i for i in (*reference.ids, *other.ids) if not 0 <= i < shape.vocab_size]
        if strange:
            return f"token id {strange[0]}, and the vocabulary has {shape.vocab_size}"
        too_long = len(asked.prompt_ids) + len(other.ids) - shape.max_position
        return count_tokens(too_long, "long: the model's context ends before") if too_long > 0 else None

    def _rest(self, other: OutputIds, at: int, behind: Sequence[float], allowed: Sequence[float]) -> Finding | None:
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

    def _scores(self, asked: JudgedRequest, logits: Tensor, output: Sequence[int]) -> Tensor:
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

    def _ending(self, asked: JudgedRequest, said: OutputIds) -> Finding | None:
        """Where the output does not end as the stop rules say; those of this engine, so not for a peer."""
        if not self._finish:
            return None
        limits = self._llm.engine.limits
        room = limits.max_model_len - len(asked.prompt_ids)
        most = room if asked.params.max_tokens is None else min(asked.params.max_tokens, room)
        skip = asked.params.skip_special_tokens
        stream = self._texts.stream(asked.prompt_ids, skip) if self._texts else None
        kept, finish, _ = StopChecker(asked.params, limits.eos_ids, most, stream).feed(said.ids)
        if kept < len(said.ids):
            what = count_tokens(len(said.ids) - kept, "long: the stop rules end it before")
        elif finish is None:
            what = "short: no stop rule ends it here"
        elif finish != said.finish:
            what = f"ended as {said.finish!r}, and the stop rules say {finish!r}"
        else:
            return None
        return Finding(what=what, position=len(said.ids) - 1)


def _shown(gap: float) -> float | None:
    """A gap for JSON, which has no infinity: a token that a rule excludes has none."""
    return gap if isfinite(gap) else None


class NearTies:
    """Judges the differences of a run: one `Judge` serves all methods held against one reference with one tolerance.

    It is made at the first difference: most runs have none.

    Args:
        llm_of: the target as a plain method of the run ran it.
        request_of: the prompt's ids and the parameters behind a sequence of a trial, by its place there.
    """

    def __init__(self, llm_of: Callable[[Method], LLM], request_of: RequestOf) -> None:
        self._llm_of, self._request_of = llm_of, request_of
        self._judges: dict[tuple[str, bool, bool], Judge] = {}

    def __call__(
        self,
        method: Method,
        reference: Method,
        base: Sequence[Trial],
        trial: Trial,
        place: int,
        said: OutputIds,
        other: OutputIds,
        at: int,
    ) -> Finding:
        """What the judge says of one sequence that parts from the reference's at position ``at``."""
        exact = bool(method.settings.get("exact")) and bool(reference.settings.get("exact"))
        key = (reference.name, method.ours, exact)
        if key not in self._judges:
            llm = self._llm_of(reference)
            done = [(trial, i) for trial in base if trial.error is None for i in range(len(trial.prompts))]
            texts = [(self._request_of(trial, i)[0], trial.outputs[i]) for trial, i in done]
            decoder = llm.decoder
            tolerance = Tolerance.own(decoder, exact, texts) if method.ours else Tolerance.foreign(decoder.dtype)
            self._judges[key] = Judge(llm, tolerance, method.ours)
        prompt_ids, params = self._request_of(trial, place)
        return self._judges[key].look(JudgedRequest(prompt_ids=prompt_ids, params=params), said, other, at)
