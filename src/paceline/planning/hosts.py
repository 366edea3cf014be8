"""Over several hosts: stages x ranks x replicas, and where the draft runs, by the time between a sequence's tokens.

    join  = alpha log2 G + beta 2 (G - 1) / G M        a sum of G ranks over M bytes: two a layer, one of the embedding;
                                                       alpha and beta of a sum of two ranks
    hop   = alpha + beta M                             states from a stage to the next one, and back to the first
    plain = max(stages + hops, k (longest stage + longest hop))    k = min(sequences, stages) parts of the batch
    here  = (draft + verify) / tau                     the draft in the target's process
    apart = (V / 2 + max(V / 2, draft) + 2 hops) / tau the draft elsewhere, under half of V, the verifying pass
    piped = P t + (1 - P) m t                          m stages, a level of drafts a tick of t; P: the token is in it

Source: Mirror, equation 14 and appendix C (its message is one share of the ring's); SpecPipe, section 3.3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ..core.errors import ConfigError
from ..core.options import check, option
from .acceptance import Acceptance
from .models import ModelSizes
from .plan import DEPTHS, PLAIN, PlanRequest
from .throughput import ACTIVATION_BYTES, held_bytes, pass_cost

SUM_BYTES, ID_BYTES = 4, 8  # of a number that ranks sum; of a token with its log-probability
LEVELS = (1, 2, 4, 8)  # rows of a level of drafts in stages
MOST = 1024  # processes
LINK = "alpha_us", "gbit", "join_us", "join_gbit"  # what a link takes
DRAFT = "draft_model"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that are alike, and links between them; raises a `ConfigError` where a number is out of bounds."""

    hosts: int = option(help="plan stages, ranks and replicas for so many hosts", minimum=1, maximum=MOST)
    each: int | None = option(
        None, help="cores of each host where CPUs compute, else its GPUs; none: the machine's", minimum=1, maximum=MOST
    )
    alpha_us: float = option(158.0, help="us of a hop between hosts: 64 bytes over a group of gloo's", minimum=0)
    gbit: float = option(10.0, help="Gbit/s of a link between hosts", above=0)
    join_us: float = option(30.0, help="us of a join of two ranks on two hosts: a sum of one number", minimum=0)
    join_gbit: float | None = option(None, help="Gbit/s of what each rank gives in a join; none: the link's", above=0)
    local_us: float = option(25.0, help="us of a hop between processes of one host", minimum=0)

    def __post_init__(self) -> None:
        check(self)


class _Law(NamedTuple):
    """Of what goes between two processes."""

    alpha: float  # seconds of next to nothing
    beta: float  # of a byte more

    def of(self, message: float) -> float:
        return self.alpha + self.beta * message


class _Link(NamedTuple):
    """Between two processes."""

    hop: _Law
    join: _Law  # of two ranks


class HostLayout(NamedTuple):
    """How a target is divided, and how many processes a host has."""

    stages: int
    ranks: int
    replicas: int
    apart: bool  # whether each replica has a process for its draft
    per_host: int

    @property
    def processes(self) -> int:
        """On all hosts."""
        return self.replicas * (self.stages * self.ranks + self.apart)


class RankedLayout(NamedTuple):
    """A layout with the draft that serves it best, predicted. Times are in seconds."""

    layout: HostLayout
    drafter: str
    size: int  # tokens of a draft; in stages rows of a level; 0: none
    token: float  # between two tokens of a sequence
    tokens_per_s: float  # of all sequences
    stage: float  # the longest of a plain pass, with ..
    joins: float  # .. these
    hops: float  # of that pass
    holds: float  # bytes of a process, at most
    fits: bool


