"""States of the frozen target that a recipe learns from: computed with each batch, or once, into a cache on disk.

A cache holds one row of ``d_model`` numbers for every token of a run that carries weight, in the order in which the
run takes them. It belongs to one run: target, data, order, rows and precision; a cache of another is refused. It is
written under another name first, so that a run that ends early leaves none behind.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from .data import TokenBatch
from .files import plain, require_same, writing
from .network import Network
from .trainer import StepContext

INDEX, PLACES = "cache.json", "rows.npy"
REPORTS = 10  # how often the making of a cache says how far it is
DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "fp32": (torch.float32, np.dtype("<f4")),
    "bf16": (torch.bfloat16, np.dtype("<i2")),  # its bits: numpy has no such type
}
CacheDtype = Literal["fp32", "bf16"]


# -- online


def capture(network: Network, batch: TokenBatch, taps: Sequence[int]) -> dict[int, Tensor]:
    """States after the layers ``taps``; no layer above the highest is run.

    Args:
        network: the target.
        batch: on the network's device.
        taps: layers as in `DrafterSpec.taps`: 0 the first, -1 the last, whose states have not gone through
            the final norm.

    Returns:
        tap -> [B, T, d_model].

    Raises:
        ConfigError: no taps, or a layer that the network does not have.
    """
    layers = network.config.num_layers
    wrong = [tap for tap in taps if not -layers <= tap < layers]
    if not taps or wrong:
        asked, remedy = f"taps {list(taps)}", f"name layers between {-layers} and {layers - 1}"
        raise ConfigError(asked, f"the target has {layers} layers" if wrong else "no layer is named", remedy)
    stop = max(tap % layers for tap in taps) + 1
    hidden, inputs = network.run(network.embed(batch.tokens, batch.positions), 0, stop, batch)
    after = [*inputs[1:], hidden]
    return {tap: after[tap % layers] for tap in taps}


class Features(Protocol):
    """Where a recipe gets the target's states from."""

    def final(self, batch: TokenBatch, context: StepContext) -> Tensor:
        """[rows, d_model] after the final norm, of the tokens of ``batch`` that carry weight, row by row."""
        ...


class OnlineFeatures:
    """Runs the frozen target on every batch."""

    def __init__(self, target: Network) -> None:
        self.target = target

    @torch.no_grad()
    def final(self, batch: TokenBatch, context: StepContext) -> Tensor:
        """As `Features.final`."""
        states = capture(self.target, batch, (-1,))[-1]
        return self.target.final(states)[batch.weights > 0]


# -- offline


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much a cache takes, known before any of it is written."""

    batches: int
    tokens: int  # that carry weight
    d_model: int
    dtype: CacheDtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.d_model * DTYPES[self.dtype][1].itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all tokens; the index adds 12 a row of a batch, and a few hundred."""
        return self.tokens * self.row_bytes

    @staticmethod
    def of(batches: Iterable[TokenBatch], d_model: int, dtype: CacheDtype) -> CacheSize:
        """By counting through the run's batches."""
        counts = [int((batch.weights > 0).sum()) for batch in batches]
        return CacheSize(len(counts), sum(counts), d_model, dtype)


