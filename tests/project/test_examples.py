"""Every script in ``examples/`` runs as it stands; their own assertions check what they show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_script_runs(name: str, tmp_path: Path) -> None:
    """In another folder than the checkout, with one thread."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert SCRIPTS[name] in done.stdout
