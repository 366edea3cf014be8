"""Sampling: the rules against a reading of their definitions, the noise against chance."""

import math

import pytest
import torch
from scipy import stats as sps

from paceline.core import noise, sampling, truncation
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams, SequenceSampler

EOS = 2

# Every rule alone, and rules together; `max_tokens` is only there to let `min_tokens` be.
RULES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "top_p_wide": {"top_p": 0.999},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "repetition_below_one": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "negative_penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 2.5, 7: -100.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [5, 9]},
    "min_tokens_met_in_the_path": {"min_tokens": 8, "stop_token_ids": [5, 9]},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    "all": {
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {1: 1.0, 4: -2.0},
        "min_tokens": 7,
        "stop_token_ids": [5],
    },
}


def make(rules=None, *, prompt=(1, 3, 3, 8), output=(3, 4, 4, 6, 11), seed=7, index=0, vocab=23, **more):
    params = SamplingParams(max_tokens=64, **(rules or {}))
    prompt, output = [t for t in prompt if t < vocab], [t for t in output if t < vocab]
    sampler = SequenceSampler(params, prompt, seed=seed, sample_index=index, vocab_size=vocab, eos_ids=(EOS,), **more)
    sampler.commit(output)
    return sampler


def random_logits(rows, vocab=23, seed=0, dtype=torch.float64):
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


GOLDEN_CHOICES = [44790, 22053, 31259, 13739, 6511, 4290]
GOLDEN_BITS = [1321962074640716710, 6702287147179186805, 6588988032904713183, 91869611370465728]

# A small tree of drafted paths below the root, the root's own row included.
PATHS = torch.tensor([[-1, -1, -1], [4, -1, -1], [0, -1, -1], [4, 12, -1], [4, 12, 4]])


def by_definition(params, prompt, output, row):
    """The rules as the documentation states them, one token at a time, in Python floats."""
    x = list(row)
    for t in range(len(x)):
        if t in prompt or t in output:
            x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
        x[t] -= params.frequency_penalty * output.count(t) + (params.presence_penalty if t in output else 0)
        x[t] += (params.logit_bias or {}).get(t, 0.0)
        if len(output) < params.min_tokens and t in {EOS, *(params.stop_token_ids or [])}:
            x[t] = -math.inf
    if params.temperature == 0:
        return x
    x = [v / params.temperature for v in x]
    if params.top_k > 0:
        kth = sorted(x, reverse=True)[params.top_k - 1]
        x = [v if v >= kth else -math.inf for v in x]
    x = nucleus(x, params.top_p)
    total = sum(math.exp(v) for v in x)
    largest = max(math.exp(v) / total for v in x)
    return [v if math.exp(v) / total >= params.min_p * largest else -math.inf for v in x]


def nucleus(x, top_p):
    if top_p == 1:
        return x
    total, reached, kept = sum(math.exp(v) for v in x), 0.0, set()
    for t in sorted(range(len(x)), key=lambda t: (-x[t], t)):
        if reached >= top_p:
            break
        kept.add(t)
        reached += math.exp(x[t]) / total
    return [v if t in kept else -math.inf for t, v in enumerate(x)]


