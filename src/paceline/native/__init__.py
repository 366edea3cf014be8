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
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "kernels.cpp"
SWITCH = "PACELINE_NATIVE"  # "0": torch's kernels only; "generic": without instructions of particular processors
COMPILE_SECONDS = 300
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-w")
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
    ]


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of weights


@cache
def library() -> ctypes.CDLL | None:
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
def _load() -> tuple[ctypes.CDLL | None, str | None]:
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


def _open(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
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
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RuntimeError("no C++ compiler was found; install one (Debian, Ubuntu: g++), or name it in CXX")
    flags = [*FLAGS, *([] if generic else ["-march=native"])]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    parts = (SOURCE.read_text("utf-8"), compiler, version, " ".join(flags), _processor(), str(torch.__version__))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = _cache_folder()
    path = folder / f"kernels-{key}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        log.info("compiling kernels for this processor (once)")
        _compile(compiler, flags, path)
    return path


def _compile(compiler: str, flags: list[str], path: Path) -> None:
    """Compile, then put the result in place in one step: several processes may do this at once.

    The OpenMP runtime is not linked: its functions are found in the one that torch has loaded. Two
    runtimes would keep two teams of threads, each waiting in the other's way.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        obj, made = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        link = [compiler, "-shared", str(obj), "-o", str(made)]
        for command in ([compiler, *flags, "-c", str(SOURCE), "-o", str(obj)], link):
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode:
                last = (done.stderr or done.stdout).strip().splitlines()[:3]
                raise RuntimeError(f"{compiler} failed: {' | '.join(last)}")
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
