"""Messages as bytes, without pickle: fields as JSON, tensors as they lie in memory.

A frame, little-endian:

    head      crc32 of all up to the tensors' bytes, version, lengths of the name and the fields, number of tensors
    name      of the message, ASCII
    fields    a JSON object
    tensors   of each: dtype, number of dimensions, the dimensions
    padding   with zeros up to a multiple of 64
    bytes     of each tensor, contiguous, padded likewise

`Codec` makes dataclasses of frames and checks every field against its type hint. Whatever bytes come in, the answer is
a message or a `FrameError`. JSON is written and read by pydantic, whose Rust core checks while it reads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from ..core.errors import PacelineError

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 1  # of frames and messages: both ends must speak the same one
HEAD = struct.Struct("<IBBHI")
TENSOR = struct.Struct("<BB")
ALIGNMENT = 64  # bytes: a cache line, and more than any dtype wants
MOST_DIMENSIONS = 8
MOST_ELEMENTS = 2**40
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
_EMPTY = bytes(ALIGNMENT)
Buffer = bytes | bytearray | memoryview


class FrameError(PacelineError):
    """Bytes that are no message: torn, cut short, of another version, or not what the message holds."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message, before anybody knows what its fields mean."""

    name: str
    fields: bytes  # JSON
    tensors: Sequence[Tensor] = ()


def encode(frame: Frame) -> list[Buffer]:
    """A frame as parts to be sent one behind the other; tensors' bytes are not copied where they are contiguous on the
    CPU, and must not change until the parts are sent."""
    name = frame.name.encode("ascii")
    parts: list[Buffer] = [name, frame.fields]
    bodies: list[Buffer] = []
    for tensor in frame.tensors:
        parts.append(_shape(tensor))
        raw = _raw(tensor)
        bodies += [raw, _EMPTY[: -len(raw) % ALIGNMENT]]
    length = HEAD.size + sum(map(len, parts))
    if bodies:
        parts.append(_EMPTY[: -length % ALIGNMENT])
    counts = PROTOCOL, len(name), len(frame.tensors), len(frame.fields)
    parts.insert(0, HEAD.pack(0, *counts)[4:])
    head = b"".join(parts)
    return [struct.pack("<I", zlib.crc32(head)), head, *bodies]


def decode(data: bytearray) -> Frame:
    """The frame that these bytes are; its tensors share their memory.

    Raises:
        FrameError: they are none.
    """
    if len(data) < HEAD.size:
        raise FrameError(f"a frame of {len(data)} bytes is cut short")
    crc, version, name_length, count, fields_length = HEAD.unpack_from(data)
    if version != PROTOCOL:
        raise FrameError(f"a frame of protocol {version}, this is protocol {PROTOCOL}")
    at = HEAD.size + name_length + fields_length
    shapes, end = _shapes(data, at, count)
    end += -end % ALIGNMENT if count else 0
    if len(data) < end or zlib.crc32(memoryview(data)[4:end]) != crc:
        raise FrameError("a torn frame: what is in it is not what was sent")
    whole = end + sum(_up(_size(*shape)) for shape in shapes)
    if len(data) != whole:
        raise FrameError(f"a frame of {len(data)} bytes, of which it says {whole}")
    name = bytes(data[HEAD.size : HEAD.size + name_length])
    if not name.isascii():
        raise FrameError("a frame whose name is no text")
    return Frame(name.decode("ascii"), bytes(data[HEAD.size + name_length : at]), _tensors(data, end, shapes))


def _up(size: int) -> int:
    return size + -size % ALIGNMENT


def _size(dtype: int, shape: tuple[int, ...]) -> int:
    return prod(shape) * _ITEM_BYTES[dtype]


_ITEM_BYTES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 1)  # of `DTYPES`