def rank_layouts(question: PlanRequest, hosts: Hosts) -> list[RankedLayout]:
    """The best form of each number of stages, ranks and replicas, the fastest first; one process is always there.

    Raises:
        ConfigError: devices or stages in the question itself, too many processes, or no layout that holds the model.
    """
    if question.all_devices > 1:
        raise ConfigError("devices or stages with hosts", "they are what is planned", "leave them out")
    site, best = _Site(question, hosts), dict[tuple[int, ...], RankedLayout]()
    for layout in site.layouts():
        key = *layout[:3], layout.processes == 1
        best[key] = max([*site.drafted(layout), *filter(None, [best.get(key)])], key=_worth)
    ranked = sorted(best.values(), key=_worth, reverse=True)
    if not ranked[0].fits:
        asked, least = f"{question.target.name} on {hosts.hosts} hosts", min(made.holds for made in ranked) / 1e9
        wrong = f"no layout holds it: its smallest parts take {least:,.1f} GB, more than a process has"
        raise ConfigError(asked, wrong, "name more hosts, or smaller weights")
    return [made for made in ranked if made.fits or made.layout.processes == 1]


def _worth(made: RankedLayout) -> tuple[bool, float, int, int]:
    """What differs by less than four digits show is equal."""
    return made.fits, float(f"{made.tokens_per_s:.4g}"), -made.layout.processes, -made.layout.per_host


