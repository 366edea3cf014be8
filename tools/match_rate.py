"""How often drafts at temperature 1 are accepted, by the way they are drafted, on the embedded pair.

    python tools/match_rate.py

prints mean accepted length and acceptance at every depth for point, coupled and sampled drafts. Point,
coupled and independent drafts are matched with what the target samples, with ``exact=True``: their answers are the
same text, so they are compared on the same positions. Rejection sampling answers with a text of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline import LLM, SamplingParams
from paceline.core.stats import SpecStats

DEPTH = 4

TABLES = ("players (name, team, number)", "films (title, year, director)", "cities (city, country, population)")
QUESTIONS = ("Which team does number 21 play for?", "How many films came out in 1999?", "What is the largest city?")
MEANINGS = (
    "name[The Vaults], eatType[pub], area[riverside]",
    "name[Blue Spice], food[Chinese], priceRange[cheap], familyFriendly[yes]",
    "name[The Mill], eatType[coffee shop], near[Cafe Rouge]",
    "name[Strada], food[Italian], customer rating[5 out of 5]",
    "name[Cotto], eatType[restaurant], area[city centre], food[French]",
)
OPENINGS = (
    "Once upon a time there was",
    "The history of the town begins with",
    "She opened the letter and",
    "In the year 1914, the",
    "It is well known that",
)
CODE = (
    "def add(a, b):\n    return",
    "import os\n\ndef read_file(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n",
)
REQUESTS = ("I need a cheap hotel in the north.", "Can you book a table for two?", "I want a train to Cambridge.")


def prompts() -> list[str]:
    """Twenty prompts of the kinds that the embedded model knows."""
    sql = [f"CREATE TABLE {table}\nQuestion: {q}\nSQL:" for table, q in zip(TABLES, QUESTIONS, strict=True)]
    e2e = [f"Write a sentence for the meaning representation.\n{meaning}\nText:" for meaning in MEANINGS]
    chat = [f"<|user|>{text}<|assistant|>" for text in REQUESTS]
    return [*sql, *e2e, *OPENINGS, *CODE, *chat]


@dataclass(frozen=True)
class Rate:
    """What one way of drafting achieved."""

    way: str
    stats: SpecStats  # summed over all prompts
    ids: list[list[int]]  # the answers

    @property
    def first(self) -> float:
        """Share of drafts whose first token was accepted."""
        return self.stats.depth_acceptance[0]

    @property
    def standard_error(self) -> float:
        """Of `first`, as for independent passes."""
        return float((self.first * (1 - self.first) / self.stats.depth_offered[0]) ** 0.5)


WAYS = {  # way -> proposes, verifier
    "point": ("point", "sample_and_match"),
    "coupled": ("coupled", "sample_and_match"),
    "independent": ("sampled", "sample_and_match"),
    "rejection": ("sampled", "rejection"),
    "block": ("sampled", "block"),
}


def measure(way: str, max_tokens: int = 48, seed: int = 3) -> Rate:
    """Answer `prompts` at temperature 1, drafting in one of `WAYS`."""
    proposes, verifier = WAYS[way]
    drafter = f"draft_model:paceline-small-draft,depth={DEPTH},proposes={proposes}"
    matching = verifier == "sample_and_match"
    llm = LLM(
        "paceline-small",
        drafter=drafter,
        budget=DEPTH,
        verifier=verifier,
        exact=matching,
        kv_memory="64MiB",
        max_model_len=512,
    )
    each = [SamplingParams(temperature=1, max_tokens=max_tokens, seed=seed + i) for i in range(len(prompts()))]
    outputs = llm.generate(prompts(), each)
    stats = SpecStats()
    for output in outputs:
        stats = stats.merge(output.stats)
    return Rate(way, stats, [o.outputs[0].token_ids for o in outputs])


def row(rate: Rate) -> str:
    """One line of the table."""
    depths = "  ".join(f"{share:.3f}" for share in rate.stats.depth_acceptance)
    length = rate.stats.mean_accepted_length
    error = f"+-{rate.standard_error:.3f}"
    return f"{rate.way:12} {length:6.2f}   {depths}   first {error}, {rate.stats.passes} passes"


def main() -> None:
    """Print the table."""
    print(f"{'drafts':12} length   accepted at depth 1 .. {DEPTH}")
    for way in WAYS:
        print(row(measure(way)))


if __name__ == "__main__":
    main()
