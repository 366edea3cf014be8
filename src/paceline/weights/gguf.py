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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from .blocks import TYPES, BlockType, StoredRows, dequantise

SUFFIX = ".gguf"
MAGIC, VERSIONS, MAX_DIMENSIONS = b"GGUF", (2, 3), 4
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
    file: GGUF
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


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file rather than a folder."""
    return str(path).endswith(SUFFIX)


def read_gguf(path: str | Path) -> GGUF:
    """Read the header of a file.

    Raises:
        ConfigError: a file that is missing, truncated, contradicts itself, or is one of a model's parts.
        CapabilityError: a file of a version or byte order that is not read here.
    """
    try:
        status = Path(path).stat()
        return _read(Path(path), status.st_size, status.st_mtime_ns)
    except OSError as error:
        wrong = f"it cannot be read ({error.strerror or error})"
        raise ConfigError(f"model {path}", wrong, "check the path") from error


@lru_cache(maxsize=4)
def _read(path: Path, size: int, mtime_ns: int) -> GGUF:
    """Read a file once; size and time of change are part of the key, so that a replaced file is read again."""
    return GGUF(path)


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
        r"tokenizer\.ggml\.\w+_token_id|split\.count|general\.alignment",
        "a whole number",
        lambda value: type(value) is int,
    ),
    (r"tokenizer\.ggml\.add_\w+", "true or false", lambda value: isinstance(value, bool)),
)


class GGUF:
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
        self.tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            if entry[0] in self.tensors:
                self.refuse(f"tensor {shown(entry[0])} is there twice")
            self.tensors[entry[0]] = self._placed(*entry, begin, alignment)
        if (parts := self.metadata.get("split.count", 1)) > 1:
            self.refuse(f"it is one of {parts} parts of a model", "join them: llama-gguf-split --merge FIRST-PART OUT")

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
            self.refuse(f"{key} is {shown(token)}, and there are {count:,} tokens")
        return token

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
