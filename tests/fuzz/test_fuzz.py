"""A fixed range of cases with every run of the tests, and proof that faults would be found.

`make fuzz` goes on from here for as long as one likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asks import Expand, make_ask
from campaign import Finding, examine
from guests import GUESTS
from kits.verdicts import gullible
from oracle import answer, foreseen
from play import Play, make_case
from texts_fuzz import said
from witness import Witness
from worlds import ADAPTERS, WORLDS, TinyLLM, available, build

from paceline.core import request
from paceline.core.counts import TokenCounts
from paceline.core.sampling import SequenceSampler
from paceline.engine import verification
from paceline.engine.scheduler import Scheduler
from paceline.kv.pool import KVPool

pytestmark = pytest.mark.timeout(240)
CASES = {"float64": 20, "bytes": 12}  # of a world; FEWER for the others
FEWER = 6
EVERYWHERE = {"requests compared", "refused requests", "chunk edges", "prefix hits", "accepted 0", "accepted 1"}
OFTEN = {
    "preemptions",
    "aborts in flight",
    "aborts while waiting",
    "streams left early",
    "later siblings accepted",
    "accepted 2",
    "accepted 3",
}
ENDED = {"EOS in mid-path", "stop ids in mid-path", "stop strings in mid-path", "accepted 5 and more"}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Drafters that fail on purpose are logged with their tracebacks."""
    caplog.set_level(logging.CRITICAL, logger="paceline")


def campaign(seeds: range, world: str, guest: str | None = None) -> Witness:
    """Play cases, which must all be right."""
    witness = Witness()
    for seed in seeds:
        finding = examine(seed, witness, world, guest)
        assert finding is None, finding.report()
    return witness


def assert_met(witness: Witness, wanted: set[str]) -> None:
    """Equal answers alone would not show that anything was put to the test."""
    missing = {name for name in wanted if not witness.met[name]}
    assert not missing, f"never met: {missing}; what was:\n{witness.report()}"


@pytest.mark.parametrize("world", WORLDS)
def test_every_answer_is_the_oracles(world: str) -> None:
    if world not in {w.name for w in available()}:
        pytest.skip("no compiled kernels")
    witness = campaign(range(CASES.get(world, FEWER)), world)
    assert_met(witness, EVERYWHERE | (OFTEN if world == "float64" else set()))


def test_answers_end_inside_accepted_paths() -> None:
    """Drafters that know the answer go on beyond its end."""
    witness = campaign(range(1000, 1010), "float64", "always_right")
    witness.met.update(campaign(range(1000, 1006), "float64", "greedy_eater").met)
    assert_met(witness, ENDED)


def test_text_is_what_the_bytes_are() -> None:
    """No model: torn characters, and tokens that end one and begin the next, through what makes text of ids."""
    wrong = [found for seed in range(600) if (found := said(seed))]
    assert not wrong, f"{len(wrong)} of 600, such as {wrong[0]}"


def test_threads_share_an_engine() -> None:
    """Calls from several threads at once, each of which must get what it would get alone."""
    world = WORLDS["float64"]
    asks = [make_ask(world, number, answer) for number in range(24)]
    asks = [ask for ask in asks if ask.params.seed is not None]
    drafter = GUESTS["ngram"].make(world, lambda view: None)
    front = TinyLLM(world, build(world, drafter, ADAPTERS, kv_tokens=900, max_sequences=4, max_batch_rows=64))
    expected = {ask: [sample.ids for sample in answer(ask).samples] for ask in asks}  # found before, in one thread

    def ask_all(start: int) -> list[str]:
        wrong = []
        for i in range(len(asks)):
            ask = asks[(start + i) % len(asks)]
            got = _by_stream(front, ask) if (start + i) % 3 else _by_generate(front, ask)
            wrong += [] if got == expected[ask] else [f"{got} for {ask.describe()}, and not {expected[ask]}"]
        return wrong

    with ThreadPoolExecutor(4) as threads:
        wrong = [w for found in threads.map(ask_all, range(0, len(asks), 6)) for w in found]
    assert not wrong, wrong[0]
    assert not front.engine.live
    front.engine.pool.check_idle()


