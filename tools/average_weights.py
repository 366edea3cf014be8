"""The mean of two models of one shape: the later one's share of every weight, the rest from the earlier one.

    .venv/bin/python tools/average_weights.py EARLIER LATER --share 0.5 --out FOLDER

Of a model and what further training made of it, the mean is often better than either (Wortsman et al. 2022, WiSE-FT):
what training forgot of texts it no longer saw comes back, and little of what it learned goes. All other files are the
later one's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(earlier: Path, later: Path, share: float, out: Path) -> None:
    """Write the mean of two model folders.

    Raises:
        SystemExit: models of different shapes, or a share that is none.
    """
    if not 0 <= share <= 1:
        raise SystemExit(f"--share {share}: it is the later model's part of the mean; give 0 to 1")
    old, new = load_file(earlier / WEIGHTS), load_file(later / WEIGHTS)
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in new.items()}:
        raise SystemExit(f"{earlier} and {later}: weights of other names or shapes; average models of one shape")
    shutil.copytree(later, out, ignore=shutil.ignore_patterns(WEIGHTS))
    mean = {name: torch.lerp(old[name].double(), value.double(), share).to(value.dtype) for name, value in new.items()}
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", type=Path, help="folder of a model")
    parser.add_argument("later", type=Path, help="folder of what it became")
    parser.add_argument("--share", type=float, default=0.5, help="of the later one, 0 to 1 (default: 0.5)")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    given = parser.parse_args()
    average(given.earlier, given.later, given.share, given.out)


if __name__ == "__main__":
    main()
