"""A drafter of one's own: remembers which token followed the last two, over everything that was served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline import LLM, SamplingParams
from paceline.draft import Drafter, DrafterConfig, DrafterSpec, TokenTree, option, register


@register
@dataclass(frozen=True, kw_only=True)
class FollowerConfig(DrafterConfig):
    """Drafts the token that followed last time, from a table learned while serving."""

    kind: ClassVar[str] = "follower"
    order: int = option(2, help="tokens of context that a follower is remembered for", minimum=1)
    depth: int = option(6, help="tokens drafted in a row", minimum=1)

    def build(self, context):
        return Follower(self)


class Follower(Drafter):
    def __init__(self, config):
        self.order, self.depth = config.order, config.depth
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth)
        self.table = {}  # the last `order` tokens -> the token that followed most recently
        self.learned = {}  # sequence key -> tokens of it that are in the table

    def observe(self, step):
        for seq in step.sequences:
            start = max(self.learned.get(seq.key, 0), self.order)
            for i in range(start, len(seq.tokens)):
                self.table[tuple(seq.tokens[i - self.order : i])] = seq.tokens[i]
            self.learned[seq.key] = len(seq.tokens)

    def draft(self, want):
        chains = [self.chain(seq.tokens, min(self.depth, budget, depth)) for seq, budget, depth in want.rows()]
        return [TokenTree.chain(chain, chance=0.5) for chain in chains]

    def chain(self, tokens, length):
        text = list(tokens[-self.order :])
        while len(text) < self.order + length and (token := self.table.get(tuple(text[-self.order :]))) is not None:
            text.append(token)
        return text[self.order :]

    def release(self, keys):
        for key in keys:
            self.learned.pop(key, None)

    def forget(self):
        self.table.clear()


def main() -> None:
    prompt = "def read_lines(filename):\n    lines = []\n    with open(filename) as f:\n"
    greedy = SamplingParams(temperature=0, max_tokens=48)
    plain = LLM("paceline-small").generate([prompt], greedy)[0]
    llm = LLM("paceline-small", drafter=FollowerConfig(depth=4), budget=4)
    first, second = (llm.generate([prompt], greedy)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == plain.outputs[0].token_ids
    assert second.stats.passes < plain.stats.passes  # by now the whole answer is in the table
    print(plain.outputs[0].text)
    for name, answer in [("plain", plain), ("first time", first), ("second time", second)]:
        print(f"{name:12}", answer.stats.summary())


if __name__ == "__main__":
    main()
