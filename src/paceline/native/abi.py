"""What compiled code is passed: every struct of ``kernels/abi.h``, field by field, which says what they mean.

A field is written twice, there and here, in the same order and under the same name. A loaded library says what its
structs are made of, and `require_same` compares that with these: a field that is forgotten, of another kind or in
another place is refused before anything is read through it.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

_KINDS: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def _fields(*declared: str) -> list[tuple[str, Any]]:
    """("int64_t n k", "pointer bias") -> fields n, k and bias; a kind may be a struct that is declared above."""
    parts = [part.split() for part in declared]
    return [(name, _KINDS.get(kind) or globals()[f"C{kind}"]) for kind, *names in parts for name in names]


class Struct(ctypes.Structure):
    """One struct. Its fields are given by name: a field that is put between others shifts no value."""

    def __init__(self, **fields: Any) -> None:
        unknown = fields.keys() - {name for name, *_ in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(**fields)


class CLinear(Struct):
    _fields_ = _fields("pointer weight scale bias order", "int64_t n k kind")


class CLayer(Struct):
    _fields_ = _fields(
        "Linear qkv out up down",
        "pointer attention_norm mlp_norm q_norm k_norm",
        "int64_t window",
        "pointer attention_post_norm mlp_post_norm",
        "int64_t rope",
    )


class CRanks(Struct):
    _fields_ = _fields(
        "int64_t rank count by_outputs",
        "pointer memory",
        "int64_t capacity",
        "pointer lives",
        "int64_t num_lives spin_us timeout_us",
        "pointer carry",
        "int64_t joins collectives bytes",
    )


class CModel(Struct):
    _fields_ = _fields(
        "int64_t d_model heads kv_heads head_dim own_head_dim d_ff rotated tokens vocab",
        "pointer of_output",
        "int64_t wide_activations",
        "float eps scale",
        "pointer layers norm",
        "Linear head",
        "int64_t activation",
        "pointer ranks",
    )


class CSegment(Struct):
    _fields_ = _fields("int64_t start stop prefix num_keys base", "pointer keys visible block_positions")


class CLowRank(Struct):
    _fields_ = _fields("Linear down up")


class CAdapterRange(Struct):
    _fields_ = _fields("int64_t start stop rank", "pointer adapter")


class CStreamSet(Struct):
    _fields_ = _fields("int64_t gamma insertion", "pointer embeddings adapter", "int64_t rank")


class CLimit(Struct):
    _fields_ = _fields("int64_t row start stop keys most")


class CPass(Struct):
    _fields_ = _fields(
        "int64_t rows",
        "pointer hidden_in hidden_out positions slots",
        "int64_t slot_base",
        "pointer cos sin",
        "int64_t num_positions",
        "pointer k_cache v_cache",
        "int64_t head_stride packed",
        "pointer segments",
        "int64_t num_segments threads layers",
        "pointer adapters",
        "int64_t num_adapters",
        "pointer limits",
        "int64_t num_limits",
    )


class CTaps(Struct):
    _fields_ = _fields("int64_t layers", "pointer after", "int64_t rows", "pointer which out", "double ms")


class CFuse(Struct):
    _fields_ = _fields("Linear both state", "pointer constant", "int64_t sum", "pointer norm", "double eps")


class CTokenInfo(Struct):
    _fields_ = _fields("Linear table", "pointer factors")


class CHeads(Struct):
    _fields_ = _fields("int64_t count", "Linear blocks", "pointer own")


class CRules(Struct):
    _fields_ = _fields("uint64_t key", "double temperature", "int64_t top_k", "double top_p min_p")


class CSparseView(Struct):
    _fields_ = _fields("int64_t sinks window", "pointer cos sin", "int64_t num_gaps")


class CChain(Struct):
    _fields_ = _fields(
        "pointer pending",
        "int64_t num_pending position steps base",
        "pointer keys",
        "float floor",
        "pointer tokens log_q",
        "int64_t made",
        "pointer rules view",
        "int64_t scratch",
    )


class CTreeStart(Struct):
    _fields_ = _fields(
        "pointer pending",
        "int64_t num_pending position room base",
        "pointer keys",
        "int64_t budget max_depth",
        "pointer rules",
        "int64_t shift most",
        "pointer states",
        "int64_t nodes forwarded passes",
        "pointer tokens parents scores",
    )


class CTreeRules(Struct):
    _fields_ = _fields("int64_t topk levels", "pointer factors", "double floor")


class CSampledTree(Struct):
    _fields_ = _fields("int64_t levels", "pointer logits", "int64_t most nodes", "pointer tokens parents scores")


class CSampleStart(Struct):
    _fields_ = _fields(
        "pointer pending",
        "int64_t num_pending position base",
        "pointer keys",
        "int64_t root place",
        "pointer rules states",
        "SampledTree fresh left",
    )


class CRingShape(Struct):
    _fields_ = _fields("int64_t sinks window span")


class CRingChain(Struct):
    _fields_ = _fields("int64_t root position steps ring start", "pointer rules tokens log_q", "int64_t made")


class CSpan(Struct):
    _fields_ = _fields("int64_t start stop prefix base", "pointer keys", "int64_t drafted", "pointer parents")


class CTokenPass(Struct):
    _fields_ = _fields(
        "int64_t rows",
        "pointer tokens positions slots",
        "int64_t slot_base",
        "pointer spans",
        "int64_t num_spans",
        "pointer wanted",
        "int64_t num_wanted",
        "pointer rules logits masks chosen",
    )


class CCarrier(Struct):
    _fields_ = _fields(
        "int64_t segment root streams most",
        "pointer ends",
        "int64_t num_ends",
        "pointer riders",
        "int64_t num_riders found rode",
        "pointer tokens log_q",
    )


class CStreamPass(Struct):
    _fields_ = _fields("pointer set carriers", "int64_t count k scratch room noisy most late_us")


STRUCTS: tuple[Any, ...] = tuple(kind for name, kind in globals().items() if re.match("C[A-Z]", name))


def require_signatures(functions: dict[str, str], source: str) -> None:
    """Refuse functions that take or return other kinds than the kernels' source says.

    Args:
        functions: `native.FUNCTIONS`.
        source: the text of all headers.

    Raises:
        RuntimeError: which function, and what each side says.
    """
    declared = {name: _signature(returned, taken) for returned, name, taken in _ENTRY.findall(source)}
    for name in sorted(declared.keys() | functions.keys()):
        theirs, own = declared.get(name, "nothing"), functions.get(name, "nothing")
        if theirs != own:
            raise RuntimeError(
                f"function {name} of the kernels is {theirs}, native.FUNCTIONS has {own}: write its kinds in both"
            )


_ENTRY = re.compile(r"^(\w+\**) (pl_\w+)\(([^)]*)\) \{", re.MULTILINE)  # of an entry point, at the start of a line
_LETTERS = {"int": "i", "int64_t": "n", "double": "d", "void": "-"}


def _signature(returned: str, taken: str) -> str:
    """The letters of `native.FUNCTIONS` for "int" and "const Model* m, int64_t rows"."""
    letters = "".join(_letter(argument.rpartition(" ")[0]) for argument in taken.split(","))
    return letters if returned == "int" else f"{letters}>{_letter(returned)}"


def _letter(kind: str) -> str:
    return "p" if "*" in kind else _LETTERS.get(kind.strip(), "?")


def require_same(library: Any) -> None:
    """Refuse a library whose structs are not these.

    Raises:
        RuntimeError: which struct, and what each side says.
    """
    for struct in STRUCTS:
        name, size = struct.__name__[1:], ctypes.c_int64()
        layout = getattr(library, f"pl_struct_{name}")
        layout.restype, layout.argtypes = ctypes.c_char_p, [ctypes.POINTER(ctypes.c_int64)]
        theirs, own = _declared(layout(ctypes.byref(size)).decode()), [*struct._fields_]
        if theirs != own or size.value != ctypes.sizeof(struct):
            odd = next((i for i, pair in enumerate(zip(theirs, own, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(theirs), len(own)) if odd is None else odd
            raise RuntimeError(
                f"struct {name} of the kernels has {_named(theirs, at)} as field {at} and {size.value} bytes, "
                f"native/abi.py has {_named(own, at)} and {ctypes.sizeof(struct)}: write the field in both"
            )


def _declared(text: str) -> list[tuple[str, Any]]:
    """The fields that a struct's declaration in C++ has: "int64_t n, k; const float* bias;"."""
    found: list[tuple[str, Any]] = []
    for declaration in filter(None, map(str.strip, text.split(";"))):
        if "*" in declaration:
            found.append((declaration.rpartition("*")[2].strip(), ctypes.c_void_p))
            continue
        kind, _, names = declaration.partition(" ")
        known = _KINDS.get(kind) or globals().get(f"C{kind}")
        found += [(name.strip(), known) for name in names.split(",")]
    return found


def _named(fields: list[tuple[str, Any]], at: int) -> str:
    return f"{fields[at][0]} ({getattr(fields[at][1], '__name__', 'unknown')})" if at < len(fields) else "nothing"
