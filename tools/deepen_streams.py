"""A set of lossless streams as the start of one that begins earlier in the target.

    .venv/bin/python tools/deepen_streams.py SET --layers 6 --target MODEL --out FOLDER

Layers that the set has adapters for keep them; those below get fresh ones that add nothing yet, so that streams enter
earlier and are changed by the frozen layers alone: close to where the set was, and far from an untrained one.
``paceline train RECIPE.toml --init FOLDER`` goes on from there. MODEL may be another state of the set's target.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.model.adapters import linear_shapes
from paceline.papers.streaming.model import StreamSet
from paceline.weights.files import fingerprint
from paceline.weights.source import read_config


def deepen(trained: StreamSet, layers: int, target: Path, seed: int = 0) -> StreamSet:
    """The set through the top ``layers`` of the model in ``target``.

    Raises:
        ConfigError: no more layers than the set has, as many as the model, or a set of an application.
    """
    config, found = read_config(target), trained.config
    if found.mode != "lossless" or not found.msa_layers < layers < config.num_layers:
        raise ConfigError(
            f"a set through {layers} layers from one of mode {found.mode} through {found.msa_layers}",
            f"a lossless one can be made deeper, through fewer than the {config.num_layers} layers of {target}",
            f"name more than {found.msa_layers} layers and fewer than {config.num_layers}",
        )
    first = config.num_layers - layers
    adapter = found.adapter and dataclasses.replace(found.adapter, layers=tuple(range(first, config.num_layers)))
    wanted = dataclasses.replace(
        found, msa_layers=layers, adapter=adapter, target=target.name, fingerprint=fingerprint(target)
    )
    made = StreamSet.fresh(wanted, linear_shapes(config), torch.Generator().manual_seed(seed))
    own = made.tensors()
    with torch.no_grad():
        for name, value in trained.tensors().items():
            own[name].copy_(value)
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, help="folder of the trained set")
    parser.add_argument("--layers", type=int, required=True, help="layers at the top of the target to go through")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the fresh adapters")
    given = parser.parse_args()
    made = deepen(StreamSet.load(given.set, dtype=torch.float32), given.layers, given.target, given.seed)
    made.save(given.out)
    print(f"{given.out}: streams through {given.layers} layers, from {given.set}")


if __name__ == "__main__":
    main()
