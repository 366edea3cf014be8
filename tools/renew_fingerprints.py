"""Puts a model's fingerprint in the place of the one by which earlier versions knew it.

    .venv/bin/python tools/renew_fingerprints.py MODEL PATH [PATH ...]

Earlier fingerprints covered a model's config, headers and sixteen samples of each weight file; the present ones cover
every byte. Sets, heads and adapters, and the notes beside answers, name the model that they were made for. Named here
are JSON files, or folders with such. No weights are written. A cache of `paceline train --cache` is made anew.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

from paceline.weights.files import fingerprint
from paceline.weights.source import resolve_folder

PIECES, PIECE_BYTES, HEADER_BYTES = 16, 4096, 100_000_000


def sampled(folder: Path) -> str:
    """The fingerprint of a checkpoint as it was before."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            length = stream.read(8)
            digest.update(length + stream.read(min(int.from_bytes(length, "little"), size, HEADER_BYTES)))
            for piece in range(PIECES):
                stream.seek(piece * max(0, size - PIECE_BYTES) // (PIECES - 1))
                digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()


def json_files(paths: list[Path]) -> Iterator[Path]:
    """Those that are named, and those below folders that are."""
    for path in paths:
        yield from sorted(path.rglob("*.json")) if path.is_dir() else [path]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what the files were made for: a folder, or an embedded model's name")
    parser.add_argument("paths", type=Path, nargs="+", help="JSON files, or folders with such")
    given = parser.parse_args()
    folder = resolve_folder(given.model, offline=True)
    new = fingerprint(folder)
    old = sampled(folder).encode()
    for file in json_files(given.paths):
        content = file.read_bytes()
        if old in content:
            file.write_bytes(content.replace(old, new.encode()))
            print(f"renewed {file}")


if __name__ == "__main__":
    main()
