"""Statistics: the definitions, on counts small enough to do by hand."""

import json
import random

import pytest

from paceline.core.stats import SourceStats, SpecStats


def chain(*passes):
    """Statistics of passes given as (drafted, accepted), with one more token of the target's own each."""
    stats = SpecStats()
    for drafted, accepted in passes:
        stats.record_pass(drafted=drafted, accepted=accepted, emitted=accepted + 1)
    return stats


def test_a_tree_says_where_its_path_ended():
    """Ten nodes, path of two: on a leaf there was nothing to refuse at depth three."""
    leaf, inner = SpecStats(), SpecStats()
    leaf.record_pass(drafted=10, accepted=2, emitted=3, offered=2)
    inner.record_pass(drafted=10, accepted=2, emitted=3, offered=3)
    assert (leaf.depth_offered, leaf.depth_accepted) == ([1, 1], [1, 1])
    assert (inner.depth_offered, inner.depth_accepted) == ([1, 1, 1], [1, 1, 0])


def test_a_cut_may_leave_no_token_of_the_targets_own():
    stats = SpecStats()
    stats.record_pass(drafted=3, accepted=2, emitted=2)
    assert (stats.emitted, stats.mean_accepted_length) == (2, 3.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"drafted": 1, "accepted": 2, "emitted": 3},
        {"drafted": 1, "accepted": -1, "emitted": 0},
        {"drafted": 3, "accepted": 2, "emitted": 1},
        {"drafted": 3, "accepted": 1, "emitted": 2, "offered": 0},
        {"drafted": 3, "accepted": 1, "emitted": 2, "offered": 3},
    ],
    ids=str,
)
def test_contradictions_are_refused_and_not_counted(bad):
    stats = SpecStats()
    with pytest.raises(ValueError, match="a pass cannot have"):
        stats.record_pass(**bad)
    assert stats == SpecStats()


def test_merge_equals_recording_everything_in_one():
    rng = random.Random(1)
    everything, merged = SpecStats(), SpecStats()
    for _ in range(7):
        part = SpecStats(draft_ms=1.5, verify_ms=2.0, host_ms=0.25, idle_ms=4.0, prompt_tokens=3, preemptions=1)
        part.cached_prompt_tokens = 2
        for _ in range(rng.randrange(5)):
            drafted = rng.randrange(6)
            accepted = rng.randint(0, drafted)
            sources = {rng.choice(["ngram", "suffix"]): (drafted, range(1, accepted + 1))}
            for stats in (part, everything):
                stats.record_pass(drafted=drafted, accepted=accepted, emitted=accepted + 1, sources=sources)
        merged = merged.merge(part)
    everything.draft_ms, everything.verify_ms, everything.host_ms, everything.idle_ms = 10.5, 14.0, 1.75, 28.0
    everything.prompt_tokens, everything.preemptions, everything.cached_prompt_tokens = 21, 7, 14
    assert merged.passes > 5
    assert merged == everything
    assert sum(s.drafted for s in merged.sources.values()) == merged.drafted


def test_sources_say_at_which_depths_their_nodes_were_accepted():
    """Of a path of three the middle node is another's."""
    stats = SpecStats()
    for _ in range(2):
        stats.record_pass(drafted=6, accepted=3, emitted=4, sources={"a": (4, [1, 3]), "b": (2, [2])})
    stats.record_pass(drafted=3, accepted=1, emitted=2, sources={"a": (2, []), "b": (1, [1])})
    assert stats.sources == {"a": SourceStats(10, 4, [2, 0, 2]), "b": SourceStats(5, 3, [1, 2])}
    assert sum(sum(s.accepted_at) for s in stats.sources.values()) == stats.accepted
    twice = stats.merge(stats)
    assert twice.sources["b"] == SourceStats(10, 6, [2, 4]) and stats.sources["b"].accepted_at == [1, 2]


def test_merge_of_times_of_requests_that_ran_together():
    a = SpecStats(elapsed_ms=100, ttft_ms=30, emitted=5)
    b = SpecStats(elapsed_ms=250, ttft_ms=20, emitted=20)
    merged = a.merge(b)
    assert (merged.elapsed_ms, merged.ttft_ms, merged.tokens_per_second) == (250, 20, 100.0)
    assert a.merge(SpecStats()).ttft_ms == 30
    assert SpecStats().merge(SpecStats()).ttft_ms is None


def test_off_reason_survives_only_while_nothing_was_drafted():
    off = SpecStats(off_reason="no drafter")
    assert off.merge(SpecStats()).off_reason == "no drafter"
    assert off.merge(chain((3, 1))).off_reason is None


def test_as_dict_is_json_and_detached():
    stats = chain((4, 2))
    stats.record_pass(drafted=2, accepted=1, emitted=2, sources={"ngram": (2, [1])})
    plain = stats.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["sources"] == {"ngram": {"drafted": 2, "accepted": 1, "accepted_at": [1]}}
    assert plain["mean_accepted_length"] == 2.5
    plain["accepted_histogram"].append(99)
    assert stats.accepted_histogram == [0, 1, 1]


def test_summary_is_one_line_with_the_figures():
    stats = chain((4, 3), (4, 3))
    stats.draft_ms, stats.verify_ms, stats.host_ms, stats.elapsed_ms = 1.2, 30.4, 2.0, 440.0
    stats.prompt_tokens, stats.queue_ms, stats.ttft_ms = 36, 100.0, 340.0
    line = stats.summary()
    assert "\n" not in line
    assert stats.headline() == "70 tokens/s, 4.00 tokens a pass, prompt 36 in 0.2 s"  # 7 tokens in the 100 ms after it
    assert stats.headline(samples=2) == "60 tokens/s, 4.00 tokens a pass, prompt 36 in 0.2 s"
    first = SpecStats(emitted=1, passes=1, prompt_tokens=3, ttft_ms=9, elapsed_ms=9)
    assert first.headline() == "1 token, prompt 3 in 9 ms"
    assert SpecStats().headline() == "0 tokens"
    for figure in (stats.headline(), "length 4.00", "2 target passes for 8 tokens", "draft 1 ms", "verify 30 ms"):
        assert figure in line
    assert "speculation off" not in line and "idle" not in line
    stats.off_reason, stats.idle_ms = "the batch is full", 7
    assert "speculation off: the batch is full" in stats.summary()
    assert "idle 7 ms" in stats.summary()
