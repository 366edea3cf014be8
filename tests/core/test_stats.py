"""Statistics: the definitions, on counts small enough to do by hand."""

import random

import pytest

from paceline.core.stats import SourceStats, SpecStats


def test_a_tree_says_where_its_path_ended():
    """Ten nodes, path of two: on a leaf there was nothing to refuse at depth three."""
    leaf, inner = SpecStats(), SpecStats()
    leaf.record_pass(drafted=10, accepted=2, emitted=3, offered=2)
    inner.record_pass(drafted=10, accepted=2, emitted=3, offered=3)
    assert (leaf.depth_offered, leaf.depth_accepted) == ([1, 1], [1, 1])
    assert (inner.depth_offered, inner.depth_accepted) == ([1, 1, 1], [1, 1, 0])


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
