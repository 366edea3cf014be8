"""A checkpoint as other engines can run it: with a stretched model's layers, its head stored on its own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import CapabilityError

WEIGHTS, HEAD = "model.safetensors", "lm_head.weight"
_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
_ADDING = (
    ".o_proj.weight",
    ".o_proj.bias",
    ".down_proj.weight",
    ".down_proj.bias",
)  # what a layer adds comes from these


def write_stretched(folder: Path, times: int, out: Path) -> None:
    """A Llama with ``times`` layers for each of its own, of which all but the first add zero, as `Decoder` has them.

    Its head is no longer tied: a quantiser can then give it the type of a product and leave the table of embeddings as
    it is, which is how Paceline quantises a plain checkpoint.

    Raises:
        CapabilityError: a checkpoint of another family, or in several files.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "llama" or not (folder / WEIGHTS).is_file():
        wrong = "only a Llama whose weights are in one file is written anew for other engines"
        raise CapabilityError(f"model {folder}", wrong, "leave the other engines out")
    out.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".model"):
            shutil.copy(file, out)
    changed = {"num_hidden_layers": config["num_hidden_layers"] * times, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    stored = load_file(folder / WEIGHTS)
    stored.setdefault(HEAD, stored["model.embed_tokens.weight"].clone())
    save_file(dict(_stretched(stored, times)), out / WEIGHTS, metadata={"format": "pt"})


def _stretched(stored: dict[str, Tensor], times: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stored.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        first, more = int(match[2]) * times, torch.zeros_like if name.endswith(_ADDING) else torch.clone
        for i in range(times):
            yield f"{match[1]}{first + i}{match[3]}", tensor if i == 0 else more(tensor)
