"""Write a model with more layers that generates the same tokens: what drafts are worth where a pass is expensive.

    .venv/bin/python tools/stretch.py MODEL OUT --times 8

OUT has seven layers after each of MODEL's own that add zero: copies whose attention and MLP end in weights of zero. It
is in MODEL's format, a folder of safetensors or a GGUF file, and holds MODEL's fingerprint, so that drafters that were
trained for MODEL fit. A trained set of streams or exits names layers: given as MODEL, it is written with the new
numbers. EAGLE-3 and SPIRe count the layers that they read from the target's last: on OUT they read other states and
draft worse.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import CapabilityError, ConfigError
from paceline.weights.files import FINGERPRINT, fingerprint
from paceline.weights.gguf import is_gguf, read_gguf
from paceline.weights.source import read_config, resolve_folder

KEPT = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja", "*.model", "vocab*", "merges.txt")
LAYER = re.compile(r"(.*\blayers\.|blk\.|adapters\.)(\d+)(\..*)", re.DOTALL)
ADDING = re.compile(r".*(\.o_proj|\.down_proj|\.attn_output|\.ffn_down)\..*")  # what a layer adds is computed by these
LISTS = ("layer_types", "no_rope_layers")  # of config.json, by layer
COUNTS = ("num_hidden_layers", "num_layers", "max_window_layers", "msa_layers")  # of layers


def write_stretched(model: str | Path, out: Path, times: int) -> Path:
    """Write ``model``, a name, folder, GGUF file or set of streams or exits, with ``times`` layers for each of its own.

    Raises:
        ConfigError: a model that is not there, or a number below 1.
        CapabilityError: a model of a form that cannot be stretched.
    """
    if times < 1:
        raise ConfigError(f"times={times}", "it is not a number of layers", "give 2 or more")
    folder = resolve_folder(model)
    if is_gguf(folder):
        _write_gguf(folder, out, times)
        _check(folder, out, times)
        return out
    out.mkdir(parents=True)
    trained = [file for name in ("streams.json", "exits.json") if (file := folder / name).is_file()]
    for config in trained or [folder / "config.json"]:
        values = json.loads(config.read_text(encoding="utf-8"))
        values |= {name: values[name] * times for name in COUNTS if values.get(name)}
        values |= {name: [k for k in values[name] for _ in range(times)] for name in LISTS if values.get(name)}
        if trained:  # behind the same layers; those that are added have no adapters
            values |= {name: [n * times for n in values[name]] for name in ("layers", "exits") if name in values}
            if values.get("adapter"):
                values["adapter"]["layers"] = [n * times for n in values["adapter"]["layers"]]
        else:
            values[FINGERPRINT] = fingerprint(folder)
        (out / config.name).write_text(json.dumps(values, indent=1), encoding="utf-8")
    if not trained:
        _check(folder, out, times)
    for file in {file for pattern in KEPT for file in folder.glob(pattern)}:
        shutil.copy(file, out)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            for new, added in _names(name, times, copies=not trained):
                zero = added and tensor.is_floating_point() and ADDING.fullmatch(name)
                tensors[new] = torch.zeros_like(tensor) if zero else tensor.clone()
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    for file in folder.glob("*.safetensors.index.json"):
        index = json.loads(file.read_text(encoding="utf-8"))
        places = index["weight_map"].items()
        index["weight_map"] = {new: place for name, place in places for new, _ in _names(name, times)}
        (out / file.name).write_text(json.dumps(index), encoding="utf-8")
    return out


def _names(name: str, times: int, copies: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield the names that a tensor has in the stretched model, and whether they are of added layers."""
    match = LAYER.fullmatch(name)
    if match is None:
        yield name, False
        return
    for i in range(times if copies else 1):
        yield f"{match[1]}{int(match[2]) * times + i}{match[3]}", i > 0


def _check(folder: Path, out: Path, times: int) -> None:
    """Refuse a configuration that gives the added layers another form than the layer that they follow has."""
    own, made = read_config(folder), read_config(out)
    windows, ropes = (tuple(v for v in values for _ in range(times)) for values in (own.windows, own.ropes))
    if made != replace(own, num_layers=own.num_layers * times, windows=windows, ropes=ropes):
        wrong = f"its configuration does not say layer by layer ({', '.join(LISTS)}) how layers differ"
        raise CapabilityError(f"stretching {folder}", wrong, "use another checkpoint")


def _write_gguf(file: Path, out: Path, times: int) -> None:
    read = gguf.GGUFReader(file)
    if len(read_gguf(file).paths) > 1:
        raise CapabilityError(f"stretching {file}", "it is in several files", "merge them (llama-gguf-split --merge)")
    family = read.fields["general.architecture"].contents()
    layers = read.fields[f"{family}.block_count"].contents()
    writer = gguf.GGUFWriter(out, family)
    writer.add_string(FINGERPRINT, fingerprint(file))
    for name, part in read.fields.items():
        value: Any = part.contents()
        if name.startswith(("GGUF.", "split.")) or name in ("general.architecture", FINGERPRINT):
            continue
        if name == f"{family}.block_count":
            value *= times
        elif isinstance(value, list) and len(value) == layers and name.startswith(f"{family}."):
            value = [entry for entry in value for _ in range(times)]
        writer.add_key_value(name, value, part.types[0], part.types[-1] if len(part.types) > 1 else None)
    for tensor in read.tensors:
        for new, added in _names(tensor.name, times):
            data = np.zeros_like(tensor.data) if added and ADDING.fullmatch(tensor.name) else tensor.data
            writer.add_tensor(new, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="embedded model, folder, GGUF file or hub name, or a trained set")
    parser.add_argument("out", type=Path, help="folder or FILE.gguf to write")
    parser.add_argument("--times", type=int, default=8, help="layers for each of its own (default: %(default)s)")
    asked = parser.parse_args()
    print(write_stretched(asked.model, asked.out, asked.times))


if __name__ == "__main__":
    main()
