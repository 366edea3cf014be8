"""Make the table of what each kind of drafter reaches after so many tokens of training, from the logs of the zoo and of
`paceline adapt`.

    python tools/reached.py > src/paceline/adapt/reached.toml

A run that went on from another one's result counts the tokens of both. ``accepted`` is the mean over the run's held-out
domains, of a chain at every place of their answers. ``used`` is what the engine's drafts of the last drafter accept
over the last ``accepted``, and ``nodes`` how many such a draft has: of the reports of `paceline adapt`, or, where its
budget drafted next to nothing and for the zoo's, of

    paceline bench --model MODEL --method "DRAFTER;budget=NODES" --workload spec_bench --workload humaneval
        --workload wikisql --workload books --workload gsm8k --prompts 8 --repeats 1 --max-new-tokens 128
"""

from __future__ import annotations

import json
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "zoo" / "recipes"
SMALL, SMOLLM = ("paceline-small", 24_388_992), ("smollm2-135m", 134_515_008)
GEMMA = ("gemma-3-270m", 268_042_240)
RUNS = (  # kind, target, tokens ahead, what it began as, log and how many follow each other, share that is used, nodes
    ("eagle", SMOLLM, 3, "target", "smollm2-135m/eagle", 2, 0.49, 2.9),
    ("lyanna", SMOLLM, 3, "target", "adapt/smollm2-135m-lyanna", 2, 1.73, 9.9),
    ("medusa", SMOLLM, 3, "random", "smollm2-135m/medusa", 1, 0.9, 4.0),
    ("eagle", GEMMA, 3, "random", "adapt/gemma-3-270m-eagle", 2, 1.08, 7.0),
    ("eagle", SMALL, 3, "target", "adapt/paceline-small-eagle", 2, 0.89, 6.4),
    ("lyanna", SMALL, 3, "target", "adapt/paceline-small-lyanna", 2, 0.82, 4.6),
    ("medusa", SMALL, 3, "random", "adapt/paceline-small-medusa", 2, 1.0, 5.9),
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
    for kind, (target, parameters), depth, start, log, parts, used, nodes in RUNS:
        logs = [f"{log}.jsonl", *(f"{log}-{part}.jsonl" for part in range(2, parts + 1))]
        print(f'\n[[run]]\nkind = "{kind}"\ntarget = "{target}"\nparameters = {parameters}  # of the target')
        print(f'depth = {depth}  # tokens ahead\nstart = "{start}"')
        print(f"used = {used}  # share of it that drafts of so many nodes accept\nnodes = {nodes}")
        print(f'source = "zoo/recipes: {", ".join(logs)}"')
        print("reached = [" + ", ".join(f"[{n}, {value}]" for n, value in points(logs)) + "]")


if __name__ == "__main__":
    main()
