"""From a Hugging Face folder or hub name to a `Decoder` ready to run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..attention.base import AttentionBackend
from ..core.errors import CapabilityError, ConfigError
from .decoder import Decoder
from .families import DecoderConfig, Piece, decoder_config, token_ids, weight_map
from .linear import Quant

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# All that is fetched from the hub: no code, and no weights in formats that can run code.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_RESTORE = "download or copy the checkpoint again"


def load_model(
    path: str | Path,
    *,
    attention: AttentionBackend,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    exact: bool = False,
    native: bool = False,
) -> Decoder:
    """Load the checkpoint in a local folder.

    Args:
        path: a folder, as `resolve_folder` gives it.
        attention: computes attention over the cache.
        dtype: "bfloat16", "float16", "float32", "float64", "int8" (int8 weights, bf16 activations), or
            "auto" for what the checkpoint is stored in.
        device: "cpu", "cuda" or "cuda:1".
        exact, native: see `Decoder`.

    Raises:
        ConfigError: files that are missing, broken or do not fit the configuration.
        CapabilityError: a dtype, device or model option that is not available.
    """
    folder = Path(path)
    config = read_config(folder)
    place = parse_device(device)
    kind, quant = parse_dtype(dtype, config)
    decoder = Decoder(config, attention, dtype=kind, device=place, exact=exact, quant=quant, native=native)
    load_weights(decoder, folder)
    return decoder.finish()


def read_config(folder: Path) -> DecoderConfig:
    """The decoder's configuration; the end-of-text ids of ``generation_config.json`` go before its own."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder}", "there is no such folder", "name a Hugging Face model folder")
    values = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if isinstance(values, dict) and generation.is_file():
        given = _read_json(generation)
        ends = given.get("eos_token_id") if isinstance(given, dict) else None
        if ends is not None and token_ids("eos_token_id", ends):
            values = {**values, "eos_token_id": ends}
    return decoder_config(values)


def parse_dtype(dtype: str | torch.dtype, config: DecoderConfig) -> tuple[torch.dtype, Quant | None]:
    """The dtype of the activations, and how the weights are quantised."""
    name = str(dtype).removeprefix("torch.")
    if name == "int8":
        return torch.bfloat16, "int8"
    if name == "auto":
        name = config.checkpoint_dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}", "no such dtype", f"use one of: auto, int8, {', '.join(DTYPES)}")
    return DTYPES[name], None


