"""Compiled kernels for decoding on a CPU, built from ``cpp/kernels.cpp`` and ``cpp/kernels/`` on the machine that runs
them.

The library is compiled once, for the processor at hand, by whatever C++ compiler the machine has
(``CXX``, else ``c++``), in one to two minutes; it is kept in the user's cache folder. It is called through
`ctypes` with addresses and sizes, so it depends on no header and no ABI but C's. Where there is no
compiler, everything runs on torch's own kernels, and `unavailable` says why.

A cached library is code that will run, so before it is opened

- it must be whole: its name carries the sha256 of its content, and it gets that name in one step, once its bytes
  are on the disk. A power cut or a full disk leaves no file under such a name, or one that fails the check and is
  compiled anew; several processes that compile at once each put a whole file there. One name cannot go without the
  other, as a file and a checksum beside it could.
- one that does not open (a home that systems share) is removed, and compiled once more.
- it and its folder must belong to the user who runs this (to root only where root runs it), and nobody else may
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
import signal
import stat
import subprocess
import tempfile
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from . import abi

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"
SWITCH = "PACELINE_NATIVE"  # "0": torch's kernels only; one of `LEVELS`: no instructions beyond it; "1": all there are
COMPILE_SECONDS = 300
# Contraction is off: two instances of one template must not round differently; where it pays, the source asks for it.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
RULES_BYTES = ctypes.sizeof(abi.CRules)  # which `SequenceSampler.rules` packs
# Levels of instructions in the order of `Isa` (kernels/simd.h): the compiler's flags, and what it must define for this
# processor.
X86 = {
    "baseline": ("-march=x86-64", ""),
    "avx2": ("-march=haswell", "__AVX2__ __FMA__ __F16C__"),
    "avx-vnni": ("-march=haswell -mavxvnni", "__AVX2__ __FMA__ __F16C__ __AVXVNNI__"),
    "avx512": ("-march=skylake-avx512", "__AVX512F__ __AVX512BW__ __AVX512DQ__ __AVX512VL__"),
    "avx512-vnni": ("-march=cascadelake", "__AVX512VL__ __AVX512VNNI__"),
    "avx512-bf16": ("-march=cooperlake", "__AVX512VL__ __AVX512VNNI__ __AVX512BF16__"),
    "amx": ("-march=sapphirerapids", "__AVX512BF16__ __AMX_TILE__ __AMX_BF16__ __AMX_INT8__"),
}
_DOTPROD, _I8MM, _BF16 = (f"__ARM_FEATURE_{name}" for name in ("DOTPROD", "MATMUL_INT8", "BF16_VECTOR_ARITHMETIC"))
ARM = {
    "baseline": ("-march=armv8-a", ""),
    "neon-dotprod": ("-march=armv8.2-a+dotprod", _DOTPROD),
    "neon-i8mm": ("-march=armv8.2-a+dotprod+i8mm", f"{_DOTPROD} {_I8MM}"),
    "neon-bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16", f"{_DOTPROD} {_I8MM} {_BF16}"),
}
LEVELS = X86 if platform.machine().lower() in ("x86_64", "amd64") else ARM
AMX = list(X86).index("amx")
TILE_ROWS, VECTOR_ROWS = 16, 4  # rows that a product takes at little more than the price of one, with AMX and without
FLOAT32, BF16, INT8 = range(3)  # kinds of weights
MIXED = 15  # weights in blocks whose rows are of several types: a table of addresses and kinds
GGML = 16  # from here on: weights in blocks, by their type in a GGUF file
BF16_SHORT = 4  # bf16 with SHORT_INPUTS inputs or fewer, less padded
SHORT_INPUTS = 8


@cache
def library() -> Any:
    """The kernels, built if need be; None where they cannot be had (see `unavailable`)."""
    return _load()[0]


def in_use() -> Any:
    """Return the kernels where something in this process has asked for them: look-ups alone have nothing built. None:
    nothing has, or they cannot be had."""
    return _load()[0] if _load.cache_info().currsize else None


@cache
def unavailable() -> str | None:
    """Why there are no compiled kernels, or None."""
    return _load()[1]


def describe() -> str:
    """The kernels in use: their instructions, or why there are none."""
    found = library()
    return list(LEVELS)[found.isa] if found is not None else f"torch ({unavailable()})"


@cache
def _load() -> tuple[Any, str | None]:
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0"
    try:
        found = _declared(opened(SOURCE))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("no compiled kernels, torch's are used: %s", error)
        return None, str(error)
    found.isa = found.pl_init(AMX)
    return found, None


def _declared(found: ctypes.CDLL) -> Any:
    """The functions of the library.

    Raises:
        RuntimeError: it lacks one, or has other structs.
    """
    try:
        return abi.declared(found, "\n".join(_texts(SOURCE)))
    except AttributeError as error:
        path = found._name
        raise RuntimeError(f"{path} is no library of these kernels: it lacks a function of theirs ({error})") from error


def opened(source: Path) -> ctypes.CDLL:
    """Open the library of a source of this package; one that does not open, as another system made it, is made again.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: as `built`, or it does not open either.
    """
    path = built(source)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("%s does not open (%s): it is removed and compiled again", path, error)
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(built(source)))


def built(source: Path) -> Path:
    """Return the compiled library of a source of this package, by this compiler, for this level of instructions.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: it cannot be had; in words.
    """
    level = os.environ.get(SWITCH) or "1"
    if level == "0":
        raise RuntimeError(f"{SWITCH}=0")
    compiler = _compiler()
    flags = [*FLAGS, *_flags_of(level)]
    version = _output([*compiler, "--version"], 60)[1]
    command = " ".join([*compiler, *flags])
    parts = (*_texts(source), version, command, _macros(), installed("torch"))
    stem = f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
    folder = _cache_folder()
    kept = _kept(folder, stem)
    if kept is None:
        _make_folder(folder)
        if source == SOURCE:  # a warning, which shows where nobody has set up logging: the start is silent for so long
            log.warning("compiling the layers for this processor, once: one to two minutes")
        kept = _compile(compiler, flags, folder, stem, source)
    return kept


def _macros() -> str:
    """Return the macros that the compiler defines for this processor; none where it fails."""
    status, text = _output([*_compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull], 60)
    return "" if status else text


def _flags_of(level: str) -> list[str]:
    if level == "1":
        return ["-march=native"]
    if level not in LEVELS:
        raise RuntimeError(f"{SWITCH}={level!r} is not a level of instructions; use 0, 1 or one of {', '.join(LEVELS)}")
    flags, needed = LEVELS[level]
    macros = set(_macros().split())
    if lost := macros and set(needed.split()) - macros:
        raise RuntimeError(
            f"{SWITCH}={level!r} needs instructions that this processor lacks: {', '.join(sorted(lost))}"
        )
    return flags.split()


def _texts(source: Path) -> list[str]:
    """A source and its headers, which lie in a folder of the same name: each name, and what it says."""
    headers = sorted(source.with_suffix("").rglob("*.h"))
    return [text for path in (source, *headers) for text in (path.name, path.read_text("utf-8"))]


def _kept(folder: Path, stem: str) -> Path | None:
    """A library that was compiled before and can be trusted; None: there is none.

    Raises:
        RuntimeError: the folder is not the user's own.
    """
    if not folder.is_dir():
        return None
    _require_own(folder)
    found = [path for path in sorted(folder.glob(f"{stem}-*.so")) if path.is_file()]
    for path in found:
        _require_own(path)
        if _sha256(path) == path.stem.rpartition("-")[2]:
            return path
    if found:
        log.warning("the compiled kernels in %s are broken: they are compiled anew", folder)
    return None


def _require_own(path: Path) -> None:
    """Refuse what another user owns or may change.

    Raises:
        RuntimeError: in words, with what to do.
    """
    facts, user = path.stat(), os.geteuid()
    if facts.st_uid != user:
        raise RuntimeError(
            f"{path} belongs to user {facts.st_uid}, not to user {user} who runs this, and its code is not run; "
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
    """The C++ compiler, and whatever stands before or behind it in CXX ("ccache g++")."""
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked) or ["c++"]
    except ValueError as error:
        raise RuntimeError(f"CXX={asked!r} is no command ({error}); correct it, or unset it") from error
    found = shutil.which(words[0])
    if found is None:
        raise RuntimeError(f"no C++ compiler {words[0]!r} was found; install g++, or name yours in CXX")
    return [found, *words[1:]]


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
    """A command's exit status and what it said, errors first; one that is given up ends with all its processes."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        except BaseException:  # an interrupt, too
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, errors + said


