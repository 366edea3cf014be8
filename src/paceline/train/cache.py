"""What the target computes after every token of the data, on disk: a run that finds it needs no target.

Kept are its likeliest next tokens, and for drafters that read states its last hidden states, too.

The target's outputs after a token depend on the token's document alone, not on the row, step or run that takes it. So
a cache holds documents: a folder for each source, in it one record for each token, at the place that the token has in
the source. A document is scored when the first run needs it, the part that it reads, and never again; files have holes
where nothing was requested yet. A document's records are written in order, and the last byte of each has the sign of
log p, which is below 0: a run that ends at any point leaves a cache to continue with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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

MADE, RECORDS = "made.json", "records.bin"
FORM = 2  # of the records
REPORTS = 10  # how often it is reported how far the scoring is
BATCH_TOKENS = 8192  # scored at a time

# An example that a run reads and nobody has scored so far: its place, its tokens [need] that the run reads.
Wish = tuple[int, np.ndarray]


def record(top: int, vocab: int, width: int = 0) -> np.dtype[Any]:
    """Return what is kept of a token: ids of the likeliest next ones, the bits of its state's ``width`` numbers in
    bfloat16, log p of those tokens and of all others together."""
    number = "<u2" if vocab <= 2**16 else "<u4"
    state = [("state", "<u2", (width,))] if width else []
    return np.dtype([("ids", number, (top,)), *state, ("log_probs", "<f2", (top + 1,))])


class TopCache:
    """Likeliest tokens and, where requested, last states by document, for the sources of a run; others' may lie in the
    folder.

    Args:
        key: what the target's words depend on next to the source: target, precision, longest document.
        top: likeliest tokens kept.
        vocab: tokens of the target.
        width: of the target's states; 0: they are not kept.

    Raises:
        ConfigError: the folder is not a cache.
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
        self.folder, self.top, self.width = folder, top, width
        self.kind = record(top, vocab, width)
        self.examples: list[list[Example]] = []  # of each source, with their places
        self._files: list[Path] = []  # of each source
        self._records: list[np.ndarray] = []  # the same, mapped
        self._firsts: list[int] = []  # their first records' places
        more, first = {"states": width} if width else {}, 0
        for spec, examples in sources:
            ends = first + np.cumsum([len(e.tokens) for e in examples])
            starts = [first, *ends[:-1].tolist()]
            self.examples.append([replace(e, place=at) for e, at in zip(examples, starts, strict=True)])
            source_key = {**key, "top": top, "source": Path(spec.file).name, "sha256": mark(spec.file), **more}
            count = int(ends[-1]) - first
            file = _open(folder, plain({**source_key, "form": FORM}), count * self.kind.itemsize)
            self._files.append(file)
            self._records.append(np.memmap(file, self.kind, "r", shape=(count,)))
            self._firsts.append(first)
            first += count

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
        examples = [example for each in self.examples for example in each]
        starts = np.array([example.place for example in examples])
        needs = np.zeros(len(starts), dtype=np.int64)
        for batch in batches:
            places = batch.places[batch.weights > 0].numpy()
            numbers = np.searchsorted(starts, places, "right") - 1
            np.maximum.at(needs, numbers, places - starts[numbers] + 1)
        needed = np.flatnonzero(needs)
        lost = needed[self._at(starts[needed] + needs[needed] - 1)["log_probs"][:, -1] >= 0]
        wishes = [(examples[i].place, examples[i].tokens[: int(needs[i])]) for i in lost.tolist()]
        return sorted(wishes, key=lambda wish: len(wish[1]))

    def _score(self, scorer: Scorer, wishes: Sequence[Wish], say: Callable[[str], None]) -> None:
        done, total, began = 0, _tokens(wishes), perf_counter()
        for group in _groups(wishes):
            before, done = done, done + _tokens(group)
            states, top = scorer([tokens for _, tokens in group], self.top)
            rows = np.empty(len(top.ids), dtype=self.kind)
            rows["ids"], rows["log_probs"] = top.ids.cpu().numpy(), top.log_probs.cpu().numpy()
            if self.width:
                rows["state"] = states.cpu().to(torch.bfloat16).view(torch.uint16).numpy()
            ends = np.cumsum([len(tokens) for _, tokens in group])[:-1]
            for (place, _), records in zip(group, np.split(rows, ends), strict=True):
                source = int(np.searchsorted(self._firsts, place, "right")) - 1
                _write(self._files[source], (place - self._firsts[source]) * self.kind.itemsize, records.tobytes())
            if done * REPORTS // total > before * REPORTS // total:
                say(f"cache: {done:,} of {total:,} tokens, {done / (perf_counter() - began):,.0f} a second")

    # -- reading

    def targets(self, batch: TokenBatch) -> TargetTop:
        """Override `Features.targets`.

        Raises:
            ConfigError: the cache has lost what a token needs.
        """
        records, device = self._read(batch.places[batch.weights > 0]), batch.tokens.device
        ids = torch.from_numpy(records["ids"].astype(np.int64)).to(device)
        return TargetTop(ids, torch.from_numpy(records["log_probs"].astype(np.float32)).to(device))

    def states(self, batch: TokenBatch) -> Tensor:
        """Override `Features.states`.

        Raises:
            ConfigError: the cache has lost what a token needs.
        """
        needed, device = needed_states(batch), batch.tokens.device
        bits = np.ascontiguousarray(self._read(batch.places[needed])["state"]).view(np.int16)
        states = torch.zeros(*batch.tokens.shape, self.width, device=device)
        states[needed] = torch.from_numpy(bits).to(device).view(torch.bfloat16).float()
        return states

    def _read(self, rows: Tensor) -> np.ndarray:
        """Return [rows] the records at these places, all of which are there."""
        places = rows.cpu().numpy()
        if len(places) and places.min() < 0:
            raise ValueError("tokens that lie in no cache: of held-out data, run the target")
        records = self._at(places)
        if (records["log_probs"][:, -1] >= 0).any():
            raise ConfigError(f"cache {self.folder}", "it has lost records", "run it again: they are made again")
        return records

    def _at(self, places: np.ndarray) -> np.ndarray:
        """Return [rows] the records at these places: zeros where there are none."""
        records = np.empty(len(places), self.kind)
        owners = np.searchsorted(self._firsts, places, "right") - 1
        for index in np.unique(owners).tolist():
            here = owners == index
            records[here] = self._records[index][places[here] - self._firsts[index]]
        return records


