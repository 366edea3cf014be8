"""Which parameters of a decoder a GGUF file fills, and which file a path means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..core.errors import ConfigError
from ..core.options import shown
from .families import DecoderConfig, decoder_config
from .gguf import SUFFIX, GGUFTensor, is_gguf, parts_of, read_gguf
from .gguf_model import config_of, tensors_of
from .weights import Piece, weight_map


def read_pieces(path: Path, config: DecoderConfig) -> list[tuple[Piece, GGUFTensor]]:
    """Where every parameter is; no data is read.

    Raises:
        ConfigError: a tensor that is missing, misshaped or left over.
    """
    wanted = {piece.source: piece for piece in weight_map(config)}
    model = read_gguf(path)
    stored = {tensor.source: tensor for tensor in tensors_of(model)}
    for name in wanted.keys() - stored.keys():
        raise ConfigError(f"GGUF file {path}", f"it misses tensor {name}", "download the file again")
    for name, tensor in stored.items():
        if name not in wanted:
            wrong = f"it has tensor {shown(tensor.name)}, for which this architecture has no place here"
            raise ConfigError(f"GGUF file {path}", wrong, "use another model")
        if tensor.shape != wanted[name].shape:
            wrong = f"tensor {shown(tensor.name)} is {list(tensor.shape)}, not {list(wanted[name].shape)}"
            raise ConfigError(f"GGUF file {path}", f"{wrong} as its metadata say", "convert the model again")
    return [(wanted[name], tensor) for name, tensor in stored.items()]


def read_gguf_config(path: Path) -> DecoderConfig:
    """The decoder's configuration of a GGUF file.

    Raises:
        ConfigError, CapabilityError: what the file says cannot be, or is not built.
    """
    model = read_gguf(path)
    try:
        return replace(decoder_config(config_of(model)), norm_offset=0.0)  # the converter has added it
    except ConfigError as error:  # CapabilityError is one
        named = error.asked.replace("config.json", f"GGUF file {path}")
        raise type(error)(named, error.wrong, error.remedy) from error


def gguf_of(place: Path, whole: Callable[[Path], bool]) -> Path | None:
    """The GGUF file that a path means: itself, the first of its parts, or the only one in a folder; None: none.

    Args:
        place: an existing file or folder.
        whole: whether a folder is a model of another kind.

    Raises:
        ConfigError: a file that is no model, a part that is missing, a folder with several models.
    """
    if place.is_file():
        if not is_gguf(place):
            wrong = "it is a file, and a model is a folder, or a file that ends in .gguf"
            raise ConfigError(f"model {place}", wrong, "name the folder that it is in")
        return parts_of(place)[0]
    files = sorted(place.glob(f"*{SUFFIX}")) if not whole(place) else []
    found = sorted({parts_of(file)[0] for file in files})
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"model folder {place}", f"it holds {len(found)} models: {names}", "name one of the files")
    return found[0] if found else None
