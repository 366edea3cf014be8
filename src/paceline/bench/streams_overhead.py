"""What a trained set of streams adds in parameters, beside Medusa heads for the same target.

A set without adapters of its own has gamma * d for the stream embeddings and 2 * r * d for the early exit of rank r
(Speculative Streaming, section 2 and table 3, whose figures these formulas give). Lossless sets have stream adapters on
top, counted apart; the adapters of a shared set are those that plain fine-tuning would have, too.

Medusa (Cai et al. 2024, section 2.1): each head is one residual block, a linear layer d x d with bias and SiLU, and an
unembedding d x V without bias of its own. As many heads as there are streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..target.streams import StreamConfig, StreamSet
from .report.markdown import table


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model of table 3, with what the paper says of it."""

    name: str
    d_model: int
    vocab_size: int
    streams: float  # extra parameters of Speculative Streaming, two digits
    medusa: float  # of Medusa heads, two digits


PUBLISHED = (
    Published(name="Mistral-Instruct-7B", d_model=4096, vocab_size=32000, streams=8.2e4, medusa=5.9e8),
    Published(name="Phi-3-Instruct-3.8B", d_model=3072, vocab_size=32064, streams=6.1e4, medusa=4.3e8),
    Published(name="Llama2-7B", d_model=4096, vocab_size=32000, streams=8.2e4, medusa=5.9e8),
)
PUBLISHED_GAMMA, PUBLISHED_RANK = 4, 8  # appendix N.1


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Parameters beside a target."""

    target: str
    streams_formula: int  # gamma d + 2 r d
    streams_counted: int | None  # embeddings and early exit of the set itself; None: a published model
    streams_published: float | None
    start: int | None  # of the map from main state to stream start
    adapters: int | None
    medusa: int
    medusa_published: float | None

    @property
    def agrees(self) -> bool:
        """Whether the set's own count, and what was published to two digits, are what the formulas say."""
        counted = self.streams_counted in (None, self.streams_formula)
        pairs = ((self.streams_formula, self.streams_published), (self.medusa, self.medusa_published))
        return counted and all(said is None or f"{ours:.1e}" == f"{said:.1e}" for ours, said in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "agrees": self.agrees}


def stream_parameters(gamma: int, d_model: int, prune_rank: int) -> int:
    """gamma d + 2 r d: stream embeddings and the early exit."""
    return gamma * d_model + 2 * prune_rank * d_model


def medusa_parameters(heads: int, d_model: int, vocab_size: int) -> int:
    """heads (d d + d + d V): a residual block with bias, and an unembedding."""
    return heads * (d_model * d_model + d_model + d_model * vocab_size)


def of_set(trained: StreamSet, target: str) -> Overhead:
    """A trained set's own parameters, and Medusa heads for its target."""
    config: StreamConfig = trained.config
    parts = trained.parameters_by_part()
    embedded = config.gamma if config.value_rotation is None else 0  # rotated values need no embeddings
    return Overhead(
        target=target,
        streams_formula=stream_parameters(embedded, config.d_model, config.prune_rank),
        streams_counted=parts["embeddings"] + parts["prune"],
        streams_published=None,
        start=parts["start"],
        adapters=parts["adapters"],
        medusa=medusa_parameters(config.gamma, config.d_model, config.vocab_size),
        medusa_published=None,
    )


def of_published() -> list[Overhead]:
    """The formulas beside the figures of table 3."""
    return [
        Overhead(
            target=model.name,
            streams_formula=stream_parameters(PUBLISHED_GAMMA, model.d_model, PUBLISHED_RANK),
            streams_counted=None,
            streams_published=model.streams,
            start=None,
            adapters=None,
            medusa=medusa_parameters(PUBLISHED_GAMMA, model.d_model, model.vocab_size),
            medusa_published=model.medusa,
        )
        for model in PUBLISHED
    ]


HEAD = ("target", "formula", "counted", "published", "start map", "adapters", "Medusa heads", "Medusa, published")


def cells(found: Overhead) -> list[str]:
    """One row, under `HEAD`."""
    counts = (found.streams_formula, found.streams_counted)
    rest = (found.start, found.adapters, found.medusa)
    return [
        found.target,
        *map(_count, counts),
        _published(found.streams_published),
        *map(_count, rest),
        _published(found.medusa_published),
    ]


def markdown(found: Sequence[Overhead]) -> str:
    """The table."""
    return table(HEAD, map(cells, found)) + "\n"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _published(value: float | None) -> str:
    return "–" if value is None else f"{value:.1E}".replace("E+0", "E")
