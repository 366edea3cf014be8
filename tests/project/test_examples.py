"""Every script in ``examples/`` runs as it stands; their own assertions check what they show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.draft import registry

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {  # name -> what its output must hold
    "quickstart": "tokens/s",
    "streaming": "drafted",
    "batch_and_sampling": "[1, ",
    "async_requests": "one left early",
    "custom_drafter": "second time",
    "network_drafter": "trained",
}


def test_every_script_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In another folder than the checkout; a process of its own would import for longer than the script runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert SCRIPTS[name] in capsys.readouterr().out
