"""Compiled kernels for decoding on a CPU, from ``cpp/kernels.cpp`` and ``cpp/kernels/``.

A wheel carries a library for each level of instructions, and the best one that the processor has is opened. Where
none fits these sources and this processor, as in a checkout, the machine's C++ compiler (``CXX``, else ``c++``)
compiles one in one to two minutes, and the user's cache folder keeps it. The library is called through
`ctypes` with addresses and sizes, so it depends on no header and no ABI but C's. Without a library
everything runs on torch's own kernels, and `unavailable` has the reason.

A cached library is code that will run, so before it is opened

- it must be whole: its name carries the sha256 of its content, and it gets that name in one step. A power cut or a full
  disk leaves no file under such a name, or one that fails the check and is compiled again; several processes that
  compile at once each put a whole file there.
- it and its folder must belong to the user that runs this (to root only where root runs it), and nobody else may
  write to them. Otherwise torch's kernels are used, and a warning gives the remedy.

Between the check and the opening only somebody who may write to that folder could change the file: by the second
rule that is the user. (Who may write to a folder above it could put another folder in its place; that one would
belong to somebody else, and be refused.)
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ..core.folders import user_cache
from . import abi

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"
SHIPPED = Path(__file__).parent / "compiled"  # the libraries of a wheel
# "0": torch's kernels only; one of `LEVELS`: no instructions beyond it; "1": compiled for this processor.
SWITCH = "PACELINE_NATIVE"
COMPILE_SECONDS = 300
# Contraction is off: two instances of one template must not round differently; where it pays, the source requests it.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
RULES_BYTES = ctypes.sizeof(abi.CRules)  # which `SequenceSampler.rules` packs
# Levels of instructions in the order of `Isa` (kernels/simd.h): the compiler's flags, and the instructions that a
# processor must have, as /proc/cpuinfo names them.
X86 = {
    "baseline": ("-march=x86-64", ""),
    "avx2": ("-march=haswell", "avx2 fma f16c bmi2 movbe"),
    "avx-vnni": ("-march=haswell -mavxvnni", "avx2 fma f16c bmi2 movbe avx_vnni"),
    "avx512": ("-march=skylake-avx512", "avx512f avx512bw avx512dq avx512vl"),
    "avx512-vnni": ("-march=cascadelake", "avx512vl avx512_vnni"),
    "avx512-bf16": ("-march=cooperlake", "avx512vl avx512_vnni avx512_bf16"),
    "amx": ("-march=sapphirerapids", "avx512_bf16 amx_tile amx_bf16 amx_int8"),
}
ARM = {
    "baseline": ("-march=armv8-a", ""),
    "neon-dotprod": ("-march=armv8.2-a+dotprod", "asimddp"),
    "neon-i8mm": ("-march=armv8.2-a+dotprod+i8mm", "asimddp i8mm"),
    "neon-bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16", "asimddp i8mm bf16"),
}
LEVELS = X86 if platform.machine().lower() in ("x86_64", "amd64") else ARM
AMX = list(X86).index("amx")
TILE_ROWS, VECTOR_ROWS = 16, 4  # rows that a product takes at little more than the price of one, with AMX and without
FLOAT32, BF16, INT8 = range(3)  # kinds of weights
MIXED = 15  # weights in blocks whose rows are of several types: a table of addresses and kinds
GGML = 16  # from here on: weights in blocks, by their type in a GGUF file
BF16_SHORT = 4  # bf16 with SHORT_INPUTS inputs or fewer, less padded
SHORT_INPUTS = 8


def library() -> Any:
    """Return the kernels, built if need be; None where they cannot be had (see `unavailable`)."""
    return _load()[0]


def in_use() -> Any:
    """Return the kernels if something in this process has loaded them, else None."""
    return _load()[0] if _load.cache_info().currsize else None


def unavailable() -> str | None:
    """Return why there are no compiled kernels, or None."""
    return _load()[1]


def describe() -> str:
    """Return the level of instructions of the kernels in use, or why there are none."""
    kernels, why = _load()
    return f"torch ({why})" if kernels is None else list(LEVELS)[kernels.isa]


@cache
def _load() -> tuple[Any, str | None]:
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0"
    try:
        functions = abi.declared(opened(SOURCE), "\n".join(_texts(SOURCE)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("no compiled kernels, torch's are used: %s", error)
        return None, str(error)
    functions.isa = functions.pl_init(AMX)
    return functions, None


def opened(source: Path) -> ctypes.CDLL:
    """Open the library of a source of this package.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: as `built`, or it does not open.
    """
    return ctypes.CDLL(str(_shipped(source) or built(source)))


def _shipped_name(source: Path, level: str) -> str:
    """Return the name of a level's library in a wheel, which depends on the sources and the flags alone."""
    return f"{source.stem}-{level}-{_digest((*_texts(source), *FLAGS, LEVELS[level][0]))}.so"


def _shipped(source: Path) -> Path | None:
    switch, has = os.environ.get(SWITCH, ""), _processor()
    for level, (_, needed) in reversed(LEVELS.items()):
        path = SHIPPED / _shipped_name(source, level)
        if switch in ("", level) and has.issuperset(needed.split()) and path.is_file():
            return path
    return None