class FeatureCache:
    """A finished cache, memory-mapped.

    Args:
        folder: where it lies.
        key: what it must have been made of.

    Raises:
        ConfigError: it is no cache, is damaged, or is of another run.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        index = _read_index(folder)
        require_same(f"--cache {folder}", index["key"], key, "name another folder, or remove this one")
        self.dtype, kind = DTYPES[index["key"]["dtype"]]
        # One file is written; a cache may also lie in several, one after the other.
        self._first = [0, *np.cumsum(index["shards"]).tolist()]  # of each file, in tokens
        self._shards = [_map_shard(folder, n, count, index["d_model"], kind) for n, count in enumerate(index["shards"])]
        places = np.load(folder / PLACES)
        self._ends, self._marks, self._batches = places["end"], places["mark"], index["first_rows"]

    def final(self, batch: TokenBatch, context: StepContext) -> Tensor:
        """As `Features.final`, in float32 on the batch's device.

        Raises:
            ConfigError: the rows are not those that the cache was made of.
        """
        first = self._batches[context.batch] + context.first_row
        last = first + len(batch.tokens)
        if self._marks[first:last].tolist() != _marks(batch):
            raise ConfigError(f"cache {self.folder}", f"batch {context.batch} is another", "remove it: it is made anew")
        start = int(self._ends[first - 1]) if first else 0
        values = self._tokens(start, int(self._ends[last - 1]))
        return torch.from_numpy(values).view(self.dtype).to(batch.tokens.device, torch.float32)

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """[stop - start, d_model] from all files that hold some of them."""
        parts = [
            shard[max(0, start - first) : max(0, stop - first)]
            for first, shard in zip(self._first, self._shards, strict=False)
        ]
        return np.concatenate([part for part in parts if len(part)] or [np.array(self._shards[0][:0])])


def open_cache(
    folder: Path,
    key: Mapping[str, Any],
    dtype: CacheDtype,
    target: Network,
    batches: Callable[[], Iterable[TokenBatch]],
    products: Callable[[], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> FeatureCache:
    """The cache in ``folder``; where there is none it is made, and its size is said before a byte is written.

    Args:
        folder: of the cache.
        key: what the run's states depend on.
        dtype: of the numbers stored. fp32: losses are those of a run without a cache, to the bit; bf16: half as
            large, and every state rounded to 8 bits of mantissa.
        target: the frozen target.
        batches: all of the run in their order; called twice.
        products: context in which the run makes its products.
        say: told what goes on.

    Raises:
        ConfigError: a cache of another run, a folder that holds something else, a disk that is too small or full.
    """
    key = {**key, "dtype": dtype}
    if folder.is_dir() and any(folder.iterdir()):
        return FeatureCache(folder, key)
    size = CacheSize.of(batches(), target.config.d_model, dtype)
    _check_space(folder, size, say)
    with _scratch(folder) as place:
        _make(place, key, size, target, batches(), products, say)
    say(f"cache {folder} is made")
    return FeatureCache(folder, key)


def _check_space(folder: Path, size: CacheSize, say: Callable[[str], None]) -> None:
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(there).free
    wanted = f"{size.total_bytes:,} bytes ({size.total_bytes / 1e9:.2f} GB)"
    say(f"cache {folder}: {size.tokens:,} tokens x {size.d_model} {size.dtype}, {wanted}; {free / 1e9:.2f} GB are free")
    if size.total_bytes > free:
        remedy = "free space there, name another folder, halve it with --cache-dtype bf16, or train without --cache"
        raise ConfigError(f"--cache {folder}", f"it takes {wanted}, and {free / 1e9:.2f} GB are free", remedy)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that takes its name in the end, or is removed if there is no end."""
    place = folder.with_name(f"{folder.name}.unfinished")
    with writing(f"--cache {folder}", "free space there, or train without --cache; what was there of it is removed"):
        try:
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            place.mkdir(parents=True)
            yield place
            if folder.is_dir():
                folder.rmdir()  # empty, as the caller saw
            place.rename(folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _make(
    place: Path,
    key: Mapping[str, Any],
    size: CacheSize,
    target: Network,
    batches: Iterable[TokenBatch],
    products: Callable[[], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> None:
    online, context = OnlineFeatures(target), StepContext(0, torch.Generator())
    first_rows, ends, marks = [0], [], []
    total = 0
    # Written plainly, not through a mapping: a full disk is then an error that can be told, and not a bus fault.
    with _shard(place, 0).open("wb") as states_file:
        for number, batch in enumerate(batches):
            with products():
                states = online.final(batch.to(target.head_weight.device), context)
            states_file.write(_bits(states, size.dtype).tobytes())
            counts = (batch.weights > 0).sum(1)
            ends.append(total + counts.cumsum(0).numpy())
            total += int(counts.sum())
            marks += _marks(batch)
            first_rows.append(len(marks))
            if (number + 1) * REPORTS // size.batches > number * REPORTS // size.batches:
                say(f"cache: {number + 1:,} of {size.batches:,} batches")
    places = np.empty(len(marks), dtype=np.dtype([("end", "<i8"), ("mark", "<u4")]))
    places["end"], places["mark"] = np.concatenate(ends), marks
    np.save(place / PLACES, places)
    index = {"key": plain(key), "d_model": size.d_model, "shards": [total] if total else [], "first_rows": first_rows}
    (place / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def _shard(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.bin"


def _map_shard(folder: Path, number: int, count: int, d_model: int, kind: np.dtype[Any]) -> np.ndarray:
    path = _shard(folder, number)
    if not path.is_file() or path.stat().st_size != count * d_model * kind.itemsize:
        raise ConfigError(f"cache {folder}", f"{path.name} is missing or cut", "remove the folder: it is made anew")
    return np.memmap(path, dtype=kind, mode="r", shape=(count, d_model))


def _bits(states: Tensor, dtype: CacheDtype) -> np.ndarray:
    """[n, d_model] as numpy can hold it."""
    stored, kind = DTYPES[dtype]
    values = states.to("cpu", stored).contiguous()
    return (values.view(torch.int16) if dtype == "bf16" else values).numpy().astype(kind, copy=False)


def _marks(batch: TokenBatch) -> list[int]:
    """[B] checksums of the tokens of every row, of where they see each other, and of which carry weight."""
    parts = (batch.tokens, batch.documents, (batch.weights > 0).long())
    rows = torch.stack([part.cpu() for part in parts], 1).contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in rows]


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text("utf-8"))
        if not {"key", "d_model", "shards", "first_rows"} <= index.keys() or not (folder / PLACES).is_file():
            raise ValueError("something is missing in it")
        return index
    except (OSError, ValueError, AttributeError) as error:
        remedy = "name an empty folder or a new one"
        raise ConfigError(f"--cache {folder}", f"the folder holds no cache ({error})", remedy) from error
