"""Who runs, with how many rows: catch-up, chunks, order, preemption, drafts on top."""

from __future__ import annotations

import pytest
import torch

from paceline.core.request import StopChecker
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.core.sequence import Sequence
from paceline.engine.base import Work
from paceline.engine.budget import FixedBudget
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.kv.pool import KVPool

SIZE = 4
VOCAB = 1000
pytestmark = pytest.mark.timeout(30)  # a scheduler that starves somebody would run for ever


class Bench:
    """A scheduler with a target that is imagined: every generating sequence gets ``1 + accepted`` tokens a step."""

    def __init__(self, blocks: int = 100, budget: int = 0, **limits: int) -> None:
        self.pool = KVPool(1, 1, 2, blocks * SIZE, torch.float32, torch.device("cpu"), SIZE)
        self.scheduler = Scheduler(self.pool, SchedulerConfig(**limits), FixedBudget(budget))
        self.made = 0

    def add(self, prompt: int | list[int], max_tokens: int = 50, n: int = 1, **params: int) -> list[Sequence]:
        """Queue a request; a number stands for a prompt of so many tokens that no other request has."""
        self.made += 1
        ids = [100 + self.made] * prompt if isinstance(prompt, int) else prompt
        rules = SamplingParams(max_tokens=max_tokens, n=n, temperature=0, **params)
        sequences = [self._sequence(ids, rules, index) for index in range(n)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def _sequence(self, ids: list[int], params: SamplingParams, index: int) -> Sequence:
        sampler = SequenceSampler(params, ids, seed=0, sample_index=index, vocab_size=VOCAB)
        assert params.max_tokens is not None
        key = self.made * 100 + index
        sequence = Sequence(key, sampler.tokens, len(ids), sampler, request_id=str(self.made))
        sequence.checker = StopChecker(params, (), params.max_tokens, None)
        return sequence

    def step(self, accepted: int = 0) -> list[Work]:
        """Schedule, check the rules that always hold, and carry it out."""
        self.scheduler.preempted.clear()
        works = self.scheduler.schedule()
        config = self.scheduler.config
        assert sum(w.rows + w.budget for w in works) <= config.max_batch_rows
        assert len(works) <= len(self.scheduler.running) <= config.max_sequences
        for work in works:
            cache = work.sequence.cache
            assert cache is not None and work.rows >= 1
            assert cache.reserved == work.rows + work.budget <= cache.capacity - cache.committed
            assert work.budget == 0 or (
                work.generates and work.budget <= self.scheduler.budget.plan([work.sequence], 1)[0]
            )
        self.pool.check_integrity()
        ended = []
        for work in works:
            self._compute(work, accepted)
            if work.sequence.finished:
                ended.append(work.sequence)
        self.scheduler.remove(ended)
        self.pool.check_integrity()
        return works

    def _compute(self, work: Work, accepted: int) -> None:
        sequence, cache = work.sequence, work.sequence.cache
        assert cache is not None
        generates = work.generates
        path = min(accepted, work.budget, work.max_depth)
        kept = sequence.emit([7] * (path + 1), path, None) if generates else 0
        if generates:
            sequence.stats.record_pass(drafted=work.budget, accepted=min(path, kept), emitted=kept)
        self.pool.commit([(cache, range(work.rows + min(path, kept)))])
        cache.publish(sequence.tokens)


def rows(works: list[Work], *sequences: Sequence) -> list[int]:
    """Rows of each sequence in the step; 0 where it was left out."""
    found = {id(w.sequence): w.rows for w in works}
    return [found.get(id(s), 0) for s in sequences]


def test_long_prompts_are_computed_in_chunks_and_decoding_goes_first():
    bench = Bench(max_batch_rows=8)
    (early,) = bench.add(5)
    assert rows(bench.step(), early) == [5]
    (late,) = bench.add(18)
    chunks = [rows(bench.step(), early, late) for _ in range(4)]
    assert chunks == [[1, 7], [1, 7], [1, 4], [1, 1]]
    assert len(late.output_ids) == 2  # the chunk that reaches the prompt's end brings the first token


def test_a_newcomer_waits_until_running_sequences_have_a_block_each_to_grow():
    bench = Bench(blocks=6)
    (a,) = bench.add(12, max_tokens=8)  # three blocks
    bench.step()
    (b,) = bench.add(12)  # three more: nothing would be left for a
    (c,) = bench.add(1)  # fits, but b was here first
    assert rows(bench.step(), a, b, c) == [1, 0, 0]
    assert list(bench.scheduler.waiting) == [b, c]
    for _ in range(6):
        bench.step()
    assert a.finished
    assert rows(bench.step(), b, c) == [12, 1]


def test_the_youngest_is_preempted_first_and_comes_back_first():
    bench = Bench(blocks=8)
    a, b, c = (bench.add(7, max_tokens=12)[0] for _ in range(3))
    bench.step()
    (d,) = bench.add(1, max_tokens=2)
    victims: list[Sequence] = []
    for _ in range(60):
        bench.step()
        for victim in bench.scheduler.preempted:
            assert victim.cache is None and victim in bench.scheduler.waiting
            running = [int(s.request_id) for s in bench.scheduler.running if s not in victims]
            assert all(int(victim.request_id) > number for number in running)
        victims += bench.scheduler.preempted
        if all(s.finished for s in (a, b, c)):
            break
    assert victims[0] is c and a not in victims
    assert c.stats.preemptions == victims.count(c)
    assert len(c.output_ids) == 12
    for _ in range(3):
        bench.step()
    assert d.finished
    bench.pool.check_idle()


def test_samples_that_report_the_prompt_compute_it_themselves():
    bench = Bench()
    samples = bench.add(list(range(1, 31)), n=2, prompt_logprobs=1)
    assert rows(bench.step(), *samples) == [30, 30]


def random_load(seed: int) -> list[Sequence]:
    """Requests at random times, some aborted; until all that are left have ended."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    bench = Bench(blocks=number(12, 20), budget=number(0, 6), max_batch_rows=number(3, 20), max_sequences=number(1, 6))
    sequences: list[Sequence] = []
    for step in range(2000):
        if step < 60 and number(0, 2) == 0:
            prompt = [number(1, 2) for _ in range(number(1, 24))]
            sequences += bench.add(prompt, max_tokens=number(1, 20), n=number(1, 3))
        if step < 60 and sequences and number(0, 15) == 0:
            bench.scheduler.remove([sequences.pop(number(0, len(sequences) - 1))])
        bench.step(accepted=number(0, 3))
        if step >= 60 and all(s.finished for s in sequences):
            break
    assert not bench.scheduler.running and not bench.scheduler.waiting
    bench.pool.check_idle()
    return sequences


def test_random_loads_come_to_their_end():
    """None starves, each gets exactly its tokens, nothing is lost; pressure and prefix hits were met."""
    ended = [sequence for seed in range(12) for sequence in random_load(seed)]
    assert len(ended) > 200
    assert all(len(s.output_ids) == s.params.max_tokens for s in ended)
    assert sum(s.stats.preemptions for s in ended) > 10
    assert sum(s.stats.cached_prompt_tokens > 0 for s in ended) > 10
    assert sum(s.stats.accepted for s in ended) > 100
