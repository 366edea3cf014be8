"""One prompt, plainly and speculatively: the same tokens, in fewer passes of the target."""

from __future__ import annotations

from paceline import LLM, SamplingParams

PROMPT = "def read_lines(path):\n"
DRAFTER = "hybrid:paceline-small-draft,dtype=int8"


def main() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=64)
    [plain] = LLM("paceline-small").generate([PROMPT], greedy)
    [drafted] = LLM("paceline-small", drafter=DRAFTER).generate([PROMPT], greedy)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.stats.passes < plain.stats.passes
    print(PROMPT + drafted.outputs[0].text)
    print("plain      ", plain.stats.summary())
    print("speculative", drafted.stats.summary())


if __name__ == "__main__":
    main()