def _open(folder: Path, key: Mapping[str, Any], least_bytes: int) -> Path:
    """Return the file of a source's records, made where it is not there, with holes up to so many bytes."""
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    place = folder / f"{str(key['source']).split('.')[0]}-{digest}"
    with writing(f"--cache {folder}", "name another folder, or train without --cache"):
        place.mkdir(parents=True, exist_ok=True)
        if not (place / MADE).is_file():
            (place / MADE).write_text(text, encoding="utf-8")
        (place / RECORDS).touch()
        if (place / RECORDS).stat().st_size < least_bytes:
            os.truncate(place / RECORDS, least_bytes)
    if (place / MADE).read_text("utf-8") != text:
        raise ConfigError(f"--cache {folder}", f"{place.name} in it is not part of a cache", "name another folder")
    return place / RECORDS


def _tokens(wishes: Sequence[Wish]) -> int:
    return sum(len(tokens) for _, tokens in wishes)


def _groups(wishes: Sequence[Wish]) -> Iterator[list[Wish]]:
    """Yield wishes to score together: `BATCH_TOKENS` with padding, one at least."""
    group: list[Wish] = []
    for wish in wishes:
        if group and (len(group) + 1) * len(wish[1]) > BATCH_TOKENS:  # they come in the order of their length
            yield group
            group = []
        group.append(wish)
    if group:
        yield group


def _write(path: Path, at: int, data: bytes) -> None:
    """Write plainly, not through a mapping: a full disk is then an error that can be reported, and not a bus fault."""
    with path.open("r+b") as handle:
        handle.seek(at)
        handle.write(data)
