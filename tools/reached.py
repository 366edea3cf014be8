"""Make the table of what each kind of drafter reaches after so many tokens of training, from the logs of the zoo and of
`paceline adapt`.

    python tools/reached.py > src/paceline/adapt/reached.toml

A run that went on from another one's result counts the tokens of both. ``accepted`` is the mean over the run's held-out
domains. ``first`` is the share of it that is left on the first 128 tokens of answers, where somebody measured both
(docs/measured/smollm2.md, "These figures flatter").
"""

from __future__ import annotations

import json
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "zoo" / "recipes"
SMALL, SMOLLM = ("paceline-small", 24_388_992), ("smollm2-135m", 134_515_008)
GEMMA = ("gemma-3-270m", 268_042_240)
RUNS = (  # kind, target, tokens ahead, what it began as, logs one behind the other, share on first tokens
    ("eagle", SMOLLM, 3, "target", ["smollm2-135m/eagle.jsonl", "smollm2-135m/eagle-2.jsonl"], 0.74),
    ("lyanna", SMOLLM, 3, "target", ["smollm2-135m/lyanna-2.jsonl", "smollm2-135m/lyanna-3.jsonl"], 1.0),
    ("medusa", SMOLLM, 3, "random", ["smollm2-135m/medusa-trial.jsonl"], 0.74),
    ("draft_model", SMOLLM, 4, "target", ["smollm2-135m/draft.jsonl"], 1.0),
    ("eagle", GEMMA, 3, "random", ["adapt/gemma-3-270m-eagle.jsonl", "adapt/gemma-3-270m-eagle-2.jsonl"], 1.0),
    ("eagle", SMALL, 3, "random", ["logs/eagle.jsonl", "logs/eagle-2.jsonl"], 1.0),
    ("lyanna", SMALL, 3, "random", ["logs/lyanna.jsonl", "logs/lyanna-2.jsonl"], 1.0),
    ("medusa", SMALL, 4, "random", ["logs/medusa.jsonl"], 1.0),
    ("draft_model", SMALL, 4, "random", ["logs/paceline-small-draft.jsonl", "logs/paceline-small-draft-2.jsonl"], 1.0),
)


def points(logs: list[str]) -> list[tuple[int, float]]:
    """Tokens seen, and accepted tokens a draft on held-out data; of runs one behind the other."""
    found: dict[int, float] = {}
    before = tokens = 0
    for log in logs:
        before, tokens = before + tokens, 0
        for line in (RECIPES / log).read_text(encoding="utf-8").splitlines():
            figures = json.loads(line)
            tokens = int(figures.get("tokens", tokens))
            own = [value for name, value in figures.items() if name.startswith("accepted/")]
            if own:
                found[before + tokens] = round(sum(own) / len(own), 3)
    return sorted(found.items())


def main() -> None:
    """Write the table."""
    print("# What each kind of drafter reaches after so many tokens of training. Made by tools/reached.py: see there.")
    for kind, (target, parameters), depth, start, logs, first in RUNS:
        print(f'\n[[run]]\nkind = "{kind}"\ntarget = "{target}"\nparameters = {parameters}  # of the target')
        print(f'depth = {depth}  # tokens ahead\nstart = "{start}"\nfirst = {first}  # share left on first tokens')
        print(f'source = "zoo/recipes: {", ".join(logs)}"')
        print("reached = [" + ", ".join(f"[{n}, {value}]" for n, value in points(logs)) + "]")


if __name__ == "__main__":
    main()
