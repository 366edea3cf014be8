"""The compiled layers under AddressSanitizer and UndefinedBehaviorSanitizer: ``make sanitize``.

Builds ``kernels.cpp`` with the package's own flags and the sanitizers, for this processor and for smaller ones, and
drives each build over odd shapes (`drive.py`) in a process into which the sanitizers' runtimes were loaded
first. Every tensor that the library is given is an allocation of its own there, and what it allocates itself
is fenced, so that a step beyond an end is seen.

It first sees whether it sees: overruns are planted, and each must end its process with the right report.

    python tests/sanitize/sanitizers.py [--quick] [--build native|avx2|baseline]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILDS = {"native": "1", "avx2": "avx2", "baseline": "baseline"}  # name -> the switch PACELINE_NATIVE
SANITIZERS = "-O1 -g1 -fno-omit-frame-pointer -D_GLIBCXX_SANITIZE_VECTOR -fsanitize=address,undefined"
# What is planted, and what the report must say. (A wide load that is half inside is an "unknown-crash" to gcc's.)
PLANTS = {
    **dict.fromkeys(("input", "output", "weight", "keys", "scratch"), "ERROR: AddressSanitizer: "),
    "buffer": "ERROR: AddressSanitizer: use-after-poison",
    "sum": "runtime error: signed integer overflow",
}
SECONDS = 900


def main() -> int:
    """0 where nothing was found, 1 with the report where something was, 2 where it cannot be run here."""
    parser = argparse.ArgumentParser(description="The compiled layers under sanitizers.")
    parser.add_argument("--quick", action="store_true", help="a small part of the shapes")
    parser.add_argument("--build", choices=[*BUILDS], help="this build alone")
    chosen = parser.parse_args()
    missing = unavailable()
    if missing:
        print(f"the sanitizers cannot run here: {missing}", file=sys.stderr)
        return 2
    wanted = [chosen.build] if chosen.build else builds()
    return 1 if any([not checked(build, chosen.quick) for build in wanted]) else 0


def builds() -> list[str]:
    """Those that differ on this processor."""
    info = Path("/proc/cpuinfo")
    wide = info.is_file() and "avx512f" in info.read_text("utf-8", "replace")
    return [name for name in BUILDS if name != "avx2" or wide]


def unavailable() -> str | None:
    """Why the sanitizers cannot be used; None where they can."""
    if not sys.platform.startswith("linux"):
        return "they are loaded in front of Python by LD_PRELOAD, on Linux"
    if shutil.which("c++") is None:
        return "no compiler c++ was found"
    lost = [name for name in ("libasan.so", "libubsan.so") if runtime(name) is None]
    return f"{', '.join(lost)} was not found beside the compiler (install libgcc's sanitizers)" if lost else None


def runtime(name: str) -> str | None:
    """Where the compiler keeps a runtime library."""
    asked = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
    path = asked.stdout.strip()
    return path if os.path.isabs(path) else None


def checked(build: str, quick: bool) -> bool:
    """Whether the harness sees what is planted in this build, and nothing else is to be seen."""
    for plant, report in PLANTS.items():
        done = drive(build, "--plant", plant)
        if done.returncode == 0 or report not in done.stderr:
            print(done.stdout + done.stderr, file=sys.stderr)
            print(f"{build}: the planted {plant} was not seen as {report!r}: nothing can be trusted", file=sys.stderr)
            return False
    print(f"{build}: all {len(PLANTS)} planted faults were seen", flush=True)
    done = drive(build, *(["--quick"] if quick else []))
    print(f"{build}: {done.stdout.strip()}", flush=True)
    if done.returncode:
        print(done.stderr[-20_000:], file=sys.stderr)
    return done.returncode == 0


def drive(build: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`drive.py` in a process of its own, with the sanitizers in front."""
    command = [sys.executable, str(HERE / "drive.py"), *arguments]
    return subprocess.run(command, env=environment(build), capture_output=True, text=True, timeout=SECONDS)


def environment(build: str) -> dict[str, str]:
    """The compiler runs without the runtimes; Python takes every object from malloc, so that each has its fences."""
    script = f'unset LD_PRELOAD; exec c++ "$@" {SANITIZERS} -fno-sanitize-recover=undefined'
    own = {
        "PACELINE_NATIVE": BUILDS[build],
        "CXX": f"sh -c '{script}' c++",
        "XDG_CACHE_HOME": str(ROOT / "build" / "sanitize"),
        "LD_PRELOAD": " ".join(str(runtime(name)) for name in ("libasan.so", "libubsan.so")),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:alloc_dealloc_mismatch=0:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    return os.environ | own


if __name__ == "__main__":
    sys.exit(main())
