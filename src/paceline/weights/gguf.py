"""GGUF files: metadata, where each tensor lies, and its values. Every value of a header is checked.

A file is mapped. A count that a header states is compared with the bytes that are left, and with the most that is read
here, before anything is made of it, so what is allocated is bounded by the file, or by some tens of megabytes where
that is more. Arrays are turned into Python values when they are read.

Source: the GGUF specification of ggml's repository, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from .blocks import TYPES, BlockType, StoredRows, dequantise

SUFFIX = ".gguf"
MAGIC, VERSIONS, MAX_DIMENSIONS = b"GGUF", (2, 3), 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_REMEDY = "download the file again"
_NAME_BYTES = 65_535  # of a key; tensors' names are shorter
_MOST = 65_536  # keys, and tensors, of a file: Python's objects for one take more bytes than the file needs to name it

# Values of metadata: struct's letters, by number. Texts and arrays have numbers of their own.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
NO_TOKEN = 2**32 - 1  # where an id would stand

# Types of tensors: name, values of a block, bytes of a block; see ggml's ``ggml.c``. Those of `blocks` come from there.
_OTHERS = """0 f32 1 4, 1 f16 1 2, 30 bf16 1 2, 28 f64 1 8, 24 i8 1 1, 25 i16 1 2, 26 i32 1 4, 27 i64 1 8, 9 q8_1 32 40,
10 q2_k 256 84, 11 q3_k 256 110, 15 q8_k 256 292, 16 iq2_xxs 256 66, 17 iq2_xs 256 74, 18 iq3_xxs 256 98,
19 iq1_s 256 50, 21 iq3_s 256 110, 22 iq2_s 256 82, 29 iq1_m 256 56, 34 tq1_0 256 54, 35 tq2_0 256 66"""
TENSOR_TYPES = {kind.number: kind for kind in TYPES}
for _number, _name, _values, _bytes in (entry.split() for entry in _OTHERS.split(",")):
    TENSOR_TYPES[int(_number)] = BlockType(_name, int(_number), int(_values), int(_bytes))
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor, as a header describes it, with its rows in a checkpoint's order."""

    name: str  # the file's
    shape: tuple[int, ...]  # rows first, as torch has it: the reverse of the file's order
    type: BlockType
    file: MappedFile
    start: int  # bytes from the beginning of the file
    source: str = ""  # a checkpoint's name of it
    heads: int = 0  # whose rows are in pairs; 0: they are in order

    def __str__(self) -> str:
        return f"tensor {shown(self.name)} in {self.file.path}"

    @property
    def nbytes(self) -> int:
        """Return the bytes in the file."""
        return math.prod(self.shape) // self.type.values * self.type.bytes

    def stored(self) -> StoredRows:
        """Return the tensor's rows where the file has them."""
        raw = self.raw()
        return StoredRows(self.type, raw, self._order(len(raw)), str(self), self.forget)

    def _order(self, rows: int) -> Tensor:
        """Return [rows] int64 which row of the file comes first, second, ..."""
        order = torch.arange(rows)
        if not self.heads:
            return order
        # Back from pairs (i, i + d/2 side by side) to halves: [heads, d/2, 2] to [heads, 2, d/2].
        return order.view(self.heads, -1, 2).transpose(1, 2).flatten()

    def values(self) -> Tensor:
        """Return the tensor's values in its shape: a plain type as it is, others as float32.

        Raises:
            CapabilityError: a type that the ``gguf`` package does not unpack.
        """
        raw = self.raw()
        if self.heads:
            raw = raw[self._order(len(raw)).numpy()]
        if self.type.name in PLAIN:
            return torch.from_numpy(np.array(raw)).view(PLAIN[self.type.name]).reshape(self.shape)
        try:
            return torch.from_numpy(dequantise(self.type, np.ascontiguousarray(raw))).reshape(self.shape)
        except (NotImplementedError, ValueError) as error:
            wrong = f"the gguf package does not unpack {self.type.name}"
            raise CapabilityError(str(self), wrong, "use a file in another format, as Q4_K_M") from error

    def forget(self) -> None:
        """Let go of the pages of memory that hold it: it can be read again from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
            size = self.start + self.nbytes - start
            if size > 0:
                self.file.data.madvise(mmap.MADV_DONTNEED, start, size)

    def raw(self) -> np.ndarray:
        """Return [rows, bytes of a row] uint8, a view of the mapped file."""
        data = np.frombuffer(self.file.data, np.uint8, self.nbytes, self.start)
        return data.reshape(math.prod(self.shape[:-1]), -1)


class GGUF(NamedTuple):
    """A model's files as one."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]  # of the first part
    tensors: dict[str, GGUFTensor]

    @property
    def path(self) -> Path:
        """Return the file that names the model."""
        return self.paths[0]

    def token_id(self, role: str) -> int | None:
        """Return the id that the file gives a role, as "bos"; None: it gives none.

        Raises:
            ConfigError: an id that no token has.
        """
        key = f"tokenizer.ggml.{role}_token_id"
        token: int = self.metadata.get(key, NO_TOKEN)
        if token == NO_TOKEN:
            return None
        count = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        if not 0 <= token < count:
            wrong = f"{key} is {shown(token)}, and there are {count:,} tokens"
            raise ConfigError(f"GGUF file {self.path}", wrong, "download the file again, or convert it again")
        return token


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file rather than a folder."""
    return str(path).endswith(SUFFIX)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of a model in parts, in order, from any of them; a model in one file is that file.

    Raises:
        ConfigError: a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    if not 1 <= int(match[2]) <= int(count):
        raise ConfigError(str(path), f"there is no part {int(match[2])} of {int(count)}", "restore its name")
    # A missing part is named before a list of 99,999 of them is made: the walk ends at the first.
    parts: list[Path] = []
    for number in range(1, int(count) + 1):
        part = path.with_name(f"{stem}-{number:05d}-of-{count}{SUFFIX}")
        if not part.is_file():
            wrong = f"part {number} of {int(count)} is missing: {part.name}"
            raise ConfigError(f"model {path}", wrong, "put all parts into one folder")
        parts.append(part)
    return tuple(parts)


def gguf_of(place: Path, whole: Callable[[Path], bool]) -> Path | None:
    """Return the GGUF file that an existing file or folder stands for; None: none.

    It is the file itself, the first of its parts, or the only one in a folder that is not a ``whole`` model of another
    kind.

    Raises:
        ConfigError: a file that is not a model, a part that is missing, a folder with several models.
    """
    if place.is_file():
        if not is_gguf(place):
            wrong = "it is a file, and a model is a folder, or a file that ends in .gguf"
            raise ConfigError(f"model {place}", wrong, "name the folder that it is in")
        return parts_of(place)[0]
    files = sorted(place.glob(f"*{SUFFIX}")) if not whole(place) else []
    models = sorted({parts_of(file)[0] for file in files})
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ConfigError(f"model folder {place}", f"it holds {len(models)} models: {names}", "name one of the files")
    return models[0] if models else None


def read_gguf(path: str | Path) -> GGUF:
    """Read the headers of a model's files; ``path`` is the file, or one of its parts.

    Raises:
        ConfigError: a file that is missing, truncated or contradicts itself.
        CapabilityError: a file of a version or byte order that is not read here.
    """
    try:
        parts = parts_of(Path(path))
        return _read_all(tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts))
    except OSError as error:
        wrong = f"it cannot be read ({error.strerror or error})"
        raise ConfigError(f"model {path}", wrong, "check the path") from error


@lru_cache(maxsize=4)
def _read_all(stamped: tuple[tuple[Path, int, int], ...]) -> GGUF:
    """Read files once; size and time of change are part of the key, so that a replaced file is read again."""
    named: dict[str, GGUFTensor] = {}
    files = [MappedFile(path) for path, _, _ in stamped]
    for number, file in enumerate(files):
        count = max(file.metadata.get("split.count", len(files)), 1)  # a merged file has 0
        part = file.metadata.get("split.no", number) if count > 1 else 0
        if (part, count) != (number, len(files)):
            stem = match[1] if (match := _PART.fullmatch(file.path.name)) else file.path.stem
            names = " to ".join(f"{stem}-{n:05d}-of-{count:05d}{SUFFIX}" for n in (1, count))
            wrong = f"it is part {part + 1} of {count} (split.no, split.count), which its name lacks"
            raise ConfigError(str(file.path), wrong, f"put all parts into one folder, and name them {names}")
        for tensor in file.tensors:
            if tensor.name in named:
                file.refuse(f"tensor {shown(tensor.name)} is there twice")
            named[tensor.name] = tensor
    total = files[0].metadata.get("split.tensors.count", len(named))
    if total != len(named):
        files[0].refuse(f"the parts hold {len(named)} tensors, and {shown(total)} are announced")
    return GGUF(tuple(path for path, _, _ in stamped), files[0].metadata, named)


# Types of the keys that are read here; arrays of numbers are checked where they are used.
_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (r"tokenizer\.ggml\.(tokens|merges)", "a list of texts", lambda value: isinstance(value, list)),
    (r"tokenizer\.ggml\.(token_type|scores)", "a list of numbers", lambda value: isinstance(value, np.ndarray)),
    (
        r"tokenizer\.(ggml\.(model|pre)|chat_template)|general\.(architecture|name)|\w+\.rope\.scaling\.type",
        "a text",
        lambda value: isinstance(value, str),
    ),
    (
        r"tokenizer\.ggml\.\w+_token_id|split\.(no|count|tensors\.count)|general\.alignment",
        "a whole number",
        lambda value: type(value) is int,
    ),
    (r"tokenizer\.ggml\.add_\w+", "true or false", lambda value: isinstance(value, bool)),
)


class MappedFile:
    """One file: its metadata and its tensors' places, all of them checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as handle:
            if handle.seek(0, 2) == 0:
                self.refuse("it is empty")
            self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic = self._take(4)
        if magic != MAGIC:
            self.refuse(f"it begins with {magic!r}, and a GGUF file with {MAGIC!r}", "name a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            wrong = f"it has version {version}, or is big-endian; read are 2 and 3, little-endian"
            raise CapabilityError(f"GGUF file {self.path}", wrong, "convert the model again with a newer llama.cpp")
        tensors, pairs = self._count(3 * 8, "tensors", _MOST), self._count(8 + 4 + 1, "keys", _MOST)
        self.metadata: dict[str, Any] = {}  # arrays are views of the file
        for _ in range(pairs):
            key = self._text(_NAME_BYTES)
            self._add(key, self._value(self._number("I"), key))
        entries = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment % 8:
            self.refuse(f"general.alignment is {shown(alignment)}; it must be a multiple of 8")
        begin = -(-self._at // alignment) * alignment
        self.tensors = [self._placed(*entry, begin, alignment) for entry in entries]

    def refuse(self, wrong: str, remedy: str = _REMEDY) -> NoReturn:
        """Report an error of this file.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"GGUF file {self.path}", wrong, remedy)

    def _add(self, key: str, value: Any) -> None:
        if key in self.metadata:
            self.refuse(f"key {shown(key)} is there twice")
        for pattern, rule, fits in _RULES:
            if re.fullmatch(pattern, key) and not fits(value):
                listed = "a list" if isinstance(value, np.ndarray | list) else shown(value)
                self.refuse(f"key {shown(key)} is {listed}, and must be {rule}")
        self.metadata[key] = value

    def _take(self, count: int) -> bytes:
        self._skip(count)
        return self.data[self._at - count : self._at]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self.data):
            self.refuse(f"it is truncated: its header continues beyond its {len(self.data):,} bytes")

    def _number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _count(self, least: int, of: str, most: int | None = None) -> int:
        """Return a count of things that take ``least`` bytes each, at least; there are at most ``most`` of them."""
        count: int = self._number("Q")
        if most is not None and count > most:
            self.refuse(f"it announces {count:,} {of}, and at most {most:,} are read")
        if count * least > len(self.data) - self._at:
            self.refuse(f"it announces {count:,} {of}, and has {len(self.data) - self._at:,} bytes left for them")
        return count

    def _text(self, most: int | None = None) -> str:
        size = self._count(1, "bytes of text")
        if most is not None and size > most:
            self.refuse(f"a name has {size:,} bytes")
        return self._take(size).decode("utf-8", "replace" if most is None else "backslashreplace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            self.refuse(f"key {shown(key)} has a value of type {kind}, which does not exist")
        element = self._number("I")
        if element == _TEXT:
            return self._texts()
        if element not in _SCALARS:
            self.refuse(f"key {shown(key)} is an array of values of type {element}, which are not read")
        size = struct.calcsize("<" + _SCALARS[element])
        count, start = self._count(size, "values"), self._at
        self._skip(count * size)
        return np.frombuffer(self.data, np.dtype("<" + _SCALARS[element]), count, start)

    def _texts(self) -> list[str]:
        count, at, data, size = self._count(8, "texts"), self._at, self.data, struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                start, at = at + 8, at + 8 + size(data, at)[0]
                if at > len(data):  # before all that is left is read
                    break
                texts.append(data[start:at].decode("utf-8", "replace"))
        except (struct.error, OverflowError, IndexError):
            at = len(data) + 1
        self._skip(at - self._at)
        return texts

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of one tensor."""
        name, dimensions = self._text(_NAME_BYTES), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.refuse(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int, alignment: int
    ) -> GGUFTensor:
        what = f"tensor {shown(name)}"
        if number not in TENSOR_TYPES:
            wrong = f"{what} has type {number}, which is not known here"
            raise CapabilityError(f"GGUF file {self.path}", wrong, "use a file in another format")
        kind = TENSOR_TYPES[number]
        if 0 in shape or math.prod(shape) > 2**48:
            self.refuse(f"{what} has the shape {list(shape)}")
        if shape[-1] % kind.values:
            self.refuse(f"{what} has {shape[-1]} values in a row, and a block of {kind.name} {kind.values}")
        if offset % alignment:
            self.refuse(f"{what} begins at {offset}, which is not a multiple of {alignment}")
        tensor = GGUFTensor(name, shape, kind, self, begin + offset)
        if tensor.start + tensor.nbytes > len(self.data):
            wrong = f"{what} ends at byte {tensor.start + tensor.nbytes:,} of {len(self.data):,}: the file is truncated"
            self.refuse(wrong)
        return tensor
