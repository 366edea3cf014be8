"""Stop rules, log-probabilities and the state of one output."""

import itertools
import random
import subprocess
import sys

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.outputs import CompletionOutput, Logprob
from paceline.core.request import GrowingText, StopChecker, token_logprobs
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.core.sequence import Sequence

EOS = 0


class ByteText:
    """A detokenizer over bytes: token i is ``pieces[i]``; text comes out when its characters are whole."""

    def __init__(self, pieces, sure=False):
        self.pieces = pieces
        self.sure = sure
        self.pending = b""

    def push(self, token):
        self.pending += self.pieces[token]
        for size in range(len(self.pending), -1, -1):
            try:
                text = self.pending[:size].decode("utf-8")
            except UnicodeDecodeError:
                continue
            self.pending = self.pending[size:]
            return text
        raise AssertionError("the empty prefix decodes")

    def end(self):
        left, self.pending = self.pending, b""
        return left.decode("utf-8", "replace")


def checker(pieces=(), max_tokens=100, eos=(EOS,), **params):
    """A checker over tokens whose texts are ``pieces``, from id 1 on; id 0 is EOS."""
    texts = [b"<eos>", *(p.encode() if isinstance(p, str) else p for p in pieces)]
    return StopChecker(SamplingParams(max_tokens=None, **params), eos, max_tokens, ByteText(texts))


class TestStrings:
    def test_only_after_min_tokens(self):
        c = checker(["a.", "b.", "c"], stop=".", min_tokens=2)
        assert c.feed([1, 2, 3, 1, 3]) == (4, "stop", ".")
        assert c.text == "a.b.ca"

    def test_one_that_began_before_min_tokens_and_ends_after(self):
        c = checker(["a<", ">b"], stop="<>", min_tokens=1)
        assert c.feed([1, 2]) == (2, "stop", "<>")
        assert c.text == "a"

    def test_the_text_of_an_eos_cannot_complete_one(self):
        c = StopChecker(SamplingParams(stop="s>"), (EOS,), 9, ByteText([b"<eos>"]))
        assert c.feed([EOS]) == (1, "stop", None)
        assert c.text == ""

    def test_without_text_they_are_refused(self):
        with pytest.raises(ConfigError, match="stop strings are found in text"):
            StopChecker(SamplingParams(stop="x"), (EOS,), 9, None)

    def test_cuts_do_not_depend_on_how_tokens_arrive(self):
        """Any split of the accepted tokens into passes, any split of the text into tokens: the same text."""
        rng = random.Random(3)
        met = set()
        for _ in range(400):
            text = "".join(rng.choice("ab.") for _ in range(12))
            stops = ["".join(rng.choice("ab.") for _ in range(rng.randint(1, 4))) for _ in range(2)]
            first = min(((text.find(s) + len(s), text.find(s), s) for s in stops if s in text), default=None)
            cuts = sorted(rng.sample(range(1, 12), 4))
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, 12])]
            c, tokens = checker(pieces, stop=stops), list(range(1, len(pieces) + 1))
            while tokens and not c.finished:
                size = rng.randint(1, len(tokens))
                c.feed(tokens[:size])
                tokens = tokens[size:]
            assert c.text == (text if first is None else text[: first[1]])
            assert c.stop_reason == (None if first is None else first[2])
            met.add(first is None)
        assert met == {True, False}


class TestStreaming:
    def test_what_was_shown_is_never_taken_back(self):
        rng = random.Random(5)
        held = 0
        for _ in range(300):
            pieces = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 3))) for _ in range(8)]
            c = checker(pieces, stop=["abba", "bbb"], min_tokens=rng.choice([0, 3]), max_tokens=8)
            shown = ""
            for token in range(1, 9):
                c.feed([token])
                now = c.stable_text()
                assert now.startswith(shown)
                held += len(c.text) > len(now)
                shown = now
                if c.finished:
                    break
            assert shown == c.text
        assert held > 100


class TestLogprobs:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0], [0.0, 0.0, 5.0, 1.0, 2.0]])

    @pytest.mark.parametrize("k", [0, 1, 3, 5])
    def test_against_the_definition(self, k):
        chosen = torch.tensor([2, 2])
        rows = token_logprobs(self.logits, chosen, k)
        for row, logits, token in zip(rows, self.logits.double(), chosen.tolist(), strict=True):
            wanted = logits.log_softmax(-1).tolist()
            assert next(iter(row)) == token
            best = sorted(wanted, reverse=True)[:k]
            assert sorted((wanted[t] for t in row if t in list(row)[-k:]), reverse=True) == best or k == 0
            assert len(row) == (k if wanted[token] in best else k + 1)
            for t, entry in row.items():
                assert entry.logprob == pytest.approx(wanted[t], abs=1e-6)
                assert entry.rank == 1 + sum(w > wanted[t] for w in wanted)

    def test_equals_share_a_rank(self):
        row = token_logprobs(self.logits[:1], torch.tensor([3]), 5)[0]
        assert [row[t].rank for t in range(5)] == [4, 1, 3, 1, 5]

    def test_ruled_out_tokens_of_processed_logits(self):
        logits = self.logits.clone()
        logits[0, 1] = -torch.inf
        row = token_logprobs(logits[:1], torch.tensor([3]), 5)[0]
        assert row[1] == Logprob(float("-inf"), 5)
        assert row[3].rank == 1