class TestRules:
    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_every_node_is_processed_as_defined(self, rules):
        sampler = make(rules)
        changed = False
        for seed in range(20):
            logits = random_logits(len(PATHS), seed=seed)
            got = sampler.process(logits, PATHS)
            for row, path, result in zip(logits.tolist(), PATHS.tolist(), got, strict=True):
                output = [3, 4, 4, 6, 11] + [t for t in path if t >= 0]
                wanted = torch.tensor(by_definition(sampler.params, [1, 3, 3, 8], output, row), dtype=torch.float64)
                torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
            changed |= not torch.equal(got, logits)
        # A minimum met before the first row is the one rule here that has nothing left to do.
        assert changed == (rules != RULES["min_tokens"])

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_a_drafted_path_counts_as_output(self, rules):
        """A row after a path equals, bit for bit, the same row once that path is committed."""
        logits = random_logits(len(PATHS), dtype=torch.float32)
        positions = [9 + int((path >= 0).sum()) for path in PATHS]
        drafted = make(rules)
        processed, probs = drafted.process(logits, PATHS), drafted.probs(logits, PATHS)
        scores = drafted.scores(logits, PATHS, positions)
        chosen = drafted.choose(logits, PATHS, positions)
        for i, path in enumerate(PATHS.tolist()):
            plain = make(rules)
            plain.commit([t for t in path if t >= 0])
            row = logits[i : i + 1]
            assert torch.equal(plain.process(row)[0], processed[i])
            assert torch.equal(plain.scores(row, None, positions[i : i + 1])[0], scores[i])
            assert torch.equal(plain.probs(row)[0], probs[i])
            assert plain.choose(row, None, [positions[i]]).item() == chosen[i]

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_a_row_does_not_depend_on_the_other_rows(self, rules, vocab=517):
        """An odd width, so that every row of the batch begins at another alignment."""
        logits = random_logits(9, vocab, dtype=torch.float32)
        logits[::2] *= 0.01  # flat rows: the nucleus is wider than the first look
        paths = torch.tensor([[-1], [4], [5], [6], [4], [-1], [0], [8], [9]])
        positions = [9 + int(p[0] >= 0) for p in paths]
        sampler = make(rules, vocab=vocab)
        scores = sampler.scores(logits, paths, positions)
        probs = sampler.probs(logits, paths)
        for i in range(9):
            one = slice(i, i + 1)
            assert torch.equal(make(rules, vocab=vocab).scores(logits[one], paths[one], positions[one])[0], scores[i])
            assert torch.equal(sampler.probs(logits[one], paths[one])[0], probs[i])

    def test_agrees_with_transformers(self):
        """The same meaning as the processors of Hugging Face transformers, where they have one."""
        from transformers.generation import logits_process as hf

        logits = random_logits(1, 101, dtype=torch.float32)
        prompt, output = [5, 9, 5, 40], [7, 9, 66]
        ids = torch.tensor([prompt + output])
        cases = [
            ({"repetition_penalty": 1.7}, hf.RepetitionPenaltyLogitsProcessor(1.7)),
            ({"temperature": 0.6}, hf.TemperatureLogitsWarper(0.6)),
            ({"top_k": 9}, hf.TopKLogitsWarper(9)),
            ({"top_p": 0.7}, hf.TopPLogitsWarper(0.7)),
            ({"min_p": 0.05}, hf.MinPLogitsWarper(0.05)),
            ({"min_tokens": 4}, hf.MinNewTokensLengthLogitsProcessor(len(prompt), 4, [EOS], device="cpu")),
        ]
        for rules, theirs in cases:
            ours = make(rules, prompt=prompt, output=output, vocab=101).process(logits)
            wanted = theirs(ids, logits.clone())
            assert not torch.equal(wanted, logits), rules
            torch.testing.assert_close(ours, wanted)

    def test_nothing_active_means_no_copy(self):
        logits = random_logits(3, dtype=torch.float32)
        before = logits.clone()
        for rules in ({"temperature": 0.0}, {}, {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}):
            assert make(rules).process(logits) is logits
        make(RULES["all"]).scores(logits, None, [1, 2, 3])
        make().scores(logits, None, [1, 2, 3])
        assert torch.equal(logits, before)  # and no rule writes to its argument

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    @pytest.mark.parametrize("noisy", [False, True])
    def test_candidates_are_behind_where_a_truncation_leaves_them_out(self, rules, noisy):
        sampler, logits, positions = make(rules), random_logits(len(PATHS)), [10] * len(PATHS)
        loose = {name: value for name, value in rules.items() if name not in ("top_k", "top_p", "min_p")}
        inner, outer = (
            one.scores(logits, PATHS, positions) if noisy else one.process(logits, PATHS)
            for one in (sampler, make(loose))
        )
        wanted = torch.where((inner == -math.inf) & (outer > -math.inf), outer - sampling.BEHIND, inner)
        got = sampler.candidates(logits, [[t for t in row if t >= 0] for row in PATHS.tolist()], positions, noisy)
        torch.testing.assert_close(got, outer if sampler.greedy else wanted, rtol=0, atol=1e-12)
        assert torch.equal(logits, random_logits(len(PATHS)))

    def test_plain_says_when_the_raw_argmax_is_the_choice(self):
        assert make({"temperature": 0.0}).plain
        assert make({"temperature": 0.0, "top_k": 3}).plain
        assert not make({}).plain
        for rule in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            assert not make({"temperature": 0.0, rule: 1.5}).plain
        assert not make({"temperature": 0.0, "logit_bias": {1: 1.0}}).plain
        assert not make({"temperature": 0.0}, matcher=lambda output: torch.ones(23, dtype=torch.bool)).plain
        waiting = make({"temperature": 0.0, "min_tokens": 7}, output=[3] * 5)
        assert not waiting.plain
        waiting.commit([1, 1])
        assert waiting.plain

    def test_top_p_keeps_the_lower_id_of_equals(self):
        got = make({"top_p": 0.5}, vocab=8).process(torch.zeros(1, 8))
        assert got.isfinite().tolist() == [[True] * 4 + [False] * 4]

    def test_top_p_first_look_and_full_sort_agree(self, monkeypatch):
        logits = random_logits(6, 999, dtype=torch.float32)
        wanted = make({"top_p": 0.95}, vocab=999).process(logits)
        monkeypatch.setattr(truncation, "_FEW", 2)
        assert torch.equal(make({"top_p": 0.95}, vocab=999).process(logits), wanted)

    def test_grammar_sees_each_rows_output(self):
        seen = []

        def only_even(output):
            seen.append(list(output))
            return torch.arange(23) % 2 == len(output) % 2

        got = make({"temperature": 0.0}, output=[3, 4], matcher=only_even).choose(random_logits(5), PATHS, [0] * 5)
        assert seen == [[3, 4], [3, 4, 4], [3, 4, 0], [3, 4, 4, 12], [3, 4, 4, 12, 4]]
        assert (got % 2).tolist() == [0, 1, 1, 0, 1]

    def test_grammar_that_allows_nothing_is_refused(self):
        sampler = make(matcher=lambda output: torch.zeros(23, dtype=torch.bool))
        with pytest.raises(ConfigError, match="no token at all"):
            sampler.process(random_logits(1))

    def test_other_width_is_refused(self):
        with pytest.raises(CapabilityError, match="width 24"):
            make().process(random_logits(1, 24))


