"""What a pass of a draft takes over links: tracks beside dense drafts, from measured computation and counted joins.

A link is emulated by its law, alpha log G + beta M a join (appendix C). What one process computes of a pass is timed,
with random weights; what it gets of the others costs nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from kit.study import Table
from torch import Tensor

from mirror_parts.common import MirrorFlags, study
from mirror_parts.latency import allreduce_time
from paceline.engine.calibration import PassTimer
from paceline.kernels.layers import unsupported
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig, decoder_config
from paceline.model.parallel import Ranks
from paceline.papers.mirror.tracks import Tracks, track_share
from paceline.papers.mirror.tracks_training import TracksOptions
from paceline.train.recipes.distillation import ModelShape

ALPHAS_MS = (0.01, 0.03, 0.1, 0.3, 1.0)
WORD_MS = 3.2e-6  # 4 bytes at 10 Gbit/s
CONTEXT = 256
TURNS = 15
PAIR = 4  # words of a choice among ranks of a dense draft: a score and a token, of 8 bytes each

# Dense drafts of equal parameters; those of 2 x 2 and 2 x 4 tracks at the same width have 2 and 4 times their layers.
# Beside them the shapes of dense drafts that read as many weights a pass as one such track.
POSITIONS = 2048
SIZES: dict[str, tuple[dict[str, int], dict[int, dict[str, int]]]] = {
    "small": (
        {"vocab_size": 8192, "layers": 2, "d_model": 160, "d_ff": 432, "heads": 4},
        {
            2: {"layers": 2, "d_model": 96, "d_ff": 256, "heads": 4},
            4: {"layers": 2, "d_model": 48, "d_ff": 160, "heads": 4},
        },
    ),
    "large": (
        {"vocab_size": 32768, "layers": 8, "d_model": 1024, "d_ff": 2816, "heads": 16},
        {
            2: {"layers": 8, "d_model": 672, "d_ff": 1856, "heads": 21},
            4: {"layers": 8, "d_model": 448, "d_ff": 1216, "heads": 14},
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A draft on so many devices."""

    name: str
    decoder: Decoder  # what one of them computes
    devices: int
    words: tuple[int, ...]  # of each join, that one device gives for a row
    parameters: int  # of all devices, each of them once

    def time(self, compute_ms: float, alpha_ms: float, rows: int) -> float:
        """Ms of a pass."""
        sizes = [rows * words for words in self.words]
        return compute_ms + sum(allreduce_time(size, self.devices, alpha_ms, WORD_MS) for size in sizes)


class Alone:
    """`model.joins.Collectives` of one process that measures what it computes: the others' parts are its own."""

    def __init__(self, count: int) -> None:
        self.count, self.struct = count, SimpleNamespace()

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return x.repeat(1, self.count)


def filled(decoder: Decoder) -> Decoder:
    """With random weights."""
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return decoder.finish()


def how(config: DecoderConfig) -> dict[str, Any]:
    """Compiled layers where they are."""
    native = unsupported(config, torch.bfloat16, torch.device("cpu")) is None
    return {"dtype": torch.bfloat16, "native": native, "attention": make_backend(torch.bfloat16)}