def _shape(tensor: Tensor) -> bytes:
    """A tensor's dtype and dimensions.

    Raises:
        FrameError: of a kind that no frame holds.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
        raise FrameError(f"a tensor of {name} with {tensor.dim()} dimensions goes into no frame")
    return struct.pack(f"<BB{tensor.dim()}q", DTYPES.index(name), tensor.dim(), *tensor.shape)


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in the CPU's memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    whole: Any = flat.view(torch.uint8).numpy()
    return memoryview(whole)


def _shapes(data: bytearray, at: int, count: int) -> tuple[list[tuple[int, tuple[int, ...]]], int]:
    """Dtype and shape of each tensor, and where their list ends.

    Raises:
        FrameError: it goes beyond the data, or says what no tensor is.
    """
    found = []
    for _ in range(count):
        if at + TENSOR.size > len(data):
            raise FrameError("a frame is cut short in front of its tensors")
        dtype, dims = TENSOR.unpack_from(data, at)
        at += TENSOR.size
        if dtype >= len(DTYPES) or dims > MOST_DIMENSIONS or at + 8 * dims > len(data):
            raise FrameError("a frame with a tensor of no known kind")
        shape = struct.unpack_from(f"<{dims}q", data, at)
        at += 8 * dims
        if any(n < 0 for n in shape) or prod(shape) > MOST_ELEMENTS:
            raise FrameError(f"a frame with a tensor of shape {list(shape)}")
        found.append((dtype, shape))
    return found, at


def _tensors(data: bytearray, at: int, shapes: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    if not shapes:
        return []
    import torch

    found = []
    for dtype, shape in shapes:
        kind, count = getattr(torch, DTYPES[dtype]), prod(shape)
        held = torch.uint8 if kind == torch.bool else kind  # a byte that is neither 0 nor 1 is no truth value
        flat = torch.frombuffer(data, dtype=held, count=count, offset=at) if count else torch.empty(0, dtype=held)
        found.append((flat if held == kind else flat != 0).reshape(shape))
        at += _up(_size(dtype, shape))
    return found


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one message class is written and read."""

    made: type[Any]
    adapter: TypeAdapter[Any]  # checks its fields that are no tensors
    tensors: tuple[str, ...]  # names of its fields that are
    plain: tuple[str, ...]


class Codec:
    """Messages of some dataclasses as bytes, and back.

    A field whose type hint is ``Tensor`` goes as a tensor; all others must be what JSON can say, and are checked by
    their type hints, strictly, with pydantic's bounds in ``Annotated``.

    Args:
        kinds: the classes that may come, by name.
    """

    def __init__(self, **kinds: type[Any]) -> None:
        self._kinds = {name: _kind(made) for name, made in kinds.items()}
        self._names = {made: name for name, made in kinds.items()}

    def encode(self, message: Any) -> list[Buffer]:
        """A message as parts to be sent one behind the other; see `encode`."""
        name = self._names[type(message)]
        kind = self._kinds[name]
        plain = to_json({field: getattr(message, field) for field in kind.plain}, inf_nan_mode="constants")
        return encode(Frame(name, plain, [getattr(message, field) for field in kind.tensors]))

    def decode(self, data: bytearray) -> Any:
        """The message that these bytes are.

        Raises:
            FrameError: they are none that may come.
        """
        frame = decode(data)
        kind = self._kinds.get(frame.name)
        if kind is None:
            known = ", ".join(self._kinds)
            raise FrameError(f"a message {frame.name[:40]!r} that is not expected here (these are: {known})")
        if len(frame.tensors) != len(kind.tensors):
            raise FrameError(f"a message {frame.name!r} with {len(frame.tensors)} tensors, not {len(kind.tensors)}")
        try:
            plain = kind.adapter.validate_json(frame.fields)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, fault["loc"]))
            raise FrameError(f"a message {frame.name!r} whose {place or 'fields'} cannot be: {fault['msg']}") from None
        return kind.made(**plain, **dict(zip(kind.tensors, frame.tensors, strict=True)))


def _kind(made: type[Any]) -> _Kind:
    hints = _hints(made)
    tensors = tuple(name for name, hint in hints.items() if hint is _AS_TENSOR)
    plain = {name: hint for name, hint in hints.items() if hint is not _AS_TENSOR}
    make: Any = TypedDict
    shape = make(made.__name__, plain)
    shape.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    return _Kind(made, TypeAdapter(shape), tensors, tuple(plain))


_AS_TENSOR = object()


def _hints(made: type[Any]) -> dict[str, Any]:
    """Type hints of a dataclass's fields; those of tensors without torch, which may not be loaded yet."""
    texts = {field.name: str(field.type) for field in fields(made)}
    others = {name for name, text in texts.items() if text != "Tensor"}
    found = get_type_hints(made, localns={"Tensor": Any}, include_extras=True)
    return {name: found[name] if name in others else _AS_TENSOR for name in texts}