class TestParams:
    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -0.1},
            {"temperature": math.nan},
            {"temperature": 1e-9},
            {"temperature": "1"},
            {"top_p": 0.0},
            {"top_k": -2},
            {"min_p": -0.1},
            {"repetition_penalty": 0},
            {"presence_penalty": 2.5},
            {"logit_bias": [1]},
            {"logit_bias": {1: math.inf}},
            {"seed": 1.5},
            {"n": 0},
            {"stop": ""},
            {"stop": 3},
            {"stop_token_ids": [-5]},
            {"min_tokens": -1},
            {"min_tokens": 20, "max_tokens": 10},
            {"max_tokens": 0},
            {"logprobs": -1},
            {"logprobs_mode": "cooked"},
            {"echo": None},
            {"temperature": 1e39},
            {"min_tokens": 10**5000, "max_tokens": None},
            {"repetition_penalty": 10**300},
            {"logit_bias": {5: 1e39}},
            {"logit_bias": {2**70: 1.0}},
            {"n": 1025},
            {"stop_token_ids": [10**5000]},
        ],
        ids=lambda bad: next(iter(bad)),
    )
    def test_out_of_range_is_refused_by_name(self, bad):
        with pytest.raises(ConfigError, match=next(iter(bad))) as caught:
            SamplingParams(**bad)
        assert caught.value.remedy and len(str(caught.value)) < 400

    @pytest.mark.parametrize(
        "bad", [{"logit_bias": {23: 1.0}}, {"stop_token_ids": [23]}, {"logprobs": 24}, {"prompt_logprobs": 24}], ids=str
    )
    def test_what_the_vocabulary_does_not_have_is_refused(self, bad):
        with pytest.raises(ConfigError, match="vocabulary has 23"):
            make(bad)


def python_gumbel(seed, index, domain, position, branch, token):
    """The noise again, from the definition, in Python integers and doubles."""
    mask = 2**64 - 1

    def mix(z, *, last=True):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31) if last else z

    key = 0
    for part in (seed, index, domain, position, branch):
        key = mix(((key ^ (part & mask)) + 0x9E3779B97F4A7C15) & mask)
    bits = mix((key + (token + 1) * 0x9E3779B97F4A7C15) & mask, last=False) & (2**63 - 1)
    return -math.log(-math.log1p(-min((bits | 1) * 2.0**-63, 1 - 2**-24)))