def _by_generate(front: TinyLLM, ask: Expand) -> list[list[int]]:
    output = front.generate({"prompt_token_ids": ask.prompt}, ask.params, application=ask.application)[0]
    return [sample.token_ids for sample in output.outputs]


def _by_stream(front: TinyLLM, ask: Expand) -> list[list[int]]:
    got: list[list[int]] = [[] for _ in range(ask.params.n)]
    for chunk in front.stream({"prompt_token_ids": ask.prompt}, ask.params, ask.application):
        got[chunk.index] += chunk.token_ids
    return got


def test_a_case_is_a_function_of_its_seed() -> None:
    assert make_case(5).describe() == make_case(5).describe() != make_case(6).describe()
    told = []
    for _ in range(2):
        play = Play(make_case(11, "float64"), Witness())
        assert not play.run()
        told.append([(g.output.outputs[0].token_ids, g.output.stats.drafted) for g in play.guests if g.output])
    assert told[0] == told[1]


@pytest.fixture
def fresh_oracle() -> Iterator[None]:
    """Nothing that was right before a fault is planted, and nothing that was said with it."""
    caches = (answer, foreseen, make_ask)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def accept_anything(patch: pytest.MonkeyPatch) -> None:
    """A token comes out that the target did not choose."""
    patch.setitem(verification.VERIFIERS, "sample_and_match", verification.VerifierKind(gullible))


def keep_in_place(patch: pytest.MonkeyPatch) -> None:
    """K/V of an accepted branch stays where the tree had it."""

    def commit(self: KVPool, kept: Sequence[Any]) -> None:
        for sequence, rows in kept:
            sequence.committed = sequence.front = sequence.committed + len(rows)
            sequence.reserved = 0

    patch.setattr(KVPool, "commit", commit)


def forget_the_place(patch: pytest.MonkeyPatch) -> None:
    """The same noise at every place: engine and plain decoding agree on it, and both are wrong."""
    keys = SequenceSampler._keys
    nowhere = lambda self, domain, places, branches: keys(self, domain, [0] * len(places), branches)  # noqa: E731
    patch.setattr(SequenceSampler, "_keys", nowhere)


def forget_the_path(patch: pytest.MonkeyPatch) -> None:
    """Penalties count what is out, and not the drafted tokens before a node."""
    patch.setattr(TokenCounts, "with_paths", lambda self, paths: self.counts[None])


def share_applications(patch: pytest.MonkeyPatch) -> None:
    """A prefix is found that another application computed."""
    patch.setattr(KVPool, "content_root", lambda self, identity: 0)


def stop_late(patch: pytest.MonkeyPatch) -> None:
    """A stop string that spans two tokens is missed."""
    find = request.find_stop
    patch.setattr(request, "find_stop", lambda stops, text, new: find(stops, text[len(text) - new :], new))


def keep_the_blocks(patch: pytest.MonkeyPatch) -> None:
    """What waits is forgotten, what runs stays: an abort leaves a sequence behind."""

    def remove(self: Scheduler, sequences: Sequence[Any]) -> None:
        gone = {id(s) for s in sequences if s.checker.finish_reason != "abort"}
        real(self, [s for s in sequences if id(s) in gone])

    real = Scheduler.remove
    patch.setattr(Scheduler, "remove", remove)


FAULTS = (
    accept_anything,
    keep_in_place,
    forget_the_place,
    forget_the_path,
    share_applications,
    stop_late,
    keep_the_blocks,
)
WITHIN = 60  # cases


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, fresh_oracle: None
) -> None:
    fault(monkeypatch)
    finding = first_finding()
    assert finding is not None, f"not found in {WITHIN} cases"
    assert finding.problems and len(finding.kept) <= len(finding.case.visits)
    print(f"{fault.__name__}: case {finding.case.seed}, {len(finding.kept)} of {len(finding.case.visits)} requests")


def first_finding() -> Finding | None:
    """What the first case that fails says, shrunk."""
    witness = Witness()
    return next((f for seed in range(WITHIN) if (f := examine(seed, witness, "float64"))), None)