def count_of(config: DecoderConfig) -> int:
    """Parameters, with embedding and head as one table."""
    own = config.track if config.tracks > 1 else config
    layer = own.d_model * ((2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim + 3 * own.d_ff)
    merge = config.d_model**2 if config.tracks > 1 else 0
    return config.vocab_size * config.d_model + config.tracks * config.num_layers * layer + merge


def of_tracks(shape: dict[str, int], tracks: int) -> Way:
    """G tracks, each on a device: two joins of states and one of logits."""
    made: dict[str, Any] = {**shape, "tracks": tracks, "kv_heads": shape["heads"]}
    made["layers"] *= tracks
    vocab = made.pop("vocab_size")
    config = decoder_config(TracksOptions(**made).config(vocab, POSITIONS, 0, 1, 2))
    ranks = Ranks(track_share(config, 0), Alone(tracks))  # type: ignore[arg-type]
    decoder = filled(Tracks(config, ranks=ranks, **how(config)))
    width, logits = config.track.d_model, config.vocab_size // tracks
    return Way(
        name=f"2 x {tracks} tracks",
        decoder=decoder,
        devices=tracks,
        words=(width, width, logits),
        parameters=count_of(config),
    )


def dense(name: str, shape: dict[str, int], devices: int) -> Way:
    """A dense draft in tensor parallel: two sums a layer, one of embeddings, and a choice."""
    made: dict[str, Any] = {**shape, "kv_heads": shape["heads"]}
    vocab = made.pop("vocab_size")
    config = decoder_config(ModelShape(**made).config(vocab, POSITIONS, 0, 1, 2))
    parts = ("num_heads", "num_kv_heads", "d_ff", "vocab_size")
    own = replace(config, **{part: getattr(config, part) // devices for part in parts})
    joins = (config.d_model,) * (2 * config.num_layers + 1)
    words = (*joins, PAIR) if devices > 1 else ()
    decoder = filled(Decoder(own, **how(own)))
    return Way(name=name, decoder=decoder, devices=devices, words=words, parameters=count_of(config))


def ways(size: str, tracks: int) -> list[Way]:
    """What is compared on so many devices."""
    shape, paths = SIZES[size]
    return [
        of_tracks(shape, tracks),
        dense(f"dense, equal parameters, in {tracks} ranks", shape, tracks),
        dense("the same in one process", shape, 1),
        dense("dense, equal critical path, in one process", {**shape, **paths[tracks]}, 1),
    ]


def timed(every: Sequence[Way], rows: int, turns: int) -> list[float]:
    """Ms that one device of each computes in a pass; the median of turns that take each in its turn."""
    timers = [PassTimer(way.decoder, 1, CONTEXT, rows) for way in every]
    found: list[list[float]] = [[] for _ in every]
    for turn in range(turns + 3):
        for way, timer, own in zip(every, timers, found, strict=True):
            taken = timer.ms(1, rows, way.decoder.num_layers)
            if turn >= 3:  # the first ones warm up
                own.append(taken)
    return [median(own) for own in found]


@study.table(quick={"tasks": "small"}, tasks="small,large", threads=1)
def tracks_law(ask: MirrorFlags) -> Iterator[Table | None]:
    """Ms a draft pass over links of alpha 10 us to 1 ms: 2 x 2 and 2 x 4 tracks beside dense drafts."""
    torch.set_num_threads(ask.threads or 1)
    names = [name for name in ask.names if name in SIZES]
    yield None
    parts: dict[str, list[list[str]]] = {}
    values: dict[str, Any] = {"alphas_ms": ALPHAS_MS, "word_ms": WORD_MS, "ways": []}
    for size in names:
        for tracks in (2, 4):
            every = ways(size, tracks)
            for rows in (1, 8):
                rows_of = parts.setdefault(f"{size}, {tracks} devices, {rows} row{'s'[: rows > 1]}", [])
                for way, ms in zip(every, timed(every, rows, TURNS * ask.repeats), strict=True):
                    times = [way.time(ms, alpha, rows) for alpha in ALPHAS_MS]
                    shown = [f"{way.parameters / 1e6:.2f}M", f"{len(way.words)}", f"{ms:.2f}"]
                    rows_of.append([way.name, *shown, *(f"{time:.2f}" for time in times)])
                    fact: dict[str, Any] = {"size": size, "tracks": tracks, "rows": rows, "name": way.name}
                    fact |= {"compute_ms": ms, "joins": len(way.words), "parameters": way.parameters, "ms": times}
                    values["ways"].append(fact)
    yield Table(
        title="A draft pass over emulated links, ms",
        head=("draft", "parameters", "joins", "computed", *(f"alpha {alpha * 1e3:g} us" for alpha in ALPHAS_MS)),
        parts=parts,
        values=values,
        remarks=[
            "computed: by one device of random weights in bfloat16, one thread, context 256, measured; a join then "
            "takes alpha log2 G + beta M, beta 4 bytes at 10 Gbit/s (appendix C)",
            "tracks: two joins of states and one of logits; ranks: two sums a layer, embedding and choice",
            "equal critical path: reads as many weights a pass as one track, and joins nothing",
        ],
    )
