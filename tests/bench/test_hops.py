"""What hops cost is measured between real processes; how much it is, no test says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.distributed.placement import cores

two_cores = pytest.mark.skipif(len(cores()) < 2, reason="two processes want a core each")


@two_cores
def test_the_command(tmp_path: Path):
    before = cores()
    out = tmp_path / "hops.json"
    done = CliRunner().invoke(app, ["bench", "hops", "--sizes", "64,5000", "--repeats", "5", "--out", str(out)])
    assert done.exit_code == 0, done.output
    costs = json.loads(out.read_text())["hops"]
    kinds = [("shared memory", "spinning"), ("shared memory", "parked"), ("tcp", "parked")]
    meetings = [("rendezvous", wait) for wait in ("spinning", "parked")]
    assert [(c["channel"], c["wait"]) for c in costs] == [kind for kind in kinds for _ in range(2)] + meetings
    assert [c["size_bytes"] for c in costs[:6]] == [64, 5000] * 3
    assert all(0 < c["low_us"] <= c["median_us"] <= c["high_us"] for c in costs)
    assert "rendezvous" in done.output and cores() == before


def test_what_cannot_be_measured():
    for options in (["--repeats", "0"], ["--sizes", "none"], ["--out", "no/such/folder/x.json"]):
        assert CliRunner().invoke(app, ["bench", "hops", *options]).exit_code == 2