def _compile(compiler: list[str], flags: list[str], folder: Path, stem: str, source: Path) -> Path:
    """Compile, then put the result in place in one step: several processes may do this at once.

    No OpenMP runtime is linked: the kernels have threads of their own.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        obj, made = Path(scratch) / f"{source.stem}.o", Path(scratch) / f"{source.stem}.so"
        link = [*compiler, "-shared", str(obj), "-o", str(made)]
        for command in ([*compiler, *flags, "-c", str(source), "-o", str(obj)], link):
            status, said = _output(command, COMPILE_SECONDS)
            if status:
                first = " | ".join(said.strip().splitlines()[:3]) or f"exit status {status}"
                raise RuntimeError(f"{shlex.join(compiler)} failed: {first}")
        return _published(made, folder / f"{stem}-{_sha256(made)}.so")


def _published(made: Path, path: Path) -> Path:
    """Move a finished file to its place, where it is whole or not at all whenever the machine stops."""
    made.chmod(0o700)  # whatever the umask
    _flush(made)
    made.replace(path)
    _flush(path.parent)
    return path


def _flush(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cache_folder() -> Path:
    """Where compiled kernels are kept.

    Raises:
        RuntimeError: there is no home, or a relative path, which would mean another folder wherever one starts.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not base.is_absolute():
        raise RuntimeError(f"the cache folder {str(base)!r} is relative; name an absolute one in XDG_CACHE_HOME")
    return base / "paceline" / "kernels"