class _Site:
    """The hosts, and what parts of a pass take there."""

    def __init__(self, q: PlanRequest, hosts: Hosts) -> None:
        cores, self.count = q.machine.cores, hosts.hosts
        self.slots = hosts.each or cores or 1  # processes of a host, at most
        self.devices = 1 if cores else self.slots  # cores of a host share its memory
        times = self.slots / cores if cores else 1.0  # arithmetic goes with cores, reads do not
        machine = replace(q.machine, flops=q.machine.flops * times)
        law = q.law and replace(q.law, row=q.law.row / times, hoi=q.law.hoi * times, attention=q.law.attention / times)
        self.q = replace(q, machine=machine, law=law)
        if self.count * self.slots > MOST:
            asked = f"{self.count} hosts with {self.slots} processes each"
            raise ConfigError(asked, f"{MOST:,} in all are planned for, at most", "name fewer hosts")
        local = _Law(1e-6 * hosts.local_us, 1 / (machine.link or machine.bandwidth))
        join = _Law(1e-6 * hosts.join_us, 8e-9 / (hosts.join_gbit or hosts.gbit))
        self.local, self.remote = _Link(local, local), _Link(_Law(1e-6 * hosts.alpha_us, 8e-9 / hosts.gbit), join)

    def layouts(self) -> Iterator[HostLayout]:
        """All that there is room for, spread over the hosts, a process a device, and on as few as can be."""
        target, most = self.q.target, self.count * self.slots
        inner = target.d_ff or (target.experts.d_ff if target.experts else 1)
        ranks = [n for n in range(1, most + 1) if target.num_heads % n == 0 == inner % n]
        for stages, each, apart in product(range(1, min(target.num_layers, most) + 1), ranks, (False, True)):
            for replicas in range(1, min(self.q.batch, most // (stages * each + apart)) + 1):
                count = replicas * (stages * each + apart)
                spread = math.ceil(count / self.count)
                for per_host in {spread, min(count, max(spread, self.devices)), min(count, self.slots)}:
                    yield HostLayout(stages, each, replicas, apart, per_host)

    def share(self, layout: HostLayout) -> float:
        """Of a device, that each process has."""
        return min(1.0, self.devices / layout.per_host)

    def link(self, processes: int, layout: HostLayout) -> _Link:
        """Between so many that follow each other: those that fit evenly into a host are on one."""
        return self.remote if layout.per_host % processes else self.local

    def seconds(self, shape: ModelSizes, batch: int, rows: int, layout: HostLayout, ranks: int = 1) -> float:
        """A pass of one process, with its part of the weights."""
        q, heads = self.q, min(ranks, shape.num_kv_heads)
        part, share = pass_cost(q.network(shape), batch, q.context, rows).part(ranks, heads), self.share(layout)
        return q.law.of(part, batch * rows, share) if q.law else part.forward(q.machine.hoi) / q.machine.flops / share

    def shapes(self, stages: int) -> list[ModelSizes]:
        """Of the stages: the first ones have the layers that are over, the last one the head."""
        each, over = divmod(self.q.target.num_layers, stages)
        parts = [self.q.target.last_layers(each + (i < over)) for i in range(stages)]
        return [*(replace(part, vocab_size=0) for part in parts[:-1]), parts[-1]]

    def passed(self, layout: HostLayout, batch: int, rows: int) -> tuple[list[float], list[float], list[float]]:
        """A pass: of each stage its seconds and those of its joins among them, and of each hop."""
        numbers, shapes, ranks = batch * rows * self.q.target.d_model, self.shapes(layout.stages), layout.ranks
        law = self.link(ranks, layout).join
        one = law.alpha * math.log2(ranks) + law.beta * 2 * (ranks - 1) / ranks * SUM_BYTES * numbers
        joins = [(2 * shape.num_layers + (shape.vocab_size > 0)) * one for shape in shapes]
        own = [self.seconds(shape, batch, rows, layout, ranks) for shape in shapes]
        on = math.ceil(layout.stages * ranks / layout.per_host)  # hosts, as many hops between them
        links = [self.remote if i < on > 1 else self.local for i in range(layout.stages if layout.stages > 1 else 0)]
        hops = [link.hop.of(ACTIVATION_BYTES * numbers) for link in links]
        return [sum(both) for both in zip(own, joins, strict=True)], joins, hops or [0.0]

    def drafted(self, layout: HostLayout) -> Iterator[RankedLayout]:
        """A layout with each draft that suits it."""
        q, known, piped = self.q, self.q.assumptions(), layout.stages > 1
        batch = math.ceil(q.batch / layout.replicas)
        parts = min(batch, layout.stages)
        stages, joins, hops = self.passed(layout, math.ceil(batch / parts), 1)
        held = max(self._held(shape, batch, layout.ranks) for shape in self.shapes(layout.stages))
        plain = max(sum(stages) + sum(hops), parts * (max(stages) + max(hops)))
        fixed, law, usual = (q.width, self._piped, LEVELS) if piped else (q.depth, self._round, DEPTHS)
        sizes = usual if fixed is None else (fixed,)
        forms = [] if layout.apart else [(PLAIN, 0, plain), *(("ngram", n, 0.0) for n in sizes)]
        for drafter, size, token in [*forms, *((DRAFT, n, 0.0) for n in sizes)]:
            token = token or law(layout, batch, drafter == DRAFT, size, known[drafter])
            draft = held_bytes(q.network(q.drafting), batch, q.context) if drafter == DRAFT else 0.0
            holds = max(held, draft) if layout.apart else held + draft
            times = token, q.batch / token, max(stages), max(joins), sum(hops), holds
            yield RankedLayout(layout, drafter, size, *times, holds <= q.machine.memory * self.share(layout))

    def _held(self, shape: ModelSizes, batch: int, ranks: int) -> float:
        """Bytes of a rank of a stage; heads of K/V are repeated where there are more ranks."""
        weights, all_ = (held_bytes(self.q.network(shape), n, self.q.context) for n in (0, batch))
        return weights / ranks + (all_ - weights) / min(ranks, shape.num_kv_heads)

    def _round(self, layout: HostLayout, batch: int, model: bool, depth: int, known: Acceptance) -> float:
        """Of a token, where whole drafts are verified."""
        ((verify,), _, _) = self.passed(layout, batch, 1 + depth)
        chains = max(1, min(8, 64 // batch)) if layout.apart else 1  # kappa, of Mirror's D.1
        draft = depth * self.seconds(self.q.drafting, batch, chains, layout) if model else 0.0
        if not layout.apart:
            return (draft + verify) / known.tokens(depth)
        hop = self.link(layout.ranks + 1, layout).hop.of(batch * chains * depth * ID_BYTES)
        return (verify / 2 + max(verify / 2, draft) + 2 * hop) / known.tokens(depth)

    def _piped(self, layout: HostLayout, batch: int, model: bool, rows: int, known: Acceptance) -> float:
        """Of a token, where a level of drafts enters in every tick."""
        stages, _, hops = self.passed(layout, batch, rows)
        level = self.seconds(self.q.drafting, batch, rows, layout) if model else 0.0
        hop = self.link(layout.stages * layout.ranks + 1, layout).hop.of(batch * rows * ID_BYTES)
        stages = [*stages, level + 2 * hop] if layout.apart else [*stages[:-1], stages[-1] + level]
        hit = known.any_of(rows)
        return (hit + (1 - hit) * layout.stages) * (max(stages) + max(hops))
