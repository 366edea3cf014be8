"""Reading untrusted files: JSON with any content, and the headers of safetensors files.

Nothing here trusts a size that a file states: JSON is bounded before it is read, and of weights the header alone
is read, whose offsets and sizes the safetensors library checks against the file's true length.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown, suggest
from .gguf import is_gguf, read_gguf
from .hashing import content_hash

FINGERPRINT = "paceline_fingerprint"  # in a checkpoint of the same function as another one: that one's
MAX_JSON_BYTES = 64 * 2**20  # many times the largest index of shards that is known


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' word: "BF16", "F32", "I8"

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def is_file(path: Path) -> bool:
    """Return whether there is such a file; a path that cannot be one (too long, a NUL in it) is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_json(file: Path, remedy: str, wrong: str = "not readable as JSON") -> Any:
    """Read a JSON file; ``remedy`` and ``wrong`` are of the message where it cannot be read.

    Raises:
        ConfigError: not JSON, nested too deep, or too large.
    """
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes, {MAX_JSON_BYTES:,} are the most")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), f"{wrong} ({error})", remedy) from error


def fill(kind: type[Any], values: Mapping[str, Any], subject: str, remedy: str = "") -> Any:
    """Return a dataclass from a table of its fields; a list fills a tuple, a whole number a fraction.

    Args:
        subject, remedy: of the message where that cannot be.

    Raises:
        ConfigError: unknown or missing entries, wrong types, and what the dataclass itself refuses.
    """
    names = [f.name for f in fields(kind)]
    if unknown := sorted(values.keys() - {*names}):
        wrong = f"unknown entry {shown(unknown[0])}"
        raise ConfigError(subject, wrong, remedy or suggest(unknown[0], sorted(names), "option"))
    try:
        # As JSON: strict, but for lists, which are all that TOML and JSON have in place of tuples.
        return TypeAdapter(kind).validate_json(json.dumps(dict(values), default=str), strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # the dataclass's own
            raise cause from error
        name, words = ".".join(map(str, fault["loc"])), fault["msg"][:1].lower() + fault["msg"][1:]
        wrong = f"{name} is missing" if fault["type"] == "missing" else f"{name}={shown(fault['input'])}: {words}"
        raise ConfigError(subject, wrong, remedy or "correct it") from error


@contextmanager
def opened(file: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file, its header checked against its length.

    Raises:
        ConfigError: truncated, not safetensors, or with a header that does not fit the file.
    """
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"weights {file}", f"the file is truncated or not safetensors ({error})", remedy) from error
    except (MemoryError, RuntimeError) as error:  # torch's word for it: of addresses, as a file is mapped, not read
        if not is_out_of_memory(error):
            raise
        size = f"its {file.stat().st_size / 2**30:.1f} GiB are more than this process may map"
        raise ConfigError(f"weights {file}", size, "use a smaller model, or raise the limit (ulimit -v)") from error
    with handle as tensors:
        yield tensors


def get_tensor(tensors: Any, stored: StoredTensor, remedy: str, take: tuple[slice, ...] = ()) -> Tensor:
    """Return one tensor of an `opened` file, or a part of it.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        tensor: Tensor = tensors.get_slice(stored.name)[take] if take else tensors.get_tensor(stored.name)
        return tensor
    except (SafetensorError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"tensor {stored.name} in {stored.file}", f"it cannot be read ({error})", remedy) from error


def stored_tensors(files: Iterable[Path], remedy: str) -> list[StoredTensor]:
    """Return the headers of safetensors files; no data is read.

    Raises:
        ConfigError: as `opened`.
    """
    listed = []
    for file in files:
        with opened(file, remedy) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (the handle is not a mapping)
                part = tensors.get_slice(name)
                listed.append(StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype()))
    return listed


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, to use again
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no Linux: the allocator has the last word
        return None
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: torch's allocator of the CPU raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in ("alloc", "out of memory", "mmap"))
    )


def fingerprint(folder: str | Path) -> str:
    """Return the sha256 over a target checkpoint: config, index of shards where it has one, and all bytes of weights.

    These are read once; see `hashing`. A checkpoint that names another one's (`FINGERPRINT`) has that.

    Raises:
        ConfigError: no config or no weights there, or they cannot be read.
    """
    place = Path(folder)
    if is_gguf(place):
        file = read_gguf(place)
        return str(file.metadata.get(FINGERPRINT) or _digest((file.path,), place))
    files = sorted(file for file in place.glob("*.safetensors") if is_file(file))
    if not files or not is_file(place / "config.json"):
        raise ConfigError(f"model folder {place}", "it lacks config.json or *.safetensors", "name a model folder")
    indices = sorted(file for file in place.glob("*.safetensors.index.json") if is_file(file))
    values = read_json(place / "config.json", "restore it")
    named = values.get(FINGERPRINT) if isinstance(values, dict) else None
    return str(named or _digest((place / "config.json", *indices, *files), place))


def _digest(files: Iterable[Path], place: Path) -> str:
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} {content_hash(file)}\n".encode())
    except OSError as error:
        wrong = f"{error.filename or place} cannot be read ({error.strerror or error})"
        raise ConfigError(f"model folder {place}", wrong, "restore the file, or name another folder") from error
    return digest.hexdigest()


def check_target(subject: str, config: Any, name: str, shape: Any = None, mark: str | None = None) -> None:
    """Refuse what was trained for another target.

    Args:
        subject: the beginning of the message.
        config: facts of the target that it was trained for: its ``d_model``, ``vocab_size`` and perhaps
            ``num_layers``, its name ``target`` and its ``fingerprint``, both of which may be empty.
        name: of the target.
        shape: an object with its ``num_layers``, ``d_model`` and ``vocab_size``; None: not checked.
        mark: the `fingerprint` of its checkpoint; None: not checked.

    Raises:
        CapabilityError: another shape or other weights.
    """
    trained_for, remedy = config.target or "another model", f"use one that was trained for {name}, or train one"
    for field in ("num_layers", "d_model", "vocab_size") if shape is not None else ():
        ours = getattr(shape, field)
        theirs = getattr(config, field, ours)
        if theirs != ours:
            raise CapabilityError(
                subject, f"it was trained for {trained_for}, and has {field}={theirs}, {name} has {ours}", remedy
            )
    if config.fingerprint and mark is not None and config.fingerprint != mark:
        raise CapabilityError(subject, f"trained for {trained_for}, whose weights differ from those of {name}", remedy)
