"""Checkpoints that studies write: a model whose added layers add zero, and a Llama whose head is stored on its own."""

from __future__ import annotations

import atexit
import json
import runpy
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from paceline.core.errors import CapabilityError
from paceline.weights.gguf import is_gguf
from paceline.weights.source import resolve_folder

WEIGHTS, HEAD = "model.safetensors", "lm_head.weight"
_TOOL = Path(__file__).resolve().parents[2] / "tools" / "stretch.py"


@cache
def stretched(model: str, times: int) -> str:
    """Return a model with ``times`` layers for each of its own (tools/stretch.py); its folder goes with the process.

    Raises:
        ConfigError, CapabilityError: a model that cannot be stretched.
    """
    if times == 1:
        return model
    scratch = Path(tempfile.mkdtemp(prefix="paceline-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    suffix = ".gguf" if is_gguf(resolve_folder(model)) else ""
    name = f"{Path(model).name.removesuffix(suffix)}-{times}x{suffix}"
    return str(runpy.run_path(str(_TOOL))["write_stretched"](model, scratch / name, times))


def write_untied(folder: Path, out: Path) -> None:
    """Write a Llama whose head is no longer tied, for other engines.

    A quantiser can then give it the type of a product and leave the table of embeddings as it is, which is how Paceline
    quantises a plain checkpoint.

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
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    stored = load_file(folder / WEIGHTS)
    stored.setdefault(HEAD, stored["model.embed_tokens.weight"].clone())
    save_file(stored, out / WEIGHTS, metadata={"format": "pt"})
