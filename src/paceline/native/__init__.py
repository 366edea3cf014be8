"""Compiled kernels for decoding on a CPU, built from ``kernels.cpp`` on the machine that runs them.

The library is compiled once, for the processor at hand, by whatever C++ compiler the machine has
(``CXX``, else ``c++``), in a few seconds; it is kept in the user's cache folder. It is called through
`ctypes` with addresses and sizes, so it depends on no header and no ABI but C's. Where there is no
compiler, everything runs on torch's own kernels, and `unavailable` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "kernels.cpp"
SWITCH = "PACELINE_NATIVE"  # "0": torch's kernels only; "generic": without instructions of particular processors
COMPILE_SECONDS = 300
# Contraction is off: two instances of one template must not round differently; where it pays, the source asks for it.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
ISA_NAMES = ("portable", "avx512-bf16", "amx-bf16")
ANY_ISA = len(ISA_NAMES) - 1


class Linear(ctypes.Structure):
    """See ``struct Linear`` in the source; the same holds for the structures below."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", ctypes.c_int64),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("d_model", "heads", "kv_heads", "head_dim", "d_ff", "rotated", "vocab", "wide_activations")
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("head", Linear),
    ]


class Segment(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("start", "stop", "prefix", "num_keys", "base")),
        *((name, ctypes.c_void_p) for name in ("keys", "visible", "block_positions")),
    ]


class LowRank(ctypes.Structure):
    _fields_ = [("down", Linear), ("up", Linear)]


class AdapterRange(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("start", "stop", "rank")),
        ("adapter", ctypes.c_void_p),
    ]


class Pass(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden_in", "hidden_out", "positions", "slots")),
        ("slot_base", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_positions", ctypes.c_int64),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
        ("num_adapters", ctypes.c_int64),
    ]


class Chain(ctypes.Structure):
    _fields_ = [
        ("pending", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_pending", "position", "steps", "base")),
        ("keys", ctypes.c_void_p),
        ("floor", ctypes.c_float),
        ("tokens", ctypes.c_void_p),
        ("log_q", ctypes.c_void_p),
        ("made", ctypes.c_int64),
    ]


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of weights
INT8_EXACT = 3  # int8 with the same bits at every width
BF16_SHORT = 4  # bf16 with SHORT_INPUTS inputs or fewer, less padded
SHORT_INPUTS = 8


@cache
def library() -> Any:
    """The kernels, built if need be; None where they cannot be had (see `unavailable`)."""
    return _load()[0]


@cache
def unavailable() -> str | None:
    """Why there are no compiled kernels, or None."""
    return _load()[1]


def describe() -> str:
    """Which kernels run: the instructions they use, or why there are none."""
    found = library()
    return ISA_NAMES[found.isa] if found is not None else f"torch ({unavailable()})"


@cache
def _load() -> tuple[Any, str | None]:
    mode = os.environ.get(SWITCH, "1")
    if mode == "0":
        return None, f"{SWITCH}=0"
    try:
        found = _open(_built(generic=mode == "generic"))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("no compiled kernels, torch's are used: %s", error)
        return None, str(error)
    found.isa = found.pl_init(ANY_ISA if mode != "generic" else 0)
    return found, None


def _open(path: Path) -> Any:
    found: Any = ctypes.CDLL(str(path))
    found.pl_packed_size.restype = ctypes.c_int64
    found.pl_packed_size.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    found.pl_pack.restype = None
    found.pl_pack.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    found.pl_linear.restype = None
    found.pl_linear.argtypes = [
        ctypes.POINTER(Linear),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    found.pl_run_layers.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Pass), ctypes.c_int, ctypes.c_int]
    found.pl_best.restype = None
    found.pl_best.argtypes = [
        ctypes.POINTER(Model),
        ctypes.c_void_p,
        *(ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p),
        ctypes.c_int,
    ]
    found.pl_roll.argtypes = [
        *(ctypes.POINTER(Model), ctypes.POINTER(Pass)),
        *(ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.POINTER(Chain), ctypes.c_int64),
    ]
    found.pl_top.restype = None
    found.pl_top.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2]
    found.pl_logits.restype = None
    found.pl_logits.argtypes = [
        ctypes.POINTER(Model),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return found


def _built(generic: bool) -> Path:
    """The compiled library of this source, compiler and processor."""
    compiler = _compiler()
    flags = [*FLAGS, *([] if generic else ["-march=native"])]
    version = _output([*compiler, "--version"], 60)[1]
    command = " ".join([*compiler, *flags])
    parts = (SOURCE.read_text("utf-8"), version, command, _processor(), str(torch.__version__))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = _cache_folder()
    path = folder / f"kernels-{key}.so"
    if not path.is_file():
        _make_folder(folder)
        log.info("compiling kernels for this processor (once)")
        _compile(compiler, flags, path)
    return path


def _compiler() -> list[str]:
    """The C++ compiler, and whatever stands before or behind it in CXX ("ccache g++")."""
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    found = shutil.which(words[0])
    if found is None:
        raise RuntimeError(f"no C++ compiler {words[0]!r} was found; install g++, or name yours in CXX")
    return [found, *words[1:]]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise RuntimeError(
            f"the compiled kernels cannot be kept in {folder} ({error.strerror}); "
            "name a folder that can be written to in XDG_CACHE_HOME"
        ) from error


def _output(command: list[str], seconds: int) -> tuple[int, str]:
    """A command's exit status and what it said, errors first."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    return done.returncode, done.stderr + done.stdout


def _compile(compiler: list[str], flags: list[str], path: Path) -> None:
    """Compile, then put the result in place in one step: several processes may do this at once.

    The OpenMP runtime is not linked: its functions are found in the one that torch has loaded. Two
    runtimes would keep two teams of threads, each waiting in the other's way.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        obj, made = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        link = [*compiler, "-shared", str(obj), "-o", str(made)]
        for command in ([*compiler, *flags, "-c", str(SOURCE), "-o", str(obj)], link):
            status, said = _output(command, COMPILE_SECONDS)
            if status:
                first = " | ".join(said.strip().splitlines()[:3]) or f"exit status {status}"
                raise RuntimeError(f"{shlex.join(compiler)} failed: {first}")
        made.replace(path)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline" / "native"


def _processor() -> str:
    """What decides which instructions there are."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8", "replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
