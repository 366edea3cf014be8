"""A part of ``make sanitize``, for the full suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import builds, unavailable

from paceline import kernels


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no compiled kernels: {kernels.unavailable()}")
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("build", builds())
def test_odd_shapes_under_sanitizers(build: str) -> None:
    command = [sys.executable, str(Path(__file__).parent / "sanitizers.py"), "--quick", "--build", build]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890)
    assert done.returncode == 0, done.stderr[-10_000:]
    assert "planted faults were seen" in done.stdout and "nothing was found" in done.stdout