def parse_device(device: str | torch.device) -> torch.device:
    """The device, once it is known to be there."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}", "no such device", "use 'cpu' or 'cuda'") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}", "the engine runs on cpu and cuda", "use 'cpu' or 'cuda'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise CapabilityError(f"device={device!r}", found, "use device='cpu', or a CUDA build of torch and a GPU")
    return place


# --- weights --------------------------------------------------------------------------------------------------


def load_weights(decoder: Decoder, folder: Path) -> None:
    """Fill the decoder's parameters from the folder's safetensors files.

    Raises:
        ConfigError: a file or tensor that is missing, broken, misshaped or left over.
    """
    files = _weight_files(folder)
    wanted: dict[str, Piece] = {piece.source: piece for piece in weight_map(decoder.config)}
    parameters = {name: value.data for name, value in decoder.named_parameters()}
    seen: set[str] = set()
    left_over: list[str] = []
    heads: list[tuple[Tensor, Path]] = []
    for file in files:
        for name, tensor in _tensors(file):
            source = name.removeprefix("model.")
            if source in wanted:
                _fill(parameters[wanted[source].into], wanted[source], tensor, file)
                seen.add(source)
            elif source == "lm_head.weight":
                heads.append((tensor, file))
            elif not source.endswith((".rotary_emb.inv_freq", ".masked_bias")):  # buffers of old checkpoints
                left_over.append(name)
    _refuse(folder, "misses", sorted(set(wanted) - seen))
    _refuse(folder, "has unexpected", left_over)
    for head, file in heads:
        _check_tied(decoder, head, file)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ConfigError(
            f"the weights in {folder}",
            "they are pickle files (.bin, .pt), which can run code when they are read",
            "convert them once with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise ConfigError(f"model folder {folder}", f"it has neither {WEIGHTS} nor {INDEX}", _RESTORE)


def _shards(folder: Path) -> list[Path]:
    index = _read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise ConfigError(str(folder / INDEX), "it has no weight_map", _RESTORE)
    shards = sorted(set(names.values()))
    outside = [n for n in shards if Path(n).name != n]
    if outside:
        raise ConfigError(str(folder / INDEX), f"shard {outside[0]!r} is not in the folder", _RESTORE)
    missing = [n for n in shards if not (folder / n).is_file()]
    if missing:
        raise ConfigError(f"model folder {folder}", f"shard {missing[0]} is missing", _RESTORE)
    return [folder / n for n in shards]


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with _open(file) as opened:
        for name in opened.keys():  # noqa: SIM118  (the handle is no mapping)
            yield name, _get(opened, name, file)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"weights {file}", f"truncated or not safetensors ({error})", _RESTORE) from error
    with handle as opened:
        yield opened


def _get(opened: Any, name: str, file: Path) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(name)
        return tensor
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ConfigError(f"tensor {name} in {file}", f"it cannot be read ({error})", _RESTORE) from error


def _fill(parameter: Tensor, piece: Piece, tensor: Tensor, file: Path) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ConfigError(
            f"tensor {piece.source} in {file}",
            f"it is {tensor.dtype}, a quantised weight",
            "use the original checkpoint, or dtype='int8'",
        )
    rows = parameter if piece.rows is None else parameter[piece.at : piece.at + piece.rows]
    if tensor.shape != rows.shape:
        raise ConfigError(
            f"tensor {piece.source} in {file}",
            f"its shape is {list(tensor.shape)}, config.json asks for {list(rows.shape)}",
            "use the config.json that belongs to these weights",
        )
    rows.copy_(tensor)


def _check_tied(decoder: Decoder, head: Tensor, file: Path) -> None:
    """A head stored beside a tied embedding must be that embedding, or one of the two would be lost."""
    if not torch.equal(head.to(decoder.dtype), decoder.embedding.data.to("cpu")):
        raise ConfigError(
            f"lm_head.weight in {file}",
            "config.json ties the head to the embedding, and the two differ",
            "set tie_word_embeddings to false in config.json",
        )


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"the checkpoint in {folder}",
            f"it {verb} {'tensors' if len(names) > 1 else 'tensor'} {', '.join(names[:3])}{more}",
            "use the config.json that belongs to these weights, or get the whole checkpoint",
        )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model folder {file.parent}", f"it has no {file.name}", _RESTORE) from error
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"not readable as JSON ({error})", _RESTORE) from error


# --- names and tokenizers -------------------------------------------------------------------------------------


def resolve_folder(name_or_path: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """The folder of a model: an embedded model's name, a local folder, or a hub name (which is downloaded).

    Args:
        name_or_path: ``paceline-small``, ``./my-model``, ``org/name``.
        revision: branch, tag or commit on the hub.
        offline: use what is cached; the environment's HF_HUB_OFFLINE does the same.

    Raises:
        ConfigError: nothing of that name, or the hub cannot be reached.
    """
    from .. import zoo

    name = str(name_or_path)
    found = zoo.find(name)
    if found is None and Path(name).expanduser().is_dir():
        found = Path(name).expanduser()
    if found is None:
        return _from_hub(name, revision, offline or _env_offline())
    if revision is not None:
        raise ConfigError(f"revision={revision!r}", f"{name} is a local model", "leave revision out")
    return found


def _env_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _from_hub(name: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name!r}", "there is no such folder", "check the path")
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), local_files_only=offline)
        )
    except HFValidationError as error:
        raise ConfigError(f"model {name!r}", f"neither a folder nor a hub name ({error})", "check the name") from error
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local cache, and the hub is " + ("switched off" if offline else "out of reach")
        remedy = "download it once without offline" if offline else "check the network, or name a local folder"
        raise ConfigError(f"model {name!r}", f"not a folder nor an embedded model, and {reason}", remedy) from error
    except Exception as error:  # the client's transport library, and so its errors, differ by version
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name!r}", f"the hub does not give it ({first})", "check name, revision, access"
        ) from error


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's Hugging Face tokenizer; code that a checkpoint brings is never run.

    Raises:
        ConfigError: no tokenizer there, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds, plain Exception among them
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"tokenizer in {folder}", f"it cannot be read ({first})", _RESTORE) from error