def built(source: Path, level: str = "") -> Path:
    """Return the compiled library of a source of this package, by this compiler.

    Args:
        source: its path.
        level: one of `LEVELS`, which this processor may lack; by default the one that the environment requests.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: it cannot be had; in words.
    """
    compiler = _compiler()
    flags = [*FLAGS, *(LEVELS[level][0].split() if level else _flags_of(os.environ.get(SWITCH) or "1"))]
    version = _output([*compiler, "--version"], 60)[1]
    command, probe = " ".join([*compiler, *flags]), [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    stem = f"{source.stem}-{_digest((*_texts(source), version, command, _output(probe, 60)[1]))}"
    if (cache_folder := user_cache()) is None:
        raise RuntimeError("the user has no cache folder; name one by an absolute path in XDG_CACHE_HOME")
    if (cached := _kept(folder := cache_folder / "kernels", stem)) is not None:
        return cached
    _make_folder(folder)
    if source == SOURCE:  # a warning, which shows where nobody has set up logging: the start is silent for so long
        log.warning("compiling the layers for %s, once: one to two minutes", level or "this processor")
    return _compile(compiler, flags, folder, stem, source)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]


@cache
def _processor() -> set[str]:
    """Return the instructions that Linux reports for this processor; none on another system."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])


def _flags_of(level: str) -> list[str]:
    if level == "0":
        raise RuntimeError(f"{SWITCH}=0")
    if level == "1":
        return ["-march=native"]
    if level not in LEVELS:
        raise RuntimeError(f"{SWITCH}={level!r} is not a level of instructions; use 0, 1 or one of {', '.join(LEVELS)}")
    flags, needed = LEVELS[level]
    if lost := ", ".join(word for word in needed.split() if _processor() and word not in _processor()):
        raise RuntimeError(f"{SWITCH}={level!r} needs instructions that this processor lacks: {lost}")
    return flags.split()


def _texts(source: Path) -> list[str]:
    """Return a source and its headers, which lie in a folder of the same name: names and contents."""
    headers = sorted(source.with_suffix("").rglob("*.h"))
    return [text for path in (source, *headers) for text in (path.name, path.read_text("utf-8"))]


def _kept(folder: Path, stem: str) -> Path | None:
    """Return a library that was compiled before and can be trusted; None: there is none.

    Raises:
        RuntimeError: the folder is not the user's own.
    """
    if not folder.is_dir():
        return None
    _require_own(folder)
    files = [path for path in sorted(folder.glob(f"{stem}-*.so")) if path.is_file()]
    for path in files:
        _require_own(path)
        if _sha256(path) == path.stem.rpartition("-")[2]:
            return path
    if files:
        log.warning("the compiled kernels in %s are broken: they are compiled again", folder)
    return None


def _require_own(path: Path) -> None:
    """Refuse what another user owns or may change.

    Raises:
        RuntimeError: in words, with what to do.
    """
    facts, user = path.stat(), os.geteuid()
    if facts.st_uid != user:
        raise RuntimeError(
            f"{path} belongs to user {facts.st_uid}, not to user {user}, and its code is not run; "
            "remove it, or name a folder of your own in XDG_CACHE_HOME"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others than its owner may write to {path}, and its code is not run; "
            f"empty the folder and take that right away: chmod go-w {shlex.quote(str(path))}"
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler() -> list[str]:
    """Return the C++ compiler, and whatever stands before or after it in CXX ("ccache g++")."""
    variable = os.environ.get("CXX", "")
    try:
        words = shlex.split(variable) or ["c++"]
    except ValueError as error:
        raise RuntimeError(f"CXX={variable!r} is not a command ({error}); correct it, or unset it") from error
    program = shutil.which(words[0])
    if program is None:
        raise RuntimeError(f"no C++ compiler {words[0]!r} was found; install g++, or name yours in CXX")
    return [program, *words[1:]]


def _make_folder(folder: Path) -> None:
    """Make sure of a folder that only the user may write to.

    Raises:
        RuntimeError: it cannot be made or written to, or it is not the user's own.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_own(folder)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise RuntimeError(
            f"the compiled kernels cannot be kept in {folder} ({error.strerror}); "
            "name a folder that can be written to in XDG_CACHE_HOME"
        ) from error


def _output(command: list[str], seconds: float) -> tuple[int, str]:
    """Return a command's exit status and output, errors first."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    return done.returncode, done.stderr + done.stdout


def _compile(compiler: list[str], flags: list[str], folder: Path, stem: str, source: Path) -> Path:
    """Compile, then put the result in place in one step: several processes may do this at once.

    No OpenMP runtime is linked: the kernels have threads of their own.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        obj, library_file = Path(scratch) / f"{source.stem}.o", Path(scratch) / f"{source.stem}.so"
        link = [*compiler, "-shared", str(obj), "-o", str(library_file)]
        for command in ([*compiler, *flags, "-c", str(source), "-o", str(obj)], link):
            status, messages = _output(command, COMPILE_SECONDS)
            if status:
                first = " | ".join(messages.strip().splitlines()[:3]) or f"exit status {status}"
                raise RuntimeError(f"{shlex.join(compiler)} failed: {first}")
        path = folder / f"{stem}-{_sha256(library_file)}.so"
        library_file.chmod(0o700)  # whatever the umask
        library_file.replace(path)
        return path