def sequence(**params):
    sampling = SamplingParams(**{"max_tokens": 6} | params)
    sampler = SequenceSampler(sampling, (3, 4), seed=11, sample_index=1, vocab_size=9, eos_ids=(EOS,))
    made = Sequence(0, sampler.tokens, 2, sampler)
    made.checker = StopChecker(sampling, (EOS,), 6, ByteText([b"", b"a", b"b", b"c"]))
    return made


class TestSequence:
    def test_collects_what_passes_bring(self):
        s = sequence()
        assert s.emit([1], 0) == 1
        assert s.emit([2, 3, 1], 2) == 3
        assert s.emit([2, EOS, 3], 2) == 2
        assert s.finished
        assert s.output(CompletionOutput) == CompletionOutput(
            index=1,
            text="abcab",
            token_ids=[1, 2, 3, 1, 2, EOS],
            finish_reason="stop",
            stop_reason=None,
            logprobs=None,
            cumulative_logprob=None,
            origins=["target", "drafted", "drafted", "target", "drafted", "drafted"],
            seed=11,
        )

    def test_the_sampler_counts_what_was_kept_and_no_more(self):
        s = sequence(max_tokens=6)
        s.emit([1, 2, 3, 1, 2, 3, 1, 2], 7)
        assert s.sampler.output_ids == [1, 2, 3, 1, 2, 3] == s.output_ids
        assert s.output(CompletionOutput).finish_reason == "length"

    def test_logprobs_are_cut_with_the_tokens_and_summed(self):
        s = sequence(logprobs=0)
        entries = [{t: Logprob(-t / 8, 1)} for t in (1, 2, EOS, 3)]
        s.emit([1, 2, EOS, 3], 3, entries)
        out = s.output(CompletionOutput)
        assert out.logprobs == entries[:3]
        assert out.cumulative_logprob == -3 / 8

    def test_unfinished_output_shows_stable_text_only(self):
        s = sequence(stop="bc")
        s.emit([1, 2], 1)
        assert (s.output(CompletionOutput).text, s.output(CompletionOutput).finish_reason) == ("a", None)
        s.checker.end("abort")
        assert (s.output(CompletionOutput).text, s.output(CompletionOutput).finish_reason) == ("ab", "abort")


MANY_LOGPROBS = """
import resource, torch
from paceline.core.request import token_logprobs

logits = torch.randn(9, 8192, generator=torch.Generator().manual_seed(0))
token_logprobs(logits, torch.zeros(9, dtype=torch.int64), 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = token_logprobs(logits, torch.zeros(9, dtype=torch.int64), 8192)
assert [len(row) for row in rows] == [8192] * 9
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""


def test_many_log_probabilities_take_memory_of_their_number():
    done = subprocess.run([sys.executable, "-c", MANY_LOGPROBS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100  # MiB; a comparison of all with all took 1,200 and more


def test_text_that_grows():
    text, whole = GrowingText(), ""
    draw = random.Random(3)
    for _ in range(300):
        piece = "xyzé"[: draw.randrange(4)] * draw.randrange(3)
        text.append(piece)
        whole += piece
        start, stop = draw.randrange(len(whole) + 1), draw.randrange(len(whole) + 1)
        assert text.length == len(whole) and text.slice(start, stop) == whole[start : max(start, stop)]
        if draw.random() < 0.1:
            text.cut(stop)
            whole = whole[:stop]
        if draw.random() < 0.1:
            assert text.whole() == whole
    assert text.whole() == whole


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"stop_token_ids": [2]}, {"min_tokens": 5}, {"stop": ["ab"]}, {"logprobs": 0}])
def test_plain_tokens_are_accepted_as_by_the_long_way(options, seed):
    """`emit_plain` where it can, else `emit`, against `emit` alone; text that waits for long is among it."""
    draw, passed = random.Random(seed), 0
    tokens = draw.choices([1, 2, 3, EOS], [30, 20 * (seed % 2), 30, seed % 3], k=200)
    found = []
    for quick in (True, False):
        sampling = SamplingParams(max_tokens=None, **options)
        sampler = SequenceSampler(sampling, (1,), seed=3, sample_index=0, vocab_size=4, eos_ids=(EOS,))
        text = ByteText([b"", b"a", b"b", b"c"], sure=True)
        state = Sequence(0, sampler.tokens, 1, sampler)
        state.checker = StopChecker(sampling, (EOS,), 150, text)
        for token in tokens:
            if quick and state.emit_plain([token]):
                passed += 1
            else:
                state.emit([token], 0, [{}] if "logprobs" in options else None)
            if state.finished:
                break
        said = state.checker
        counts = said.num_tokens, said.finish_reason, said.stop_reason, said.text
        found.append((state.output_ids, state.origins, state.logprobs, counts))
    assert found[0] == found[1] and found[0][-1][1] is not None
    if {"stop", "logprobs"} & {*options}:
        assert not passed
    elif len(found[0][0]) > 12:
        assert passed > 3
