"""What the target computes after every token of the data, on disk: a run that finds it needs no target.

Kept are its likeliest next tokens, and for drafters that read states its last hidden states, too.

The target's outputs after a token depend on the token's document alone, not on the row, step or run that takes it. So
a cache holds documents: a folder for each source, in it one record for each token, at the place that the token has in
the source. A document is scored when the first run needs it, the part that it reads, and never again;
files have holes where nothing was requested yet. A document counts as scored once that is written after its records, so
that a run that ends at any point leaves a cache to continue with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from .data import Example, SourceSpec, TokenBatch, mark
from .features import needed_states
from .files import plain, writing
from .losses import TargetTop
from .scoring import Scorer

MADE, RECORDS, SCORED = "made.json", "records.bin", "scored.bin"
REPORTS = 10  # how often it is reported how far the scoring is
BATCH_TOKENS = 8192  # scored at a time


def record(top: int, vocab: int, width: int = 0) -> np.dtype[Any]:
    """Return what is kept of a token: ids of the likeliest next ones, their log p and that of all others together,
    and the bits of its state's ``width`` numbers in bfloat16."""
    number = "<u2" if vocab <= 2**16 else "<u4"
    state = [("state", "<u2", (width,))] if width else []
    return np.dtype([("ids", number, (top,)), ("log_probs", "<f2", (top + 1,)), *state])


@dataclass(slots=True)
class CachedSource:
    """One source's share of a cache."""

    folder: Path
    kind: np.dtype[Any]
    starts: np.ndarray  # [examples + 1] places of the examples' first tokens in the run's numbering; the end
    scored: np.ndarray  # [examples] uint32, leading tokens of each that have a record

    def keep(self, scored: Mapping[int, np.ndarray]) -> None:
        """Write the records of some examples' first tokens, and after them all that they count."""
        for number, records in scored.items():
            at = (int(self.starts[number]) - int(self.starts[0])) * self.kind.itemsize
            _write(self.folder / RECORDS, at, records.tobytes())
        for number, records in scored.items():
            self.scored[number] = len(records)
            _write(self.folder / SCORED, 4 * number, np.array([len(records)], dtype="<u4").tobytes())


# An example that a run reads and nobody has scored so far: the numbers of its source and its own, its tokens [need] as
# far as the run reads it.
Wish = tuple[int, int, np.ndarray]


class TopCache:
    """Likeliest tokens and, where requested, last states by document, for the sources of a run; others' may lie in the
    folder.

    Args:
        key: what the target's words depend on next to the source: target, precision, longest document.
        top: likeliest tokens kept.
        vocab: tokens of the target.
        width: of the target's states; 0: they are not kept.

    Raises:
        ConfigError: the folder is not a cache, or is damaged.
    """

    def __init__(
        self,
        folder: Path,
        sources: Sequence[tuple[SourceSpec, Sequence[Example]]],
        key: Mapping[str, Any],
        top: int,
        vocab: int,
        width: int = 0,
    ) -> None:
        more = {"states": width} if width else {}
        keys = [{**key, "top": top, "source": Path(s.file).name, "sha256": mark(s.file), **more} for s, _ in sources]
        self.folder, self.top, self.width = folder, top, width
        self.kind = record(top, vocab, width)
        self.parts: list[CachedSource] = []
        self.examples: list[list[Example]] = []  # of each source, with their places
        first = 0
        for (_, examples), source_key in zip(sources, keys, strict=True):
            starts = first + np.concatenate(([0], np.cumsum([len(e.tokens) for e in examples])))
            self.examples.append([replace(e, place=int(at)) for e, at in zip(examples, starts, strict=False)])
            self.parts.append(_open(folder, plain(source_key), starts, self.kind))
            first = int(starts[-1])
        self._files: list[np.ndarray] = []  # of each part, once they are read

    # -- making

    def complete(
        self,
        make_scorer: Callable[[], Scorer],
        batches: Iterable[TokenBatch],
        say: Callable[[str], None],
    ) -> None:
        """Score what the run reads in all of its batches and the cache lacks.

        The scorer is made where something is to be scored.

        Raises:
            ConfigError: a disk that is full; scored documents stay.
        """
        wishes = self._wishes(batches)
        if wishes:
            size = (tokens := _tokens(wishes)) * self.kind.itemsize
            say(f"cache {self.folder}: {tokens:,} tokens to score, {size / 1e6:,.0f} MB")
            remedy = "free space there, or train without --cache; scored documents stay, the same command continues"
            with writing(f"--cache {self.folder}", remedy):
                self._score(make_scorer(), wishes, say)

    def _wishes(self, batches: Iterable[TokenBatch]) -> list[Wish]:
        """Return what no run has scored yet, short documents first: those of a batch are about as long as each
        other.
        """
        starts = np.concatenate([part.starts[:-1] for part in self.parts])
        needs = np.zeros(len(starts), dtype=np.int64)
        for batch in batches:
            places = batch.places[batch.weights > 0].numpy()
            numbers = np.searchsorted(starts, places, "right") - 1
            np.maximum.at(needs, numbers, places - starts[numbers] + 1)
        wishes: list[Wish] = []
        for index, examples in enumerate(self.examples):
            lengths, needs = needs[: len(examples)], needs[len(examples) :]
            for number in np.flatnonzero(lengths > self.parts[index].scored).tolist():
                wishes.append((index, number, examples[number].tokens[: int(lengths[number])]))
        return sorted(wishes, key=lambda wish: len(wish[2]))

    def _score(self, scorer: Scorer, wishes: Sequence[Wish], say: Callable[[str], None]) -> None:
        done, total, began = 0, _tokens(wishes), perf_counter()
        for group in _groups(wishes):
            before, done = done, done + _tokens(group)
            states, top = scorer([tokens for _, _, tokens in group], self.top)
            rows = np.empty(len(top.ids), dtype=self.kind)
            rows["ids"], rows["log_probs"] = top.ids.cpu().numpy(), top.log_probs.cpu().numpy()
            if self.width:
                rows["state"] = states.cpu().to(torch.bfloat16).view(torch.uint16).numpy()
            ends = np.cumsum([len(tokens) for _, _, tokens in group])[:-1]
            scored = list(zip(group, np.split(rows, ends), strict=True))
            for index, part in enumerate(self.parts):
                part.keep({number: records for (source, number, _), records in scored if source == index})
            if done * REPORTS // total > before * REPORTS // total:
                say(f"cache: {done:,} of {total:,} tokens, {done / (perf_counter() - began):,.0f} a second")

    # -- reading

    def targets(self, batch: TokenBatch) -> TargetTop:
        """Override `Features.targets`.

        Raises:
            ConfigError: the cache has lost what a token needs.
        """
        records = self._read(batch.places[batch.weights > 0], ["ids", "log_probs"])
        device = batch.tokens.device
        ids = torch.from_numpy(records["ids"].astype(np.int64)).to(device)
        return TargetTop(ids, torch.from_numpy(records["log_probs"].astype(np.float32)).to(device))

    def states(self, batch: TokenBatch) -> Tensor:
        """Override `Features.states`.

        Raises:
            ConfigError: the cache has lost what a token needs.
        """
        needed = needed_states(batch)
        records = self._read(batch.places[needed], ["state", "log_probs"])["state"].view(np.int16)
        states = torch.zeros(*batch.tokens.shape, self.width, device=batch.tokens.device)
        states[needed] = torch.from_numpy(records).to(batch.tokens.device).view(torch.bfloat16).float()
        return states

    def _read(self, rows: Tensor, names: list[str]) -> dict[str, np.ndarray]:
        """Return [rows] fields of the records at these places."""
        places = rows.cpu().numpy()
        if len(places) and places.min() < 0:
            raise ValueError("tokens that lie in no cache: of held-out data, run the target")
        self._files = self._files or [_map(part.folder / RECORDS, self.kind) for part in self.parts]
        columns = {name: np.empty((len(places), *self.kind[name].shape), self.kind[name].base) for name in names}
        owners = np.searchsorted([int(part.starts[0]) for part in self.parts], places, "right") - 1
        for index in np.unique(owners).tolist():
            here = owners == index
            for name, values in columns.items():
                values[here] = self._files[index][name][places[here] - int(self.parts[index].starts[0])]
        if not columns["log_probs"].any(1).all():  # a hole: probabilities of 1 each
            raise ConfigError(f"cache {self.folder}", "it has lost records", "remove the folder: it is made again")
        return columns


