"""Layouts over hosts: every law against figures that were worked out by hand, and bounds in words.

A layer of the model reads 192 bytes and the head 64; the machine takes 1,000 us a pass and 1 us a byte, so that a pass
is 1,000 + 4 x 192 + 64 = 1,832 us. A hop between hosts is 100 us, a byte 10; a join of two ranks
is 300 and 20 a byte. On one host both are 10 us and next to nothing a byte.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.planning import machines, models
from paceline.planning.acceptance import Acceptance
from paceline.planning.hosts import DRAFT, Hosts, RankedLayout, _Site, rank_layouts
from paceline.planning.hosts import HostLayout as Of
from paceline.planning.models import ModelSizes
from paceline.planning.plan import PLAIN, PlanRequest
from paceline.planning.throughput import PassLaw

SIZES: dict[str, Any] = {"d_model": 4, "d_ff": 4, "num_heads": 4, "num_kv_heads": 4, "head_dim": 1, "vocab_size": 8}
TARGET = ModelSizes(name="four layers", num_layers=4, max_position=2048, gated=False, **SIZES)
DRAFTING = replace(TARGET, name="one layer", num_layers=1)  # 1,000 + 192 + 64 = 1,256 us
LAW = PassLaw(host=1e-3, row=0.0, weight=1e-6, hoi=1e9, kv=0.0, attention=0.0)
HERE = replace(machines.machine("cpu"), bandwidth=1e18, link=0.0, cores=1)
HALF = Acceptance(accept=0.5, source="", siblings=0.0)  # of any width; 1.75 tokens a round of two
LINKS: dict[str, Any] = {"alpha_us": 100, "join_us": 300, "gbit": 8e-4, "join_gbit": 4e-4, "local_us": 10}
HOP = 100 + 10 * 8  # us: four numbers of two bytes
IDS = 100 + 10 * 8  # us: one token with its log-probability


def question(**more: Any) -> PlanRequest:
    known = {"ngram": HALF, DRAFT: HALF}
    given = {
        "target": TARGET,
        "machine": HERE,
        "draft": DRAFTING,
        "law": LAW,
        "acceptance": known,
        "depth": 2,
        "width": 1,
    }
    return PlanRequest(**{"context": 16, **given, **more})


def us(layout: Of, drafter: str = PLAIN, **more: Any) -> float:
    """Microseconds of a token."""
    hosts = Hosts(hosts=8, each=more.pop("each", None), **LINKS)
    made = {one.drafter: one for one in _Site(question(**more), hosts).drafted(layout)}
    return 1e6 * made[drafter].token


def ranked(hosts: int = 4, each: int | None = None, **more: Any) -> list[RankedLayout]:
    return rank_layouts(question(**more), Hosts(hosts=hosts, each=each, **LINKS))


@pytest.mark.parametrize(
    ("layout", "drafter", "more", "wanted"),
    [
        (Of(1, 1, 1, False, 1), PLAIN, {}, 1832),
        (Of(1, 1, 1, False, 1), "ngram", {}, 1832 / 1.75),
        (Of(1, 1, 1, False, 1), DRAFT, {}, (1832 + 2 * 1256) / 1.75),
        # Two stages: 1,000 + 2 x 192, the last one with the head; a hop there and one back.
        (Of(2, 1, 1, False, 1), PLAIN, {}, 1384 + 1448 + 2 * HOP),
        (Of(2, 1, 1, False, 2), PLAIN, {"each": 2}, 1000 + 2 * 384 + 1000 + 2 * (384 + 64) + 2 * 10),
        # Two sequences, one behind the other: the longer stage counts twice.
        (Of(2, 1, 1, False, 1), PLAIN, {"batch": 2}, 2 * (1448 + HOP)),
        # Two replicas share two sequences.
        (Of(2, 1, 2, False, 1), PLAIN, {"batch": 2}, 1384 + 1448 + 2 * HOP),
        # A hit in half of the ticks, else two of them.
        (Of(2, 1, 1, False, 1), "ngram", {}, 1.5 * (1448 + HOP)),
        (Of(2, 1, 1, False, 1), DRAFT, {}, 1.5 * (1448 + 1256 + HOP)),
        (Of(2, 1, 1, True, 1), DRAFT, {}, 1.5 * (1256 + 2 * IDS + HOP)),
        # Three stages of 2, 1 and 1 layers.
        (Of(3, 1, 1, False, 1), PLAIN, {}, 1384 + 1192 + 1256 + 3 * HOP),
        # Two ranks, each with half of the bytes: 2 x 4 + 1 sums of 16 bytes on a ring of two.
        (Of(1, 2, 1, False, 1), PLAIN, {}, 1416 + 9 * (300 + 20 * 16)),
        (Of(1, 2, 1, False, 2), PLAIN, {"each": 2}, 1000 + 832 + 9 * 10),
        (Of(1, 4, 1, False, 1), PLAIN, {}, 1208 + 9 * (2 * 300 + 20 * 1.5 * 16)),
        # Two stages of two ranks, the stage a host.
        (Of(2, 2, 1, False, 2), PLAIN, {"each": 2}, 1384 + 4 * 10 + 1448 + 5 * 10 + 2 * HOP),
        # Beside half of the verifying pass: 916 us of 2 x 1,256; two hops with 8 chains of 2 tokens.
        (Of(1, 1, 1, True, 1), DRAFT, {}, (916 + 2512 + 2 * (100 + 10 * 16 * 8)) / 1.75),
    ],
)
def test_laws(layout: Of, drafter: str, more: dict[str, Any], wanted: float) -> None:
    assert us(layout, drafter, **more) == pytest.approx(wanted, abs=1e-3)


def test_more_cores_compute_faster_and_read_as_fast() -> None:
    """1,832 us at 1 FLOP a byte: a row has 2 x 416 FLOPs in all, as many us as bytes; 8 rows have 8 times those."""
    bound = replace(LAW, hoi=1.0)
    one, two = Of(1, 1, 1, False, 1), {"law": bound, "depth": 7}
    assert us(one, "ngram", **two) == pytest.approx((1000 + 8 * 832) / (2 - 0.5**7))
    assert us(one, "ngram", each=4, **two) == pytest.approx((1000 + 2 * 832) / (2 - 0.5**7))
    assert us(one, PLAIN, each=4, **two) == pytest.approx(1832)


def test_published_peaks_serve_as_well() -> None:
    peaks = replace(HERE, bandwidth=1e6, flops=1e12)
    assert us(Of(1, 1, 1, False, 1), law=None, machine=peaks, kv_bytes=1e-9) == pytest.approx(832, rel=1e-6)


def test_one_process_wins_on_one_host_and_where_links_are_slow() -> None:
    assert ranked(hosts=1, each=4)[0].layout == Of(1, 1, 1, False, 1)
    assert ranked(hosts=4)[0].layout == Of(1, 1, 1, False, 1)


def test_stages_win_where_a_pass_is_long_and_links_are_fast() -> None:
    slow = replace(LAW, host=0.0, weight=1e-3)  # 832 ms a pass, 192 a layer
    best = ranked(law=slow)[0]
    assert best.layout[:3] == (1, 4, 1) and best.joins == pytest.approx(9 * 1080e-6)
    narrow: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4}  # cannot be divided among ranks
    sure = dict.fromkeys(("ngram", DRAFT), replace(HALF, accept=0.9))
    best = ranked(law=slow, target=replace(TARGET, **narrow), acceptance=sure, depth=1)[0]
    assert best.layout[:3] == (4, 1, 1) and best.drafter == "ngram" and best.hops == pytest.approx(4 * HOP / 1e6)
    assert best.token == pytest.approx((0.9 + 0.1 * 4) * (0.256 + HOP / 1e6))


def test_replicas_win_where_sequences_are_many() -> None:
    """K/V of each takes 1,024 us; where it takes nothing, one process serves all as fast."""
    best = ranked(batch=4, law=replace(LAW, kv=1e-6))[0]
    assert best.layout == Of(1, 1, 4, False, 1) and best.tokens_per_s == pytest.approx(4 * 1.75 / 2856e-6)
    assert ranked(batch=4)[0].layout == Of(1, 1, 1, False, 1)


def test_what_one_process_does_not_hold_is_divided() -> None:
    """832 bytes of weights and 64 of an embedding; K/V of 16 tokens: 16 x 4 layers x 8 numbers x 2 bytes = 1,024."""
    small = replace(HERE, memory=1000.0)
    found = ranked(machine=small)
    assert found[0].fits and found[0].layout.processes > 1
    (alone,) = [made for made in found if made.layout.processes == 1]
    assert not alone.fits and alone.holds == 832 + 64 + 1024
    assert all(made.fits for made in found if made is not alone)


def test_llama_on_gpus_has_its_ranks_on_a_host() -> None:
    target = models.named("llama-3-70b")
    asked = PlanRequest(target=target, machine=machines.machine("h100"), batch=8, context=8192)  # type: ignore[arg-type]
    best = rank_layouts(asked, Hosts(hosts=2, each=8))[0]
    assert best.fits and best.layout.ranks in (2, 4, 8) and best.layout.per_host % best.layout.ranks == 0


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Hosts(hosts=0), "hosts must be 1 or more"),
        (lambda: Hosts(hosts=2, each=0), "each must be 1 or more"),
        (lambda: Hosts(hosts=2, gbit=0.0), "gbit must be above 0"),
        (lambda: Hosts(hosts=2, alpha_us=-1.0), "alpha_us must be 0 or more"),
        (lambda: Hosts(hosts=2, alpha_us=float("nan")), "alpha_us"),
        (lambda: ranked(hosts=200, each=16), "200 hosts with 16 processes each: 1,024 in all are planned for, at most"),
        (lambda: ranked(devices=2), "devices or stages with hosts: they are what is planned"),
        (
            lambda: ranked(machine=replace(HERE, memory=10.0)),
            "four layers on 4 hosts: no layout holds it: its smallest",
        ),
    ],
)
def test_what_cannot_be_planned(made: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made()
