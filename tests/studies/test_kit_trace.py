"""The trace file is what Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.clock import VirtualClock
from kit.timeline import Timeline, trace_events
from kits.channels import RealTime

from paceline.core.errors import ConfigError


def pipelined() -> Timeline:
    """Two stages, the second one beside the first."""
    with VirtualClock() as clock:
        timeline = Timeline(clock)

        def second() -> None:
            with timeline.span("stage 1", "verify", rows=3) as arguments:
                clock.sleep_until(3.0)
                arguments["kept"] = 2

        clock.start("stage 1", second)
        with timeline.span("stage 0", "draft"):
            clock.sleep_until(2.0)
        with timeline.span("stage 0", "verify"):
            clock.sleep_until(4.0)
    return timeline


def test_the_trace_file(tmp_path: Path):
    made = json.loads(pipelined().write(tmp_path / "trace.json").read_text())
    events = made["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("stage 0", "draft", 0.0, 2e6),
        ("stage 1", "verify", 0.0, 3e6),
        ("stage 0", "verify", 2e6, 2e6),
    ]
    (whole,) = (e["args"] for e in events if e["ph"] == "X" and e["tid"] == 1)
    assert whole == {"rows": 3, "kept": 2, "clock": "virtual clock"}
    assert made["otherData"] == {"clock": "virtual clock"}
    assert "virtual clock" in next(e["args"]["name"] for e in events if e["name"] == "process_name")


def test_real_time_has_no_label_and_a_failure_is_noted_too():
    timeline = Timeline(RealTime())
    with pytest.raises(ValueError), timeline.span("host", "step"):
        raise ValueError
    made = trace_events(timeline.spans, timeline.clock.label)
    assert [e["name"] for e in made["traceEvents"]] == ["process_name", "thread_name", "step"]
    assert made["otherData"] == {} and made["traceEvents"][2]["args"] == {}


def test_a_place_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        pipelined().write(tmp_path / "no" / "trace.json")
