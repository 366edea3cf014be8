"""Options of the server are read without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.api import options
from paceline.cli import app
from paceline.core.errors import ConfigError
from paceline.engine.rounds import AUTO
from paceline.engine.verification import DEFAULT_VERIFIER, VERIFIERS


def test_names_that_are_written_twice_are_the_same() -> None:
    assert options.AUTO_ROUND == AUTO
    assert tuple(VERIFIERS) == options.VERIFIERS and options.VERIFIERS[0] == DEFAULT_VERIFIER


@pytest.mark.parametrize(
    ("args", "model"), [(["--model", "x"], "x"), (["x"], "x"), (["x", "--model", "x"], "x"), ([], "paceline-small")]
)
def test_the_model_is_named_by_position_or_by_flag(
    args: list[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def stop(given: dict[str, Any]) -> Any:
        seen.append(given)
        raise ConfigError("a server", "not needed here", "look at the options")

    monkeypatch.setattr("paceline.cli.serve.EngineClient", stop)
    assert CliRunner().invoke(app, ["serve", "--port", "0", *args]).exit_code == 2
    assert [(given["model"], given["drafter"]) for given in seen] == [(model, "auto")]


def test_a_missing_package_is_named_with_the_command_that_brings_it() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from paceline.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "paceline serve: packages are missing: uvicorn" in done.stderr and "'paceline[serve]'" in done.stderr
