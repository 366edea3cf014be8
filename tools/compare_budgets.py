"""Compare the automatic draft budgets of two checkouts in worlds without a model (`tests/kits/budget_world.py`).

    git archive HEAD~1 | (mkdir -p build/before && tar -x -C build/before)
    .venv/bin/python tools/compare_budgets.py build/before .

The worlds are this checkout's, and their clock is simulated, so that the machine's load changes nothing; the time that
the rules take is not counted. A figure is new over old in tokens a second, in the geometric mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from math import exp, log
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent.parent
WORKER = """
import json, sys
from itertools import product
from kits.budget_world import HARD, LOOKUP, NETWORK, STEP_COSTS, World, run
from paceline import kernels as native
from paceline.engine.auto import AutoBudget
from paceline.engine.costs import DraftCosts

native.library()  # nodes are chosen in compiled code
TWO = ((0.3, 0.9, 0.7), (0.5, 0.5, 0.85), (0.8, 0.3, 0.5), (0.1, 0.8, 0.3), (0.9, 0.9, 0.8))


def worlds():
    found = {}
    kinds, rates = {"look-up": LOOKUP, "network": NETWORK}, (0.0, 0.2, 0.5, 0.8, 0.95)
    for (shape, costs), (kind, drafter), rate in product(STEP_COSTS.items(), kinds.items(), rates):
        found[f"usual: {shape}, {kind}, {rate}"] = {**drafter, "costs": costs, "acceptance": lambda _, r=rate: r}
    found |= {f"hard: {name}": {"costs": STEP_COSTS["stairs"], **world} for name, world in HARD.items()}
    for (shape, costs), ms, (offer, rate, far) in product(STEP_COSTS.items(), (0.1, 0.6), TWO):
        shared = {"costs": costs, "longest": 8, "spread": 0.1}
        net = World(**shared, acceptance=lambda _, r=far: r, claimed=far, level_ms=ms, ask_ms=0.5, unseen_ms=0.02)
        found[f"two: {shape}, {ms} ms, {offer}, {rate}, {far}"] = {
            **shared, **LOOKUP, "acceptance": lambda _, r=rate: r, "claimed": rate, "offer": offer, "second": net
        }
    return found


batches, seeds, steps = map(json.loads, sys.argv[1:])
speeds = {}
for name, made in worlds().items():
    for batch in batches:
        for seed in range(seeds):
            world = World(**made, seed=seed)
            parts = [world] if world.second is None else [world, world.second]
            costs = [DraftCosts.of_network(world.table()) if p.level_ms else DraftCosts() for p in parts]
            prepares = 0 if world.prepares else None
            budget = AutoBudget(
                world.table(), cap=8 * len(parts), sources=[*map(str, range(len(parts)))], draft_costs=costs,
                prepares=prepares,
            )
            speeds[f"{name}|{batch}|{seed}"] = run(budget, world, batch, steps).speed
print(json.dumps(speeds))
"""


def start(checkout: Path, given: list[object]) -> subprocess.Popen[str]:
    """Run all worlds with a checkout's rule."""
    paths = [(checkout / "src").resolve(), (HERE / "tests").resolve()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", WORKER, *map(json.dumps, given)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def ratios(old: dict[str, float], new: dict[str, float]) -> dict[tuple[str, int], float]:
    """New over old by world and batch size."""
    logs: dict[tuple[str, int], list[float]] = {}
    for key, speed in new.items():
        name, batch, _ = key.split("|")
        logs.setdefault((name, int(batch)), []).append(log(speed / old[key]))
    return {key: exp(mean(values)) for key, values in logs.items()}


def main() -> None:
    """Print the means by batch size and kind of world, and the lowest worlds."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("old", type=Path)
    ask.add_argument("new", type=Path)
    ask.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    ask.add_argument("--seeds", type=int, default=4)
    ask.add_argument("--steps", type=int, default=600)
    asked = ask.parse_args()
    running = [start(folder, [asked.batches, asked.seeds, asked.steps]) for folder in (asked.old, asked.new)]
    found = ratios(*(json.loads(process.communicate()[0]) for process in running))
    for kind in sorted({name.split(":")[0] for name, _ in found}):
        means = []
        for batch in asked.batches:
            cells = [value for (name, size), value in found.items() if size == batch and name.startswith(f"{kind}:")]
            means.append(f"{exp(mean(map(log, cells))):.3f} at {batch} (lowest of {len(cells)} {min(cells):.3f})")
        print(f"{kind}: {', '.join(means)}")
    print(f"all: {exp(mean(map(log, found.values()))):.4f}")
    for (name, batch), value in sorted(found.items(), key=lambda item: item[1])[:8]:
        print(f"  {value:.3f} {name}, batch {batch}")


if __name__ == "__main__":
    main()
