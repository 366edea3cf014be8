"""What is right: each request alone, plainly decoded, and where float64 allows it checked by a calculation of its own.

The calculation shares no code with the engine but the network's layers: one dense causal pass over the whole text,
its own sampling rules over a row, its own hash for the noise, its own stop rules and text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from asks import Expand
from kits.byte_tokens import PIECES, SPECIAL
from kits.tiny import full_logits, holds_back, piece
from torch import Tensor
from worlds import MAX_LEN, SHARED, build, lossless_streams, merged, texts

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.papers.streaming.drafter import StreamsConfig, StreamsDrafter

CLOSE = 1e-9  # by how much float64 may differ, relative to the figure's size

BEYOND = 8  # tokens that adversaries know beyond the end of an answer


@dataclass
class Sample:
    """One sample of an answer."""

    ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[Any] | None
    seed: int
    shown: list[str] = field(default_factory=list)  # [k]: the text that was safe to show after k tokens

    @property
    def failed(self) -> bool:
        """Whether its own rules failed on the way: legal requests never do."""
        return self.finish_reason == "error"


@dataclass
class Answer:
    """What the oracle says to a request."""

    samples: list[Sample]
    prompt_logprobs: list[Any] | None
    complaints: list[str] = field(default_factory=list)  # of the independent calculation


def alone(ask: Expand) -> Answer:
    """The request by itself: no drafts, no company, no pressure, no prefix to find, its prompt in one pass."""
    engine = _plain_engine(ask)
    request_id = engine.submit(ask.prompt, ask.params, prompt=ask.text, application=ask.application)
    live = engine.live[request_id]
    shown: list[list[str]] = [[_echo(ask)] for _ in live.sequences]
    while engine.busy:
        engine.step()
        for safe, sample in zip(shown, engine.output(live).outputs, strict=True):
            safe += [sample.text] * (len(sample.token_ids) + 1 - len(safe))
    engine.pool.check_integrity()
    output = engine.output(live)
    samples = [
        Sample(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.seed, safe)
        for o, safe in zip(output.outputs, shown, strict=True)
    ]
    return Answer(samples, output.prompt_logprobs)


def _plain_engine(ask: Expand) -> Engine:
    """A block holds any text: no block is ever full, so none is found again."""
    drafter, names = None, [] if ask.application is None else [ask.application]
    if ask.application == SHARED:  # the streams are part of the answer, and only this drafter brings them
        drafter = StreamsDrafter(StreamsConfig(k=1), lossless_streams(ask.world))
    room = 4 * 512
    return build(ask.world, drafter, names, budget=0, kv_tokens=room, block_size=512, max_sequences=1)


@lru_cache(maxsize=4000)
def answer(ask: Expand) -> Answer:
    """The oracle's answer, certified where it can be."""
    found = alone(ask)
    found.complaints = [f"sample {i} ended with an error" for i, s in enumerate(found.samples) if s.failed]
    if ask.world.reference and ask.application != SHARED:
        found.complaints += certify(ask, found)
    return found


@lru_cache(maxsize=1000)
def foreseen(ask: Expand) -> list[list[int]]:
    """The ids of each sample, and where that can be told what would follow, had no rule ended it."""
    free = {"stop": None, "stop_token_ids": None, "ignore_eos": True, "logprobs": None, "prompt_logprobs": None}
    said = [sample.ids for sample in answer(ask).samples]
    most = max(map(len, said)) + BEYOND
    endless = replace(ask, params=replace(ask.params, **free, max_tokens=most, min_tokens=0))
    further = [sample.ids for sample in alone(endless).samples]
    return [long if long[: len(ids)] == ids else ids for ids, long in zip(said, further, strict=True)]


def unseeded(ask: Expand, seed: int) -> Answer:
    """The answer to a request that named no seed, for the seed that was drawn for it."""
    return answer(replace(ask, params=replace(ask.params, seed=seed)))


# The independent calculation


def certify(ask: Expand, found: Answer, chosen: bool = True) -> list[str]:
    """What is wrong with an answer, by a calculation that knows nothing of engines.

    Args:
        chosen: False where another verifier chose: then each token must only be possible.
    """
    complaints: list[str] = []
    for index, sample in enumerate(found.samples):
        logits = _logits(ask, sample.ids)
        rows = logits[len(ask.prompt) - 1 :].numpy()
        complaints += _choices(ask, index, sample, rows, chosen)
        complaints += _ends(ask, sample)
        if ask.params.logprobs is not None:
            raw = [_rules(ask, sample.ids[:t], row) for t, row in enumerate(rows)] if _processed(ask) else rows
            complaints += _logprobs(f"sample {index}", sample.logprobs, raw, sample.ids, ask.params.logprobs)
    if ask.params.prompt_logprobs is not None:
        complaints += _prompt_logprobs(ask, found)
    return complaints


def _processed(ask: Expand) -> bool:
    return ask.params.logprobs_mode == "processed"


