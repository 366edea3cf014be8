"""A folder that `paceline adapt` made beside drafters of the zoo, on the prompts that it held out, in turns.

    python tools/adapted_beside_zoo.py FOLDER --model paceline-small --drafter hybrid:paceline-small-draft

``FOLDER``'s own head and its hybrid with look-ups stand beside; greedy, one request. Ids are compared with plain
decoding's. The first of the repeats warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from math import exp, log
from pathlib import Path
from time import perf_counter

from paceline import LLM, SamplingParams
from paceline.api.config import TARGET_OPTIONS


def main() -> None:
    """Print a line a drafter: over plain decoding, with a 95% interval, and by kind of prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", action="append", default=[], help="of the zoo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    asked = parser.parse_args()
    settings = asked.folder / "adapted.json"
    if not settings.is_file():
        parser.error(f"{asked.folder} holds no {settings.name}: name a folder that paceline adapt has finished")
    head = f"{json.loads(settings.read_text(encoding='utf-8'))['kind']}:{asked.folder / 'drafter'}"
    plain = LLM(asked.model, drafter="none", dtype=asked.dtype, threads=asked.threads, max_sequences=1)
    same = {name: getattr(plain.config, name) for name in TARGET_OPTIONS}
    models = {"plain": plain}
    for drafter in (str(asked.folder), "suffix", head, f"hybrid:suffix+{head}", *asked.drafter):
        models[drafter] = LLM(**same, share=plain, drafter=drafter, threads=asked.threads, max_sequences=1)
    params = SamplingParams(temperature=0, max_tokens=asked.tokens)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    differ = 0
    for repeat in range(asked.repeats):
        for file in sorted((asked.folder / "prompts").glob("held-*.jsonl")):
            for number, line in enumerate(file.open(encoding="utf-8")):
                ids = json.loads(line)["prompt_tokens"]
                order = random.Random(repeat + number).sample([*models], len(models))
                said = {}
                for name in order:
                    models[name].forget()
                    began = perf_counter()
                    [output] = models[name].generate({"prompt_token_ids": ids}, params)
                    said[name] = output.outputs[0].token_ids, perf_counter() - began
                tokens = {name: own for name, (own, _) in said.items()}
                differ += sum(own != tokens["plain"] for own in tokens.values())
                if repeat:
                    for name, (_, seconds) in said.items():
                        found[name].setdefault(file.stem, []).append(log(said["plain"][1] / seconds))
    print(f"{differ} answers differ from plain decoding's")
    for name, kinds in found.items():
        logs, draw = sum(kinds.values(), []), random.Random(0)
        means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(2000))
        by = ", ".join(f"{kind.removeprefix('held-')} {exp(statistics.fmean(own)):.2f}" for kind, own in kinds.items())
        print(f"{name}: {exp(statistics.fmean(logs)):.2f} [{exp(means[50]):.2f}, {exp(means[1949]):.2f}]; {by}")


if __name__ == "__main__":
    main()
