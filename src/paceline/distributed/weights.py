"""Checkpoints for hosts that lack them, from the process that asks, over a group of their own.

    Lacking   from a worker: the checkpoints that its host does not have
    Parts     to it, of each: the files, and what of them follows; is answered by `Answer`
    WeightBytes     to it: bytes of a file and their hash; is answered likewise, and a few are on their way

A stage gets the bytes of its own layers. They lie in files as long as the asker's, with holes for all others, in the
user's cache folder, where the next worker of that stage finds them; every piece is checked when it comes and when it is
found again. Nothing is pickled: files are JSON, tokenizers and safetensors, or GGUF.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.folders import user_cache
from ..network import hub
from ..network.files import MAX_JSON_BYTES, RECEIVED, fingerprint, is_file
from ..network.gguf import is_gguf, read_gguf
from ..network.loader import read_config, resolve_folder
from ..network.weights import weight_map
from .channels import ChannelClosed, Line
from .clock import Late
from .frames import FrameError
from .worker import Checkpoint

PIECE_BYTES = 4 * 2**20
AHEAD = 8  # pieces on their way
ANSWER_S = 60.0  # for the other end to say something
MOST_FILES, MOST_BYTES = 4096, 2**44
SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt")  # no format that can run code
Range = tuple[int, int, int]  # which file, from which byte, how many


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a worker's host does not have."""

    names: list[str]


@dataclass(frozen=True, slots=True)
class Parts:
    """A checkpoint that follows."""

    name: str
    fingerprint: str
    files: list[tuple[str, int]]  # names and whole sizes
    ranges: list[Range]  # that come, each in pieces


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The next bytes."""

    sha256: str
    data: Tensor  # [bytes] uint8


@dataclass(frozen=True, slots=True)
class Answer:
    """What came last has been read, or written."""

    goes_on: bool  # whether bytes are to come; else the worker's host has the checkpoint from an earlier time


KINDS = Lacking, Parts, WeightBytes, Answer


# -- the process that asks


def give(line: Line, checkpoints: Sequence[Checkpoint], moved: Callable[[], None]) -> None:
    """Send a worker what its host lacks.

    Args:
        line: to the worker.
        checkpoints: that it may ask for.
        moved: called after every piece.

    Raises:
        ChannelClosed, Late, FrameError: the worker is gone, or says nothing or nonsense.
        ConfigError: a checkpoint that cannot be read.
    """
    known = {one.name: one for one in checkpoints}
    lacking = line.receive(ANSWER_S)
    for one in [known[name] for name in lacking.names if name in known]:
        parts = parts_of(one)
        line.send(parts, ANSWER_S)
        if not line.receive(ANSWER_S).goes_on:
            continue
        base = one.folder if one.folder.is_dir() else one.folder.parent
        waited_for = 0
        for data in _pieces(base, parts):
            line.send(WeightBytes(sha256(data).hexdigest(), torch.frombuffer(data, dtype=torch.uint8)), ANSWER_S)
            waited_for += 1
            if waited_for == AHEAD:
                line.receive(ANSWER_S)
                waited_for -= 1
            moved()
        for _ in range(waited_for):
            line.receive(ANSWER_S)


def parts_of(checkpoint: Checkpoint) -> Parts:
    """What of a checkpoint's files a worker needs."""
    folder, (start, stop) = checkpoint.folder, checkpoint.layers or (0, -1)
    if is_gguf(folder):
        files = [*read_gguf(folder).paths]
    else:
        files = [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and is_file(file)]
    sizes, ranges = [(file.name, file.stat().st_size) for file in files], list[Range]()
    needed = None if stop < 0 or is_gguf(folder) else _sources(folder, start, stop)
    for index, (file, (_, size)) in enumerate(zip(files, sizes, strict=True)):
        if file.suffix == ".safetensors" and needed is not None:
            ranges += [(index, at, count) for at, count in _of_layers(file, needed)]
        else:
            ranges.append((index, 0, size))
    return Parts(checkpoint.name, fingerprint(folder), sizes, ranges)


def _sources(folder: Path, start: int, stop: int) -> set[str]:
    """Tensors of these layers, without their last word: blocks of 4 bits have several in the place of a weight."""
    wanted = {f"layers.{index}" for index in range(start, stop)}
    pieces = weight_map(read_config(folder))
    return {piece.source.rpartition(".")[0] for piece in pieces if ".".join(piece.into.split(".")[:2]) in wanted}


