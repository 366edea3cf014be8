"""A model that the user names: its folder, its configuration, its tokenizer, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..core.errors import CapabilityError, ConfigError
from ..core.options import did_you_mean, shown
from ..model.families import DecoderConfig, decoder_config
from ..model.linear import QUANTS, Quant
from . import generation, zoo
from .files import is_file, opened, read_json
from .gguf import is_gguf, read_gguf
from .gguf_model import read_gguf_config
from .gguf_tokenizer import load_gguf_tokenizer
from .hub import env_offline, first_line, from_hub, local

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
RESTORE = "download or copy the checkpoint again"
MODEL, HEAD = "draft_model", "eagle"  # drafters that read a config.json next to tensors
READERS = {  # files that one drafter alone reads
    "lyanna.json": "lyanna",
    "medusa.json": "medusa",
    "medusa_lm_head.safetensors": "medusa",
    "medusa_lm_head.pt": "medusa",
    "spire.json": "spire",
    "streams.json": "streams",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose configuration was read, and nothing else."""

    name: str
    folder: Path  # or GGUF file
    shape: DecoderConfig
    dtype: torch.dtype  # of the activations
    quant: Quant | None  # how the weights are stored

    def tokenizer(self) -> Any:
        """Return its tokenizer, or None.

        Raises:
            ConfigError: it cannot be read.
        """
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        if not is_gguf(self.folder) and not any(is_file(self.folder / name) for name in names):
            return None
        return load_tokenizer(self.folder, self.shape.family)


def resolve(
    name: str | Path, dtype: str | torch.dtype = "auto", revision: str | None = None, offline: bool = False
) -> Source:
    """Find the model of a name, and read its configuration.

    Args:
        name, revision, offline: as of `resolve_folder`.
        dtype: as of `parse_dtype`.

    Raises:
        ConfigError: there is no such model, or it cannot be used.
    """
    folder = resolve_folder(name, revision, offline)
    if (reader := reader_of(folder)) not in (None, MODEL):
        also = ", or give it as an application" if reader == "streams" else ""
        wrong = f"{folder} holds weights of the drafter {reader!r}, not a model"
        raise ConfigError(f"model {str(name)!r}", wrong, f"write drafter='{reader}:{name}'{also}")
    shape = read_config(folder)
    return Source(str(name), folder, shape, *parse_dtype(dtype, shape))


def resolve_folder(name_or_path: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """Return the folder of a model: an embedded model's name, a local folder, or a hub name.

    A hub name (``org/name``) is downloaded; ``offline``, as HF_HUB_OFFLINE, uses what is cached.

    Raises:
        ConfigError: nothing of that name, or the hub cannot be reached.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip() or "\0" in str(name_or_path):
        raise ConfigError(f"model {shown(name_or_path)}", "not a model's name", "name an embedded model or a folder")
    name = str(name_or_path)
    folder = zoo.find(name) or local(name)
    if folder is None and is_gguf(name):
        raise ConfigError(f"model {shown(name)}", "there is no such file", "check the path")
    if folder is None:
        try:
            return from_hub(name, revision, offline or env_offline())
        except ConfigError as e:
            remedy = did_you_mean(name, [entry.name for entry in zoo.available()])
            raise ConfigError(e.subject, e.wrong, remedy + e.remedy[:1].upper() + e.remedy[1:]) from e
    if revision is not None:
        raise ConfigError(f"revision={revision!r}", f"{name} is a local model", "leave revision out")
    return folder


def reader_of(folder: Path) -> str | None:
    """Return the name of the drafter that reads the files of a folder, `MODEL` for a model; None: not known."""
    for file, kind in READERS.items():
        if is_file(folder / file):
            return kind
    if is_gguf(folder):
        return MODEL
    tensors: list[str] = []
    try:
        if is_file(index := folder / "model.safetensors.index.json"):
            tensors = [*read_json(index, "")["weight_map"]]
        elif is_file(weights := folder / "model.safetensors"):
            with opened(weights, "") as file:
                tensors = [*file.keys()]
        names = {name.removeprefix("model.") for name in tensors}
        if "norm.weight" in names and "fc.weight" not in names:
            return MODEL
        return (
            HEAD if "fc.weight" in names or "speculators_model_type" in read_json(folder / "config.json", "") else None
        )
    except (ConfigError, TypeError, LookupError):  # loading it reports this
        return None


def read_config(folder: Path) -> DecoderConfig:
    """Return the decoder's configuration; the end-of-text ids of `generation` precede its own."""
    if is_gguf(folder):
        return read_gguf_config(folder)
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder}", "there is no such folder", "name a Hugging Face model folder")
    if not is_file(folder / "config.json"):
        raise ConfigError(f"model folder {folder}", "it has no config.json", RESTORE)
    values = read_json(folder / "config.json", RESTORE)
    ends = generation.ends(folder)
    if not ends or not isinstance(values, dict):
        return decoder_config(values)
    return replace(decoder_config({**values, "eos_token_id": None}), eos_ids=ends)