def _open(folder: Path, key: Mapping[str, Any], starts: np.ndarray, kind: np.dtype[Any]) -> CachedSource:
    """Return a source's part of a cache, made where it is not there. Marks of scored documents must be right."""
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    place = folder / f"{str(key['source']).split('.')[0]}-{digest}"
    if not (place / MADE).is_file():
        with writing(f"--cache {folder}", "name another folder, or train without --cache"):
            place.mkdir(parents=True, exist_ok=True)
            (place / MADE).write_text(text, encoding="utf-8")
    elif (place / MADE).read_text("utf-8") != text:
        raise ConfigError(f"--cache {folder}", f"{place.name} in it is not part of a cache", "name another folder")
    scored = np.zeros(len(starts) - 1, dtype=np.uint32)
    if (place / SCORED).is_file():
        stored = np.fromfile(place / SCORED, dtype="<u4", count=len(scored))
        scored[: len(stored)] = stored
    ends = np.where(scored > 0, starts[:-1] - starts[0] + scored, 0)
    there = (place / RECORDS).stat().st_size if (place / RECORDS).is_file() else 0
    if (scored > np.diff(starts)).any() or int(ends.max(initial=0)) * kind.itemsize > there:
        wrong = f"{RECORDS} or {SCORED} is cut or of other data"
        raise ConfigError(f"cache {place}", wrong, "remove the folder: it is made again")
    return CachedSource(place, kind, starts, scored)


def _map(path: Path, kind: np.dtype[Any]) -> np.ndarray:
    count = path.stat().st_size // kind.itemsize if path.is_file() else 0
    if not count:
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", shape=(count,))


def _tokens(wishes: Sequence[Wish]) -> int:
    return sum(len(tokens) for _, _, tokens in wishes)


def _groups(wishes: Sequence[Wish]) -> Iterator[list[Wish]]:
    """Yield wishes to score together: `BATCH_TOKENS` with padding, one at least."""
    group: list[Wish] = []
    for wish in wishes:
        if group and (len(group) + 1) * len(wish[2]) > BATCH_TOKENS:  # they come in the order of their length
            yield group
            group = []
        group.append(wish)
    if group:
        yield group


def _write(path: Path, at: int, data: bytes) -> None:
    """Write plainly, not through a mapping: a full disk is then an error that can be reported, and not a bus fault."""
    with path.open("r+b" if path.is_file() else "w+b") as handle:
        handle.seek(at)
        handle.write(data)
