"""Counters, gauges and histograms as Prometheus reads them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from kits.tiny import VOCAB, assemble, draft_model, tiny_decoder
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.serve.metrics import HISTOGRAMS, Metrics, merged
from paceline.serve.models import speculation

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
TARGET = tiny_decoder()
PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
PROMPT = torch.randint(10, VOCAB, (9,), generator=torch.Generator().manual_seed(1)).tolist() * 2


def counters(engine: Engine) -> dict[str, Any]:
    """As they come over the line."""
    found: dict[str, Any] = json.loads(json.dumps(engine.snapshot().as_dict() | {"speculation": {}}))
    return found


@pytest.fixture
def engine() -> Engine:
    made = assemble(draft_model(depth=5), decoder=TARGET)
    for _ in range(2):
        made.submit(PROMPT, PARAMS)
    while made.busy:
        made.step()
    return made


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.text())
    drop = ("model_name", "engine")
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k not in drop))): s.value
        for family in families
        for s in family.samples
    }


def test_counts_are_the_engines(engine: Engine) -> None:
    metrics = Metrics("m", "paceline")
    metrics.update(counters(engine), 0)
    found, stats = samples(metrics), engine.snapshot().stats
    assert found["paceline:spec_decode_num_accepted_tokens_total", ()] == stats.accepted > 0
    assert found["paceline:spec_decode_num_draft_tokens_total", ()] == stats.drafted
    assert found["paceline:generation_tokens_total", ()] == stats.emitted == 48
    per_pos = [v for (name, _), v in found.items() if name == "paceline:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(per_pos) == stats.accepted and per_pos == sorted(per_pos, reverse=True)
    source = (("application", "base"), ("source", "draft_model"))
    assert found["paceline:source_accepted_tokens_total", source] == stats.accepted
    assert found["paceline:request_success_total", (("finished_reason", "length"),)] == 2
    assert found["paceline:num_requests_running", ()] == 0
    assert 0 <= found["paceline:kv_cache_usage_perc", ()] <= 1


def test_vllms_names_for_what_it_counts_and_no_others(engine: Engine) -> None:
    ours, theirs = Metrics("m", "paceline"), Metrics("m", "vllm")
    for metrics in (ours, theirs):
        metrics.update(counters(engine), 0)
    renamed = {name for name, _ in samples(theirs) if name.startswith("vllm:")}
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert f"vllm:spec_decode_num_{name}_total" in renamed
    assert {f"vllm:{name}_bucket" for name in HISTOGRAMS} <= renamed
    back = {(name.replace("vllm:", "paceline:"), labels): v for (name, labels), v in samples(theirs).items()}
    assert back == samples(ours)
    assert {"paceline:time_seconds_total", "paceline:passes_total"} <= {name for name, _ in samples(theirs)}


def test_counters_grow_through_a_restart(engine: Engine) -> None:
    metrics, name = Metrics("m", "paceline"), ("paceline:generation_tokens_total", ())
    metrics.update(counters(engine), 0)
    metrics.update(None, 1)
    assert samples(metrics)[name] == 48 and ("paceline:num_requests_running", ()) not in samples(metrics)
    metrics.update(counters(engine), 1)
    assert samples(metrics)[name] == 96 and samples(metrics)["paceline:engine_restarts_total", ()] == 1
    metrics.update(counters(engine), 1)
    assert samples(metrics)[name] == 96


def test_samples_of_replicas_stand_together(engine: Engine) -> None:
    replicas = [Metrics("m", "paceline", replica) for replica in ("a", "b")]
    for metrics in replicas:
        metrics.update(counters(engine), 0)
    text = merged(metrics.text() for metrics in replicas)
    families = {family.name: family for family in text_string_to_metric_families(text)}  # the last one of a name
    assert {sample.labels["replica"] for sample in families["paceline:passes"].samples} == {"a", "b"}
    assert sum(sample.value for sample in families["paceline:generation_tokens"].samples) == 96


def test_the_parts_of_a_requests_time_add_up(engine: Engine) -> None:
    live = engine.live[engine.submit(PROMPT, PARAMS)]
    while engine.busy:
        engine.step()
    stats = engine.output(live).stats.as_dict()
    metrics = Metrics("m", "paceline")
    metrics.ended(stats, 1.0, len(PROMPT), 24, 1)
    found = samples(metrics)
    parts = [found[f"paceline:request_{name}_time_seconds_sum", ()] for name in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts) and sum(parts) == pytest.approx(stats["elapsed_ms"] / 1e3)
    assert found["paceline:request_time_per_output_token_seconds_sum", ()] == pytest.approx(parts[2] / 23)


def test_a_drafter_that_failed_is_shown(engine: Engine) -> None:
    for failure in (None, "drafter 'draft_model' failed: KeyError: 3"):
        counted = counters(engine) | {"speculation": {"failure": failure}}
        metrics = Metrics("m", "vllm")
        metrics.update(counted, 0)
        assert samples(metrics)["paceline:drafter_failed", ()] == float(failure is not None)
        client = SimpleNamespace(look=AsyncMock(return_value=counted))
        served = SimpleNamespace(client=client, described=SimpleNamespace(speculation={"off_reason": None}))
        request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(server=served)))
        assert json.loads(bytes(asyncio.run(speculation(request)).body))["off_reason"] == failure


def test_the_dashboard_asks_for_names_that_there_are(engine: Engine) -> None:
    metrics = Metrics("m", "paceline")
    metrics.update(counters(engine), 0)
    known = {name for name, _ in samples(metrics)}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 15
    asked = {name for query in queries for name in re.findall(r"[a-z]+:[a-z0-9_]+", query)}
    assert asked <= known, asked - known
    kinds = {"_bucket", "_sum", "_count"}
    told = {re.sub("|".join(f"{kind}$" for kind in kinds), "", name) for name in known}
    left = {name for name in told if not any(query_name.startswith(name) for query_name in asked)}
    assert len(left) <= 8, left  # most of what there is can be seen