def _of_layers(file: Path, needed: set[str]) -> Iterator[tuple[int, int]]:
    """Where a safetensors file's header is, and those tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_JSON_BYTES:
            raise ConfigError(f"weights {file}", f"a header of {length:,} bytes", "download or copy it again")
        header = json.loads(opened.read(length))
    yield 0, 8 + length
    for name, entry in header.items():
        if name.removeprefix("model.").rpartition(".")[0] in needed:
            begin, end = entry["data_offsets"]
            yield 8 + length + begin, end - begin


def _pieces(base: Path, parts: Parts) -> Iterator[bytearray]:
    """Bytes of all ranges, in order."""
    for index, begin, count in parts.ranges:
        with (base / parts.files[index][0]).open("rb") as file:
            for at, size in _cut(begin, count):
                file.seek(at)
                data = bytearray(file.read(size))
                if len(data) != size:
                    raise ConfigError(f"weights {file.name}", "it became shorter", "leave it as it is while it is used")
                yield data


def _cut(begin: int, count: int) -> Iterator[tuple[int, int]]:
    """A range in pieces: where each begins, and its bytes."""
    for at in range(begin, begin + count, PIECE_BYTES):
        yield at, min(PIECE_BYTES, begin + count - at)


# -- the worker


def lacking(names: Sequence[str]) -> list[str]:
    """Those that this host does not have; the hub is not asked."""
    found = []
    for name in names:
        try:
            resolve_folder(name, offline=True)
        except ConfigError:
            found.append(name)
    return found


def obtain(line: Line, names: Sequence[str], host: str) -> None:
    """Get the checkpoints that this host lacks, and know them by their names from now on.

    Args:
        line: to the process that asks.
        names: of checkpoints.
        host: this one, for errors.

    Raises:
        ConfigError: what comes is not what its hash says, too much for this disk, or does not come.
    """
    wanted = lacking(names)
    line.send(Lacking(wanted), ANSWER_S)
    for name in wanted:
        asked = f"weights of {name} by broadcast to {host}"
        try:
            parts = line.receive(ANSWER_S)
            if not isinstance(parts, Parts) or parts.name != name:
                raise FrameError("another message came")
            hub.RECEIVED[name] = _received(line, parts, asked)
        except (ChannelClosed, Late, FrameError) as error:
            raise ConfigError(
                asked, f"they did not come ({error})", "look at the host that asks, and the link"
            ) from error
        except OSError as error:
            wrong = f"they cannot be kept ({error.strerror or error})"
            raise ConfigError(asked, wrong, "make room in the cache folder of this host's user") from error


def _received(line: Line, parts: Parts, asked: str) -> Path:
    """The folder or file of a checkpoint that is announced."""
    _check(parts, asked)
    base = (user_cache() or Path(tempfile.gettempdir(), f"paceline-{os.getuid()}")) / "received"
    what = sha256(json.dumps([parts.files, parts.ranges]).encode()).hexdigest()[:16]
    place = base / parts.fingerprint[:16] / what
    base.mkdir(parents=True, exist_ok=True)
    kept = _kept(place, parts)
    line.send(Answer(not kept), ANSWER_S)
    if not kept:
        _get(line, parts, place, asked)
    return place / parts.files[0][0] if parts.files[0][0].endswith(".gguf") else place


def _kept(place: Path, parts: Parts) -> bool:
    """Whether they are there from an earlier time, every byte as it was; what is not is removed."""
    try:
        known = json.loads((place / RECEIVED).read_text(encoding="utf-8"))
        if known["pieces"] == [sha256(data).hexdigest() for data in _pieces(place, parts)]:
            return True
    except (OSError, ValueError, KeyError, TypeError, ConfigError):  # what lies there is not whole: it comes anew
        pass
    shutil.rmtree(place, ignore_errors=True)
    return False


def _get(line: Line, parts: Parts, place: Path, asked: str) -> None:
    """Have all pieces, and then the folder."""
    base = place.parent.parent
    total, free = sum(count for _, _, count in parts.ranges), shutil.disk_usage(base).free
    if total > free:
        wrong = f"its part has {total / 2**30:.1f} GiB, and {base} has room for {free / 2**30:.1f}"
        raise ConfigError(asked, wrong, "make room there, or give that host its own checkpoint")
    with tempfile.TemporaryDirectory(dir=base) as temporary:
        folder = Path(temporary, place.name)
        folder.mkdir()
        _write(line, parts, folder, asked)
        place.parent.mkdir(exist_ok=True)
        with suppress(OSError):  # another worker's is there already
            folder.rename(place)


def _check(parts: Parts, asked: str) -> None:
    """Refuse names that lead elsewhere, files that are none of a checkpoint, and ranges beyond their ends."""
    names = [name for name, _ in parts.files]
    good = len(parts.files) <= MOST_FILES and len({*names}) == len(names) > 0
    good &= all(Path(name).name == name and Path(name).suffix in SUFFIXES for name in names)
    good &= all(0 <= size <= MOST_BYTES for _, size in parts.files) and parts.fingerprint.isalnum()
    for index, begin, count in parts.ranges if good else ():
        good &= 0 <= index < len(names) and begin >= 0 <= count and begin + count <= parts.files[index][1]
    if not good:
        raise ConfigError(asked, "what is announced is no checkpoint", "install the same version on all hosts")


def _write(line: Line, parts: Parts, folder: Path, asked: str) -> None:
    """Take all pieces; their hashes are noted last."""
    hashes = []
    for name, size in parts.files:
        with (folder / name).open("wb") as file:
            file.truncate(size)
    for index, begin, count in parts.ranges:
        with (folder / parts.files[index][0]).open("r+b") as file:
            for at, size in _cut(begin, count):
                piece = line.receive(ANSWER_S)
                if not isinstance(piece, WeightBytes) or piece.data.numel() != size:
                    raise FrameError("another message came")
                data = piece.data.numpy().tobytes()
                if sha256(data).hexdigest() != piece.sha256:
                    wrong = f"bytes {at:,} on of {parts.files[index][0]} are not what their hash says"
                    raise ConfigError(asked, wrong, "start it again; where it happens again, test memory and network")
                file.seek(at)
                file.write(data)
                hashes.append(piece.sha256)
                line.send(Answer(True), ANSWER_S)
    noted = {"fingerprint": parts.fingerprint, "pieces": hashes}
    (folder / RECEIVED).write_text(json.dumps(noted), encoding="utf-8")