def assert_same_gumbel(got, wanted):
    """Tight where a draw can be won; the lower tail (u near 1) is on float32's coarse grid."""
    for a, b in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, abs=2e-6 if b > -1 else 0.1)


class TestNoise:
    @pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**64 + 12345, 2**63, -(2**63)])
    def test_equals_its_definition(self, seed):
        sampler = make(seed=seed, index=3, vocab=300)
        got = sampler.noise([0, 17, 100_000])
        for row, position in zip(got.tolist(), (0, 17, 100_000), strict=True):
            wanted = [python_gumbel(seed, 3, 0, position, 0, t) for t in range(300)]
            assert_same_gumbel(row, wanted)
        draft = sampler.draft_noise([5], [9])[0].tolist()
        assert_same_gumbel(draft, [python_gumbel(seed, 3, 1, 5, 9, t) for t in range(300)])

    def test_golden(self):
        """Fixed for good: a seed noted down today gives the same tokens tomorrow."""
        sampler = make(seed=2024, vocab=50_000)
        logits = torch.zeros(6, 50_000)
        assert sampler.choose(logits, None, list(range(6))).tolist() == GOLDEN_CHOICES
        bits = noise._hash_bits([noise.key(1, 2, 3)], 4, torch.device("cpu"))
        assert bits[0].tolist() == GOLDEN_BITS

    def test_depends_on_nothing_but_its_key(self):
        """Not on the other rows, the rules, the prompt, the output, the cache, or the vocabulary's width."""
        wanted = make(vocab=1001).noise([40])[0]
        other = make(RULES["all"], prompt=[9], output=[], vocab=1001)
        assert torch.equal(other.noise([41, 40, 39, 40])[1], wanted)
        assert torch.equal(other.noise([40, 40])[1], wanted)  # now from the cache
        assert torch.equal(make(vocab=777).noise([40])[0], wanted[:777])

    def test_is_gumbel(self):
        """Kolmogorov-Smirnov on 10^5 values of one long row, and of one token over positions."""
        row = make(vocab=100_000).noise([3])[0].double()
        assert row.isfinite().all()
        assert sps.kstest(row.numpy(), sps.gumbel_r.cdf).pvalue > 1e-3
        column = torch.stack([make(vocab=1).noise([p])[0, 0] for p in range(5_000)]).double()
        assert sps.kstest(column.numpy(), sps.gumbel_r.cdf).pvalue > 1e-3

    def test_the_winning_tail_is_right(self):
        """The largest of m Gumbels is a Gumbel moved by log m; a coarse uniform would cut it off."""
        sampler = make(vocab=4096)
        largest = torch.cat([sampler.noise(list(range(i, i + 64))).amax(-1) for i in range(0, 4096, 64)]).double()
        assert sps.kstest((largest - math.log(4096)).numpy(), sps.gumbel_r.cdf).pvalue > 1e-3
        assert largest.unique().numel() > 4090

    def test_extreme_bits_stay_finite(self):
        bits = torch.tensor([[0, 1, 2**63 - 1, 2**62]])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise, "_hash_bits", lambda *_: bits.clone())
            got = noise.gumbel([0], 4, torch.device("cpu"))
        assert got.isfinite().all()
        assert got[0, 0] == pytest.approx(63 * math.log(2), rel=1e-6)

    def test_is_independent_of_every_part_of_its_key(self):
        """Rank correlation of 20,000 pairs: standard deviation 0.007 under independence."""
        size = 20_000
        base = make(vocab=size)
        row = base.noise([9])[0]
        others = {
            "next position": base.noise([10])[0],
            "far position": base.noise([9 + 2**32])[0],
            "sample": make(vocab=size, index=1).noise([9])[0],
            "seed": make(vocab=size, seed=8).noise([9])[0],
            "seed and position swapped": make(vocab=size, seed=9).noise([7])[0],
            "draft": base.draft_noise([9], [0])[0],
            "draft branch": base.draft_noise([9], [1])[0],
            "residual": base.residual_gumbel(9),
            "next token": row.roll(1),
        }
        for name, other in others.items():
            assert abs(sps.spearmanr(row.numpy(), other.numpy()).statistic) < 0.035, name
            assert sps.ks_2samp(row.numpy(), other.numpy()).pvalue > 1e-3 or name == "next token", name

    def test_consecutive_positions_and_seeds_do_not_share_winners(self):
        """Winners over 64 tokens on a 2-D grid of (this, next): chi-square against independence."""
        sampler = make(vocab=8)
        for wins in (
            sampler.noise(list(range(5_000))).argmax(-1),
            torch.stack([make(vocab=8, seed=s).noise([5]).argmax() for s in range(3_000)]),
        ):
            table = torch.bincount(wins[:-1] * 8 + wins[1:], minlength=64).double()
            assert sps.chisquare(table.numpy()).pvalue > 1e-3

    @pytest.mark.parametrize(
        "rules", [{}, {"temperature": 0.6}, {"top_k": 4, "temperature": 1.5}, {"top_p": 0.7}], ids=str
    )
    def test_choices_follow_the_distribution(self, rules):
        """Chi-square over 5,000 choices; the same test sees 4% of the mass moved between two tokens."""
        sampler = make(rules, vocab=9)
        logits = random_logits(1, 9) / 3
        p = sampler.probs(logits)[0]
        trials = 5_000
        chosen = sampler.choose(logits.expand(trials, -1), None, list(range(trials)))
        counts = torch.bincount(chosen, minlength=9).double()
        kept = p > 0
        assert counts[~kept].sum() == 0
        wanted = p[kept] * trials
        assert sps.chisquare(counts[kept].numpy(), wanted.numpy()).pvalue > 1e-3
        first, last = wanted.argmax(), wanted.argmin()
        wanted[first], wanted[last] = wanted[first] - 0.04 * trials, wanted[last] + 0.04 * trials
        assert sps.chisquare(counts[kept].numpy(), wanted.numpy()).pvalue < 1e-3

    def test_draws_follow_q_and_ignore_the_target(self):
        sampler = make(vocab=6)
        q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0], dtype=torch.float64)
        trials = 5_000
        places = list(range(trials))
        drawn = (q.log() + sampler.draft_noise(places, [0] * trials)).argmax(-1)
        counts = torch.bincount(drawn, minlength=6).double()
        assert counts[5] == 0
        assert sps.chisquare(counts[:5].numpy(), (q[:5] * trials).numpy()).pvalue > 1e-3
        target = sampler.choose(q.log().expand(trials, -1), None, places)
        pairs = torch.bincount(drawn * 6 + target, minlength=36).view(6, 6)[:5, :5].double()
        assert sps.chi2_contingency(pairs.numpy()).pvalue > 1e-3
        other = (q.log() + sampler.draft_noise(places, [1] * trials)).argmax(-1)
        assert 0.25 < (drawn == other).double().mean() < 0.32  # sum of q squared: 0.285

    def test_accept_uniform_is_uniform_and_keyed(self):
        sampler = make()
        got = sampler.accept_uniform(range(20_000), [0] * 20_000)
        assert got.dtype == torch.float64 and (got > 0).all() and (got < 1).all()
        assert sps.kstest(got.numpy(), "uniform").pvalue > 1e-3
        other = sampler.accept_uniform(range(20_000), [1] * 20_000)
        assert abs(sps.spearmanr(got.numpy(), other.numpy()).statistic) < 0.035
        assert sampler.accept_uniform([7, 3], [1, 0]).tolist() == [other[7], got[3]]


@pytest.mark.gpu
class TestCuda:
    def test_hash_is_the_same(self):
        keys = [noise.key(i) for i in range(4)]
        host = noise._hash_bits(keys, 9001, torch.device("cpu"))
        assert torch.equal(noise._hash_bits(keys, 9001, torch.device("cuda")).cpu(), host)

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_choices_are_the_same(self, rules):
        logits = random_logits(len(PATHS), dtype=torch.float32)
        positions = [9 + int((p >= 0).sum()) for p in PATHS]
        there = make(rules).choose(logits.cuda(), PATHS, positions)
        assert there.cpu().tolist() == make(rules).choose(logits, PATHS, positions).tolist()

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_a_row_does_not_depend_on_the_other_rows(self, rules):
        logits = random_logits(9, 4099, dtype=torch.float32).cuda()
        positions = list(range(9, 18))
        scores = make(rules, vocab=4099).scores(logits, None, positions)
        for i in range(9):
            alone = make(rules, vocab=4099).scores(logits[i : i + 1], None, positions[i : i + 1])
            assert torch.equal(alone[0], scores[i])
