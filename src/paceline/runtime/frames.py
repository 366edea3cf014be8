"""Messages as bytes, without pickle: fields as JSON, tensors as they lie in memory.

A frame, little-endian:

    head      crc32 of all up to the tensors' bytes, version, lengths of the next two
    what      JSON: the message's class, and dtype and shape of each tensor
    fields    a JSON object
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
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from ..core.errors import PacelineError

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 3  # of frames and messages: both ends must speak the same one
HEAD = struct.Struct("<IIII")
ALIGNMENT = 64  # bytes: a cache line, and more than any dtype wants
MOST_DIMENSIONS = 8
MOST_ELEMENTS = 2**40
DType = Literal["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
DTYPES: tuple[DType, ...] = get_args(DType)
_Shape = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_DIMENSIONS)]
_WHAT: TypeAdapter[tuple[str, list[tuple[DType, _Shape]]]] = TypeAdapter(tuple[str, list[tuple[DType, _Shape]]])
_EMPTY = bytes(ALIGNMENT)
Buffer = bytes | bytearray | memoryview


class FrameError(PacelineError):
    """Bytes that are no message: torn, cut short, of another version, or not what the message holds."""


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _what(tensor: Tensor) -> tuple[str, list[int]]:
    """A tensor's dtype and shape.

    Raises:
        FrameError: of a kind that no frame holds.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
        raise FrameError(f"a tensor of {name} with {tensor.dim()} dimensions goes into no frame")
    return name, [*tensor.shape]


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in the CPU's memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    whole: Any = flat.view(torch.uint8).numpy()
    return memoryview(whole)


def _tensors(data: bytearray, at: int, shapes: Sequence[tuple[DType, list[int]]]) -> list[Tensor]:
    """Tensors that share the memory of these bytes, from a place on.

    Raises:
        FrameError: they have other sizes, or one that no tensor has.
    """
    if shapes:
        import torch
    found = []
    for dtype, shape in shapes:
        kind, count = getattr(torch, dtype), prod(shape)
        size = count * kind.itemsize
        if prod(n or 1 for n in shape) > MOST_ELEMENTS:
            raise FrameError(f"a frame with a tensor of shape {shape}")
        if at + size <= len(data):
            held = torch.uint8 if dtype == "bool" else kind  # a byte that is neither 0 nor 1 is no truth value
            flat = torch.frombuffer(data, dtype=held, count=count, offset=at) if count else torch.empty(0, dtype=held)
            found.append((flat if held == kind else flat != 0).reshape(shape))
        at += size + _padding(size)
    if at != len(data):
        raise FrameError(f"a frame of {len(data)} bytes, of which it says {at}")
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
        kinds: the classes that may come, each of another name.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {made.__name__: _kind(made) for made in kinds}

    def encode(self, message: Any) -> list[Buffer]:
        """A message as parts to be sent one behind the other; tensors' bytes are not copied where they are contiguous
        on the CPU, and must not change until the parts are sent."""
        kind = self._kinds[type(message).__name__]
        tensors = [getattr(message, field) for field in kind.tensors]
        what = to_json((kind.made.__name__, [_what(tensor) for tensor in tensors]))
        plain = to_json({field: getattr(message, field) for field in kind.plain}, inf_nan_mode="constants")
        head = b"".join((HEAD.pack(0, PROTOCOL, len(what), len(plain))[4:], what, plain))
        head += _EMPTY[: _padding(4 + len(head))]
        parts: list[Buffer] = [struct.pack("<I", zlib.crc32(head)), head]
        for raw in map(_raw, tensors):
            parts += [raw, _EMPTY[: _padding(len(raw))]]
        return parts

    def decode(self, data: bytearray) -> Any:
        """The message that these bytes are; its tensors share their memory.

        Raises:
            FrameError: they are none that may come.
        """
        if len(data) < HEAD.size:
            raise FrameError(f"a frame of {len(data)} bytes is cut short")
        crc, version, what_length, length = HEAD.unpack_from(data)
        if version != PROTOCOL:
            raise FrameError(f"a frame of protocol {version}, this is protocol {PROTOCOL}")
        at = HEAD.size + what_length
        end = at + length + _padding(at + length)
        if len(data) < end or zlib.crc32(memoryview(data)[4:end]) != crc:
            raise FrameError("a torn frame: what is in it is not what was sent")
        name, shapes = _read(_WHAT, data[HEAD.size : at], "a frame", "head")
        kind = self._kinds.get(name)
        if kind is None:
            known = ", ".join(self._kinds)
            raise FrameError(f"a message {name[:40]!r} that is not expected here (these are: {known})")
        if len(shapes) != len(kind.tensors):
            raise FrameError(f"a message {name!r} with {len(shapes)} tensors, not {len(kind.tensors)}")
        plain = _read(kind.adapter, data[at : at + length], f"a message {name!r}", "fields")
        return kind.made(**plain, **dict(zip(kind.tensors, _tensors(data, end, shapes), strict=True)))


def _read(adapter: TypeAdapter[Any], text: bytearray, whose: str, part: str) -> Any:
    """What JSON says, checked; errors name the first place that is wrong."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or part
        raise FrameError(f"{whose} whose {place} cannot be: {fault['msg']}") from None


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
