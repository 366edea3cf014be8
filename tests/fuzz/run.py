"""The fuzz for as long as one likes, in the foreground: `python tests/fuzz/run.py --minutes 60 --seed 0`.

Stops at the first finding, or collects them with ``--keep-going``; ``--case N`` plays one case again. The exit status
is 1 where anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import monotonic

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "studies")]

import logging  # noqa: E402

import torch  # noqa: E402
from campaign import Finding, examine  # noqa: E402
from witness import Witness  # noqa: E402

logging.getLogger("paceline").setLevel(logging.CRITICAL)  # drafters that fail on purpose are many


def main() -> int:
    """Run; the exit status."""
    asked = _arguments()
    torch.set_num_threads(1)
    witness, findings = Witness(), []
    for finding in _examined(asked, witness):
        print(finding.report(), flush=True)
        findings.append(finding.case.seed)
        if not asked.keep_going:
            break
    print(f"what was met:\n{witness.report()}")
    print(f"{len(findings)} findings" + (f": cases {findings}" if findings else ""))
    return 1 if findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--case", type=int, help="play this case alone")
    parser.add_argument("--world", help="cases of this world alone")
    parser.add_argument("--guest", help="cases with this drafter alone")
    parser.add_argument("--keep-going", action="store_true", help="collect findings instead of stopping at the first")
    return parser.parse_args()


def _examined(asked: argparse.Namespace, witness: Witness) -> Iterator[Finding]:
    """The findings, with a line of progress a minute."""
    began = told = monotonic()
    for seed in [asked.case] if asked.case is not None else count(asked.seed):
        finding = examine(seed, witness, asked.world, asked.guest)
        if finding is not None:
            yield finding
        now = monotonic()
        if now - told >= 60:
            told = now
            _progress(seed, witness, now - began)
        if now - began >= 60 * asked.minutes:
            return


def _progress(seed: int, witness: Witness, seconds: float) -> None:
    met = witness.met
    rate = met["requests"] / seconds
    print(f"{seconds / 60:.0f} min: case {seed}, {met['requests']:,} requests, {rate:.1f} a second", flush=True)


if __name__ == "__main__":
    sys.exit(main())