def parse_dtype(dtype: str | torch.dtype, config: DecoderConfig) -> tuple[torch.dtype, Quant | None]:
    """Return the dtype of the activations, and how the weights are quantised."""
    name = check_dtype(dtype)
    if name == "auto":
        name = check_dtype(config.checkpoint_dtype or "float32", "config.json: dtype")
    if name in QUANTS:
        return torch.bfloat16, cast("Quant", name)
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype={name!r}", "there is no such dtype", f"use one of: {', '.join(DTYPES)}")
    return DTYPES[name], None


def check_dtype(dtype: str | torch.dtype, subject: str = "dtype") -> str:
    """Return the name of a dtype, checked.

    Raises:
        ConfigError: there is no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in (*DTYPES, *QUANTS, "auto"):
        names = ", ".join(("auto", *QUANTS, *DTYPES))
        raise ConfigError(f"{subject}={shown(name)}", "no such dtype", f"use one of: {names}")
    return name


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device, checked to be present."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={shown(device)}", "there is no such device", "use 'cpu' or 'cuda'") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={shown(device)}", "the engine runs on 'cpu' and 'cuda' alone", "use 'cpu' or 'cuda'")
    if place.type == "cpu" and place.index:
        raise ConfigError(f"device={shown(device)}", "the CPU is one device", "use 'cpu', and threads=... for cores")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        devices = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise CapabilityError(f"device={device!r}", devices, "use device='cpu', or a CUDA build of torch and a GPU")
    return place


def load_tokenizer(folder: str | Path, family: str = "") -> Any:
    """Return the folder's Hugging Face tokenizer; code of a checkpoint is never run.

    Raises:
        ConfigError: no tokenizer there, or one that cannot be read.
    """
    if is_gguf(folder):
        return load_gguf_tokenizer(read_gguf(folder))
    try:
        if family in ("llama", "paceline_tracks") and _plain_tokenizer(Path(folder)):
            from transformers import TokenizersBackend

            tokenizer = TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        # Some settings of a file (truncation, padding) are taken back in the first use: not while threads use it.
        tokenizer.encode("")
        if isinstance(template := tokenizer.chat_template, str):
            tokenizer.chat_template = template.removeprefix("\ufeff")  # some editors begin a file with this mark
        return tokenizer
    except Exception as error:  # transformers and tokenizers raise many kinds, plain Exception among them
        raise ConfigError(f"tokenizer in {folder}", f"it cannot be read ({first_line(error)})", RESTORE) from error


def _plain_tokenizer(folder: Path) -> bool:
    """Return whether `AutoTokenizer` would choose transformers' plain class for a Llama.

    `AutoTokenizer` imports torch's compiler to find out: half of the time in which a small model starts.
    """
    file = folder / "tokenizer_config.json"
    values = read_json(file, RESTORE) if is_file(file) else None
    if not isinstance(values, dict) or "auto_map" in values:
        return False
    return values.get("tokenizer_class") == "TokenizersBackend"
