"""What compiled code is passed and what it has: structs and functions, read from the text of the kernels.

Every struct of ``cpp/kernels/abi.h`` is an attribute here, with a C in front: `abi.CModel` is `Model`. Its fields, and
the kinds of every function's arguments, are written in C++ alone.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

_KINDS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
_ENTRY = re.compile(r"^(\w+\**) (pl_\w+)\(([^)]*)\) \{", re.MULTILINE)  # of an entry point, at the start of a line
_STRUCT = re.compile(r"^PL_STRUCT\((\w+),\n(.*?)^\)", re.MULTILINE | re.DOTALL)


class Struct(ctypes.Structure):
    """One struct. Its fields are given by name: a field that is put between others shifts no value."""

    def __init__(self, **fields: Any) -> None:
        unknown = fields.keys() - {name for name, *_ in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(**fields)


STRUCTS: dict[str, Any] = {}  # by name in C++


def _kind(written: str) -> Any:
    """Return the ctypes kind of a C++ one: any pointer is an address."""
    if "*" in written:
        return ctypes.c_void_p
    if written not in _KINDS and written not in STRUCTS:
        raise RuntimeError(f"the kernels have a kind {written!r} that kernels/abi.py does not know: add it to _KINDS")
    return STRUCTS.get(written) or _KINDS[written]


def _fields(text: str) -> list[tuple[str, Any]]:
    """Return the fields that a struct's declaration has: "int64_t n, k; const float* bias;"."""
    members: list[tuple[str, Any]] = []
    for declaration in filter(None, map(str.strip, text.split(";"))):
        written = re.fullmatch(r"(.*\*|\w+) +(.*)", declaration, re.DOTALL)
        if written is None or ("*" in written[1] and "," in written[2]):  # of ``float* a, b`` b is not a pointer
            raise RuntimeError(
                f"the kernels declare {declaration!r}, which kernels/abi.py cannot read: write KIND NAME"
            )
        members += [(name.strip(), _kind(written[1])) for name in written[2].split(",")]
    return members


def _read(header: str) -> None:
    for name, body in _STRUCT.findall(re.sub(r"//.*", "", header)):
        STRUCTS[name] = type(f"C{name}", (Struct,), {"_fields_": _fields(body)})


_read((Path(__file__).parent / "cpp" / "kernels" / "abi.h").read_text("utf-8"))
globals().update((struct.__name__, struct) for struct in STRUCTS.values())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the structs


def declared(library: ctypes.CDLL, source: str) -> Any:
    """Return the functions of a library, each of which knows the kinds of its arguments, and its ``path``.

    Args:
        library: the kernels.
        source: the text that it was compiled from, with the entry points.

    Raises:
        RuntimeError: a kind that is not known.
    """
    functions = SimpleNamespace(path=library._name)
    for returned, name, arguments in _ENTRY.findall(source):
        function = getattr(library, name)
        function.argtypes = [_kind(argument.rpartition(" ")[0].strip()) for argument in arguments.split(",")]
        function.restype = _kind(returned)
        setattr(functions, name, function)
    return functions