def _logits(ask: Expand, ids: Sequence[int]) -> Tensor:
    """[prompt + answer - 1, V]: one causal pass over the whole text."""
    return full_logits(merged(ask.world, ask.application), [*ask.prompt, *ids[:-1]])


def _choices(ask: Expand, index: int, sample: Sample, rows: np.ndarray, chosen: bool) -> list[str]:
    for t, token in enumerate(sample.ids):
        place = len(ask.prompt) + t
        possible = _possible(ask, sample, index, t, rows[t], place) if chosen else None
        if possible is None:
            row = _rules(ask, sample.ids[:t], rows[t])
            wrong = row[token] == -math.inf if ask.params.temperature else row[token] < row.max()
        else:
            wrong = token not in possible
        if wrong:
            return [f"sample {index}: token {t} is {token}, and should be {possible or 'possible'}"]
    return []


def _possible(ask: Expand, sample: Sample, index: int, t: int, row: np.ndarray, place: int) -> set[int]:
    """The right token; several where rounding alone decides between them."""
    noise: Any = 0.0
    if ask.params.temperature > 0:
        noise = keyed_noise(sample.seed, index, place, len(row))
    found: set[int] = set()
    for lean in (0.0, -CLOSE, CLOSE) if 0 < ask.params.top_p < 1 else (0.0,):
        scores = _rules(ask, sample.ids[:t], row, lean) + noise
        best = scores.max()
        margin = CLOSE * 1e-3 * max(1.0, abs(best)) if math.isfinite(best) else 0.0
        found |= {int(scores.argmax()), *map(int, np.flatnonzero(scores > best - margin))}
    return found


