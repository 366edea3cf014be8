"""The study of Speculative Streaming: what it measures, verdicts, counts of parameters, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import speculative_streaming  # noqa: F401  (all its figures are known from then on)
import torch
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kits.stream_sets import MODEL, save_all
from kits.studies import run
from streaming.common import CUT, study

from paceline.bench.records import REPORT
from paceline.papers.streaming.model import StreamSet

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_all(tmp_path_factory.mktemp("sets"))


SMALL = ("--model", MODEL, "--prompts", 1, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1)


def test_a_sweep_writes_tables_and_figures(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("appendix_e1", "--set", sets["lossless"], "--tasks", "sql", *SMALL)
    values = run(study, tmp_path, *given)
    assert {(ln["series"], ln["x"]) for ln in values["lines"]} == {
        (series, gamma) for series in ("chain", f"best {CUT} nodes") for gamma in (1, 2)
    }
    assert all(ln["exact"] == "yes" and ln["row_layers"] for ln in values["lines"])
    assert values["sets"][0]["gamma"] == 2
    assert (tmp_path / "appendix_e1.svg").is_file() and "ids equal plain" in (tmp_path / "appendix_e1.md").read_text()
    assert REPORT.validate_json((tmp_path / "appendix_e1" / "report.json").read_bytes()).methods[0].plain
    assert study.run([*map(str, given), "--out", str(tmp_path)]) == 2 and "--overwrite" in capsys.readouterr().err


def test_tables_without_a_run_are_written(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(study, tmp_path, "table_3_parameters", "--set", sets["lossless"])
    assert "81,920" in capsys.readouterr().out and all(row["agrees"] for row in found["overhead"])
    small = ("--model", MODEL, "--tasks", "sql", "--prompts", 1, "--max-new-tokens", 4, "--threads", 1)
    stored = tmp_path / "stored"
    StreamSet.load(sets["lossless"], dtype=torch.bfloat16).save(stored)  # as the zoo's sets are
    values = run(study, tmp_path, "figure_5", "--set", stored, *small)
    assert values["layers"] == [1, 2] and len(values["streams"]) == 2 and (tmp_path / "figure_5.svg").is_file()
