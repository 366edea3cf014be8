"""What a benchmark writes down: methods, cells, trials, and the report that holds them.

Everything a figure is computed from is here, raw: a report can be summarised again, compared with
another one, and repeated. Aggregates are never stored without their trials.

- A *method* is a drafter x a round x settings in this engine, or a mode of a peer.
- A *cell* is what stays the same while methods are compared: workload, batch size, context, temperature.
- A *group* is one batch of prompts, submitted together; at batch 1 it is one prompt.
- A *trial* is one method on one group, once. Trials of one (cell, group, repeat) are *paired*: they ran
  one right after the other on the same prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, PlainSerializer, TypeAdapter

OWN = "paceline"  # the engine of our own methods
PLAIN = "plain"  # name of the method that every speed-up is over
PLAIN_MODES = ("none", PLAIN)  # `Method.drafter` of decoding without speculation, ours and the peers'

Ms = Annotated[float, PlainSerializer(lambda value: round(value, 3))]  # written to a microsecond


class Record:
    """A record that is written as JSON and read back; unknown keys are refused."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Method(Record):
    """One way of decoding."""

    name: str  # unique in a report, shown everywhere
    engine: str = OWN  # or a peer: "transformers", "llama.cpp", "vllm"
    drafter: str = "none"  # as the registry reads it; of a peer: the name of its mode
    round: str = "auto"  # by the drafter
    settings: dict[str, Any] = field(default_factory=dict)  # options of LLM beyond drafter and round; a peer's own
    dtype: str = "auto"
    application: str | None = None  # whose adapters answer; None: the base model

    @property
    def ours(self) -> bool:
        """Return whether it runs in this engine."""
        return self.engine == OWN

    @property
    def plain(self) -> bool:
        """Return whether it decodes without speculation.

        An application whose answers depend on its streams decodes plainly with a budget of 0 under the drafter that
        brings the streams: they are still part of every generated row, and nothing is drafted.
        """
        return self.drafter in PLAIN_MODES or (self.application is not None and self.settings.get("budget") == 0)


@dataclass(frozen=True, kw_only=True)
class Cell(Record):
    """Settings that all methods of one comparison share."""

    workload: str
    batch: int = 1
    temperature: float = 0.0
    context: int | None = None  # prompts are cut (or filled) to this many tokens; None: as they are
    max_new_tokens: int = 64
    ignore_eos: bool = False  # True where the same number of tokens must come out of every engine
    top_k: int = 0  # likeliest tokens that sampling chooses from; 0: all


@dataclass(frozen=True, kw_only=True)
class PromptIds:
    """One prompt as it goes to every method: token ids, templates included."""

    id: str  # unique within the workload
    ids: tuple[int, ...]


@dataclass(kw_only=True)
class Trial(Record):
    """One method on one group of prompts, once."""

    method: str
    cell: Cell
    group: int  # index of the group within the cell
    repeat: int
    prompts: list[str]  # ids, in the order of submission
    prompt_tokens: list[int]  # of each
    outputs: list[list[int]] = field(default_factory=list)  # new token ids of each
    finish: list[str] = field(default_factory=list)  # why each ended
    wall_ms: Ms = 0.0  # from submission of the group to its last token
    ttft_ms: list[Ms] = field(default_factory=list)  # of each request, from submission of the group to its first token
    waits_ms: list[Ms] = field(default_factory=list)  # between successive arrivals of tokens, all requests pooled
    arrivals: list[int] = field(default_factory=list)  # tokens that came at the end of each of those waits
    passes: int = 0  # target passes that chose tokens, summed over sequences
    drafted: int = 0
    accepted: int = 0
    depth_offered: list[int] = field(default_factory=list)  # [d-1] passes that accepted d-1 and had a node at d
    depth_accepted: list[int] = field(default_factory=list)  # [d-1] of them, those that accepted at d
    draft_ms: Ms = 0.0
    verify_ms: Ms = 0.0
    host_ms: Ms = 0.0
    steps: int = 0  # engine steps: target passes over the whole group
    bytes_read: int = 0  # weights and K/V that the target passes must read, from their shapes
    row_layers: int = 0  # of those passes: rows times the layers that each went through (see `core.stats`)
    upper_row_layers: int = 0  # those in the layers that streams go through
    pruned: int = 0  # proposed nodes that were pruned in mid-pass
    stream_drafts: int = 0  # passes after which streams were read
    rode: int = 0  # those in which the last accepted node carried its streams
    error: str | None = None  # why the trial failed; then there are no outputs
    off_reason: str | None = None  # why speculation was off, or was put aside on the way

    @property
    def tokens(self) -> int:
        """Return the new tokens of the group."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        """Return the new tokens over the wall time, prompt processing included."""
        return 1000 * self.tokens / self.wall_ms if self.wall_ms else 0.0


@dataclass(kw_only=True)
class Exactness(Record):
    """The comparison of one method's ids with the reference's in one cell (see `bench.lossless`)."""

    method: str
    reference: str
    cell: Cell
    sequences: int
    identical: int
    explained: int = 0  # first difference at a top-2 gap below the tolerance, the rest agrees teacher-forced
    failures: list[dict[str, Any]] = field(default_factory=list)  # prompt id, position, both tokens, gap, what
    tolerance: float | None = None

    @property
    def passed(self) -> bool:
        """Return whether every difference is explained."""
        return not self.failures


@dataclass(kw_only=True)
class Report(Record):
    """A whole run, enough to repeat it."""

    title: str
    created: str  # ISO 8601, UTC
    command: list[str]  # the command line that repeats it
    model: dict[str, Any]  # name, parameters, dtype, pass_bytes, kv_bytes_per_token, ...
    machine: dict[str, Any]  # as bench.machine.describe gives it, and read_bandwidth_bytes_per_s
    versions: dict[str, str]  # paceline, torch, transformers, each peer that ran
    commit: str | None  # of the project, with "-dirty" where the tree was changed
    settings: dict[str, Any]  # seeds, repeats, limits
    workloads: dict[str, dict[str, Any]]  # by name: title, source, licence, prompts used
    methods: list[Method]
    trials: list[Trial]
    exactness: list[Exactness] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)  # method -> why it could not run
    notes: list[str] = field(default_factory=list)
    schema: Literal[1] = 1  # raised when a reader of an older one would go wrong

    @property
    def interrupted(self) -> bool:
        """Return whether the run was cut off, so that trials are missing."""
        return bool(self.settings.get("interrupted"))

    def is_own(self, name: str) -> bool:
        """Return whether a method of that name ran in this engine; one that is not listed counts as ours."""
        return next((method.ours for method in self.methods if method.name == name), True)

    def as_json(self) -> str:
        """Return JSON; infinities and NaN, which it lacks, become null."""
        return REPORT.dump_json(self).decode()


REPORT = TypeAdapter(Report)