def _rules(ask: Expand, output: Sequence[int], logits: np.ndarray, lean: float = 0.0) -> np.ndarray:
    """[V] float64: a row after every rule of the request, in the documented order.

    Args:
        lean: by how much, relatively, to move the border of top_p.
    """
    p, row = ask.params, logits.astype(np.float64)
    seen = sorted({*ask.prompt, *output})
    if p.repetition_penalty != 1:
        row[seen] = np.where(row[seen] > 0, row[seen] / p.repetition_penalty, row[seen] * p.repetition_penalty)
    for token in set(output):
        row[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty  # type: ignore[attr-defined]
    for token, bias in (p.logit_bias or {}).items():
        row[token] += bias
    if len(output) < p.min_tokens:
        row[[*ask.world.config.eos_ids, *(p.stop_token_ids or ())]] = -math.inf
    return _truncate(row / p.temperature, p, lean) if p.temperature > 0 else row


def _truncate(row: np.ndarray, p: SamplingParams, lean: float) -> np.ndarray:
    """[V]: a row after top_k, top_p and min_p."""
    if 0 < p.top_k < len(row):
        row = np.where(row >= np.sort(row)[-p.top_k], row, -math.inf)
    if p.top_p < 1:
        weights = [round(w * 2**40) for w in np.exp(row - row.max()).tolist()]
        order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
        limit, before, kept = sum(weights) * min(1.0, p.top_p * (1 + lean)), 0, np.full(len(row), -math.inf)
        for token in order:
            if before and before >= limit:
                break
            kept[token] = row[token]
            before += weights[token]
        row = kept
    if p.min_p > 0:
        row = np.where(row >= row.max() + math.log(p.min_p), row, -math.inf)
    return row


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * _FIRST % 2**64
    x = (x ^ (x >> 27)) * _SECOND % 2**64
    return x ^ (x >> 31)


def keyed_noise(seed: int, index: int, place: int, vocab: int) -> np.ndarray:
    """[V] the Gumbel noise of one place: a function of seed, sample index and place alone."""
    key = 0
    for part in (seed, index, 0, place, 0):  # the zeros: the target's own domain, and its only branch
        key = _scramble(((key ^ (part % 2**64)) + _GOLDEN) % 2**64)
    with np.errstate(over="ignore"):
        x = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    bits = (x & np.uint64(2**63 - 1)) | np.uint64(1)
    uniform = (torch.from_numpy(bits.astype(np.int64)).float() * 2.0**-63).clamp(max=1 - 2**-24)
    return (-(-(-uniform).log1p()).log()).double().numpy()


def _ends(ask: Expand, sample: Sample) -> list[str]:
    """What is wrong with where an answer ends, and with its text."""
    p, eos = ask.params, set() if ask.params.ignore_eos else {*ask.world.config.eos_ids}
    room = MAX_LEN - len(ask.prompt)
    most = room if p.max_tokens is None else min(p.max_tokens, room)
    speaker = texts(ask.world).stream(ask.prompt, p.skip_special_tokens) if ask.world.bytes else _ToySpeaker()
    text, end, spoken = "", (None, None), 0
    for t, token in enumerate(sample.ids):
        if end[0] is not None:
            return [f"the answer goes on for {len(sample.ids) - t} tokens after {end}"]
        armed = t >= p.min_tokens
        if armed and (token in eos or token in (p.stop_token_ids or ())):
            end = ("stop", None if token in eos else token)
            continue
        text, stopped = _say(text, speaker.push(token), p, armed)
        spoken += 1
        end = ("stop", stopped) if stopped else ("length", None) if t + 1 == most else end
    if (sample.finish_reason, sample.stop_reason) != end:
        return [f"it ends as {(sample.finish_reason, sample.stop_reason)}, and should as {end}"]
    cut = isinstance(end[1], str)
    return _texts(ask, sample, text if cut else text + speaker.end(), None if cut else spoken)


def _say(text: str, fresh: str, p: SamplingParams, armed: bool) -> tuple[str, str | None]:
    """Letter by letter: the first stop string to be complete wins, of two the longer."""
    for letter in fresh:
        text += letter
        hits = [stop for stop in p.stop_strings if armed and text.endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text if p.include_stop_str_in_output else text.removesuffix(stop), stop
    return text, None


def _texts(ask: Expand, sample: Sample, expected: str, spoken: int | None) -> list[str]:
    """What is wrong with a text; ``spoken``: the tokens that have text, None where a stop string cut it."""
    prefix = _echo(ask)
    if sample.text != prefix + expected:
        return [f"its text is {sample.text!r}, and should be {prefix + expected!r}"]
    if ask.world.bytes and spoken is not None:
        pattern = byte_pattern(ask.prompt, sample.ids[:spoken], ask.params.skip_special_tokens)
        if not re.fullmatch(pattern, expected, re.DOTALL):
            return [f"its text {expected!r} is not what its bytes are: {pattern!r}"]
    return []


def _echo(ask: Expand) -> str:
    """What the text of an answer begins with."""
    if not ask.params.echo:
        return ""
    return ask.text if ask.text is not None else texts(ask.world).prompt(ask.prompt, ask.params.skip_special_tokens)


class _ToySpeaker:
    """A letter and a digit an id; some ids' text waits for the next one's."""

    sure = False

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        text, self._held = self._held + piece(token), ""
        if holds_back(token):
            self._held, text = text, ""
        return text

    def end(self) -> str:
        return ""


def byte_pattern(prompt: Sequence[int], ids: Sequence[int], skip_special: bool) -> str:
    """The text of an answer in the world of bytes, as a regular expression.

    A run of byte tokens that is UTF-8 has exactly its characters. Of one that is not, U+FFFD and its whole
    characters may come out in any number. The run with which the prompt ends goes on in the answer.
    """
    _, run = _runs(prompt, skip_special)
    begun = len(run.decode("utf-8", "ignore"))  # characters of the first run that are the prompt's own
    pattern, _ = _runs(ids, skip_special, run, begun)
    return pattern


def _runs(ids: Sequence[int], skip_special: bool, run: bytes = b"", told: int = 0) -> tuple[str, bytes]:
    """The pattern of some tokens behind a run that has begun, and the run with which they end."""
    pattern = ""
    for token in ids:
        number = token - len(SPECIAL)
        if 0 <= number < 256:
            run += bytes([number])
        elif number >= 0 or not skip_special:
            visible = SPECIAL[token] if number < 0 else PIECES[number - 256].replace("▁", " ")
            pattern, run, told = pattern + _run_pattern(run, told) + re.escape(visible), b"", 0
    return pattern + _run_pattern(run, told), run


def _run_pattern(run: bytes, told: int) -> str:
    whole = run.decode("utf-8", "ignore")
    if whole.encode() == run:
        return re.escape(whole[told:])
    return f"[\ufffd{re.escape(whole)}]*"


def _prompt_logprobs(ask: Expand, found: Answer) -> list[str]:
    rows = _logits(ask, [0])[:-1].numpy()
    if _processed(ask):
        rows = np.stack([_rules(ask, [], row) for row in rows]) if len(rows) else rows
    given = found.prompt_logprobs
    if given is None or len(given) != len(ask.prompt) or given[0] is not None:
        return ["the prompt's log-probabilities are not one a token, the first one None"]
    wanted = ask.params.prompt_logprobs or 0
    return _logprobs("the prompt", given[1:], rows, ask.prompt[1:], wanted)


def _logprobs(where: str, given: Any, rows: Any, tokens: Sequence[int], k: int) -> list[str]:
    if given is None or len(given) != len(tokens):
        return [f"{where}: {None if given is None else len(given)} log-probabilities for {len(tokens)} tokens"]
    for t, (row, logits, token) in enumerate(zip(given, rows, tokens, strict=True)):
        expected = logits - logits.max()
        expected = expected - math.log(np.exp(expected).sum())
        best = np.sort(expected)[::-1][:k]
        values = {i: entry.logprob for i, entry in row.items()}
        likeliest = sorted(values.values(), reverse=True)[:k]
        right = [*values][0] == token and len(values) in (k, k + 1)
        right = right and all(near(value, float(expected[i])) for i, value in values.items())
        if not (right and all(near(a, float(b)) for a, b in zip(likeliest, best, strict=True))):
            return [f"{where}: log-probabilities of token {t} are {values}, the likeliest have {best.tolist()}"]
    return []


def near(a: float, b: float) -> bool:
    """Whether two figures are equal but for float64's rounding."""
    return a == b or abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b))
