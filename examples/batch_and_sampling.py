"""Many prompts at once, each with its own sampling options; every one works with a drafter as without."""

from __future__ import annotations

from paceline import LLM, SamplingParams

PROMPTS = ["The best way to learn is", "It was a dark night, and", "def add(a, b):\n"]


def main() -> None:
    llm = LLM("paceline-small", drafter="draft_model:paceline-small-draft")
    plain = LLM("paceline-small")

    each = [
        # Two samples of one prompt. A seed fixes both, whatever else is in the batch.
        SamplingParams(temperature=0.8, top_p=0.95, seed=7, n=2, max_tokens=24),
        # Repetition is discouraged, and the answer ends before the first full stop.
        SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.1, frequency_penalty=0.2, stop=".", max_tokens=48),
        # Greedy, with the log-probabilities of the chosen token and of the two likeliest.
        SamplingParams(temperature=0, logprobs=2, max_tokens=12),
    ]
    outputs = llm.generate(PROMPTS, each)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for answer in output.outputs:
            print(f"{prompt!r} [{answer.index}, {answer.finish_reason}] {answer.text!r}")
        print("   ", output.stats.summary())

    # The drafter changes how fast tokens come, and never which.
    for drafted, alone in zip(outputs, plain.generate(PROMPTS, each), strict=True):
        assert [a.token_ids for a in drafted.outputs] == [a.token_ids for a in alone.outputs]
    assert len(outputs[0].outputs) == 2
    assert "." not in outputs[1].outputs[0].text
    scores = outputs[2].outputs[0].logprobs
    assert scores is not None and len(scores) == len(outputs[2].outputs[0].token_ids)
    for position in scores[:3]:
        print(position)


if __name__ == "__main__":
    main()
