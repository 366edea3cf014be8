"""The parts of the exactness grid: an independent oracle, drafters, sampling options, conditions, a witness.

The oracle is plain decoding as one would write it first: the whole text through the network for every
token, no pool, no scheduler, no drafts, one sequence, its own stop rules. Every cell of the grid must give what
it gives, and the witness must have seen the cell meet what it is for.
"""

from __future__ import annotations

import math
import random
import sys
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit.ticks import watch_ticks
from kits.adversaries import RULES, Adversary, Rule, too_deep
from kits.medusa import medusa, taught_heads
from kits.spire import spire
from kits.state import eagle, lyanna
from kits.suffixes import suffix_config
from kits.tiny import (
    EOS,
    LOOKUP,
    MODEL,
    ToyText,
    assemble,
    draft_model,
    full_logits,
    hybrid,
    hybrid_with_streams,
    run,
    streams,
    tiny_config,
    tiny_decoder,
)
from torch import Tensor

from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRule
from paceline.draft.hybrid import Hybrid, HybridConfig
from paceline.draft.magicdec import MagicDec, MagicDecConfig
from paceline.draft.ngram import NgramConfig
from paceline.draft.suffix import SuffixConfig
from paceline.engine.base import StepResult, Work
from paceline.engine.engine import Engine
from paceline.engine.passes import Pass
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.model.rope import RopeConfig
from paceline.papers.specpipe.records import Tick
from paceline.papers.specpipe.round import PipelineRound

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))

EOS_IDS = (EOS, 23, 61)  # three, so that an answer of 20 tokens often meets one
CONFIG = tiny_config(eos_ids=EOS_IDS)
WHOLE = tiny_config(eos_ids=EOS_IDS, windows=(None,) * CONFIG.num_layers)  # for drafters that refuse sliding windows
# As Gemma 3: norms behind both halves, scaled embeddings, a rotation of its own in the layer that slides.
NORMED = tiny_config(
    **{"eos_ids": EOS_IDS, "qk_norm": True, "post_norms": True, "activation": "gelu_tanh", "embedding_scale": 2.0},
    **{"query_scalar": 0.5, "rope": RopeConfig(dim=8, theta=1000.0)},
    ropes=tuple(RopeConfig(dim=8, theta=theta) for theta in (1000.0, 50.0, 1000.0)),
)
VOCAB = CONFIG.vocab_size
TOKENS = 20  # of an answer, unless an option says otherwise
BEYOND = 24  # tokens that the oracle goes on for after the end, for drafters that know the answer

# The oracle


@cache
def target(config: DecoderConfig = CONFIG) -> Decoder:
    """The target of the grid: float64, dense reference attention."""
    return tiny_decoder(config, seed=3 if config == WHOLE else 0)  # others of WHOLE repeat themselves


