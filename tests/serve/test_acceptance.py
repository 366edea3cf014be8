"""The shape of vLLM's counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.stats import SpecStats
from paceline.serve.acceptance import speculative_decoding

STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda s: (max(s), min(s))), max_size=30)
KEYS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "acceptance_histogram_by_draft_length",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}


@given(STEPS, STEPS)
def test_counts_add_up_as_vllm_says(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    parts = []
    for steps in (first, second):
        stats = SpecStats()
        for drafted, accepted in steps:
            stats.record_pass(drafted=drafted, accepted=accepted, emitted=accepted + 1) if drafted else (
                stats.record_plain()
            )
        parts.append(stats)
    drafts = [step for step in first + second if step[0]]
    merged = parts[0].merge(parts[1]).as_dict()
    found = speculative_decoding(merged, 4, drafts)
    most = found["num_spec_tokens"]
    assert set(found) == KEYS | {"per_step_accepted", "per_step_drafted"}
    assert most == max([4, *(drafted for drafted, _ in drafts)])
    assert len(found["acceptance_histogram"]) == most + 1
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) == len(drafts)
    assert found["num_draft_tokens"] == sum(found["per_step_drafted"])
    assert found["num_accepted_draft_tokens"] == sum(found["per_step_accepted"])
    assert found["num_accepted_draft_tokens"] == sum(a * n for a, n in enumerate(found["acceptance_histogram"]))
    by_length = found["acceptance_histogram_by_draft_length"]
    assert all(len(row) == int(k) + 1 for k, row in by_length.items())
    for k, row in by_length.items():
        assert row == [sum(step == (int(k), a) for step in drafts) for a in range(int(k) + 1)]
    assert set(speculative_decoding(merged, 4, None)) == KEYS
