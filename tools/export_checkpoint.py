"""The weights of a target's run as a model folder, wherever the run stands.

    .venv/bin/python tools/export_checkpoint.py RUN --init MODEL --out FOLDER

RUN is the folder of a ``paceline train`` of recipe kind ``target`` that was stopped; MODEL the folder that it started
from, whose config and tokenizer the weights go with.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from paceline.model.families import decoder_config
from paceline.train.network import Network
from paceline.train.trainer import CHECKPOINT
from paceline.weights.loader import WEIGHTS


def export(run: Path, init: Path, out: Path) -> tuple[int, int]:
    """Write the model folder; returns the run's steps and tokens so far.

    Raises:
        SystemExit: a checkpoint of another model.
    """
    config = json.loads((init / "config.json").read_text("utf-8"))
    network, saved = Network(decoder_config(config)), torch.load(run / CHECKPOINT, weights_only=False)
    own = dict(network.named_parameters())
    if own.keys() != saved["parameters"].keys():
        raise SystemExit(
            f"{run / CHECKPOINT}: it is of another shape than {init}; name the model that the run started from"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved["parameters"][name])
    shutil.copytree(init, out, ignore=shutil.ignore_patterns(WEIGHTS, "training.json"))
    network.save(out, config, torch.bfloat16)
    return saved["step"], saved["tokens"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--init", type=Path, required=True, help="folder of the model that it started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    given = parser.parse_args()
    steps, tokens = export(given.run, given.init, given.out)
    print(f"{given.out}: {steps:,} steps, {tokens:,} tokens")


if __name__ == "__main__":
    main()