@dataclass
class Answer:
    """What plain decoding says to one sample of a request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)  # chosen and likeliest, one dict a token
    beyond: list[int] = field(default_factory=list)  # what would have come next, had nothing ended it


@cache
def next_logits(config: DecoderConfig, tokens: tuple[int, ...]) -> Tensor:
    """[1, V]: of the whole text, once for all options that lead to it."""
    return full_logits(target(config), tokens)[-1:].clone()


def plain(
    prompt: abc.Sequence[int], params: SamplingParams, index: int = 0, beyond: int = 0, config: DecoderConfig = CONFIG
) -> Answer:
    """Plain decoding of one sample, token by token, everything computed anew for each.

    Args:
        prompt, params: the request; it names a seed.
        index: which of its samples.
        beyond: tokens to go on for after the end.
        config: of the target.
    """
    assert params.seed is not None and params.max_tokens is not None
    sampler = SequenceSampler(params, prompt, seed=params.seed, sample_index=index, vocab_size=VOCAB, eos_ids=EOS_IDS)
    answer, tokens, decode = Answer(), list(prompt), ToyText().push
    while not answer.finish_reason or len(answer.beyond) < beyond:
        logits = next_logits(config, tuple(tokens))
        token = int(sampler.choose(logits, None, [len(tokens)]))
        if answer.finish_reason:
            answer.beyond.append(token)
        else:
            if params.logprobs is not None:
                rows = sampler.process(logits) if params.logprobs_mode == "processed" else logits
                answer.logprobs.append(likeliest(rows[0], token, params.logprobs))
            answer.ids.append(token)
            _end(answer, token, params, decode)
        tokens.append(token)
        sampler.commit([token])
    return answer


def _end(answer: Answer, token: int, params: SamplingParams, decode: Callable[[int], str]) -> None:
    """Whether this token ends the answer, and what text it leaves."""
    may_stop = len(answer.ids) > params.min_tokens
    ends = may_stop and token in EOS_IDS and not params.ignore_eos
    if ends or (may_stop and token in (params.stop_token_ids or ())):
        answer.finish_reason, answer.stop_reason = "stop", None if ends else token
        return
    for letter in decode(token):  # letter by letter: the first stop string to be complete wins
        answer.text += letter
        hits = [s for s in params.stop_strings if may_stop and answer.text.endswith(s)]
        if hits:
            stop = max(hits, key=len)
            if not params.include_stop_str_in_output:
                answer.text = answer.text.removesuffix(stop)
            answer.finish_reason, answer.stop_reason = "stop", stop
            return
    if len(answer.ids) == params.max_tokens:
        answer.finish_reason = "length"


def likeliest(logits: Tensor, chosen: int, k: int) -> dict[int, float]:
    """Log-probability of the chosen token and of the k likeliest ones, from one row [V]."""
    logprobs = logits - logits.logsumexp(0)
    ids = [chosen, *logprobs.argsort(descending=True, stable=True)[:k].tolist()]
    return {i: float(logprobs[i]) for i in ids}


def prompt_logprobs(prompt: abc.Sequence[int], k: int, config: DecoderConfig) -> list[dict[int, float] | None]:
    """The same for every token of a prompt; nothing precedes the first."""
    logits = full_logits(target(config), prompt)
    return [None, *(likeliest(logits[i], token, k) for i, token in enumerate(prompt[1:]))]


# Requests


def _prompts() -> list[list[int]]:
    """Eight prompts, from one token to several blocks; two share a long beginning, two repeat themselves."""
    draw = random.Random(5)
    plain_ids = [i for i in range(VOCAB) if i not in EOS_IDS]
    texts = [draw.choices(plain_ids, k=n) for n in (1, 3, 9, 17, 33, 40, 12, 64)]
    texts[5][:32] = texts[4][:32]
    texts[6] = texts[6] * 3 + texts[6][:5]
    texts[7] = [*texts[7], *texts[7][10:30], *texts[7][10:20]]
    return texts


PROMPTS = _prompts()
SIZES = (1, 3, 8)  # batch sizes of the full product


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": TOKENS, "ignore_eos": True, "seed": 11} | options))


Maker = Callable[[abc.Sequence[int], DecoderConfig], SamplingParams]  # some options are made for the prompt and target


def _fixed(**options: Any) -> Maker:
    return lambda prompt, config: _params(**options)


def _stop_string(keep: bool = False, **options: Any) -> Maker:
    """Stops at five characters out of the middle of the answer: they span tokens, and begin inside one."""

    def make(prompt: abc.Sequence[int], config: DecoderConfig) -> SamplingParams:
        text = plain(prompt, _params(**options), config=config).text
        middle = len(text) // 2 | 1
        return _params(stop=["~~", text[middle : middle + 5]], include_stop_str_in_output=keep, **options)

    return make


def _stop_id(**options: Any) -> Maker:
    def make(prompt: abc.Sequence[int], config: DecoderConfig) -> SamplingParams:
        ids = plain(prompt, _params(**options), config=config).ids
        return _params(stop_token_ids=[ids[TOKENS // 2]], **options)

    return make


def _eos(**options: Any) -> Maker:
    """Ends at EOS in the middle of the answer, by as much bias towards it as that takes; an answer that goes round in
    circles may not end before its middle."""

    seeds = range(11, 16) if options.get("temperature") != 0 else (11,)  # of greedy answers all are the same

    def make(prompt: abc.Sequence[int], config: DecoderConfig) -> SamplingParams:
        steps = product((0,), seeds, range(12)), product((0,), seeds, (n / 8 for n in range(-96, 96)))
        for least, seed, bias in chain(*steps, product((12,), seeds, range(12))):
            weights = {i: float(bias) for i in EOS_IDS}
            params = _params(
                ignore_eos=False, logit_bias=weights, max_tokens=40, seed=seed, min_tokens=least, **options
            )
            if 9 <= len(plain(prompt, params, config=config).ids) <= 36:
                return params
        raise AssertionError("no bias ends this answer in its middle: choose other seeds")

    return make


_COLD = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02}
_BIAS = {3: 4.0, 50: -100.0, 90: 3.0}

OPTIONS: dict[str, Maker] = {
    "greedy": _fixed(temperature=0, max_tokens=32),
    "sampled": _fixed(max_tokens=32),
    "hot": _fixed(temperature=1.6),
    "top_p": _fixed(temperature=0.7, top_p=0.8),
    "top_k": _fixed(temperature=0.7, top_k=6),
    "min_p": _fixed(temperature=0.7, min_p=0.1),
    "truncated": _fixed(**_COLD),
    "repetition_greedy": _fixed(temperature=0, repetition_penalty=1.4),
    "repetition_sampled": _fixed(repetition_penalty=1.2),
    "presence_greedy": _fixed(temperature=0, presence_penalty=1.5),
    "frequency_sampled": _fixed(frequency_penalty=1.1),
    "penalties_negative": _fixed(temperature=0.8, presence_penalty=-0.6, frequency_penalty=-0.7),
    "penalties_all": _fixed(temperature=0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    "logit_bias_greedy": _fixed(temperature=0, logit_bias=_BIAS),
    "logit_bias_sampled": _fixed(logit_bias=_BIAS),
    "min_tokens": _fixed(ignore_eos=False, min_tokens=9, stop_token_ids=[3, 4, 5], logit_bias={EOS: 5.0}),
    "stop_string_greedy": _stop_string(temperature=0),
    "stop_string_sampled": _stop_string(),
    "stop_string_kept": _stop_string(keep=True, temperature=0.5),
    "stop_id_greedy": _stop_id(temperature=0),
    "stop_id_sampled": _stop_id(),
    "eos_greedy": _eos(temperature=0),
    "eos_sampled": _eos(),
    "eos_ignored": _fixed(logit_bias={EOS: 5.0}),
    "n_three": _fixed(n=3, max_tokens=12),
    "n_three_penalised": _fixed(n=3, max_tokens=12, temperature=0.8, frequency_penalty=0.7),
    "logprobs_raw": _fixed(logprobs=4),
    "logprobs_processed": _fixed(logprobs=3, logprobs_mode="processed", temperature=0.7, presence_penalty=0.9),
    "prompt_logprobs": _fixed(temperature=0, prompt_logprobs=2, logprobs=0),
    "one_token": _fixed(max_tokens=1),
    "two_tokens": _fixed(temperature=0, max_tokens=2),
    "mixed": _stop_string(
        **_COLD,
        ignore_eos=False,
        n=2,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=_BIAS,
        min_tokens=4,
        logprobs=2,
        logprobs_mode="processed",
    ),
}


@dataclass(frozen=True)
class Case:
    """One request of the grid with its plain answers."""

    option: str
    prompt: list[int]
    params: SamplingParams
    answers: list[Answer]  # one a sample
    prompt_logprobs: list[dict[int, float] | None] | None


@cache
def case(option: str, prompt_index: int, config: DecoderConfig = CONFIG) -> Case:
    """The case of one option and one of `PROMPTS`."""
    prompt = PROMPTS[prompt_index]
    params = OPTIONS[option](prompt, config)
    answers = [plain(prompt, params, i, BEYOND, config) for i in range(params.n)]
    wanted = params.prompt_logprobs
    return Case(option, prompt, params, answers, None if wanted is None else prompt_logprobs(prompt, wanted, config))


# Drafters: the real ones, and some that are up to no good


def _model(**options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: draft_model(target={"config": CONFIG}, **options)


def _hybrid(parts: str, **options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: hybrid(parts, target={"config": CONFIG}, **options)


def _streams(layers: int = 1, **options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: streams(target={"config": CONFIG, "layers": layers}, **options)


def _lyanna(**options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: lyanna(
        config=CONFIG, **{"past": 8} | options
    )  # else a prefix hit would never be short of states


def _eagle(**options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: eagle(config=CONFIG, **{"past": 8} | options)


def _beside_a_lookup(part: Callable[[abc.Sequence[Case]], Any]) -> Callable[[abc.Sequence[Case]], Any]:
    config = HybridConfig(parts=f"{LOOKUP}+a drafter of states", nodes=20)
    return lambda cases: Hybrid(config, [*hybrid(LOOKUP, target={"config": CONFIG}).parts, part(cases)])


def _medusa(**options: Any) -> Callable[[abc.Sequence[Case]], Any]:
    return lambda cases: medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))), **options)


def _adversary(rule: Rule) -> Callable[[abc.Sequence[Case]], Any]:
    def make(cases: abc.Sequence[Case]) -> Adversary:
        known = {(id(c.params), tuple(c.prompt), i): a.ids + a.beyond for c in cases for i, a in enumerate(c.answers)}

        def answer(sequence: Sequence) -> list[int]:
            prompt, output = sequence.tokens[: sequence.prompt_len], sequence.tokens[sequence.prompt_len :]
            found = known[id(sequence.sampler.params), tuple(prompt), sequence.sampler.sample_index]
            assert output == found[: len(output)], "the output has left the plain answer"
            return found

        return Adversary(rule, answer)

    return make


DRAFTERS: dict[str, Callable[[abc.Sequence[Case]], Any]] = {
    "none": lambda cases: None,
    "ngram": lambda cases: NgramConfig(depth=5),
    "ngram_short": lambda cases: NgramConfig(depth=4, max_ngram=2),
    "suffix": lambda cases: SuffixConfig(depth=6),
    "suffix_bold": lambda cases: suffix_config(depth=9, min_prob=0.01),
    "chain_coupled": _model(depth=4),
    "chain_point": _model(depth=4, proposes="point"),
    "chain_drawn": _model(depth=3, proposes="sampled"),
    "static_coupled": _model(branching="3x2x1", noise=0.08),
    "static_point": _model(branching="3x1x2", noise=0.08, proposes="point"),
    "static_drawn": _model(branching="2x2", proposes="sampled"),
    "dynamic_coupled": _model(topk=3, depth=4, nodes=9, noise=0.08),
    "dynamic_point": _model(topk=4, depth=3, noise=0.08, proposes="point"),
    "dynamic_narrow": _model(topk=2, depth=6),
    "streams_tree": _streams(k=12, nodes=24, at="nodes"),
    "streams_frontier": _streams(k=12, nodes=24),
    "streams_point": _streams(k=12, nodes=24, proposes="point"),
    "streams_chain": _streams(k=1, at="nodes"),
    "streams_threshold": _streams(k=12, nodes=24, prune_threshold=0.003, at="nodes"),
    "streams_count": _streams(k=12, nodes=24, prune_count=9),
    "streams_best_path": _streams(k=12, nodes=24, best_path_batch=2),
    "lyanna": _lyanna(extra=0),
    "lyanna_fused": _lyanna(nodes=8, extra=24),
    "lyanna_point": _lyanna(nodes=8, extra=24, proposes="point"),
    "eagle": _eagle(depth=3, nodes=24),
    "eagle_chain": _eagle(depth=4, topk=1, nodes=4, proposes="point"),
    "hybrid_lyanna": _beside_a_lookup(_lyanna(nodes=14, extra=6)),
    "hybrid_eagle": _beside_a_lookup(_eagle(depth=3, nodes=14)),
    "medusa": _medusa(),
    "medusa_point": _medusa(nodes=12, depth=2, proposes="point"),
    "medusa_chain": _medusa(topk=1),
    "hybrid": _hybrid(f"{LOOKUP}+{MODEL}"),
    "hybrid_streams": lambda cases: hybrid_with_streams(target={"config": CONFIG}),
    "hybrid_of_three": lambda cases: hybrid_with_streams(f"{LOOKUP}+{MODEL};topk=2", target={"config": CONFIG}),
    "hybrid_trees": _hybrid(f"ngram+{LOOKUP}+{MODEL};topk=3;nodes=9", nodes=12, noise=0.08),
    **{rule.__name__: _adversary(rule) for rule in (*RULES[:5], *RULES[6:4:-1], too_deep, *RULES[7:])},
    # Behind the others: the place of a drafter decides which options meet which conditions.
    "magicdec": lambda cases: MagicDecConfig(window=12, sinks=2, depth=4),
    "magicdec_point": lambda cases: MagicDecConfig(window=5, depth=3, proposes="point"),
    "magicdec_drawn": lambda cases: MagicDecConfig(window=12, sinks=0, depth=4, proposes="sampled"),
    "spire": lambda cases: spire(config=WHOLE, seed=3),
    "spire_drawn": lambda cases: spire(config=WHOLE, seed=3, depth=3, proposes="sampled"),
    "hybrid_spire": _beside_a_lookup(lambda cases: spire(config=WHOLE, seed=3)),
    "hybrid_magicdec": _beside_a_lookup(lambda cases: MagicDec(MagicDecConfig(window=8, depth=3))),
    "mirror": _model(depth=3),
    "mirror_plain": _model(depth=2, proposes="point"),
    "pipeline_none": lambda cases: None,
    "pipeline_model": _model(depth=4),
    "pipeline_noisy": _model(depth=4, noise=0.08),
    "pipeline_ngram": lambda cases: NgramConfig(depth=5),
    "pipeline_suffix": lambda cases: SuffixConfig(depth=6),
    "pipeline_hybrid": _hybrid(f"{LOOKUP}+{MODEL}"),
    "pipeline_shared": _model(depth=4, noise=0.08),
    "normed_tree": lambda cases: draft_model(target={"config": NORMED}, topk=3, depth=4, nodes=9, noise=0.08),
    "normed_streams": lambda cases: streams(target={"config": NORMED}, k=12, nodes=24),
    "normed_eagle": lambda cases: eagle(config=NORMED, depth=3, nodes=24, past=8),
    "pipeline_normed": lambda cases: draft_model(target={"config": NORMED}, depth=4),
}
ROUNDS = {  # else the drafter's
    "mirror": "mirror,kappa=5,exit=2",
    "mirror_plain": "mirror,kappa=3,exit=1",
    "pipeline_none": "pipeline,stages=3,texts=1",
    "pipeline_model": "pipeline,stages=3,width=6,children=3",
    "pipeline_noisy": "pipeline,stages=3,width=3,children=3",
    "pipeline_ngram": "pipeline,stages=2,width=4,children=4",
    "pipeline_suffix": "pipeline,stages=3,width=2,children=2",
    "pipeline_hybrid": "pipeline,stages=2,width=4,children=2",
    "pipeline_shared": "pipeline,stages=3,width=6,children=2,rows=5",
    "pipeline_normed": "pipeline,stages=3,width=6,children=3",
}
TARGETS = {name: WHOLE for name in DRAFTERS if "magicdec" in name or "spire" in name} | {
    name: NORMED for name in DRAFTERS if "normed" in name
}  # of drafters that need another target


def config_of(drafter: str) -> DecoderConfig:
    """The shape of the target that a drafter of the grid drafts for."""
    return TARGETS.get(drafter, CONFIG)


# With the full grids alone: what differs from another one in a shape, in what it proposes, or in what stands beside it.
TWINS = {
    *("ngram_short", "suffix_bold", "static_point", "static_drawn", "dynamic_point", "dynamic_narrow", "eagle_chain"),
    *("streams_point", "streams_best_path", "streams_count", "lyanna_point", "medusa_point"),
    *("magicdec_point", "magicdec_drawn", "spire_drawn", "normed_streams", "hybrid_lyanna", "hybrid_streams"),
    *("hybrid_spire", "hybrid_of_three", "hybrid_eagle", "hybrid_magicdec"),
    *("pipeline_ngram", "pipeline_suffix", "pipeline_hybrid", "pipeline_normed"),
}
assert DRAFTERS.keys() >= TWINS

FAILING = {"unreliable"}  # drafters that the engine must put aside

# Conditions and what they must bring about

CONDITIONS: dict[str, dict[str, Any]] = {
    "one by one": {"max_sequences": 1},
    "few rows": {"max_sequences": 3, "max_batch_rows": 11},
    "together": {"max_sequences": 8},
    "tight pool": {"max_sequences": 8, "kv_tokens": 160, "block_size": 4, "max_model_len": 150},
}


@dataclass
class Witness:
    """What was met, over any number of runs."""

    accepted: set[int] = field(default_factory=set)  # drafted tokens that a pass accepted, before the stop rules' cut
    marks: set[str] = field(default_factory=set)
    checks: int = 0  # samples compared

    def watch(self, engine: Engine) -> None:
        """See every step of ``engine``, and every verdict on a tree."""
        round_: Any = engine.round
        if isinstance(round_, PipelineRound):
            self._watch_pipeline(engine, round_)
            return
        step, emit = round_.step, round_.emitter.emit
        paths: dict[int, list[int]] = {}

        def watched_emit(p: Pass) -> None:
            for i in p.generating:
                tree, path = p.spans[i].tree, p.paths[i]
                if tree is not None:
                    paths[p.works[i].sequence.key] = path
                    self._saw_path(path, [-1, *tree.parents])
                    if any(tree.marks[n - 1] for n in path):
                        self.marks.add("a node of a second source")
            emit(p)

        def watched_step(works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
            paths.clear()
            self._saw_works(engine, works)
            before = [len(w.sequence.tokens) for w in works]
            result = step(works, rule)
            if len(result.works) < len(works):
                self.marks.add("a sequence waits")
            for work, length in zip(works, before, strict=True):
                path = paths.get(work.sequence.key, [])
                self._saw_end(work, path, len(work.sequence.tokens) - length)
            return result

        round_.step = watched_step
        round_.emitter.emit = watched_emit

    def _watch_pipeline(self, engine: Engine, round_: PipelineRound) -> None:
        """See every step of a pipeline, and what its ticks tell."""
        step = round_.step

        def watched_step(works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
            self._saw_works(engine, works)
            result = step(works, rule)
            for sequence, _ in result.emitted:
                self._saw_token(sequence, round_.source is not None)
            return result

        def ticked(tick: Tick) -> None:
            self.accepted.update(int(verdict.hit) for verdict in tick.verdicts)
            for met, mark in ((tick.refills, "a partial refill"), (tick.late, "a late sibling")):
                if met:
                    self.marks.add(mark)

        round_.step = watched_step  # type: ignore[method-assign]
        watch_ticks(round_, ticked)

    def _saw_token(self, sequence: Sequence, drafts: bool) -> None:
        params = sequence.params
        if drafts and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
            self.marks.add("drafts accepted under penalties")
        if sequence.checker.finish_reason == "stop":
            self.marks.add("a stop with levels in flight" if drafts else "a stop")

    def _saw_path(self, path: list[int], parents: list[int]) -> None:
        self.accepted.add(len(path))
        if any(parents.index(parents[node]) != node for node in path):
            self.marks.add("a sibling that is not the first")

    def _saw_works(self, engine: Engine, works: abc.Sequence[Work]) -> None:
        if any(not w.generates for w in works):
            self.marks.add("a chunk edge")
        ample = engine.scheduler.config.max_batch_rows >= 512
        if ample and any(w.generates and w.sequence.pending == 1 and w.budget < _wanted(engine, w) for w in works):
            self.marks.add("drafts cut by the pool")

    def _saw_end(self, work: Work, path: list[int], emitted: int) -> None:
        params, checker = work.sequence.params, work.sequence.checker
        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        if path and penalised:
            self.marks.add("drafts accepted under penalties")
        if emitted < len(path):  # the rest of the path was accepted, too, and must not come out
            kind = "EOS" if checker.stop_reason is None else "a stop " + type(checker.stop_reason).__name__
            self.marks.add(f"{kind} inside a path")

    def graft(self, fresh: TokenTree, other: TokenTree, source: int) -> None:
        """`TokenTree.graft`, seen."""
        apart = len(fresh) + len(other)
        _graft(fresh, other, source)
        if len(fresh) < apart:
            self.marks.add("a duplicate merged")

    def saw_output(self, output: RequestOutput) -> None:
        """Take in the statistics of an answer."""
        if output.stats.preemptions:
            self.marks.add("preemption")
        if output.stats.cached_prompt_tokens:
            self.marks.add("a prefix hit")


_graft = TokenTree.graft


def _wanted(engine: Engine, work: Work) -> int:
    return engine.budget.plan([work.sequence], 1)[0] if work.max_depth > 0 else 0


def check(output: RequestOutput, expected: Case, where: str) -> None:
    """Assert that an answer is what plain decoding says: ids, reasons, text, log-probabilities."""
    for completion, answer in zip(output.outputs, expected.answers, strict=True):
        assert completion.token_ids == answer.ids, where
        assert (completion.finish_reason, completion.stop_reason) == (answer.finish_reason, answer.stop_reason), where
        assert completion.text == answer.text, where
        assert len(completion.origins) == len(answer.ids), where
        if expected.params.logprobs is not None:
            assert completion.logprobs is not None
            _check_logprobs(completion.logprobs, answer.logprobs, where)
    if expected.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        _check_logprobs(output.prompt_logprobs, expected.prompt_logprobs, where)
    emitted = sum(len(a.ids) for a in expected.answers)
    assert output.stats.emitted == emitted, where
    assert emitted - output.stats.passes <= output.stats.accepted <= emitted, where


def _check_logprobs(rows: abc.Sequence[Any], expected: abc.Sequence[Any], where: str) -> None:
    assert len(rows) == len(expected), where
    for row, wanted in zip(rows, expected, strict=True):
        assert (row is None) == (wanted is None), where
        if row is None:
            continue
        # Which of the tokens that a rule has ruled out are shown, where too few are left, is nobody's business.
        possible = [i for i in wanted if wanted[i] > -math.inf]
        assert len(row) == len(wanted) and [i for i in row if row[i].logprob > -math.inf] == possible, where
        assert all(abs(row[i].logprob - wanted[i]) < 1e-9 for i in possible), where


def play(drafter: str, condition: str, cases: abc.Sequence[Case], witness: Witness, encore: int = 0) -> None:
    """Answer all cases in one engine, then the first ``encore`` again, and compare each with its plain answer."""
    options = {"round": ROUNDS.get(drafter, "auto"), **CONDITIONS[condition]}
    engine = assemble(DRAFTERS[drafter](cases), decoder=target(config_of(drafter)), **options)
    witness.watch(engine)
    for batch in (cases, cases[:encore]):
        with patch.object(TokenTree, "graft", lambda *graft: witness.graft(*graft)):
            outputs = run(engine, [(c.prompt, c.params) for c in batch])
        for output, expected in zip(outputs, batch, strict=True):
            check(output, expected, f"{drafter}, {condition}, {expected.option}, {len(expected.prompt)} prompt tokens")
            witness.saw_output(output)
            witness.checks += len(expected.answers)
    # A drafter that fails is put aside and costs no request: equal answers alone would not show it.
    failure = engine.round.failure  # type: ignore[attr-defined]
    assert (failure is None) or drafter in FAILING, failure
    if failure is not None:
        witness.marks.add("a failed drafter")
